"""Checkpoints written by released versions of megatron-core; see tests/golden/checkpoints/README.md."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import checkpoints, inventory, plan
from megatron_nemotron3.checkpoints.convert.checkpoints import open_megatron
from megatron_nemotron3.checkpoints.convert.keys import (
    master_keys,
    non_weight_kind,
    numbered_by_layer,
    plain_name,
)
from megatron_nemotron3.checkpoints.convert.sources import raw
from megatron_nemotron3.checkpoints.convert.torch_dist import open_torch_dist, reorder_mamba
from megatron_nemotron3.checkpoints.metadata import CheckpointError, CheckpointIndex, read_metadata
from megatron_nemotron3.checkpoints.state import common_state, read_dcp_state
from megatron_nemotron3.checkpoints.structure import check_structure
from megatron_nemotron3.checkpoints.trust import hostile_objects
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.pattern import parse
from tests.golden.checkpoints.values import LAYERS, SIZES, VOCABULARY, values
from tests.support.checkpoint_reading import read_rows

ARCHIVES = Path(__file__).parents[2] / "golden" / "checkpoints"
#: Archive -> (whether the model has MTP, dialects besides the default, in which rows may be).
FOLDERS: dict[str, tuple[bool, set[str]]] = {
    "0.16.1_te": (False, set()),
    "0.16.1_te_tp2_ep2": (False, set()),
    "0.16.1_local": (False, {"separate norm"}),
    "0.17.1_singleton": (True, {"singleton experts"}),
    "0.18.2_te": (True, set()),
    "0.18.2_te_tp2_ep2": (True, set()),
    "0.19.2_te": (True, set()),
}
#: Megatron-FSDP: archive -> TP it was written at, MTP, dialects.
FSDP: dict[str, tuple[int, bool, set[str]]] = {
    "0.16.1_fsdp": (1, False, {"parameter", "conv1d module"}),
    "0.18.2_fsdp": (1, True, {"parameter", "conv1d module"}),
    "0.19.2_fsdp": (1, True, {"parameter"}),
    "0.19.2_fsdp_dp2": (1, True, {"parameter"}),
    "0.19.2_fsdp_tp2_ep2": (2, True, {"parameter"}),
}


def config(mtp: bool) -> Nemotron3Config:
    """The model of the archives."""
    layers, _, inner = LAYERS.partition("/")
    fields = {name: value for name, value in SIZES.items() if name in Nemotron3Config.__dataclass_fields__}
    return Nemotron3Config(
        name="golden",
        title="golden",
        pattern=layers,
        vocab_size=VOCABULARY,
        dense_ffn_hidden_size=SIZES["ffn_hidden_size"],
        init_method_std=0.02,
        moe_router_topk_scaling_factor=1.0,
        mtp_pattern=inner if mtp else None,
        mtp_num_layers=1 if mtp else 0,
        **fields,
    )


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def expected(key: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.from_numpy(values(key, shape)).to(getattr(torch, dtype))


def weights(index: CheckpointIndex) -> list[str]:
    return [key for key in index.tensors if non_weight_kind(key) is None]


def dialects(mappings: list[inventory.TensorMapping]) -> set[str]:
    return {
        mapping.spelling.dialect for mapping in mappings if mapping.spelling is not mapping.row.spellings[0]
    }


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, tmp_path: Path) -> None:
    """Every weight is in the table, every other key is known, and all elements are read correctly."""
    mtp, others = FOLDERS[name]
    folder = unpacked(name, tmp_path)
    assert check_structure(folder).state == "complete"
    index = read_metadata(folder)
    keys = weights(index)
    mappings = list(inventory.mappings_of(config(mtp), keys))
    assert dialects(mappings) == others
    for mapping in mappings:
        for tensor in mapping.megatron:
            (key,) = (k for k in keys if plain_name(k) == tensor.name)
            assert index.tensors[key].shape == tensor.shape
    assert not {k for k in (*index.tensors, *index.objects) if non_weight_kind(k) is None} - set(keys)
    for key in keys:
        stored = index.tensors[key]
        assert torch.equal(read_rows(index, key), expected(key, stored.shape, stored.dtype))
    if "tp2" in name:
        assert len(index.tensors["output_layer.weight"].chunks) == 2
    # Up to 0.18 the common state is common.pt; in 0.19 it is an object of the checkpoint.
    assert (index.common_state is None) == (folder / "common.pt").exists() == (name < "0.19")
    state = common_state(index)
    assert state["iteration"] == 1 and state["args"].field("moe_latent_size") == SIZES["moe_latent_size"]


def test_legacy_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "iter_0000003/mp_rank_00"
    place.mkdir(parents=True)
    torch.save({"model": {}, "args": None}, place / "model_optim_rng.pt")
    for command in (
        ["convert", "to-hf", str(place.parent), str(tmp_path / "hf")],
        ["check", str(place.parent)],
    ):
        assert cli.main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{place.parent}: mp_rank_… folders" in line
        assert "--ckpt-format torch --ckpt-convert-format torch_dist --ckpt-convert-save DIR" in line


def hugging_face(
    mappings: Iterable[inventory.TensorMapping], read: Callable[[str, tuple[int, ...]], Any]
) -> Any:
    """Convert Megatron's tensors, which `read` returns by name and shape, to HF tensors."""
    result: dict[str, Any] = {}
    for mapping in mappings:
        result |= plan.apply(mapping.to_hf(), {t.name: read(t.name, t.shape) for t in mapping.megatron})
    return result


