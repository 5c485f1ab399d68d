"""The sides of a training step in gpu.py: our torch spec, upstream's TE spec, transformers' model."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpu_setting import Skipped
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

    def pieces(self, gradients: bool = False) -> Iterator[tuple[str, Any]]:
        from gpu_weights import megatron_pieces

        return megatron_pieces(self.module, self.config, gradients)

    def forward(self, tokens: Any, labels: Any = None) -> Any:
        import torch

        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return self.module(tokens, positions, None, labels=labels)

    def loss(self, tokens: Any, labels: Any) -> Any:
        return self.forward(tokens, labels).mean()


class Ours(Megatron):
    """Our torch spec. Unless `mamba_ssm`, mamba-ssm and causal-conv1d are hidden, so that torch runs."""

    def __init__(self, device: str, environment: dict[str, str], mamba_ssm: bool = False) -> None:
        super().__init__(device, environment)
        self._mamba_ssm = mamba_ssm
        if not mamba_ssm:
            for package in ("mamba_ssm", "causal_conv1d"):
                sys.modules[package] = None  # type: ignore[assignment]  # importing it now fails

    def make(self) -> Any:
        from tests.support.model_mapping import megatron_model

        if self._mamba_ssm and importlib.util.find_spec("mamba_ssm") is None:
            raise Skipped("package mamba-ssm is not installed")
        return megatron_model(self.config, **self._changes())

    def settings(self) -> str:
        from megatron_nemotron3.layers.backend import TORCH

        return TORCH.describe()


class StockTE(Megatron):
    """Upstream's own `hybrid_stack_spec` on TransformerEngine and mamba-ssm, with its fused paths."""

    def make(self) -> Any:
        from megatron_nemotron3.layers.backend import te_problem

        if problem := te_problem():
            raise Skipped(problem)
        if self.device != "cuda":
            raise Skipped("TransformerEngine runs on a GPU only")
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


#: transformers' implementations of experts, and the tokens of the step that decides between them.
EXPERTS = ("grouped_mm", "eager", "batched_mm")
CHOICE_TOKENS = 2048


class Transformers(Side):
    """NemotronHForCausalLM at its best setting.

    Flash attention if it is installed, otherwise SDPA; mamba-ssm where it runs; the fastest of its
    implementations of experts.
    """

    def __init__(self, device: str, environment: dict[str, str]) -> None:
        super().__init__(device, environment)
        self._scan = ""
        #: Implementation of experts -> milliseconds of a step, or why it does not run.
        self.tried: dict[str, float | str] = {}

    def make(self) -> Any:
        import torch
        import transformers
        from common import do_not_clamp_time_steps

        from tests.support.model_mapping import transformers_config

        config = transformers_config(self.config)
        flash = self.device == "cuda" and importlib.util.find_spec("flash_attn") is not None
        config._attn_implementation = "flash_attention_2" if flash else "sdpa"
        config._experts_implementation = EXPERTS[0]
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

    def pieces(self, gradients: bool = False) -> Iterator[tuple[str, Any]]:
        from gpu_weights import transformers_pieces

        return transformers_pieces(self.module, self.config, gradients)

    def forward(self, tokens: Any) -> Any:
        return self.module(tokens).logits

    def loss(self, tokens: Any, labels: Any) -> Any:
        import torch.nn.functional as F

        return F.cross_entropy(self.forward(tokens).flatten(0, 1).float(), labels.flatten())

    def probe(self) -> None:
        """Choose the first scan of `SCANS` that runs, and the fastest of `EXPERTS`."""
        self._choose_scan()
        length, times = (CHOICE_TOKENS, 3) if self.device == "cuda" else (CHOICE_TOKENS // 64, 1)
        batch = self.batch(min(length, self.config.seq_length))
        for name in EXPERTS:
            self.module.config._experts_implementation = name
            try:
                self._step(*batch)
                self.tried[name] = 1e3 * min(self._seconds(*batch, times))
            except Exception as error:  # out of memory, or not implemented here
                self.tried[name] = f"{type(error).__name__}: {error}"[:120]
            self.module.zero_grad(set_to_none=True)
            self.clean()
        took = {name: value for name, value in self.tried.items() if isinstance(value, float)}
        if not took:
            raise RuntimeError(f"no implementation of experts runs: {self.tried}")
        self.module.config._experts_implementation = min(took, key=lambda name: took[name])

    def _choose_scan(self) -> None:
        from transformers.models.nemotron_h import modeling_nemotron_h as module

        names = ("causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined")
        originals = {name: getattr(module, name) for name in names}
        if not is_kernel(originals["mamba2_chunk_scan"]):
            self._scan = "torch (no mamba-ssm)"
            self._short_step()
            return
        failures = []
        for scan, (plain, fused_off) in SCANS.items():
            for name in names:
                setattr(module, name, originals[name])
            for name in plain:
                setattr(module, name, originals[name].__wrapped__)
            if fused_off:
                module.mamba2_split_conv1d_scan_combined = lambda *args, **kwargs: None
            try:
                self._short_step()
            except Exception as error:
                failures.append(f"{scan}: {type(error).__name__}: {error}"[:120])
                continue
            self._scan = f"mamba-ssm, {scan}" if scan != "torch" else "torch"
            self._scan += "".join(f"; not {failure}" for failure in failures)
            return None
        raise RuntimeError("; ".join(failures))

    def settings(self) -> str:
        attention = self.module.config._attn_implementation
        experts = self.module.config._experts_implementation
        tried = ", ".join(f"{n} {v:.1f} ms" if isinstance(v, float) else n for n, v in self.tried.items())
        return f"attention {attention}, experts {experts} (of {tried}), scan {self._scan}"


def is_kernel(function: Any) -> bool:
    """Whether transformers uses a function of a kernel package instead of its own in torch."""
    return bool(inspect.getclosurevars(function).nonlocals.get("is_new_implementation"))


_DEFAULT = {"NEMOTRON3_GPU_KERNELS": ""}
#: Name of the stage -> factory of the side, called with the device.
SIDES: dict[str, Callable[[str], Side]] = {
    "plain": partial(Ours, environment=_DEFAULT),
    "mamba-ssm": partial(Ours, environment=_DEFAULT, mamba_ssm=True),
    "hf": partial(Transformers, environment=_DEFAULT),
    "te": partial(StockTE, environment=_DEFAULT),
}
