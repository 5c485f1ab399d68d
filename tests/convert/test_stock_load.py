"""Stock Megatron loads what `convert from-hf` writes, at any layout, with no flag but --load.

Megatron's own `load_checkpoint` is run on a model of our torch spec, and on stock TransformerEngine modules
where they are installed (`-m te`, see tests/te/test_te_stack.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.args import ParallelLayout
from megatron_nemotron3.checkpoint.describe import common_state
from megatron_nemotron3.checkpoint.integrity import read_all
from megatron_nemotron3.checkpoint.metadata import read_metadata
from megatron_nemotron3.checkpoint.read import read_rows
from megatron_nemotron3.checkpoint.structure import judge
from megatron_nemotron3.convert import from_hf
from megatron_nemotron3.convert.hf_folder import open_hf
from megatron_nemotron3.convert.inventory import links
from megatron_nemotron3.convert.job import Job, run
from megatron_nemotron3.convert.megatron_args import config_of
from megatron_nemotron3.convert.views import Converted
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from tests.checkpoint import runs
from tests.convert.folders import write_hf
from tests.convert.models import DISTINCT, GOLDEN
from tests.helpers import run_distributed
from tests.parallel.case import Case
from tests.parallel.tensors import Tensors, gather

LAYOUTS = {
    "one rank": ParallelLayout(),
    "TP2 EP2": ParallelLayout(tp=2, ep=2),
    "PP2": ParallelLayout(pp=2),
    "EP2": ParallelLayout(dp=2, ep=2),
    "TP2 ETP2": ParallelLayout(tp=2, etp=2),
    "TP2 PP2 EP2": ParallelLayout(tp=2, pp=2, ep=2),
}
#: Sizes that all layouts divide, MTP and every kind of layer; the vocabulary needs padding.
MODELS = {
    "super": tiny(get("super")).but(pattern="ME*M", vocab_size=509),
    "distinct": DISTINCT,
    "dense": tiny(get("nemotron-h-8b")).but(pattern="M-*-"),
}
QUICK = [("super", "one rank"), ("super", "TP2 EP2"), ("distinct", "PP2"), ("dense", "one rank")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model -> folder that was converted from Hugging Face's, in several files."""
    made = {}
    for name, config in MODELS.items():
        place = tmp_path_factory.mktemp(name)
        write_hf(place / "hf", config, files=2)
        made[name] = convert(config, place, "bfloat16")
    return made


def convert(config: Nemotron3Config, place: Path, dtype: str) -> Path:
    """The folder PLACE/megatron made of PLACE/hf, in files of 0.2 MB."""
    source, rows = open_hf(place / "hf"), from_hf.padded(config.vocab_size, 128)
    view = Converted(source, links(config, dtype=dtype, padded_vocab_size=rows), to_hf=False)
    files, small = from_hf.plan(view, config, padded_vocab_size=rows, dtype=dtype, limit=200_000)
    run(Job(place / "megatron", view, files, small))
    return place / "megatron"


