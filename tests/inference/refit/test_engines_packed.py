"""Packed streams against what SGLang's own loaders made of them (tests/golden/make_engine_packed.py)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden.make_engine_packed import CASES, FILE, key
from tests.golden.make_engine_parameters import crc, numbers
from tests.support.refit_packed import converted, packing_plan

GOLDEN = json.loads(FILE.read_text())
#: What no checkpoint need have: copies made after loading, and scales that the engine starts with.
OF_THE_ENGINE = ("_blockscale_swizzled", ".k_scale", ".v_scale")


def held(name: str, shape: list[int], stream: dict[str, Tensor]) -> Tensor:
    """A parameter of the engine from the tensors of the stream: fused, stacked, a scale for each part."""
    name = name.replace("model.", "backbone.", 1) if name.startswith("model.") else name
    name = name.replace("embed_tokens", "embeddings").replace(
        "mixer.attn.", "mixer.k_proj." if ".k_" in name else "mixer.v_proj."
    )
    if name.endswith("in_proj.weight_scale_2"):
        # SGLang 0.5.23 fills the first of the scales of z, x, B, C and dt, and leaves the others as they are.
        untouched = torch.full(shape, 0x7F7F7F7F, dtype=torch.int32).view(torch.float32)
        return torch.cat([stream[name].view(1), untouched[1:]])
    if name.endswith("mixer.A"):
        return -stream[f"{name}_log"].float().exp()
    for fused, projection in (("w13_", "up_proj."), ("w2_", "down_proj.")):
        before, found, suffix = name.partition(f"experts.{fused}")
        if found:
            number = sum(
                n.startswith(f"{before}experts.") and n.endswith(f"{projection}weight") for n in stream
            )
            parts = [stream[f"{before}experts.{e}.{projection}{suffix}"] for e in range(number)]
            return torch.stack([part.view(torch.uint8) if part.itemsize == 1 else part for part in parts])
    if "qkv_proj" in name:
        return torch.cat([stream[name.replace("qkv_proj", f"{x}_proj")] for x in "qkv"])
    return stream[name].repeat(shape) if stream[name].dim() == 0 else stream[name]


@pytest.mark.parametrize("case", CASES, ids=key)
def test_an_engine_holds_the_streams_bits(case: tuple[str, str, bool]) -> None:
    assert GOLDEN["version"] == "sglang 0.5.23"
    name, recipe, scaled = case
    plan = packing_plan((name, "", recipe, scaled, {}))
    config = plan.training.config
    stream: dict[str, Any] = converted(config, (name, "", recipe, scaled, {}), numbers(config))
    expected: dict[str, Any] = GOLDEN["cases"][key(case)]
    packed = [n for n, (kind, _, _) in expected.items() if kind in ("uint8", "float8_e4m3fn")]
    assert len(packed) > 10
    for own, (kind, shape, sum_) in expected.items():
        if sum_ is None:
            # Without scales of activations weights alone are packed, and input_scale is of no use.
            assert own.endswith(OF_THE_ENGINE) or (own.endswith("input_scale") and not scaled), own
            continue
        tensor = held(own, shape, stream)
        kinds = {str(tensor.dtype).removeprefix("torch."), "float8_e4m3fn" if tensor.itemsize == 1 else ""}
        assert kind in kinds, own
        assert crc(own, tensor.reshape(-1)) == sum_ and tensor.numel() == torch.Size(shape).numel(), own
