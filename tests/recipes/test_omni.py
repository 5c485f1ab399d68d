"""The recipes of Nano Omni: what they print, refuse and train. Training needs a Megatron-LM checkout."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megatron_nemotron3.common.ranks import free_port
from megatron_nemotron3.train.monitor import events
from tests.recipes.cases import RECIPES, run

OMNI = RECIPES / "omni"
CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "/nowhere")
needs_checkout = [
    pytest.mark.checkout,
    pytest.mark.skipif(
        not Path(CHECKOUT, "examples/mimo/pretrain_mimo.py").is_file(),
        reason="MEGATRON_LM_DIR names no Megatron-LM checkout with MIMO",
    ),
]
#: As the recipes' headers have it.
TRIAL = {
    **{"TINY": "1", "DEVICE": "cpu", "PRECISION": "fp32", "BACKEND": "torch", "SEQ": "64", "NNODES": "1"},
    **{"TP": "2", "EP": "2", "STEPS": "3", "MEGATRON_LM_DIR": CHECKOUT},
}
TRIALS = {
    "disjoint": {"GPUS": "4", "VISION": "tp=1,dp=1", "SOUND": "tp=1,dp=1"},
    "colocated": {"GPUS": "2"},
}


@pytest.fixture
def checkout(tmp_path: Path) -> str:
    """A folder that looks like a checkout."""
    entry = tmp_path / "checkout/examples/mimo/pretrain_mimo.py"
    entry.parent.mkdir(parents=True)
    entry.touch()
    return str(tmp_path / "checkout")


@pytest.mark.parametrize(
    ("name", "layouts", "language"),
    [
        ("disjoint", ("tp=1,dp=4", "tp=1,dp=4"), "12"),
        ("colocated", ("tp=1,dp=32,offset=0", "tp=1,dp=32,offset=0"), "16"),
    ],
)
def test_what_is_launched(name: str, layouts: tuple[str, str], language: str, checkout: str) -> None:
    done = run(OMNI / f"{name}.sh", {"DRY_RUN": "1", "MEGATRON_LM_DIR": checkout, "MASTER_ADDR": "node0"})
    assert done.returncode == 0 and done.stdout.count("\n") == 1, done.stderr
    words = shlex.split(done.stdout)
    given = {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}
    assert (given["--vision-layout"], given["--sound-layout"]) == layouts
    assert given["--tensor-model-parallel-size"] == "2" and given["--expert-model-parallel-size"] == "8"
    assert int(given["--global-batch-size"]) == 8 * int(given["--micro-batch-size"]) * int(language)
    assert "--sequence-parallel" in words and "--mock-data" in words
    assert len((OMNI / f"{name}.sh").read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("disjoint", {"MEGATRON_LM_DIR": "/nowhere"}, "use tag core_v0.19.0"),
        ("disjoint", {"VISION": "tp=1,dp=30"}, "need ranks 0 to 33, and the world has 32"),
        ("disjoint", {"VISION": "tp=1,dp=8", "EP": "1"}, "10 samples of a microbatch"),
        ("disjoint", {"VISION": "cp=2"}, "--vision-layout cp=2: encoders have tp=, dp= and offset= only"),
        ("disjoint", {"SOUND": "tp=1,dp=4,offset=0"}, "as many modules on each rank as on the others"),
        ("disjoint", {"DATA_PATH": "/data/talks.jsonl"}, "set PROCESSOR"),
        ("colocated", {"PP": "2"}, "give the encoders ranks of their own"),
        ("colocated", {"EXTRA": "--freeze all"}, "--freeze"),
        ("sft", {}, "set DATA_PATH"),
        ("sft", {"DATA_PATH": "/data/talks.jsonl", "PROCESSOR": "/model"}, "set LOAD"),
    ],
)  # fmt: skip
def test_one_clear_line(name: str, variables: dict[str, str], message: str, checkout: str) -> None:
    given = {"DRY_RUN": "1", "MEGATRON_LM_DIR": checkout, **variables}
    done = run(OMNI / f"{name}.sh", {key: value for key, value in given.items() if value})
    assert done.returncode == 2 and not done.stdout
    assert message in done.stderr and (done.stderr.count("\n") == 1 or "--freeze" in message)


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_checkout) for name in TRIALS])
def test_a_recipe_trains(name: str, tmp_path: Path) -> None:
    """Three steps on gloo, with the checkout's forward step and loss."""
    given = {**TRIAL, **TRIALS[name], "MASTER_PORT": str(free_port()), "OUTPUT": str(tmp_path)}
    done = run(OMNI / f"{name}.sh", given, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [value for _, value in events.read(events.find(tmp_path / "tensorboard"))["lm loss"]]
    # Random words of 2048: log 2048 = 7.62, and 0.4 for logits of variance 0.8.
    assert len(losses) == 3 and all(7.5 < loss < 8.5 for loss in losses)
