"""Linears with the weights of an inference checkpoint; gradients ignore the rounding."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.quantized import quantization
from megatron_nemotron3.checkpoints.convert.quantized_views import Dequantized, Quantized
from megatron_nemotron3.launch import Launch, flags, precision_file
from megatron_nemotron3.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron_nemotron3.models import get
from megatron_nemotron3.precision import install, yaml_file
from megatron_nemotron3.precision.numerics import ALL_SCALES, FOUR_OVER_SIX, nvfp4
from megatron_nemotron3.precision.packed import PackedProducts, packed_values
from megatron_nemotron3.precision.serving import PACKED_KINDS, unquantized_layers
from megatron_nemotron3.precision.settings import (
    Emulation,
    emulating,
    logging_precision,
    parse_emulation,
    parse_logging,
)
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from megatron_nemotron3.specs import nemotron3_torch_stack_spec
from tests.support.emulation import FIELDS, quant_recipe, seed, step
from tests.support.models import build_hybrid, hybrid_config
from tests.support.quantized_models import Memory, random_model

SUPER = Emulation(packed="super-nvfp4")


def converted(weight: Tensor, search: str = "") -> Tensor:
    """What `convert to-hf --quantize` stores of a weight, as `from-hf --dequantize` reads it."""
    amax = nvfp4.amax(weight)
    scale = nvfp4.tensor_scale(amax, nvfp4.LARGEST[search])
    return nvfp4.dequantize(*nvfp4.quantize(weight, amax, search), scale).to(weight.dtype)


@pytest.mark.parametrize("search", nvfp4.LARGEST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_converters(dtype: torch.dtype, search: str) -> None:
    """Each weight by its own largest magnitude: an outlier, tiny ones, and one of zeros."""
    weights = torch.randn(4, 48, 64, generator=torch.Generator().manual_seed(1))
    weights[0, 3, 5], weights[3] = 900.0, 0.0
    weights = (weights * torch.tensor([1.0, 1e-3, 40.0, 1.0]).view(-1, 1, 1)).to(dtype)
    expected = torch.stack([converted(w, search) for w in weights])
    assert torch.equal(packed_values(weights, None, search), expected)
    assert not torch.equal(expected, weights)


@pytest.mark.parametrize(
    ("recipe", "search"),
    [
        ("super-nvfp4", ""),
        ("super-nvfp4,4over6=1", FOUR_OVER_SIX),
        ("ultra-nvfp4", FOUR_OVER_SIX),
        ("nvfp4", ""),
        ("nvfp4-mse", ALL_SCALES),
    ],
)
def test_values_are_those_of_the_packed_checkpoint(recipe: str, search: str) -> None:
    """Every expert of a model in Hugging Face's form, packed by the converter and read back."""
    config = get("super-tiny").but(pattern="ME*", num_moe_experts=4, moe_router_topk=2)
    source = Memory(random_model(config, torch.float32))
    read_back = Dequantized(Quantized(source, quantization(config, recipe)))
    names = [name for name in source.tensors if ".experts." in name and "mtp" not in name]
    assert len(names) == 8
    for name in names:
        used = packed_values(source.read(name)[None], None, search)[0]
        assert torch.equal(used.bfloat16(), read_back.read(name))


def test_a_nan_is_not_hidden() -> None:
    weights = torch.ones(2, 16, 16)
    weights[1, 2, 3] = torch.nan
    found = packed_values(weights, None)
    assert found[0].isfinite().all() and found[1].isnan().all()


def built(chosen: Emulation | None, pattern: str = "MEM*E/*E/*E", **changes: Any) -> Any:
    seed(11)
    with emulating(chosen):
        return build_hybrid(pattern, nemotron3_torch_stack_spec, **{**FIELDS, **changes}).train()


def packed_names(model: Any) -> set[str]:
    return {
        name for name, m in model.named_modules() if isinstance(getattr(m, "products", None), PackedProducts)
    }


@pytest.mark.usefixtures("world")
def test_super_packs_its_routed_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """In every decoder layer, also where training keeps BF16, and nowhere in MTP. Loss and gradients are
    those of a plain model with the converter's weights."""
    model, plain = built(SUPER), built(None)
    found = step(model)
    assert "4 linears of this rank have the weights of super-nvfp4" in capsys.readouterr().out
    names = {f"decoder.layers.{i}.mlp.experts.linear_fc{j}" for i in (1, 4) for j in (1, 2)}
    assert packed_names(model) == names
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.rpartition(".")[0] in names:
                parameter.copy_(converted(parameter))
    expected = step(plain)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("world")
def test_nano_spares_the_mamba_layer_before_attention() -> None:
    model = built(Emulation(packed="nano-nvfp4"), "MM*EM/*E/*E")
    step(model)
    parts = ("mixer.in_proj", "mixer.out_proj")
    wanted = {f"decoder.layers.{i}.{part}" for i in (0, 4) for part in parts}
    shared = {f"decoder.layers.3.mlp.{e}.linear_fc{j}" for e in ("experts", "shared_experts") for j in (1, 2)}
    assert packed_names(model) == wanted | shared
    assert unquantized_layers("nano-nvfp4", "MM*EM") == {1} and not unquantized_layers("super-nvfp4", "MM*EM")


