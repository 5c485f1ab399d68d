"""With --use-checkpoint-args the checkpoint says what the model is, as in Megatron."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.checkpoints.convert.megatron_args import args_of
from megatron_nemotron3.checkpoints.state import stored_state
from megatron_nemotron3.launch import stored_model
from megatron_nemotron3.launch.explain import Explanation, explain_command, explain_nearest
from tests.checkpoints.convert.test_megatron_args import release
from tests.support.distributed import run_fresh

LINE = "torchrun pretrain_hybrid.py --bf16 --use-checkpoint-args --num-experts 999 --hidden-size 77 --swiglu"


@pytest.fixture(params=["release", "iter_0000003"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder for --load with Super's stored arguments."""
    release(tmp_path, args_of(models.SUPER, padded_vocab_size=131072), common_pt=False)
    if request.param != "release":
        (tmp_path / "release").rename(tmp_path / request.param)
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    return tmp_path


def stored_args(run: Path) -> dict[str, Any]:
    state = stored_state(next(path for path in run.iterdir() if path.is_dir()))
    assert state is not None
    return dict(state.args)


def values(explained: Explanation) -> dict[str, tuple[str, str]]:
    return {s.name: (s.value, s.origin) for s in explained.settings if s.passed}


def test_the_model_is_the_checkpoints(run: Path) -> None:
    explained = explain_nearest(f"{LINE} --load {run}")
    stored = stored_args(run)
    found = values(explained)
    assert found["--num-experts"] == (str(stored["num_experts"]), "checkpoint")
    assert found["--hybrid-layer-pattern"] == (stored["hybrid_layer_pattern"], "checkpoint")
    assert found["--disable-bias-linear"] == ("on", "checkpoint") and stored["add_bias_linear"] is False
    assert found["--squared-relu"] == ("on", "checkpoint") and "--swiglu" not in found
    assert found["--mamba-state-dim"] == (str(stored["mamba_state_dim"]), "checkpoint")
    assert {s.name for s in explained.differences if s.of_model} >= {"--hidden-size"}
    assert explained.config is models.SUPER
    # Megatron takes the width from the command line where that has one.
    assert found["--hidden-size"][0] == "77"
    note = next(note for note in explained.notes if stored_model.OPTION in note)
    assert "--num-experts" in note and "--swiglu" in note and "--hidden-size" not in note


def test_a_stack_with_other_experts_than_the_checkpoints(tmp_path: Path) -> None:
    puzzle = models.get("puzzle")
    release(tmp_path, args_of(puzzle, padded_vocab_size=131072), common_pt=False)

    def note(spec: str) -> str:
        explained = explain_command(puzzle, f"{LINE} --load {tmp_path} {spec}")
        return next(note for note in explained.notes if stored_model.OPTION in note)

    module = "--spec megatron_nemotron3.specs"
    for spec in ("", f"{module} nemotron3_te_stack_spec"):
        said = "experts of its layers (width:per token) are 1280:4 1280:8"
        assert said in note(spec) and "--spec are those of all layers alike: Megatron does" in note(spec)
    for spec in (f"{module} nemotron3_puzzle_te_stack_spec", "--spec mine spec"):
        assert "experts of its layers" not in note(spec)


def test_what_is_taken_is_what_megatron_takes(tmp_path: Path) -> None:
    release(tmp_path, args_of(models.SUPER, padded_vocab_size=131072), common_pt=False)
    stored = stored_args(tmp_path)
    megatrons = run_fresh(_taken_by_megatron, stored, str(tmp_path))
    for field in (*stored_model._FORCED, *stored_model._IF_NOT_PASSED):
        assert megatrons.get(field) == (77 if field == "hidden_size" else stored.get(field)), field


def _taken_by_megatron(stored: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the arguments after Megatron's own `load_args_from_checkpoint`."""
    from megatron.training import checkpointing

    both = {"args": Namespace(**stored), "checkpoint_version": 3.0, "iteration": 3}
    loaded = (both, "", False, checkpointing.CheckpointType.GLOBAL)
    checkpointing._load_base_checkpoint = lambda *a, **k: loaded
    given: dict[str, Any] = dict.fromkeys(stored)
    given |= {"load": folder, "num_experts": 999, "hidden_size": 77, "swiglu": True, "iteration": 0}
    given |= {"use_tokenizer_model_from_checkpoint_args": False, "use_mp_args_from_checkpoint_args": False}
    args, _ = checkpointing.load_args_from_checkpoint(Namespace(**given))
    return {name: value for name, value in vars(args).items() if name in stored}


@pytest.mark.parametrize("load", ["/no/such/folder", "$CHECKPOINT", "EMPTY"])
def test_without_the_checkpoint_the_model_is_not_compared(load: str, tmp_path: Path) -> None:
    text = f"{LINE} --load {str(tmp_path) if load == 'EMPTY' else load}"
    explained = explain_command(models.SUPER, text)
    different = {s.name for s in explained.differences if s.of_model}
    assert not different & {"--num-experts", "--swiglu", "--hybrid-layer-pattern", "--mtp-num-layers"}
    # The width of the command line holds, and so do numbers that Megatron does not take from checkpoints.
    assert {"--hidden-size", "--init-method-std"} <= different
    assert any("cannot be read here" in note for note in explained.notes)
    with pytest.raises(ValueError, match="give the NAME of the model"):
        explain_nearest(text)


def test_a_damaged_tracker_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs --load"):
        explain_command(models.SUPER, LINE)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("x")
    with pytest.raises(ValueError, match=f"the tracker in {tmp_path} holds 'x'"):
        explain_command(models.SUPER, f"{LINE} --load {tmp_path}")
