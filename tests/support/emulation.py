"""A small Super-shaped model with emulated NVFP4, and one training step of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.quantization.quant_config import GlobMatcher, RecipeConfig
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_nemotron3.precision.settings import current_logging, emulating, parse_emulation
from megatron_nemotron3.specs import nemotron3_torch_stack_spec
from tests.support.models import VOCABULARY, build_hybrid

PATTERN = "MEM*E/*E/*E"
#: Over `SIZES`: an in_proj of 336 rows, 168 at TP=2 would not fill blocks, so 32 heads are for that.
FIELDS: dict[str, Any] = {
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "moe_latent_size": 32,
    "mtp_use_repeated_layer": True,
    "first_last_layers_bf16": True,
    "num_layers_at_start_in_bf16": 0,
    "num_layers_at_end_in_bf16": 1,
}


def quant_recipe() -> RecipeConfig:
    """What Megatron loads from the published recipe's file."""
    bf16, mxfp8 = ("*mtp.*", "*.linear_qkv", "*.linear_proj", "*mlp.fc[12]_latent_proj"), "*mixer.out_proj"
    kind = {"transformer_engine_config_type": "TEQuantizationParams"}
    configs = {
        "bf16": {**kind, "training_recipe": {}},
        "mxfp8": {**kind, "training_recipe": {"fp8_quantization_recipe": "mxfp8"}},
    }
    return RecipeConfig([*(GlobMatcher(glob, "bf16") for glob in bf16), GlobMatcher(mxfp8, "mxfp8")], configs)


def seed(number: int) -> None:
    """Torch's generator and all of Megatron's streams begin here."""
    torch.manual_seed(number)
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: torch.get_rng_state() for name in tracker.get_states()})


def built(text: str | None, pattern: str = PATTERN, **changes: Any) -> Any:
    """A model that emulates as `text` says, always with the same weights and the same draws after it."""
    seed(11)
    chosen = parse_emulation(text or "")
    with emulating(chosen):
        # A plain model that is not measured either would ignore a precision file, which is refused.
        file = quant_recipe() if chosen or current_logging() else None
        fields = {**FIELDS, "quant_recipe": file, **changes}
        model = build_hybrid(pattern, nemotron3_torch_stack_spec, **fields).train()
    seed(3)
    return model


@dataclass
class Step:
    """What a training step left behind."""

    loss: Tensor
    gradients: dict[str, Tensor]
    #: Bytes autograd held after forward, parameters not counted.
    saved: int


def step(model: Any, seed: int = 5, batch: int = 1, length: int = 64) -> Step:
    """Forward and backward of one microbatch; gradients add up from call to call."""
    stream = torch.randint(VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def note(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    positions = torch.arange(length).unsqueeze(0)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = model(stream[:, :-1], positions, None, labels=stream[:, 1:].contiguous()).mean()
    saved = sum(storage.nbytes() for storage in held.values())
    held.clear()
    loss.backward()
    return Step(loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}, saved)


def assert_same(a: Step, b: Step) -> None:
    """To the bit."""
    assert torch.equal(a.loss, b.loss)
    different = [
        name for name, gradient in a.gradients.items() if not torch.equal(gradient, b.gradients[name])
    ]
    assert not different
