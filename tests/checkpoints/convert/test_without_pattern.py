"""Checkpoints whose arguments have no pattern, as of a model that is built from a list of layer configs.

Their layers are read from the names of the tensors. What else their layers differ in, the arguments must say.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import from_hf
from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.keys import pattern_of_names
from megatron_nemotron3.checkpoints.convert.megatron_args import args_of
from megatron_nemotron3.checkpoints.state import stored_state
from megatron_nemotron3.launch.manifest import parts_of_checkpoint
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models import names as catalog_names
from megatron_nemotron3.models.stack_specs import ARGUMENT
from megatron_nemotron3.models.tensors import DIALECTS
from megatron_nemotron3.train.teacher.check import find
from tests.support.convert_models import DISTINCT
from tests.support.hf_folders import write_hf
from tests.support.megatron_tensors import megatron_tensors

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
PUZZLE = get("puzzle-tiny")


def nemotron3(*words: object) -> int:
    return cli.main([str(word) for word in words])


def names(config: Nemotron3Config, **options: Any) -> list[str]:
    return [tensor.name for tensor in megatron_tensors(config, **options)]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "config", [*(get(f"{name}-tiny") for name in catalog_names()), DISTINCT], ids=lambda one: one.name
)
def test_names_tell_the_pattern(config: Nemotron3Config, dialect: str) -> None:
    args = vars(args_of(config, padded_vocab_size=config.vocab_size))
    keys = [f"module.{name}" for name in names(config, dialect=dialect)]
    # What else a checkpoint holds says nothing.
    keys += ["decoder.layers.0.mlp._extra_state/shard_0_1", "rng_state/shard_0_1", "decoder.layers.0.bias"]
    keys += [f"optimizer.state.exp_avg.{keys[0]}", "decoder.layers.0.mlp.adapter.linear_in.weight"]
    assert pattern_of_names(keys, args) == config.full_pattern


MODEL = get("super-tiny").but(pattern="M" * 11 + "E*")
ARGS: dict[str, Any] = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
GPT = ["decoder.layers.2.mlp.linear_fc2.weight"]


@pytest.mark.parametrize(
    ("removed", "added", "args"),
    [
        ("decoder.layers.3.", [], ARGS),
        ("decoder.layers.12.", [f"decoder.layers.13.{GPT[0].split('.', 3)[-1]}"], ARGS),
        ("nothing", GPT, ARGS),
        ("nothing", ["mtp.layers.1.mtp_model_layer.layers.0.mixer.D"], ARGS),
        ("mtp.", [], ARGS),
        ("nothing", [], {"mtp_use_repeated_layer": True}),
        *(("nothing", [], ARGS | {"mtp_num_layers": wrong}) for wrong in ("2", 2.0, -2, 10**12, [2])),
        ("mtp.", [], {"mtp_num_layers": "x"}),
        ("decoder.", [], ARGS),
    ],
)
def test_names_that_tell_no_pattern(removed: str, added: list[str], args: dict[str, Any]) -> None:
    """A layer is missing, or has weights of two kinds, blocks differ, or their depths are unknown."""
    keys = [name for name in names(MODEL) if not name.startswith(removed)]
    assert pattern_of_names(keys + added, args) is None
    assert pattern_of_names(names(MODEL), ARGS) == MODEL.full_pattern


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts differ by layer: "hf", and as Megatron's "pattern", "stated" and "unstated"."""
    place = tmp_path_factory.mktemp("listed")
    write_hf(place / "hf", PUZZLE)
    for name, dropped in (("pattern", ()), ("stated", PATTERNS), ("unstated", (*PATTERNS, ARGUMENT))):

        def stored(*given: Any, dropped: tuple[str, ...] = dropped, **options: Any) -> Namespace:
            values = (
                vars(args_of(*given, **options)) | {"spec": None} | dict.fromkeys(set(dropped) - {ARGUMENT})
            )
            return Namespace(**{n: v for n, v in values.items() if n != ARGUMENT or ARGUMENT not in dropped})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(from_hf, "args_of", stored)
            assert nemotron3("convert", "from-hf", place / "hf", place / name, "--workers", 1) == 0
    return place


def test_there_and_back(folder: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(folder / "stated").config
    assert (opened.full_pattern, opened.moe_layers) == (PUZZLE.full_pattern, PUZZLE.moe_layers)
    files = []
    for name in ("pattern", "stated"):
        assert nemotron3("convert", "to-hf", folder / name, tmp_path / name, "--workers", 1) == 0
        files.append([(tmp_path / name / one).read_bytes() for one in ("model.safetensors", "config.json")])
    assert files[0] == files[1]
    before = load_file(next((folder / "hf").glob("*.safetensors")))
    after = load_file(tmp_path / "stated/model.safetensors")
    assert before.keys() == after.keys() and all(before[n].equal(after[n]) for n in before)
    assert nemotron3("check", folder / "stated") == 0


def test_every_reader_of_stored_arguments_has_it(folder: Path) -> None:
    place = folder / "stated/release"
    assert find(str(folder / "stated")).config.pattern == PUZZLE.pattern  # a teacher
    args = (stored_state(place) or pytest.fail("no state")).args
    assert parts_of_checkpoint(args) == parts_of_checkpoint(stored_state(folder / "pattern/release").args)


def test_experts_that_nothing_states(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shapes of weights do not show how many experts a token gets."""
    words = ("convert", "to-hf", folder / "unstated", tmp_path / "out", "--workers", 1)
    assert nemotron3(*words) == 2 and not (tmp_path / "out").exists()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith(
        "the stored arguments have no pattern but a list, which may have other sizes in each layer: give the "
        "model (--model NAME or FILE)"
    )
    assert nemotron3(*words, "--model", "puzzle", "--tiny") == 0
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["block_configs"]
