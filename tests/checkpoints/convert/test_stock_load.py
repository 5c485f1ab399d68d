"""Stock Megatron loads what `convert from-hf` writes, at any layout, with no flag but --load.

Megatron's own `load_checkpoint` is run on a model of our torch spec, and on stock TransformerEngine modules
where they are installed (`-m te`, see tests/te/test_te_stack.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.checkpoints.convert import from_hf
from megatron_nemotron3.checkpoints.convert.from_hf import extra_state_keys
from megatron_nemotron3.checkpoints.convert.hf_folder import open_hf
from megatron_nemotron3.checkpoints.convert.inventory import mappings
from megatron_nemotron3.checkpoints.convert.job import Job, run
from megatron_nemotron3.checkpoints.convert.megatron_args import config_of
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.checkpoints.metadata import read_metadata
from megatron_nemotron3.checkpoints.state import common_state
from megatron_nemotron3.checkpoints.structure import check_integrity, check_structure
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import gather
from tests.parallel.case import Case
from tests.support import checkpoint_runs as runs
from tests.support import loaded_weights as arrived
from tests.support.convert_models import DISTINCT, GOLDEN
from tests.support.hf_folders import write_hf
from tests.support.loaded_weights import same, written

LAYOUTS = {
    "one rank": ParallelLayout(),
    "TP2": ParallelLayout(tp=2),
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
#: (model, layout, strictness) of `make test`.
QUICK = (
    ("super", "TP2 EP2", "raise_all"),
    ("distinct", "PP2", "assume_ok_unexpected"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Map each model to its folder, converted from Hugging Face in several files."""
    made = {}
    for name, config in MODELS.items():
        place = tmp_path_factory.mktemp(name)
        write_hf(place / "hf", config, files=2)
        made[name] = convert(config, place, "bfloat16")
    return made


