"""The keys of configuration that docs/bridge.md gives verl and NeMo-RL are keys of theirs.

`tests/golden/framework_keys.json` has the names; with `VERL_DIR` and `NEMO_RL_DIR` they are looked up in the
frameworks' own files.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT, blocks

GOLDEN = json.loads((ROOT / "tests" / "golden" / "framework_keys.json").read_text())
PROGRAMS = {"verl": "verl.trainer.main_ppo", "nemo_rl": "run_nemotron3.py"}
#: Configurations of a checkout that hold the keys, each over the one before.
FILES = {
    "verl": (
        "VERL_DIR",
        [
            "verl/trainer/config/ppo_trainer.yaml",  # whose defaults have the choice of an engine
            "verl/trainer/config/_generated_ppo_megatron_trainer.yaml",
        ],
    ),
    "nemo_rl": (
        "NEMO_RL_DIR",
        [
            "examples/configs/grpo_math_1B.yaml",
            "examples/configs/recipes/llm/grpo-nemotron3-super-120BA12B-16n8g-megatron.yaml",
        ],
    ),
}


def of_the_page(framework: str) -> dict[str, bool]:
    """Key -> whether it is added with `+`, of the page's command."""
    (text,) = (b.text for b in blocks("docs/bridge.md") if PROGRAMS[framework] in b.text)
    return {key: bool(plus) for plus, key in re.findall(r"(?<=\s)(\+?)([a-z]\w*(?:\.\w+)*)=", text)}


@pytest.mark.parametrize("framework", FILES)
def test_the_page_gives_known_keys(framework: str) -> None:
    found = of_the_page(framework)
    assert len(found) > 10 and not {key for key, added in found.items() if not added} - {*GOLDEN[framework]}
    for key in (key for key, added in found.items() if added):  # new, in a section that there is
        assert key.rpartition(".")[0] in GOLDEN[framework] and key not in GOLDEN[framework]


def test_the_added_key_is_one_of_megatron() -> None:
    from megatron.core.transformer import TransformerConfig

    added = [key for key, plus in of_the_page("verl").items() if plus]
    assert added and all(hasattr(TransformerConfig, key.rpartition(".")[2]) for key in added)


@pytest.mark.rl
@pytest.mark.parametrize("framework", FILES)
def test_the_framework_has_these_keys(framework: str) -> None:
    variable, names = FILES[framework]
    if not os.environ.get(variable):
        pytest.skip(f"{variable} does not name a checkout")
    trees = [yaml.safe_load((Path(os.environ[variable]) / name).read_text()) for name in names]
    trees += [choice for tree in trees for choice in tree.get("defaults", []) if isinstance(choice, dict)]
    missing = [key for key in GOLDEN[framework] if not any(has(tree, key) for tree in trees)]
    assert missing == []


def has(tree: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True
