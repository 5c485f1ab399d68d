"""Omni checkpoints: from transformers' folder to Megatron and back, bit for bit, with equal logits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.checkpoints.convert import omni_inventory
from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.omni_config import omni_config
from megatron_nemotron3.checkpoints.metadata import read_metadata
from megatron_nemotron3.checkpoints.state import common_state, stored_arguments
from megatron_nemotron3.models.omni import ARGUMENT, NANO_OMNI, tiny, with_encoders
from megatron_nemotron3.models.omni_tensors import released_tensors
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support import omni_checkpoints as folders
from tests.support import parity
from tests.support.checkpoint_writer import same_bytes
from tests.support.counted_job import digest
from tests.support.hf_folders import omni_tensors
from tests.support.omni_checkpoints import is_scale, nemotron3, tensors
from tests.support.omni_oracle import pair
from tests.support.world import world_of_one
from tests.train.omni.test_parity import SEED, media_of

# MIMO's classes call themselves experimental.
pytestmark = pytest.mark.filterwarnings("ignore:.* is experimental:UserWarning")

MODEL = tiny(NANO_OMNI)


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Any, Any]]:
    with world_of_one():
        yield pair(MODEL, SEED)


@pytest.fixture(scope="module")
def place(models: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf: what transformers saves; megatron, back: what the command makes of it."""
    folder = tmp_path_factory.mktemp("omni")
    models[1].save_pretrained(folder / "hf")
    assert nemotron3("convert", "from-hf", folder / "hf", folder / "megatron", "--workers", 1) == 0
    assert nemotron3("convert", "to-hf", folder / "megatron", folder / "back", "--workers", 2) == 0
    return folder


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not same_bytes(found[name], expected[name])]


def test_the_inventory_is_what_transformers_saves(place: Path) -> None:
    saved = {name: tuple(tensor.shape) for name, tensor in tensors(place / "hf").items()}
    stated = {t.name: t.shape for t in omni_tensors(MODEL)}
    made = {n: tuple(v.shape) for n, v in omni_inventory.made(MODEL, "float32").items()}
    assert saved == stated | made and not stated.keys() & made.keys()
    assert all(map(is_scale, made))


def test_the_inventory_of_the_release() -> None:
    """7,349 tensors, of which 4 are constants (Megatron-Bridge's card of the released checkpoint)."""
    found = {tensor.name: tensor.dtype for tensor in omni_tensors(NANO_OMNI)}
    assert len(found) + 4 == 7349 == released_tensors(NANO_OMNI)
    # The card counts 7,300 in BF16 and 25 in FP32: two constants are in each.
    assert Counter(found.values()) == {"bfloat16": 7298, "float32": 23, "int64": 24}


def test_back_to_the_same_bits(place: Path, tmp_path: Path) -> None:
    """Every tensor returns, and a second trip gives the same files."""
    equal(tensors(place / "back"), tensors(place / "hf"))
    assert nemotron3("convert", "from-hf", place / "back", tmp_path / "megatron", "--workers", 1) == 0
    assert nemotron3("convert", "to-hf", tmp_path / "megatron", tmp_path / "back", "--workers", 1) == 0
    one, other = digest(place / "back"), digest(tmp_path / "back")
    assert one.pop("nemotron3_manifest.json") and other.pop("nemotron3_manifest.json")
    assert one == other
    found = omni_config(json.loads((place / "back/config.json").read_text()))
    assert found.encoders_json() == MODEL.encoders_json()


