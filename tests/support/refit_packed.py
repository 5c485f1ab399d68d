"""Streams of packed weights, and what the packed converter makes of the whole tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.quantized import formats, quantization
from megatron_nemotron3.checkpoints.convert.quantized_views import Quantized
from megatron_nemotron3.inference.refit.execute import Refit, RefitError
from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.plan import RefitPlan
from megatron_nemotron3.inference.refit.planner import make_plan
from megatron_nemotron3.models import Nemotron3Config, get
from tests.support.quantized_models import Memory, all_scales, random_model
from tests.support.refit_reference import trained

#: (model, trainer, recipe, whether scales of activations are given, settings of `make_plan`)
Packing = tuple[str, str, str, bool, dict[str, Any]]


def packing_plan(case: Packing) -> RefitPlan:
    """The plan of a case; each trainer has a server in its process."""
    name, source, recipe, scaled, settings = case
    config = get(name)
    if recipe.endswith("-blockwise"):  # experts of three blocks, which two ranks cut inside one
        config = config.but(
            moe_ffn_hidden_size=384, **({"moe_latent_size": 128} if config.moe_latent_size else {})
        )
    training = Training.of(config, source)
    serving = EngineLayout(
        config=config,
        engine="hf",
        replicas=training.layout.world_size,
        quantize=recipe,
        input_scales=tuple(all_scales(config, recipe).items()) if scaled else (),
    )
    return make_plan(training, serving, **{"colocated": True, **settings})


def packed_stream(case: Packing, dtype: str = "bfloat16") -> tuple[int, int]:
    """Refit twice; returns the bytes sent, and the number of tensors that are equal to the converter's."""
    plan = packing_plan(case)
    config, layout = plan.training.config, plan.training.layout
    hf = random_model(config, getattr(torch, dtype))
    refit = Refit(plan)
    source = trained(config, layout, dist.get_rank(), hf)
    got = dict(refit.stream(source))
    rounded = {n: t if "e_score" in n else t.to(torch.bfloat16) for n, t in hf.items()}
    expected = converted(config, case, rounded)
    assert got.keys() == expected.keys() == set(plan.names)
    for name, tensor in expected.items():
        assert got[name].shape == tensor.shape and got[name].dtype == tensor.dtype, name
        assert torch.equal(_bits(got[name]), _bits(tensor)), name
    for tensor in source.values():
        tensor.copy_(tensor * 1.5)
    again = dict(refit.stream(source))
    assert any(not torch.equal(_bits(again[n]), _bits(got[n])) for n in got)
    refit.close()
    return plan.load().total, len(got)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def converted(config: Nemotron3Config, case: Packing, hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `nemotron3 convert to-hf --quantize`; blocks of 128 by their definition."""
    recipe, scaled = case[2], case[3]
    if not recipe.endswith("-blockwise"):
        plan = quantization(config, recipe, all_scales(config, recipe) if scaled else None)
        source = Quantized(Memory(hf), plan)
        return {name: source.read(name) for name in source.tensors}
    kinds, found = formats(config, recipe.removesuffix("-blockwise")), {}
    for name, tensor in hf.items():
        found[name] = tensor
        if kinds[name] == "fp8" and not name.endswith("in_proj.weight"):
            elements = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
            scales = torch.empty([-(-n // 128) for n in tensor.shape])
            for i in range(scales.shape[0]):
                for j in range(scales.shape[1]):
                    block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                    scales[i, j] = tensor[block].abs().max().float() / torch.tensor(448.0)
                    elements[block] = (tensor[block].float() / scales[i, j]).to(torch.float8_e4m3fn)
            found |= {name: elements, f"{name}_scale_inv": scales}
    return found


def refused(case: Packing, value: float) -> str:
    """What this rank says where one weight of the last trainer has such an element."""
    plan = packing_plan(case)
    config = plan.training.config
    hf = random_model(config)
    hf["backbone.layers.1.mixer.experts.7.up_proj.weight"][-1, -1] = value
    source = trained(config, plan.training.layout, dist.get_rank(), hf)
    try:
        list(Refit(plan).stream(source))
    except RefitError as error:
        return str(error)
    return "no error"
