"""A model whose E layers differ trains, resumes, and is not continued as another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.state import loaded_state
from megatron_nemotron3.inference.generate.decode import load
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
from megatron_nemotron3.launch import Launch, ParallelLayout, flags, to_argv
from megatron_nemotron3.launch.script_folders import update_manifest
from megatron_nemotron3.models import get
from megatron_nemotron3.models.stack_specs import (
    ARGUMENT,
    MODULE,
    experts_text,
    models_by_spec,
    stored_experts,
)
from megatron_nemotron3.proof.certify import ranks
from megatron_nemotron3.train import log, processes
from tests.support import distributed
from tests.support.own_stack import WORDS, config
from tests.support.short_run import mock_argv, short_schedule

#: Megatron's null tokenizer adds a word.
CONFIG = config.but(vocab_size=255)
STEPS = 3


def _argv(layout: ParallelLayout, *extra: str, **folders: str) -> list[str]:
    schedule = short_schedule(STEPS, seq_length=32, global_batch_size=2)
    return ["--device", "cpu", str(processes.ENTRY), *mock_argv(CONFIG, layout, schedule, extra, **folders)]


def _train(layout: ParallelLayout, *extra: str, **folders: str) -> log.Curve:
    """Train with the model's flags alone; `WORDS` in `extra` name a module of one's own instead."""
    words = _argv(layout, *extra, **folders)
    return distributed.curve_of(distributed.run_launcher(words, layout.world_size, 240))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The checkpoints of two steps of three, on two pipeline stages."""
    place = tmp_path_factory.mktemp("own")
    first = _train(ParallelLayout(pp=2), "--exit-interval", "2", save=str(place), load=str(place))
    assert sorted(first.steps) == [1, 2]
    yield place


def test_a_checkpoint_says_which_experts_its_layers_have(folder: Path) -> None:
    found = loaded_state(["--load", str(folder)])
    assert found is not None and found[0] == 2
    assert found[1].args[ARGUMENT] == experts_text(CONFIG) == "32:2 96:5 64:3 32:4"


def test_a_checkpoint_of_ones_own_model_generates_and_converts(folder: Path, tmp_path: Path) -> None:
    """Nothing names the model: the checkpoint says its table, and so does the folder made from it."""
    hf = tmp_path / "hf"
    assert cli.main(["convert", "to-hf", str(folder), str(hf), "--workers", "1"]) == 0
    texts = []
    for place in (folder, hf):
        engine = Engine(load(place, dtype=torch.float32))
        assert engine.config.moe_layers == CONFIG.moe_layers
        options = GenerationOptions(max_new_tokens=8)
        texts.append(generate(engine, [[1, 2, 3, 4]], options).rows[0].tokens)
    assert len(texts[0]) == 8 and texts[0] == texts[1]


@pytest.mark.full
def test_resumes_like_an_uninterrupted_run(folder: Path) -> None:
    """A module of one's own continues what the flags' stack began."""
    resumed = _train(ParallelLayout(pp=2), *WORDS, load=str(folder)).steps
    whole = _train(ParallelLayout(pp=2)).steps
    assert sorted(resumed) == [3]
    assert resumed[3].loss == pytest.approx(whole[3].loss, rel=1e-5)
    assert resumed[3].mtp == pytest.approx(whole[3].mtp, rel=1e-5)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (("tests.support.own_stack", "other"), "(width:top-k) 32:2 96:4 64:3 32:4"),
        (("megatron_nemotron3.specs", "nemotron3_torch_stack_spec"), "the same experts in every layer"),
    ],
)
def test_another_table_does_not_load(
    spec: tuple[str, str], said: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where every weight has the shape of the checkpoint's."""
    words = _argv(ParallelLayout(), *WORDS, load=str(folder))
    at = words.index(WORDS[0])
    words[at + 1 : at + 3] = spec
    words.append("--no-load-optim")  # the checkpoint's layout is PP2
    code, _, err = distributed.run_fresh(_main, words)
    assert code == 2 and len(err.splitlines()) == 1
    assert f"--spec {' '.join(spec)} builds" in err and said in err
    assert "iter_0000002 of --load was trained with layers of experts (width:top-k) 32:2 96:5 64:3" in err


def _main(words: list[str]) -> tuple[object, str, str]:
    from tests.test_specs import call_main

    return call_main(words, ".")


def _load(folder: str, spec: str) -> str:
    """What Megatron says when a stack loads this checkpoint; "" if it does."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_nemotron3 import build_model
    from megatron_nemotron3.checkpoints.folders import checkpoint_path

    model = build_model(CONFIG.but(moe_layers=None) if spec == "stock" else CONFIG, precision="fp32")
    state = model.sharded_state_dict(metadata=None)
    try:
        dist_checkpointing.load(state, str(checkpoint_path(Path(folder), 2)))
    except (CheckpointException, CheckpointingException) as problem:
        return str(problem)
    return ""


@pytest.mark.full
@pytest.mark.parametrize("spec", ["own", "stock"])
def test_widths_of_another_table_do_not_fit(spec: str, folder: Path) -> None:
    """Megatron refuses them by itself, for whoever loads without our launcher."""
    (said,) = ranks.run_distributed(_load, 1, str(folder), spec)
    assert bool(said) == (spec == "stock") and ("shape" in said or spec == "own")


def test_a_folder_of_one_model_is_not_continued_as_another(tmp_path: Path) -> None:
    """Puzzle, then Super with Puzzle's Mamba state: no option but --spec tells them apart."""
    puzzle = get("puzzle-tiny")
    for model in (puzzle, puzzle.but(moe_layers=None)):
        words = mock_argv(model.but(vocab_size=255), ParallelLayout(), short_schedule(1), save=str(tmp_path))
        if model is puzzle:
            update_manifest(tmp_path, words)
            (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    with pytest.raises(ValueError, match=r"another model.*experts of layers 32:2 .* -> not given"):
        update_manifest(tmp_path, words)


def test_the_flags_of_ones_own_model_say_which_experts_its_layers_have() -> None:
    """A table of one's own under a known name, too."""
    for model in (CONFIG, get("puzzle-tiny").but(pattern="MEMEME*EE")):
        words = to_argv(flags(Launch.of(model, backend="torch")))
        at = words.index("--spec")
        assert words[at + 1] == MODULE and words[at + 2] not in models_by_spec()
        assert stored_experts({"spec": words[at + 1 : at + 3]}) == experts_text(model)
    assert words[at + 2].startswith("nemotron3_torch_stack_spec@MEMEME*EE@32:")
