"""What a rank notes of its first step besides tensors: random states, dtypes, routers, norms. Runs on the
ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.common.files import atomic

#: The generator outside Megatron's streams.
DEFAULT = "default"


class FirstStep:
    """Notes of one rank, written once: "ranks", "streams", "gradients", "biases", "routers",
    "norms"."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._in_model = False
        #: Random stream -> digest of its state where the model begins to compute.
        self._streams: dict[str, str] = {}
        #: Router -> largest relative difference of a token's shares of experts from those in FP64.
        self._routers: dict[str, float] = {}
        #: RMS norm -> relative error of the scale of a group of channels (`_norm_error`).
        self._norms: dict[str, float] = {}
        self._names: dict[int, str] = {}

    def install(self) -> None:
        """Look from now on, until the process ends."""
        from megatron.core.models.hybrid.hybrid_model import HybridModel
        from megatron.core.transformer.moe.router import TopKRouter

        from megatron_nemotron3.layers.norm import GatedGroupRMSNorm, RMSNorm

        def before(module: torch.nn.Module, _inputs: object) -> None:
            if isinstance(module, HybridModel):
                self._in_model = True
                self._names |= {id(part): name for name, part in module.named_modules()}
            elif self._in_model and not self._streams:  # behind the hooks of the model, which seed
                self._streams = _streams()

        def after(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            name = self._names.get(id(module), "")
            if isinstance(module, TopKRouter) and name not in self._routers:
                self._routers[name] = _router_error(module, inputs[0], *output[:2])
            # A subclass computes something else, and what is fused into a linear is no module.
            if type(module) in (RMSNorm, GatedGroupRMSNorm) and name not in self._norms:
                self._norms[name] = _norm_error(module, inputs, output)

        torch.nn.modules.module.register_module_forward_pre_hook(before)
        torch.nn.modules.module.register_module_forward_hook(after)

    def write(self, models: Iterable[torch.nn.Module]) -> None:
        """Write what was seen in the first step, once."""
        if self._file.exists():
            return
        models = list(models)
        parameters = [(name, p) for model in models for name, p in model.named_parameters()]
        biases = [(n, b) for model in models for n, b in model.named_buffers() if n.endswith("expert_bias")]
        facts = {
            "ranks": _ranks(),
            "streams": self._streams,
            "gradients": {n: _name(p.main_grad.dtype) for n, p in parameters if hasattr(p, "main_grad")},
            "biases": {name: _name(bias.dtype) for name, bias in biases},
            "routers": self._routers,
            "norms": self._norms,
        }
        with atomic(self._file) as part:
            torch.save(facts, part)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ranks() -> dict[str, int]:
    from megatron.core import parallel_state as state

    return {
        "tp": state.get_tensor_model_parallel_rank(),
        "pp": state.get_pipeline_model_parallel_rank(),
        "dp": state.get_data_parallel_rank(),
        "cp": state.get_context_parallel_rank(),
        "ep": state.get_expert_model_parallel_rank(),
        "etp": state.get_expert_tensor_parallel_rank(),
    }


def _streams() -> dict[str, str]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    states = {DEFAULT: torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    return {name: hashlib.sha256(state.numpy().tobytes()).hexdigest() for name, state in states.items()}


@torch.no_grad()
def _router_error(router: Any, tokens: Tensor, shares: Tensor, chosen: Tensor) -> float:
    """How far the shares of the chosen experts are from those of FP64 logits; 0 where that is not written."""
    config = router.config
    if config.moe_router_score_function != "sigmoid" or config.moe_input_jitter_eps or router.topk == 1:
        return 0.0
    logits = tokens.double().flatten(0, -2) @ router.weight.double().mT
    chosen = chosen.bool().view_as(logits)
    expected = logits.sigmoid() * chosen
    expected /= expected.sum(-1, keepdim=True)
    found = shares.double().view_as(logits) * chosen
    found /= found.sum(-1, keepdim=True)
    return float(((found - expected).abs() / expected.clamp(min=1e-300))[chosen].max())


@torch.no_grad()
def _norm_error(norm: Any, inputs: tuple[Tensor, ...], output: Tensor) -> float:
    """How far the scale of a norm's output is from FP64's: root mean square over tokens and groups."""
    # The output's own rounding averages out in a group of 16 channels, that of the statistics does not.
    x, gain = inputs[0].double(), norm.weight.double()
    if len(inputs) > 1:
        x = x * torch.nn.functional.silu(inputs[1].double())
    elif norm.zero_centered_gamma:
        gain = gain + 1
    groups = (-1, getattr(norm, "group_size", x.shape[-1]))
    if groups[1] < 16:
        return 0.0
    x = x.unflatten(-1, groups)
    expected = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * gain.unflatten(-1, groups)
    found = output.double().unflatten(-1, groups)
    scale = (found * expected).sum(-1) / expected.square().sum(-1).clamp(min=1e-300)
    return float((scale - 1).square().mean().sqrt())
