"""The sides of train_step_gpu.py: our torch spec, upstream's TE spec, transformers' model."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpu_side import Side


class Megatron(Side):
    """Stock `HybridModel`, with the load-balancing loss of training, which transformers lacks."""

    def _changes(self) -> dict[str, Any]:
        import torch

        return {
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "use_cpu_initialization": self.device == "cpu",
            "perform_initialization": False,
        }

    def pieces(self) -> Iterator[tuple[str, Any]]:
        from gpu_weights import megatron_pieces

        return megatron_pieces(self.module, self.config)

    def forward(self, tokens: Any, labels: Any = None) -> Any:
        import torch

        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return self.module(tokens, positions, None, labels=labels)

    def loss(self, tokens: Any, labels: Any) -> Any:
        return self.forward(tokens, labels).mean()


class Ours(Megatron):
    """Our torch spec. `without_mamba_ssm` hides mamba-ssm, so that our own Triton scan runs."""

    def __init__(self, device: str, environment: dict[str, str], without_mamba_ssm: bool = False) -> None:
        super().__init__(device, environment)
        self._redundant = without_mamba_ssm and importlib.util.find_spec("mamba_ssm") is None
        if without_mamba_ssm:
            sys.modules["mamba_ssm"] = None  # type: ignore[assignment]  # importing it now fails

    def make(self) -> Any:
        from tests.support.model_mapping import megatron_model

        if self._redundant:
            raise RuntimeError("package mamba-ssm is not installed: ours-kernels is the same")
        return megatron_model(self.config, **self._changes())

    def settings(self) -> str:
        from megatron_nemotron3.layers.backend import TORCH

        return TORCH.describe()


class StockTE(Megatron):
    """Upstream's own `hybrid_stack_spec` on TransformerEngine and mamba-ssm, with its fused paths."""

    def make(self) -> Any:
        from megatron_nemotron3.layers.backend import te_problem

        if problem := te_problem():
            raise RuntimeError(problem)
        if self.device != "cuda":
            raise RuntimeError("TransformerEngine runs on a GPU only")
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel
        from megatron.core.ssm import mamba_mixer

        from tests.support.model_mapping import transformer_config

        self._conv = conv1d_problem()
        if self._conv:
            mamba_mixer.causal_conv1d_fn = None
        changes = {
            "use_mamba_mem_eff_path": self._conv is None,  # its fused kernel contains the convolution
            "persist_layer_norm": True,
            "bias_dropout_fusion": True,
            "moe_permute_fusion": True,
            "use_fused_weighted_squared_relu": True,
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "native",
        }
        return HybridModel(
            config=transformer_config(self.config, **self._changes(), **changes),
            hybrid_stack_spec=hybrid_stack_spec,
            vocab_size=self.config.vocab_size,
            max_sequence_length=self.config.seq_length,
            hybrid_layer_pattern=self.config.pattern,
        )

    def settings(self) -> str:
        if self._conv is None:
            return "TransformerEngine, mamba-ssm's fused convolution and scan"
        return f"TransformerEngine, mamba-ssm's scan, torch's convolution ({self._conv})"


def conv1d_problem() -> str | None:
    """Why causal-conv1d's CUDA kernel cannot run here, or None. An import alone does not show it."""
    import torch

    try:
        from causal_conv1d import causal_conv1d_fn

        x = torch.zeros(1, 8, 8, device="cuda", dtype=torch.bfloat16)
        causal_conv1d_fn(x, x[0, :, :4].contiguous(), activation="silu")
    except Exception as error:  # a binary built for another torch may raise anything
        return f"causal-conv1d: {type(error).__name__}"
    return None


#: Implementations of transformers' mixer, best first: functions of its module that must be plain torch, and
#: whether the fused kernel is disabled (it then returns None, and the mixer computes the parts separately).
SCANS: dict[str, tuple[tuple[str, ...], bool]] = {
    "fused kernel": ((), False),
    "scan kernel, torch's convolution": (("causal_conv1d_fn",), True),
    "torch": (("causal_conv1d_fn", "mamba2_chunk_scan"), True),
}


class Transformers(Side):
    """NemotronHForCausalLM with flash attention if installed, otherwise SDPA, and mamba-ssm where it runs."""

    def __init__(self, device: str, environment: dict[str, str], experts: str) -> None:
        super().__init__(device, environment)
        self.experts, self._scan = experts, ""

    def make(self) -> Any:
        import torch
        import transformers
        from common import do_not_clamp_time_steps

        from tests.support.model_mapping import transformers_config

        config = transformers_config(self.config)
        flash = self.device == "cuda" and importlib.util.find_spec("flash_attn") is not None
        config._attn_implementation = "flash_attention_2" if flash else "sdpa"
        config._experts_implementation = self.experts
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                module = transformers.NemotronHForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        module = module.to_empty(device=self.device)
        do_not_clamp_time_steps(module)
        for part in module.modules():
            if hasattr(part, "e_score_correction_bias"):
                part.e_score_correction_bias = part.e_score_correction_bias.float()  # as after loading
        return module

    def pieces(self) -> Iterator[tuple[str, Any]]:
        from gpu_weights import transformers_pieces

        return transformers_pieces(self.module, self.config)

    def forward(self, tokens: Any) -> Any:
        return self.module(tokens).logits

    def loss(self, tokens: Any, labels: Any) -> Any:
        import torch.nn.functional as F

        return F.cross_entropy(self.forward(tokens).flatten(0, 1).float(), labels.flatten())

    def probe(self) -> None:
        """Choose the first scan of `SCANS` that runs."""
        from transformers.models.nemotron_h import modeling_nemotron_h as module

        names = ("causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined")
        originals = {name: getattr(module, name) for name in names}
        if not is_kernel(originals["mamba2_chunk_scan"]):
            self._scan = "torch (no mamba-ssm)"
            return super().probe()
        failures = []
        for scan, (plain, fused_off) in SCANS.items():
            for name in names:
                setattr(module, name, originals[name])
            for name in plain:
                setattr(module, name, originals[name].__wrapped__)
            if fused_off:
                module.mamba2_split_conv1d_scan_combined = lambda *args, **kwargs: None
            try:
                super().probe()
            except Exception as error:
                failures.append(f"{scan}: {type(error).__name__}: {error}"[:120])
                continue
            self._scan = f"mamba-ssm, {scan}" if scan != "torch" else "torch"
            self._scan += "".join(f"; not {failure}" for failure in failures)
            return None
        raise RuntimeError("; ".join(failures))

    def settings(self) -> str:
        attention = self.module.config._attn_implementation
        return f"attention {attention}, experts {self.experts}, scan {self._scan}"


def is_kernel(function: Any) -> bool:
    """Whether transformers uses a function of a kernel package instead of its own in torch."""
    return bool(inspect.getclosurevars(function).nonlocals.get("is_new_implementation"))


_ON, _OFF = {"NEMOTRON3_GPU_KERNELS": "1"}, {"NEMOTRON3_GPU_KERNELS": "0"}
#: Name on the command line -> factory of the side, called with the device.
SIDES: dict[str, Callable[[str], Side]] = {
    "ours-kernels": partial(Ours, environment=_ON),
    "ours-triton": partial(Ours, environment=_ON, without_mamba_ssm=True),
    "ours-plain": partial(Ours, environment=_OFF),
    "hf-grouped_mm": partial(Transformers, environment=_OFF, experts="grouped_mm"),
    "stock-te": partial(StockTE, environment=_OFF),
    "hf-eager": partial(Transformers, environment=_OFF, experts="eager"),
    "hf-batched_mm": partial(Transformers, environment=_OFF, experts="batched_mm"),
}