def test_transformers_reads_what_comes_back(models: tuple[Any, Any], place: Path) -> None:
    """Without a complaint; the logits of images, video and sound are equal."""
    back, said = folders.from_transformers(place / "back")
    assert not any(said.values()), said
    media = media_of("everything")
    with torch.no_grad():
        expected, found = (model(**media.theirs(model)).logits for model in (models[1], back))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_megatron_loads_it(models: tuple[Any, Any], place: Path) -> None:
    """Every parameter and buffer arrives in another model; the logits of all media are equal."""
    model = folders.load(folders.built(MODEL), place / "megatron/release")
    expected = models[0].state_dict()
    found = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    assert len(found) > 300 and all(torch.equal(value, expected[name]) for name, value in found.items())
    media = media_of("everything")
    assert torch.equal(folders.logits(model, media), folders.logits(models[0], media))
    index = read_metadata(place / "megatron/release")
    line = stored_arguments(common_state(index))[ARGUMENT]
    assert with_encoders(MODEL.language, line).encoders_json() == MODEL.encoders_json()


def save_on_ranks(folder: str) -> None:
    """On each rank: a model of its own random weights at TP 2 and EP 2."""
    model = folders.built(MODEL, ep=2, tp=2, dp=2)
    folders.save(model, MODEL, Path(folder))


@pytest.mark.full
def test_saved_at_tp2_ep2(models: tuple[Any, Any], tmp_path: Path) -> None:
    """What four ranks save is read by one; transformers computes the same."""
    run_distributed(save_on_ranks, 4, str(tmp_path / "iter_0000003"), timeout=300)
    assert nemotron3("convert", "to-hf", tmp_path / "iter_0000003", tmp_path / "hf", "--workers", 1) == 0
    model = folders.load(folders.built(MODEL), tmp_path / "iter_0000003")
    theirs, said = folders.from_transformers(tmp_path / "hf")
    assert not any(said.values()), said
    media = media_of("everything")
    with torch.no_grad():
        expected = theirs(**media.theirs(theirs)).logits
    torch.testing.assert_close(folders.logits(model, media), expected, atol=parity.LOGITS_ATOL, rtol=0)


def test_what_megatron_saves(models: tuple[Any, Any], place: Path, tmp_path: Path) -> None:
    """Megatron's own checkpoint holds the keys of a converted one, and goes to the same folder."""
    saved = tmp_path / "iter_0000003"
    folders.save(folders.load(folders.built(MODEL), place / "megatron/release"), MODEL, saved)
    ours, theirs = (read_metadata(f).tensors for f in (place / "megatron/release", saved))
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert nemotron3("convert", "to-hf", saved, tmp_path / "hf", "--workers", 1) == 0
    equal(tensors(tmp_path / "hf"), tensors(place / "hf"))
    assert nemotron3("convert", "verify", saved, place / "hf", "--workers", 1) == 0


def test_names_of_wrapped_modules(place: Path, tmp_path: Path) -> None:
    """Upstream's MIMO model writes a `module.` for each wrapper of a module into the names."""

    def wrapped(name: str) -> str:
        name = name.replace("language_model.", "language_model.module.module.")
        return name.replace("s.vision.", "s.vision.module.")

    other = folders.renamed(place / "megatron/release", tmp_path / "iter_0000003", wrapped)
    assert nemotron3("convert", "verify", other, place / "hf", "--workers", 1) == 0


def test_constants_of_the_release(place: Path, tmp_path: Path) -> None:
    """They survive the way there and back, without transformers' scales; a reference gives them, too."""
    given = folders.constants(MODEL)

    def as_released(values: dict[str, torch.Tensor]) -> None:
        for name in [name for name in values if is_scale(name)]:
            del values[name]
        values.update(given)

    hf = folders.rewritten(place / "hf", tmp_path / "hf", as_released)
    assert nemotron3("convert", "from-hf", hf, tmp_path / "megatron", "--workers", 1) == 0
    assert nemotron3("convert", "verify", hf, tmp_path / "megatron", "--workers", 1) == 0
    assert nemotron3("convert", "to-hf", tmp_path / "megatron", tmp_path / "back", "--workers", 1) == 0
    equal(tensors(tmp_path / "back"), tensors(hf))
    # They keep their types where the weights are cast.
    cast = ("--dtype", "bfloat16", "--workers", 1)
    assert nemotron3("convert", "to-hf", tmp_path / "megatron", tmp_path / "cast", *cast) == 0
    found = tensors(tmp_path / "cast")
    assert all(same_bytes(found[name], value) for name, value in given.items())
    counted = [name for name in found if name.endswith("num_batches_tracked")]
    assert counted and all(found[name].dtype == torch.int64 for name in counted)
    assert found["mlp1.1.weight"].dtype == torch.bfloat16
    # A checkpoint without them gets them from the reference.
    reference = ("--reference", hf, "--workers", 1)
    assert nemotron3("convert", "to-hf", place / "megatron", tmp_path / "referred", *reference) == 0
    equal(tensors(tmp_path / "referred"), tensors(hf))


