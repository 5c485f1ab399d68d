"""The specs of `--spec megatron_nemotron3.specs …`, and errors of `python -m megatron_nemotron3.run`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.distributed import run_fresh
from tests.support.models import build_hybrid

ROOT = Path(__file__).parents[1]
MODULE = "megatron_nemotron3.specs"
SPECS = ("nemotron3_stack_spec", "nemotron3_torch_stack_spec", "nemotron3_te_stack_spec")
OPTIONAL = ("transformer_engine", "mamba_ssm", "causal_conv1d", "apex", "flash_attn")

#: A new process without the optional packages: what the module has, what is picked, what building says.
WITHOUT = f"""
import json, sys
for name in {OPTIONAL!r}:
    sys.modules[name] = None  # import raises ImportError
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron_nemotron3 import specs
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.test_specs import built_kinds

found = {{name: isinstance(import_module([{MODULE!r}, name]), ModuleSpec) for name in {SPECS!r}}}
auto = specs.nemotron3_stack_spec is specs.nemotron3_torch_stack_spec
(built,) = run_distributed(built_kinds, 1)
print("RESULT", json.dumps({{"found": found, "auto is torch": auto, "built": built}}))
"""

#: Command lines of megatron_nemotron3.run that must end in exit code 2, and what the message must name.
REFUSED: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "unknown spec": (
        ["script.py", "--spec", MODULE, "nemotron9_stack_spec"],
        ("nemotron9_stack_spec", *SPECS),
    ),
    "TE spec": (["script.py", "--spec", MODULE, SPECS[2]], (SPECS[2], "transformer-engine", "pip install")),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with `script.py`."""
    (tmp_path / "script.py").write_text("import sys\nprint('THE SCRIPT RAN', *sys.argv[1:])\n")
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_script_runs(case: str, folder: Path) -> None:
    if case == "TE spec" and te_installed():
        pytest.skip("TransformerEngine is installed: its spec is accepted")
    arguments, expected = REFUSED[case]
    code, out, err = run_fresh(call_main, ["--device", "cpu", *arguments], str(folder))
    assert code == 2
    assert "THE SCRIPT RAN" not in out
    assert_refusal(err, expected)


@pytest.mark.parametrize("spec", [["--spec", MODULE, SPECS[1]], ["--spec", "some.module", "nothing"]])
def test_other_command_lines_run_the_script(spec: list[str], folder: Path) -> None:
    """Valid command lines run, so the refusals above mean something."""
    code, out, err = run_fresh(call_main, ["--device", "cpu", "script.py", *spec], str(folder))
    assert (code, out, err) == (0, " ".join(["THE SCRIPT RAN", *spec]) + "\n", "")


def call_main(arguments: list[str], folder: str) -> tuple[Any, str, str]:
    """(exit code, stdout, stderr) of `megatron_nemotron3.run` in `folder`."""
    from megatron_nemotron3.run import main

    os.chdir(folder)
    code: Any = 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()


def assert_refusal(err: str, expected: tuple[str, ...]) -> None:
    """The error is one or two lines that name the problem."""
    assert err.startswith("megatron_nemotron3.run: "), err
    assert 1 <= len(err.splitlines()) <= 2, err
    for text in expected:
        assert text in err


def te_installed() -> bool:
    """Whether the TE spec is a real one here."""
    from megatron_nemotron3.layers.backend import te_problem

    return te_problem() is None


def test_names_are_plain_attributes() -> None:
    """Megatron reads `vars(module)[name]`: no property, no module `__getattr__`."""
    from megatron.core.transformer.spec_utils import ModuleSpec, import_module

    from megatron_nemotron3 import specs

    for name in SPECS:
        assert isinstance(vars(specs)[name], ModuleSpec)
        # The list of two words is what argparse gives `--spec`.
        assert import_module([MODULE, name]) is vars(specs)[name]


def test_auto_is_torch_without_a_gpu() -> None:
    import torch

    from megatron_nemotron3 import specs

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert specs.nemotron3_stack_spec is specs.nemotron3_torch_stack_spec


def built_kinds() -> dict[str, str]:
    """Spec -> what building it makes, or says."""
    from megatron_nemotron3 import specs

    initialize()
    found = {}
    for name in SPECS:
        try:
            found[name] = type(build_hybrid("M", vars(specs)[name]).decoder).__qualname__
        except ImportError as error:
            found[name] = str(error)
    return found


@pytest.mark.full
def test_te_stack_without_te_says_so_when_built() -> None:
    """Importing and listing it needs nothing; the others are built without any optional package."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result["found"] == dict.fromkeys(SPECS, True)
    assert result["auto is torch"]
    built = result["built"]
    said = built.pop(SPECS[2])
    assert set(built.values()) == {"Nemotron3Stack"}
    assert SPECS[2] in said and "transformer-engine is not installed" in said


def build_twice_on_two_stages() -> tuple[str, bool]:
    """(what this rank printed, whether it has a final norm)."""
    from megatron_nemotron3.specs import nemotron3_torch_stack_spec

    initialize(pp=2)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _ in range(2):
            model = build_hybrid("M|*", nemotron3_torch_stack_spec)
    return printed.getvalue(), hasattr(model.decoder, "final_norm")


def test_description_is_printed_once_on_rank_0() -> None:
    from megatron_nemotron3.specs import nemotron3_torch_stack_spec

    (first, first_norm), (second, last_norm) = run_distributed(build_twice_on_two_stages, 2)
    description = nemotron3_torch_stack_spec.submodules.description
    assert description.startswith("backend torch: ")
    assert first == f"megatron_nemotron3: {description}\n"
    assert second == ""
    assert (first_norm, last_norm) == (False, True)  # only the last stage ends in a norm


def build_with_final_norm(params: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """(keyword arguments the final norm's builder got, whether the model has what it returned)."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_nemotron3.layers.norm import RMSNorm
    from megatron_nemotron3.specs import nemotron3_torch_stack_spec as stock

    calls: list[dict[str, Any]] = []
    made: list[RMSNorm] = []

    def final_norm(**kwargs: Any) -> RMSNorm:
        calls.append({k: v for k, v in kwargs.items() if k != "config"})
        made.append(RMSNorm(**kwargs))
        return made[0]

    initialize()
    spec = ModuleSpec(
        module=stock.module, submodules=replace(stock.submodules, final_norm=final_norm), params=params
    )
    decoder = build_hybrid("M", spec, layernorm_epsilon=3e-5).decoder
    return calls, bool(made) and decoder.final_norm is made[0]


@pytest.mark.parametrize("params", [{}, {"post_layer_norm": False}])
def test_final_norm_comes_from_the_spec(params: dict[str, Any]) -> None:
    calls, used = run_distributed(build_with_final_norm, 1, params)[0]
    assert calls == ([] if params else [{"hidden_size": 64, "eps": 3e-5}])
    assert used is not bool(params)
