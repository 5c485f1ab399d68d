"""examples/omni_cpu.py: every layout trains as the single process does, and the recipes parse."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.certify.ranks import run_distributed

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
RECIPES = ROOT / "megatron_nemotron3/recipes" / "omni"
CHECKOUT = os.environ.get("MEGATRON_LM_DIR", "/nowhere")
ENTRY = Path(CHECKOUT, "examples/mimo/pretrain_mimo.py")
needs_checkout = [
    pytest.mark.checkout,
    pytest.mark.skipif(not ENTRY.is_file(), reason="MEGATRON_LM_DIR names no Megatron-LM checkout with MIMO"),
]
#: As the recipes' headers have it.
TRIAL = {
    "TINY": "1",
    "DEVICE": "cpu",
    "PRECISION": "fp32",
    "BACKEND": "torch",
    "VOCABULARY": "2048",
    "STEPS": "3",
}
TRIALS = {
    "disjoint": {
        "GPUS": "3",
        "ENCODER_TP": "1",
        "ENCODER_DP": "1",
        "LLM_TP": "1",
        "LLM_DP": "2",
        "LLM_EP": "1",
    },
    "colocated": {"GPUS": "2", "LLM_TP": "2", "LLM_DP": "1", "LLM_EP": "2"},
}
#: Megatron's own parser over the words after the entry, as one of 32 ranks.
PARSE = """
import sys
from megatron_nemotron3.cpu import cpu_mode
with cpu_mode():
    import pretrain_omni
    args = pretrain_omni.parse()
sizes = args.encoder_dp, args.llm_dp, args.data_parallel_size, args.world_size
print("sizes", *sizes, args.calculate_per_token_loss)
"""


@cache
def example(name: str) -> Any:
    """A module of the example; they import each other by plain names, as scripts in one folder do."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return __import__(name)


def _run(mode: str, steps: int, weights: str, save: bool) -> tuple[list[float], list[float], list[float]]:
    cpu = example("omni_cpu")
    losses = example("omni_train").run(
        cpu.SINGLE if mode == "single" else cpu.MODES[4][mode], steps, weights, save=save
    )
    return losses.all, losses.captions, losses.norms


def test_disjoint_ranks_train_as_a_single_process(tmp_path: Path) -> None:
    """Three steps: losses and gradient norms, which tell a wrong gradient scale where Adam does not."""
    weights = str(tmp_path / "weights")
    (single,) = run_distributed(_run, 1, "single", 3, weights, True, apart=True)
    assert single[0][2] < single[0][0] - 1
    for losses in run_distributed(_run, 4, "disjoint", 3, weights, False):  # all modes: test_the_script
        for mine, other in zip(losses, single, strict=True):
            assert mine == pytest.approx(other, rel=1e-4)


@pytest.mark.full
def test_the_script(tmp_path: Path) -> None:
    """As a user starts it; after eight steps the captions are known better than without encoders."""
    picture = tmp_path / "curves.png"
    words = [str(EXAMPLES / "omni_cpu.py"), "--processes", "4", "--steps", "8", "--plot", str(picture)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert picture.stat().st_size > 1000
    lines = done.stdout.splitlines()
    (title,) = [number for number, line in enumerate(lines) if line.startswith("loss of the captions")]
    *seen, blind = (float(word) for word in lines[title + 1].split())
    assert len(seen) == 6 and max(seen) < blind - 0.5


def test_samples() -> None:
    """The same wherever they are asked for; as many placeholders as rows; all kinds occur."""
    data = example("omni_data")
    kinds = set()
    for index in range(60):
        one, again = data.sample(index), data.sample(index)
        assert one.tokens == again.tokens
        assert all(torch.equal(a, b) for a, b in zip(one.pictures, again.pictures, strict=True))
        rows = sum(picture[0].numel() for picture in one.pictures) // data.PATCH**2
        assert one.tokens.count(data.PICTURE) == rows
        assert one.tokens.count(data.SOUND) == sum(map(len, one.sounds)) // data.FRAMES
        kinds.add((len(one.pictures), len(one.sounds)))
    assert kinds == {(0, 0), (1, 0), (0, 1), (1, 1), (2, 0)}


def test_a_caption_depends_on_its_picture_alone() -> None:
    """Noise of the same shape has the same text: nothing but the encoder can tell."""
    data = example("omni_data")
    seeing, blind = data.microbatch(0, 12), data.microbatch(0, 12, blind=True)
    assert [one.tokens for one in seeing] == [one.tokens for one in blind]
    assert not any(
        torch.allclose(a, b)
        for one, other in zip(seeing, blind, strict=True)
        for a, b in zip(one.pictures + one.sounds, other.pictures + other.sounds, strict=True)
    )


def _recipe(name: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    full = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": port}
    script = str(RECIPES / f"{name}.sh")
    return subprocess.run(["bash", script], env=full | env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", TRIALS)
def test_a_recipe_stops_without_the_stock_entry(name: str, tmp_path: Path) -> None:
    done = _recipe(name, MEGATRON_LM_DIR=str(tmp_path), DRY_RUN="1")
    assert done.returncode == 2 and "use tag core_v0.19.0" in done.stderr and not done.stdout
    assert len((RECIPES / f"{name}.sh").read_text().splitlines()) <= 60


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_checkout) for name in TRIALS])
def test_the_stock_parser_takes_a_recipe(name: str) -> None:
    printed = _recipe(name, DRY_RUN="1").stdout
    assert printed.count("\n") == 1
    words = shlex.split(printed)
    entry = words.index(str(RECIPES / "pretrain_omni.py"))
    paths = os.pathsep.join([str(RECIPES), CHECKOUT, str(ROOT)])
    env = {**os.environ, "PYTHONPATH": paths, "RANK": "0", "WORLD_SIZE": "32", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", PARSE, *words[entry + 1 :]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {"disjoint": "sizes 4 12 12 32 True", "colocated": "sizes 32 16 16 32 True"}
    assert done.stdout.splitlines()[-1] == expected[name]


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_checkout) for name in TRIALS])
def test_a_recipe_trains(name: str) -> None:
    """The checkout's training loop over our model, communicator and gradient scale: three steps on gloo."""
    done = _recipe(name, NNODES="1", **TRIAL, **TRIALS[name])
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(word) for word in re.findall(r"lm loss: ([0-9.E+-]+)", done.stdout)]
    # Random words of 2048: log 2048 = 7.62, and 0.4 for logits of variance 0.8.
    assert len(losses) == 3 and all(7.5 < loss < 8.5 for loss in losses)