def convert(config: Nemotron3Config, place: Path, dtype: str) -> Path:
    """Convert PLACE/hf to PLACE/megatron in files of 0.2 MB."""
    source, rows = open_hf(place / "hf"), from_hf.pad_vocab_size(config.vocab_size, 128)
    view = Converted(source, mappings(config, dtype=dtype, padded_vocab_size=rows), to_hf=False)
    plan = from_hf.plan(view, config, padded_vocab_size=rows, dtype=dtype, limit=200_000)
    run(Job(place / "megatron", view, plan.files, plan.small, plan.index))
    return place / "megatron"


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_is_sound_and_says_what_it_is(name: str, folders: dict[str, Path]) -> None:
    folder = folders[name] / "release"
    verdict = check_structure(folder)
    assert (verdict.state, verdict.problems) == ("complete", ())
    assert verdict.index is not None
    assert check_integrity(folder, verdict.index).problems == ()
    found = config_of(common_state(verdict.index)["args"])
    assert (found.full_pattern, found.vocab_size) == (MODELS[name].full_pattern, MODELS[name].vocab_size)
    assert (folders[name] / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert len(verdict.index.files) > 1


@pytest.mark.parametrize(
    ("name", "layout", "strictness"),
    [
        pytest.param(m, k, s, marks=() if (m, k, s) in QUICK else pytest.mark.full, id=f"{m} at {k}, {s}")
        for m in MODELS
        for k in LAYOUTS
        for s in ("assume_ok_unexpected", "raise_all")
        if MODELS[m].is_moe or LAYOUTS[k].ep == LAYOUTS[k].etp == 1
    ],
)
def test_every_weight_arrives(name: str, layout: str, strictness: str, folders: dict[str, Path]) -> None:
    case = Case(config=MODELS[name], layout=LAYOUTS[layout])
    ranks = run_distributed(load, case.layout.world_size, case, str(folders[name]), strictness, apart=True)
    assert all(rank["iteration"] == 0 and rank["optimizer"] == 0 for rank in ranks)
    same(written(folders[name]), gather([rank["pieces"] for rank in ranks]), MODELS[name])


def test_without_a_placeholder_megatron_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the `_extra_state` objects, a load fails at the default strictness."""
    config = MODELS["dense"]
    keys = [key for key in extra_state_keys(config) if "output_layer" not in key]
    monkeypatch.setattr(from_hf, "extra_state_keys", lambda config: iter(keys))
    write_hf(tmp_path / "hf", config)
    arguments = (Case(config=config), str(convert(config, tmp_path, "bfloat16")), "assume_ok_unexpected")
    with pytest.raises(RuntimeError, match=r"output_layer\._extra_state/shard_0_1"):
        run_distributed(load, 1, *arguments, apart=True)


def test_a_checkpoint_without_any_placeholder_loads_with_megatrons_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As main saves with `--ckpt-drop-redundant-extra-state` (Megatron-LM #5552): every weight arrives."""
    config = MODELS["dense"]
    monkeypatch.setattr(from_hf, "extra_state_keys", lambda config: iter(()))
    write_hf(tmp_path / "hf", config)
    folder = convert(config, tmp_path, "bfloat16")
    ranks = run_distributed(load, 1, Case(config=config), str(folder), "log_all", apart=True)
    same(written(folder), gather([rank["pieces"] for rank in ranks]), config)


def load(case: Case, folder: str, strictness: str) -> dict[str, Any]:
    """On each rank: build a model with other weights, and load as `megatron.training` does at its start."""
    from unittest import mock

    from megatron.core.num_microbatches_calculator import (
        destroy_num_microbatches_calculator,
        init_num_microbatches_calculator,
    )
    from megatron.training import checkpointing, global_vars

    from megatron_nemotron3.proof.certify.tensors import pieces
    from megatron_nemotron3.proof.certify.world import TrainingRun

    ours = TrainingRun(case, None)
    args = ours.args
    args.load, args.dist_ckpt_strictness = folder, strictness
    assert not args.finetune and not args.no_load_optim and not args.no_load_rng
    init_num_microbatches_calculator(0, None, args.global_batch_size, 1, case.layout.dp)
    problems: list[str] = []
    try:
        with (
            mock.patch.object(global_vars, "_GLOBAL_ARGS", args),
            # If a strict load of the module fails, Megatron prints that and loads what it can.
            mock.patch.object(
                checkpointing, "print", lambda *words: problems.append(str(words)), create=True
            ),
        ):
            iteration, _ = checkpointing.load_checkpoint(ours.chunks, ours.optimizer, None)
    finally:
        destroy_num_microbatches_calculator()
    assert not problems, problems
    return {"pieces": pieces(ours.chunks), "iteration": iteration, "optimizer": moments(ours.optimizer)}


def moments(optimizer: Any) -> int:
    """Count the optimizer's state tensors: none before the first step, unless some were loaded."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return sum(len(state) for part in parts for state in part.optimizer.state.values())


@pytest.mark.full
@pytest.mark.parametrize("layout", [ParallelLayout(tp=2, ep=2), ParallelLayout(pp=2)], ids=str)
def test_a_training_run_starts_from_it(layout: ParallelLayout, tmp_path: Path) -> None:
    """The launcher with --load alone: the first loss is that of the weights, in any layout."""
    folders = []
    for seed in (0, 1):
        place = tmp_path / str(seed)
        write_hf(place / "hf", runs.CONFIG, values=scaled(runs.CONFIG, seed), dtype="float32")
        folders.append(convert(runs.CONFIG, place, "float32"))
    spread, single, other = (
        first_loss(*run)
        for run in ((layout, folders[0]), (ParallelLayout(), folders[0]), (layout, folders[1]))
    )
    assert spread == pytest.approx(single, abs=1e-4)
    assert abs(spread - other) > 1e-2


def first_loss(layout: ParallelLayout, folder: Path) -> float:
    """Return the loss of the first iteration of a run that loads the folder."""
    # Padding that does not depend on TP: Megatron's loss counts the logits of padded rows.
    extra = ("--make-vocab-size-divisible-by", "128", "--exit-interval", "1")
    curve, output = runs.train(layout, *extra, load=str(folder))
    assert f"loading release distributed checkpoint from {folder}" in output
    assert f"successfully loaded checkpoint from {folder}" in output and "at iteration 0" in output
    assert "--finetune" not in runs.argv(layout) and list(curve.steps) == [1]
    return float(curve.steps[1].values["lm loss"])


def scaled(config: Nemotron3Config, seed: int) -> dict[str, Any]:
    """Return random tensors of a scale that gives finite losses."""
    from tests.support.hf_folders import hf_values

    return {name: value * 0.1 for name, value in hf_values(config, seed, "float32").items()}


#: Run by TE_PYTHON: stock TransformerEngine modules, and our spec on them, load a folder with `raise_all`.
WITH_TE = """
import json, logging, warnings
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
from pathlib import Path
from tests.support.loaded_weights import load_with_te

print("RESULT", json.dumps(load_with_te(Path({folder!r}), {name!r}, {specs!r})))
"""


@pytest.mark.te
@pytest.mark.skipif(not os.environ.get("TE_PYTHON"), reason="TE_PYTHON names no interpreter")
@pytest.mark.parametrize("name", GOLDEN)
def test_transformer_engine_loads_it(name: str, tmp_path: Path) -> None:
    from tests.te.test_te_stack import SPECS, run_with_te

    specs = {who: SPECS[who] for who in ("stock", "te")}
    write_hf(tmp_path / "hf", GOLDEN[name])
    folder = convert(GOLDEN[name], tmp_path, "bfloat16")
    compared = run_with_te(WITH_TE.format(folder=str(folder), name=name, specs=specs))
    tensors = len(read_metadata(folder / "release").tensors)
    layouts = [layout for layout in arrived.LAYOUTS if GOLDEN[name].is_moe or layout != "TP2 EP2"]
    assert compared == {f"{who} at {layout}": tensors for who in specs for layout in layouts}
