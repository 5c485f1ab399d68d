"""What must not change while modules move: names, options, flags, formats and numbers, as they are today.

golden/invariants has them. A file's name is that of the function in support/invariants.py that measures it.
After a change that is meant: `python -m tests.golden.make_invariants NAME`, and read the difference.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.support.invariants import GOLDEN, MEASURED, ROOT, facade, nemotron3, numbers, oracles, specs

#: Wrong lines, and a text that the message has.
ERRORS = {
    "flags supper": "did you mean 'super'",
    "flags super --backnd te": "unknown option --backnd; did you mean '--backend'?",
    "flags super --tp 0": "tp=0 is not a positive integer",
    "convert to-hf /nowhere /nothing": "/nowhere",
    "plan super --gpus 8": "--gpu",
    "run --device cpu": "SCRIPT",
}


def golden(name: str) -> Any:
    """Content of a golden file."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["commands", "variables", "flags", "plan", "precision"])
def test_command_line(name: str) -> None:
    """Commands, options with their defaults, variables, and what commands print, byte for byte."""
    found, kept = json.loads(json.dumps(MEASURED[name]())), golden(name)
    assert list(found) == list(kept)
    for key in kept if isinstance(kept, dict) else ():
        assert found[key] == kept[key], key


def test_facade() -> None:
    """Names and parameters may be added; what is here stays, in this order."""
    found = facade()
    for name, kept in golden("facade").items():
        assert [one for one in found.get(name, ["nothing"]) if not kept or one in kept] == kept, name


def test_specs() -> None:
    """Names for `--spec megatron_nemotron3.specs`, also one that holds a table."""
    assert not set(golden("specs")) - set(specs())
    module = importlib.import_module("megatron_nemotron3.specs")
    assert module.named("megatron_nemotron3.specs", "nemotron3_torch_stack_spec@ME*E@64:4,96:8") is not None


def test_oracles_are_not_edited() -> None:
    """Files may be added; a file that another system wrote, or that a test compares, stays as it is."""
    found, kept = oracles(), golden("oracles")
    assert {name: found.get(name, "gone") for name in kept} == kept


@pytest.mark.parametrize("line", ERRORS)
def test_wrong_lines(line: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr without a traceback."""
    status, out, err = nemotron3(line)
    assert (status, out) == (2, "")
    assert ERRORS[line] in err and "Traceback" not in err and err.count("\n") == 1, err


@pytest.mark.parametrize("line", ["megatron_nemotron3.run nowhere.py", "megatron_nemotron3 flags supper"])
def test_modules_that_run(line: str) -> None:
    words = [sys.executable, "-m", *line.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"(megatron_nemotron3\.run|nemotron3 flags): .+\n", done.stderr), done.stderr


def test_bridge_needs_only_bridge() -> None:
    """`import megatron_nemotron3.bridge` works, or names Megatron-Bridge as what is missing."""
    code = "import megatron_nemotron3.bridge as b; print(b.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    assert last == "megatron_nemotron3.bridge" or "No module named 'megatron.bridge" in last, done.stderr


@pytest.mark.parametrize("name", ["names_and_keys", "conversion", "training_codes"])
def test_model_and_folders(name: str, world: None) -> None:
    """Names, shapes, keys and bytes: of built models, both directions of conversion, and packed weights."""
    found, kept = MEASURED[name](), golden(name)
    assert list(found) == list(kept)
    for key in kept:
        assert found[key] == kept[key], key
        assert list(found[key]) == list(kept[key]), key


def test_numbers(world: None) -> None:
    """Of one forward and backward pass.

    Processors add in other orders. Where weights move by half a unit in the last place, logits move by 1.2e-6
    to 1.6e-6 of the largest; the bound is three times that.
    """
    import numpy

    found, kept = numbers(), golden("numbers")
    assert list(found["gradient norms"]) == list(kept["gradient norms"])
    for kind, values in kept.items():
        now, then = (numpy.array([*v.values()] if isinstance(v, dict) else v) for v in (found[kind], values))
        assert numpy.abs(now - then).max() <= 5e-6 * numpy.abs(then).max(), kind