def test_the_language_model_alone(place: Path, tmp_path: Path) -> None:
    """Taken out, in both directions, it is an ordinary folder; put in, it changes nothing else."""
    only = ("--only", "language", "--workers", 1)
    assert nemotron3("convert", "from-hf", place / "hf", tmp_path / "megatron", *only) == 0
    assert nemotron3("convert", "to-hf", place / "megatron", tmp_path / "hf", *only) == 0
    assert nemotron3("convert", "verify", tmp_path / "megatron", tmp_path / "hf", "--workers", 1) == 0
    whole = tensors(place / "hf")
    start = "language_model."
    language = {n.removeprefix(start): t for n, t in whole.items() if n.startswith(start)}
    equal(tensors(tmp_path / "hf"), language)
    assert open_checkpoint(tmp_path / "megatron").config.name == MODEL.language.name

    def other(values: dict[str, torch.Tensor]) -> None:
        values["lm_head.weight"] += 1

    changed = folders.rewritten(tmp_path / "hf", tmp_path / "changed", other)
    into = (*only, "--into", place / "megatron")
    assert nemotron3("convert", "from-hf", changed, tmp_path / "put", *into) == 0
    assert nemotron3("convert", "to-hf", tmp_path / "put", tmp_path / "put_hf", "--workers", 1) == 0
    expected = {**whole, f"{start}lm_head.weight": language["lm_head.weight"] + 1}
    equal(tensors(tmp_path / "put_hf"), expected)
    assert nemotron3("convert", "from-hf", changed, tmp_path / "changed_megatron", "--workers", 1) == 0
    into = (*only, "--into", place / "hf")
    assert nemotron3("convert", "to-hf", tmp_path / "changed_megatron", tmp_path / "again", *into) == 0
    equal(tensors(tmp_path / "again"), expected)
    before, after = (json.loads((f / "config.json").read_text()) for f in (place / "hf", tmp_path / "again"))
    assert after["vision_config"] == before["vision_config"]
    assert omni_config(after).encoders_json() == MODEL.encoders_json()


def test_check_and_logits(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` knows the folder; --check-logits compares the language model of both sides."""
    assert nemotron3("check", place / "back", "--full") == 0
    assert "nano-omni-tiny" in capsys.readouterr().out
    check = ("--check-logits", 12, "--workers", 1)
    assert nemotron3("convert", "to-hf", place / "megatron", tmp_path / "hf", *check) == 0
    assert "logits" in capsys.readouterr().out
    assert nemotron3("convert", "from-hf", place / "hf", tmp_path / "megatron", *check) == 0


def test_verify_finds_a_changed_encoder(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "vision_model.radio_model.model.blocks.1.attn.qkv.weight"

    def change(values: dict[str, torch.Tensor]) -> None:
        values[name][-1, -1] += 1

    other = folders.rewritten(place / "hf", tmp_path / "other", change)
    assert nemotron3("convert", "verify", place / "megatron", other, "--workers", 1) == 1
    out = capsys.readouterr().out
    assert f"differs      {name}: 1 of 12,288 elements, first at [191, 63]" in out