def written(folder: Path) -> Tensors:
    """Every tensor of the folder, as our own reader finds it."""
    index = read_metadata(folder / "release")
    return {name: read_rows(index, name) for name in index.tensors}


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_is_sound_and_says_what_it_is(name: str, folders: dict[str, Path]) -> None:
    folder = folders[name] / "release"
    verdict = judge(folder)
    assert (verdict.state, verdict.problems) == ("complete", ())
    assert verdict.index is not None
    assert read_all(folder, verdict.index).problems == ()
    found = config_of(common_state(verdict.index)["args"])
    assert (found.full_pattern, found.vocab_size) == (MODELS[name].full_pattern, MODELS[name].vocab_size)
    assert (folders[name] / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert len(verdict.index.files) > 1


@pytest.mark.parametrize("strictness", ["assume_ok_unexpected", "raise_all"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(m, k, marks=() if (m, k) in QUICK else pytest.mark.full, id=f"{m} at {k}")
        for m in MODELS
        for k in LAYOUTS
        if m != "dense" or LAYOUTS[k].ep == 1
    ],
)
def test_every_weight_arrives(name: str, layout: str, strictness: str, folders: dict[str, Path]) -> None:
    case = Case(config=MODELS[name], layout=LAYOUTS[layout])
    ranks = run_distributed(
        load, case.layout.world_size, case, str(folders[name]), strictness, apart=True, children=True
    )
    assert all(rank["iteration"] == 0 and rank["optimizer"] == 0 for rank in ranks)
    same(written(folders[name]), gather([rank["pieces"] for rank in ranks]), MODELS[name])


def same(kept: Tensors, got: Tensors, config: Nemotron3Config) -> None:
    """Equal to the bit; a model may pad its vocabulary less than the file or more."""
    assert kept.keys() == got.keys(), sorted(kept.keys() ^ got.keys())
    for key, tensor in kept.items():
        rows = config.vocab_size if key in VOCABULARY else tensor.shape[0]
        assert rows <= min(len(tensor), len(got[key])), key
        assert got[key][:rows].equal(tensor[:rows].to(got[key].dtype)), key
        assert key in VOCABULARY or got[key].shape == tensor.shape, key


VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def load(case: Case, folder: str, strictness: str) -> dict[str, Any]:
    """On a rank: build a model with other weights, and load as `megatron.training` does when it starts."""
    from unittest import mock

    from megatron.core.num_microbatches_calculator import (
        destroy_num_microbatches_calculator,
        init_num_microbatches_calculator,
    )
    from megatron.training import checkpointing, global_vars

    from tests.parallel.tensors import pieces
    from tests.parallel.world import Run

    ours = Run(case, None)
    args = ours.args
    args.load, args.dist_ckpt_strictness = folder, strictness
    assert not args.finetune and not args.no_load_optim and not args.no_load_rng
    init_num_microbatches_calculator(0, None, args.global_batch_size, 1, case.layout.dp)
    problems: list[str] = []
    try:
        with (
            mock.patch.object(global_vars, "_GLOBAL_ARGS", args),
            # Where a strict load of the module fails Megatron prints that, and loads what it can.
            mock.patch.object(checkpointing, "print", lambda *words: problems.append(str(words)), create=True),
        ):
            iteration, _ = checkpointing.load_checkpoint(ours.chunks, ours.optimizer, None)
    finally:
        destroy_num_microbatches_calculator()
    assert not problems, problems
    return {"pieces": pieces(ours.chunks), "iteration": iteration, "optimizer": moments(ours.optimizer)}


def moments(optimizer: Any) -> int:
    """How many tensors of state the optimizer has: none before the first step, unless some were loaded."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return sum(len(state) for part in parts for state in part.optimizer.state.values())


SPREAD = ParallelLayout(tp=2, ep=2)


@pytest.mark.parametrize("layout", [SPREAD, pytest.param(ParallelLayout(pp=2), marks=pytest.mark.full)], ids=str)
def test_a_training_run_starts_from_it(layout: ParallelLayout, tmp_path: Path) -> None:
    """The launcher with --load and nothing else; the first loss is that of the weights, in any layout."""
    folders = []
    for seed in (0, 1):
        place = tmp_path / str(seed)
        write_hf(place / "hf", runs.CONFIG, values=scaled(runs.CONFIG, seed), dtype="float32")
        folders.append(convert(runs.CONFIG, place, "float32"))
    spread, single, other = (
        first_loss(*run) for run in ((layout, folders[0]), (ParallelLayout(), folders[0]), (layout, folders[1]))
    )
    assert spread == pytest.approx(single, abs=1e-4)
    assert abs(spread - other) > 1e-2


def first_loss(layout: ParallelLayout, folder: Path) -> float:
    """Loss of the first iteration of a run that loads the folder."""
    curve, output = runs.train(layout, "--exit-interval", "1", load=str(folder))
    assert f"loading release distributed checkpoint from {folder}" in output
    assert f"successfully loaded checkpoint from {folder}" in output and "at iteration 0" in output
    assert "--finetune" not in runs.argv(layout) and list(curve.steps) == [1]
    return float(curve.steps[1].values["lm loss"])


def scaled(config: Nemotron3Config, seed: int) -> dict[str, Any]:
    """Random tensors of a size that gives finite losses."""
    from tests.convert.folders import hf_values

    return {name: value * 0.1 for name, value in hf_values(config, seed, "float32").items()}