@pytest.mark.parametrize("name", FSDP)
def test_fsdp(name: str, tmp_path: Path) -> None:
    """Give a model the values of torch_dist keys, wrap it in Megatron-FSDP, and save it."""
    tp, mtp, others = FSDP[name]
    folder, model = unpacked(name, tmp_path), config(mtp)
    assert check_structure(folder).state == "complete"
    stored, index = open_torch_dist(folder)
    state = read_dcp_state(index)
    assert state["args"].field("tensor_model_parallel_size") == tp
    keys = {plain_name(key): key for key in weights(index)}
    assert all(key == f"model.module.{short}" for short, key in keys.items())
    mappings = list(inventory.mappings_of(model, keys.values()))
    assert dialects(mappings) == others
    source = reorder_mamba(stored, model, state)
    assert source.tensors.keys() == stored.tensors.keys()
    mine = hugging_face(mappings, lambda n, shape: source.read(keys[n]).numpy())
    theirs = hugging_face(inventory.mappings(model), values)
    assert mine.keys() == theirs.keys()
    assert all(numpy.array_equal(mine[n], theirs[n]) for n in mine)
    # Its main weights are stored as the model: FP32, so no master is missing.
    assert {index.tensors[key].dtype for key in keys.values()} == {"float32"}
    assert master_keys(index.tensors) == {}
    raw = hugging_face(mappings, lambda n, shape: stored.read(keys[n]).numpy())
    wrong = {n.split("mixer.")[1] for n in raw if not numpy.array_equal(raw[n], theirs[n])}
    assert wrong == ({"in_proj.weight", "conv1d.weight", "conv1d.bias"} if tp > 1 else set())


#: Of `4798_grouped`, M[ME][*-]E/*E: the number of each decoder layer in the keys.
GROUPED = (0, 1, 1, 2, 2, 3)


def grouped_key(name: str) -> str:
    """The key Megatron-LM #4798 gives a tensor of a layer with its own number."""
    if name == "decoder.final_norm.weight":
        return "decoder.final_layernorm.weight"
    if not name.startswith("decoder.layers."):
        return name
    head, number, rest = name[: len("decoder.layers.")], *name[len("decoder.layers.") :].split(".", 1)
    return f"{head}{GROUPED[int(number)]}.{rest}"


def test_grouped_layers(tmp_path: Path) -> None:
    """The layers of a group share a number; they are told apart by the pattern, and converted one by one."""
    folder = unpacked("4798_grouped", tmp_path)
    model = config(mtp=True).but(pattern="MME*-E")
    keys = weights(read_metadata(folder))
    mappings = list(inventory.mappings(model))
    assert set(keys) == {grouped_key(t.name) for m in mappings for t in m.megatron}
    opened = open_megatron(folder, model=model)
    assert dialects(list(opened.mappings)) == {"GPT norm"}
    theirs = hugging_face(mappings, lambda name, shape: values(grouped_key(name), shape))
    view = opened.hf_view()
    assert view.tensors.keys() == theirs.keys()
    for name, tensor in view.tensors.items():
        expected = torch.from_numpy(theirs[name]).to(getattr(torch, tensor.dtype))
        assert torch.equal(raw(view.read(name)), raw(expected)), name


