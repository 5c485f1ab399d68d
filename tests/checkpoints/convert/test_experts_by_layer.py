"""Conversion of Nemotron Puzzle, whose layers have experts of their own width and number per token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.config_json import write
from megatron_nemotron3.models import PUZZLE, SUPER, count, get
from tests.support import parity
from tests.support.hf_folders import write_hf
from tests.support.megatron_tensors import megatron_tensors
from tests.support.model_mapping import megatron_model, transformers_from, unclamped
from tests.support.world import world_of_one

TINY = get("puzzle-tiny")
#: What transformers builds.
ALONE = parity.without_mtp(TINY)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with world_of_one():
        yield


def nemotron3(*words: object) -> int:
    return cli.main([str(word) for word in words])


def test_the_released_checkpoint() -> None:
    """Its names begin with `model.`; the sizes of experts are those of each layer, and MTP has Super's."""
    tensors = {t.name: t.shape for t in inventory.hf_tensors(PUZZLE)}
    supers = {t.name for t in inventory.hf_tensors(SUPER)}
    assert tensors.keys() == {name.replace("backbone.", "model.", 1) for name in supers}
    assert tensors["model.embeddings.weight"] == tensors["lm_head.weight"] == (131072, 4096)
    assert sum(name.startswith("mtp.") for name in tensors) == 1040  # as engines count them in the release
    for layer, width in ((1, 1280), (23, 2688), (26, 1536), (50, 1792), (87, 2048)):
        stem = f"model.layers.{layer}.mixer.experts.511"
        assert tensors[f"{stem}.up_proj.weight"] == (width, 1024)
        assert tensors[f"{stem}.down_proj.weight"] == (1024, width)
    assert tensors["mtp.layers.1.mixer.experts.0.up_proj.weight"] == (2688, 1024)
    assert sum(t.elements for t in inventory.hf_tensors(PUZZLE)) == count(PUZZLE).stored
    assert sum(t.elements for t in megatron_tensors(PUZZLE)) == count(PUZZLE).stored


def test_logits_of_transformers_survive_the_way_to_megatron(world: None, tmp_path: Path) -> None:
    """Random weights of transformers' layers, converted from files and loaded by Megatron."""
    from megatron.core import dist_checkpointing

    config = ALONE
    data = json.loads(json.dumps(write(config, dtype="float32")))
    theirs = transformers_from(data).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            if ".experts." in name or ".gate." in name:  # transformers leaves them as they were allocated
                tensor.copy_(noise * (tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1))
            elif tensor.is_floating_point():
                tensor += 0.05 * noise
    unclamped(theirs)
    write_hf(tmp_path / "hf", config, values=separate_experts(theirs.state_dict()), dtype="float32")
    words = ("--make-vocab-size-divisible-by", 1, "--workers", 1)
    assert nemotron3("convert", "from-hf", tmp_path / "hf", tmp_path / "megatron", *words) == 0
    ours = megatron_model(config).eval()
    state = ours.sharded_state_dict(metadata={"singleton_local_shards": False})
    loaded = dist_checkpointing.load(state, str(tmp_path / "megatron/release"))
    ours.load_state_dict({k: v for k, v in loaded.items() if not k.endswith("_extra_state")}, strict=False)
    ids = parity.text(config, 1, 200, 4)
    with torch.no_grad(), parity.router_logits(ours, theirs) as calls:
        found, expected = parity.forward(ours, ids), theirs(ids).logits
    assert parity.routing(calls)[0] > parity.ROUTING_MARGIN
    torch.testing.assert_close(found, expected, rtol=0, atol=parity.LOGITS_ATOL)
    assert expected.std() > 0.1
    assert nemotron3("convert", "verify", tmp_path / "hf", tmp_path / "megatron", "--workers", 1) == 0
    assert nemotron3("check", "--full", tmp_path / "megatron") == 0


def separate_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            stem, _, which = name.rpartition(".")
            result |= {f"{stem}.{e}.{which}.weight": part.clone() for e, part in enumerate(tensor)}
        else:
            result[name] = tensor.clone()
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Tensor]]:
    """The tiny form as a Hugging Face folder and as Megatron's, and its tensors."""
    folder = tmp_path_factory.mktemp("puzzle")
    values = write_hf(folder / "hf", TINY, dtype="float32")
    assert nemotron3("convert", "from-hf", folder / "hf", folder / "megatron", "--workers", 1) == 0
    return folder / "hf", folder / "megatron", values


Folders = tuple[Path, Path, dict[str, Tensor]]