@pytest.mark.usefixtures("world")
def test_what_cannot_be_packed_is_refused() -> None:
    assert parse_emulation("super-nvfp4") == SUPER and parse_emulation(SUPER.text()) == SUPER
    assert set(PACKED_KINDS) == {"super-nvfp4", "super-nvfp4-mse", "ultra-nvfp4", "nano-nvfp4"}
    for text, message in (
        ("lightning-nvfp4", "output head"),
        ("super-fp8", "has no NVFP4"),
        ("super-nvfp4,sr=0", "only ,4over6=1 or ,4over6=0 may follow"),
        ("super-nvfp4,4over6=1,4over6=0", "only ,4over6=1 or ,4over6=0 may follow"),
        ("super-fp8,4over6=1", "has no NVFP4 weights to scale"),
        ("super-nvfp4-mse,4over6=0", "super-nvfp4-mse has all scales to choose from: drop ,4over6=0"),
        ("super-int4", "a recipe of packed weights"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_emulation(text)
    with pytest.raises(ValueError, match="no such switch"):
        Emulation(packed="super-nvfp4", tile=False)
    with pytest.raises(ValueError, match="drop --te-precision-config-file"):
        built(SUPER, quant_recipe=quant_recipe())
    with logging_precision(parse_logging("10")), pytest.raises(ValueError, match="drop NEMOTRON3_LOG"):
        built(SUPER)
    model = built(SUPER, "MM*-")
    with pytest.raises(RuntimeError, match="packs no weight of this model"):
        step(model)


@pytest.mark.usefixtures("world")
def test_the_search_is_the_recipes_unless_the_text_says_otherwise() -> None:
    for text, canonical, search in (
        ("super-nvfp4,4over6=1", "super-nvfp4,4over6=1", FOUR_OVER_SIX),
        ("super-nvfp4,4over6=0", "super-nvfp4", ""),
        ("super-nvfp4-mse", "super-nvfp4-mse", ALL_SCALES),
        ("ultra-nvfp4", "ultra-nvfp4", FOUR_OVER_SIX),
        ("ultra-nvfp4,4over6=0", "ultra-nvfp4,4over6=0", ""),
    ):
        chosen = parse_emulation(text)
        assert chosen is not None and chosen.text() == canonical and parse_emulation(canonical) == chosen
        model = built(chosen, "ME*")
        step(model)
        found = {m.products.search for m in model.modules() if hasattr(m, "products") and m.products}
        assert found == {search}


def both_kinds() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    initialize(tp=2)
    return {kind: on_ranks(kind) for kind in ("column", "row")}


def on_ranks(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's y, dx and dw of a linear over two ranks with sequence parallelism."""
    rank = torch.distributed.get_rank()
    config = hybrid_config("M", sequence_parallel=True)
    x, w, dy = whole(kind)
    common: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
    module: Any
    if kind == "column":
        module = ColumnParallelLinear(64, 96, gather_output=False, **common)
        x, w, dy = x.chunk(2)[rank], w.chunk(2)[rank], dy.chunk(2, -1)[rank]
    else:
        module = RowParallelLinear(64, 96, input_is_parallel=True, skip_bias_add=True, **common)
        x, w, dy = x.chunk(2, -1)[rank], w.chunk(2, 1)[rank], dy.chunk(2)[rank]
    module.weight.data.copy_(w)
    install.assign_products(module, "here", "nvfp4", SUPER, None)
    x = x.contiguous().requires_grad_()
    y, _ = module(x)
    dx, dw = torch.autograd.grad(y, [x, module.weight], dy.contiguous())
    return y.detach(), dx, dw


def whole(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and dy; the two shards of the weight have very different magnitudes."""
    generator = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(*s, generator=generator) for s in ((32, 2, 64), (96, 64), (32, 2, 96)))
    w.chunk(2, 0 if kind == "column" else 1)[1].mul_(37.3)
    return x, w, dy


def test_shards_have_the_scale_of_the_whole_weight() -> None:
    """A stored weight has one scale, so ranks agree on it: the layout of training does not matter."""
    first, second = run_distributed(both_kinds, 2)
    for kind, axes in {"column": (-1, 0, 0), "row": (0, -1, 1)}.items():
        x, w, dy = whole(kind)
        values = converted(w)
        pairs = zip(first[kind], second[kind], axes, strict=True)
        found = [torch.cat((a, b), axis) for a, b, axis in pairs]
        expected = [x @ values.t(), dy @ values, dy.flatten(0, 1).t() @ x.flatten(0, 1)]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
        shards = [converted(part) for part in w.chunk(2, axes[2])]
        assert (x @ torch.cat(shards, axes[2]).t() - found[0]).abs().max() > 1  # what their scales would give


def test_a_launch_needs_neither_a_precision_file_nor_bf16_layers(tmp_path: Path) -> None:
    """As `nemotron3 flags` and `train` make it; a file that would have no effect is refused."""
    launch = Launch.of("super-tiny", precision="nvfp4", backend="torch", emulate="super-nvfp4")
    names = {flag.name for flag in flags(launch)}
    assert "--bf16" in names and not names & {"--first-last-layers-bf16", "--te-precision-config-file"}
    file = tmp_path / "precision.yaml"
    yaml_file.write_precision_file(launch.config, file)
    with pytest.raises(ValueError, match="drop the file"):
        precision_file.check(dataclasses.replace(launch, te_precision_config_file=str(file)))