def test_grouped_optimizer_state_follows_its_weight() -> None:
    pattern = parse("M[*E]")
    assert numbered_by_layer(
        ["chained_1.optimizer.state.fp32_param.decoder.layers.1.mlp.router.weight", "decoder.layers.7.x"],
        pattern,
    ) == {
        "chained_1.optimizer.state.fp32_param.decoder.layers.1.mlp.router.weight": (
            "chained_1.optimizer.state.fp32_param.decoder.layers.2.mlp.router.weight"
        ),
        "decoder.layers.7.x": "decoder.layers.7.x",
    }
    with pytest.raises(
        ValueError, match="layers.1.mlp.+ and .+layers.2.mlp.+ are the same tensor of .+M\\[\\*E\\]"
    ):
        numbered_by_layer(["decoder.layers.1.mlp.x", "decoder.layers.2.mlp.x"], pattern)


def test_groups_in_other_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a group is a stack inside the stack, whose names no version has been seen to write."""
    folder = unpacked("0.19.2_fsdp", tmp_path)

    def grouped(index: CheckpointIndex) -> Any:
        state = read_dcp_state(index)
        state["args"].state["hybrid_layer_pattern"] = "[ME]*-/*E"
        return state

    monkeypatch.setattr(checkpoints, "read_state", grouped)
    with pytest.raises(ValueError, match=r"grouped \(\[ME\]\*-/\*E\).*save it with --ckpt-format torch_dist"):
        open_megatron(folder, model=config(mtp=True))


def test_order_needs_tp(tmp_path: Path) -> None:
    model = config(mtp=True)
    stored, index = open_torch_dist(unpacked("0.19.2_fsdp_tp2_ep2", tmp_path))
    with pytest.raises(CheckpointError, match="parallel_size=None: save it with --ckpt-format torch_dist"):
        reorder_mamba(stored, model, {})
    arguments = read_dcp_state(index)["args"]
    arguments.state["tensor_model_parallel_size"] = 3
    with pytest.raises(CheckpointError, match="written at TP=3, but golden: .*not divisible by TP=3"):
        reorder_mamba(stored, model, {"args": arguments})
    plain_folder, _ = open_torch_dist(unpacked("0.18.2_te", tmp_path))
    assert reorder_mamba(plain_folder, model, {}).tensors == plain_folder.tensors


def test_arguments_of_fsdp(tmp_path: Path) -> None:
    index = read_metadata(unpacked("0.19.2_fsdp", tmp_path))
    state = read_dcp_state(index)
    assert (state["iteration"], state["checkpoint_version"]) == (1, 3.0)
    assert state["args"].field("moe_latent_size") == SIZES["moe_latent_size"]
    place = index.objects["args"]
    data = bytearray((index.folder / place.file).read_bytes())
    data[data.index(b"argparse", place.offset)] ^= 1
    (index.folder / place.file).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{index.folder / place.file}: record 'data.pkl'.*CRC32"):
        read_dcp_state(index)
    assert read_dcp_state(read_metadata(unpacked("0.19.2_te", tmp_path))) == {}


#: torch_dist folders hold values made from their own keys; FSDP's from those of torch_dist.
@pytest.mark.parametrize("name", [*FOLDERS, *FSDP])
def test_the_command_converts_every_kind(name: str, tmp_path: Path) -> None:
    """Convert with the command line and only the stored arguments; read the result with safetensors."""
    folder = unpacked(name, tmp_path)
    assert hostile_objects(folder) == []
    out = tmp_path / "hf"
    vocabulary = ("--vocab-size", str(VOCABULARY))
    assert cli.main(["convert", "to-hf", str(folder), str(out), *vocabulary, "--workers", "1"]) == 0
    found = load_file(out / "model.safetensors")
    opened = open_megatron(folder, vocab_size=VOCABULARY)
    kind = "fsdp_dtensor" if name in FSDP else "torch_dist"
    assert (opened.kind, opened.config.hidden_size) == (kind, SIZES["hidden_size"])
    if name in FSDP:
        wanted = hugging_face(inventory.mappings(config(FSDP[name][1])), values)
    else:
        wanted = hugging_face(opened.mappings, values)
    assert wanted.keys() == found.keys()
    for tensor, value in found.items():
        assert torch.equal(value, torch.from_numpy(wanted[tensor]).to(value.dtype)), tensor
    assert cli.main(["convert", "verify", str(folder), str(out), *vocabulary, "--workers", "1"]) == 0