def test_both_folders_say_what_the_model_is(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, megatron, values = folders
    for folder in (hf, megatron):
        opened = open_checkpoint(folder)
        assert (opened.config.name, opened.config.moe_layers) == ("puzzle-tiny", TINY.moe_layers)
    assert nemotron3("convert", "to-hf", megatron, tmp_path / "back", "--reference", hf, "--workers", 1) == 0
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == values.keys() and all(back[name].equal(values[name]) for name in values)
    assert nemotron3("check", tmp_path / "back") == 0
    # Experts of another number per token have the same shapes; those of another width do not.
    rows = TINY.expert_sizes
    for name, row, said in (
        ("topk", (rows[0][0], rows[0][1] + 1), "its experts of each layer (width:per token) 32:3 "),
        ("width", (rows[0][0] + 32, rows[0][1]), "its experts of each layer (width:per token) 64:2 "),
    ):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"base": "puzzle-tiny", "moe_layers": [row, *rows[1:]]}))
        capsys.readouterr()
        assert nemotron3("convert", "to-hf", megatron, tmp_path / name, "--model", file) == 2
        assert said in capsys.readouterr().err
        assert nemotron3("convert", "from-hf", hf, tmp_path / name, "--model", file) == 2
        assert "it is not the model" in capsys.readouterr().err and not (tmp_path / name).exists()


def test_quantized(folders: Folders, tmp_path: Path) -> None:
    """By another model's recipe: no published recipe of this model is known."""
    megatron = folders[1]
    out = tmp_path / "quantized"
    assert nemotron3("convert", "to-hf", megatron, out, "--quantize", "super-nvfp4", "--workers", 1) == 0
    stored = load_file(out / "model.safetensors")
    packed = [name for name, tensor in stored.items() if tensor.dtype == torch.uint8]
    assert {"model.layers.1.mixer.experts.0.up_proj.weight"} < set(packed)
    assert not [name for name in stored if name.startswith("backbone.")]
    config = json.loads((out / "config.json").read_text())
    assert "model.layers.1.mixer.experts.0.up_proj" in json.dumps(config["quantization_config"])
    words = ("convert", "from-hf", out, tmp_path / "again", "--dequantize", "--dtype", "bfloat16")
    assert nemotron3(*words) == 0
    assert open_checkpoint(tmp_path / "again").config.moe_layers == TINY.moe_layers


def test_adapters(folders: Folders, tmp_path: Path) -> None:
    """LoRA on experts of three widths: peft's file, Megatron's tensors and back, and merged."""
    hf, megatron, values = folders
    rank, experts, latent = 2, TINY.num_moe_experts or 0, TINY.moe_latent_size or 0
    made = torch.Generator().manual_seed(2)
    file: dict[str, Tensor] = {}
    expected = dict(values)
    for layer, kind in enumerate(TINY.pattern):
        if kind != "E":
            continue
        width = TINY.at(layer).moe_ffn_hidden_size or 0
        for inner, (name, rows, columns) in enumerate(
            (("down_proj", latent, width), ("up_proj", width, latent))
        ):
            a = torch.randn(experts, rank, columns, generator=made)
            b = torch.randn(experts, rows, rank, generator=made)
            stem = f"base_model.model.model.layers.{layer}.mixer.experts" + ".base_layer" * inner
            file[f"{stem}.lora_A.weight"] = a.reshape(experts * rank, columns).contiguous()
            file[f"{stem}.lora_B.weight"] = b.permute(1, 2, 0).reshape(rows, rank * experts).contiguous()
            for e in range(experts):
                weight = f"model.layers.{layer}.mixer.experts.{e}.{name}.weight"
                expected[weight] = values[weight] + 4 / rank * b[e] @ a[e]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(file, adapter / "adapter_model.safetensors", {"format": "pt"})
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": []}
    stated["target_parameters"] = ["experts.up_proj", "experts.down_proj"]
    (adapter / "adapter_config.json").write_text(json.dumps(stated))
    words = ("--adapter", adapter, "--workers", 1)
    assert nemotron3("convert", "from-hf", hf, tmp_path / "megatron", *words) == 0
    only = ("--adapter-only", "--workers", 1)
    assert nemotron3("convert", "to-hf", tmp_path / "megatron", tmp_path / "again", *only) == 0
    again = load_file(tmp_path / "again/adapter_model.safetensors")
    assert again.keys() == file.keys() and all(again[name].equal(file[name]) for name in file)
    assert nemotron3("convert", "to-hf", megatron, tmp_path / "merged", *words, "--merge-adapter") == 0
    merged = load_file(tmp_path / "merged/model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
