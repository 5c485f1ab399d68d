"""The sides of a training step: our torch layers, upstream's TransformerEngine stack, transformers' model.

A side is one model in a process of its own, on a CPU or a GPU, with weights that depend on their names only
(weights.py). `SIDES` names them.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from common import do_not_clamp_time_steps, operations, peak
from weights import fill, megatron_pieces, transformers_pieces

#: Tokens of the first step.
PROBE_TOKENS = 160
#: Logits that are compared: the last rows, and every n-th entry of the vocabulary.
LAST_ROWS, VOCABULARY_STRIDE = 128, 8


def quiet() -> None:
    """Suppress warnings about missing packages: `settings` says what each side uses."""
    from megatron_nemotron3.cpu import quiet_on_cpu

    quiet_on_cpu()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)


class Side:
    """A model on one device, "cuda" or "cpu".

    A subclass has `make`, the module with undefined weights; `pieces`, its tensors under Hugging Face names;
    `forward`, logits [1, s, vocabulary] of tokens [1, s]; `loss`, the mean cross-entropy; and `settings`, the
    implementations in use, in words.

    Args:
        dtype: of its weights, a name of torch.
    """

    make: Callable[[], Any]
    pieces: Callable[[], Iterator[tuple[str, Any]]]
    forward: Callable[..., Any]
    loss: Callable[[Any, Any], Any]
    settings: Callable[[], str]

    def __init__(self, device: str, dtype: str = "bfloat16") -> None:
        os.environ["NEMOTRON3_GPU_KERNELS"] = ""  # the default, whatever the caller's is
        quiet()
        self.device, self.dtype = device, getattr(torch, dtype)
        self._world = ExitStack()
        self.module: Any = None

    def build(self, config: Any) -> str:
        """Make the model of `config`, run it once, and return its settings."""
        from tests.support.gpu_world import world

        self._world.enter_context(world(self.device))
        self.config = config
        self.module = self.make().train()
        fill(self.pieces())
        self.probe()
        self.module.zero_grad(set_to_none=True)
        return self.settings()

    def close(self) -> None:
        """Destroy the process groups; not needed in a process that ends."""
        self._world.close()

    def probe(self) -> None:
        """Run one short step; raises if the settings do not work here."""
        self._short_step()

    def _short_step(self) -> None:
        self._step(*self.batch(min(PROBE_TOKENS, self.config.seq_length)))

    def clean(self) -> None:
        """Free cached memory."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def batch(self, length: int) -> tuple[Any, Any]:
        """Tokens and labels [1, length]."""
        generator = torch.Generator().manual_seed(length)
        stream = torch.randint(self.config.vocab_size, (1, length + 1), generator=generator).to(self.device)
        return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()

    def step(self, length: int) -> float:
        """Seconds of one forward and backward; on a GPU the mean of several, queued one after the other."""
        seconds = self._seconds(*self.batch(length), 8 if self.device == "cuda" else 1)
        return sum(seconds) / len(seconds)

    def peak(self, length: int) -> tuple[int, int]:
        """Bytes that one forward and backward adds to the idle model, without and with gradients before it.

        The second is that of Megatron's gradient buffers: activations and temporary memory.
        """
        self.module.zero_grad(set_to_none=True)
        first, second = (peak(partial(self._step, *self.batch(length)), self.device) for _ in range(2))
        self.module.zero_grad(set_to_none=True)
        return first, second

    def waits(self, length: int) -> int:
        """How often the host waits for the device in one step."""
        from tests.support.gpu_world import host_waits

        return host_waits(partial(self._step, *self.batch(length)), self.device)

    @torch.no_grad()
    def logits(self, length: int) -> Any:
        """[rows, vocabulary] as a NumPy array; in BF16 the last rows, and part of the vocabulary.

        In BF16 the routing is pinned: rounding could otherwise swap nearly equal experts.
        """
        if self.dtype == torch.float32:
            return self.forward(self.batch(length)[0])[0].cpu().numpy()
        fill(self.pieces(), pinned=True)
        found = self.forward(self.batch(length)[0])[0, -LAST_ROWS:, ::VOCABULARY_STRIDE].float().cpu()
        fill(self.pieces())
        return found.numpy()

    def profile(self, length: int, rows: int) -> list[dict[str, Any]]:
        """The operations that take most device time in one step."""
        batch = self.batch(length)
        found = operations(lambda: self._step(*batch), self.device, rows)
        self.module.zero_grad(set_to_none=True)
        return found

    def _step(self, tokens: Any, labels: Any) -> Any:
        loss = self.loss(tokens, labels)
        loss.backward()
        return loss.detach()

    def _seconds(self, tokens: Any, labels: Any, steps: int) -> list[float]:
        if self.device != "cuda":
            seconds = []
            for _ in range(steps):
                self.module.zero_grad(set_to_none=True)
                start = time.perf_counter()
                self._step(tokens, labels)
                seconds.append(time.perf_counter() - start)
            return seconds
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
        for start, end in pairs:
            self.module.zero_grad(set_to_none=True)
            start.record()
            self._step(tokens, labels)
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


class Megatron(Side):
    """Stock `HybridModel`, with the load-balancing loss of training, which transformers lacks."""

    def _changes(self) -> dict[str, Any]:
        return {
            "bf16": self.dtype.itemsize == 2,
            "params_dtype": self.dtype,
            "use_cpu_initialization": self.device == "cpu",
            "perform_initialization": False,
        }

    def pieces(self) -> Iterator[tuple[str, Any]]:
        return megatron_pieces(self.module, self.config)

    def forward(self, tokens: Any, labels: Any = None) -> Any:
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return self.module(tokens, positions, None, labels=labels)

    def loss(self, tokens: Any, labels: Any) -> Any:
        return self.forward(tokens, labels).mean()


class Ours(Megatron):
    """Our torch spec. Unless `mamba_ssm`, mamba-ssm and causal-conv1d are hidden, so that torch runs."""

    def __init__(self, device: str, dtype: str = "bfloat16", mamba_ssm: bool = False) -> None:
        super().__init__(device, dtype)
        self._mamba_ssm = mamba_ssm
        if not mamba_ssm:
            for package in ("mamba_ssm", "causal_conv1d"):
                sys.modules[package] = None  # type: ignore[assignment]  # importing it now fails

    def make(self) -> Any:
        from tests.support.model_mapping import megatron_model

        if self._mamba_ssm and importlib.util.find_spec("mamba_ssm") is None:
            raise RuntimeError("package mamba-ssm is not installed")
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
CHOICE_TOKENS = {"cuda": 2048, "cpu": 512}


class Transformers(Side):
    """NemotronHForCausalLM at its best setting.

    Flash attention if it is installed, otherwise SDPA; mamba-ssm where it runs; the fastest of its
    implementations of experts.
    """

    def __init__(self, device: str, dtype: str = "bfloat16") -> None:
        super().__init__(device, dtype)
        self._scan = ""
        #: Implementation of experts -> milliseconds of a step, or why it does not run.
        self.tried: dict[str, float | str] = {}

    def make(self) -> Any:
        import transformers

        from tests.support.model_mapping import transformers_config

        config = transformers_config(self.config)
        flash = self.device == "cuda" and importlib.util.find_spec("flash_attn") is not None
        config._attn_implementation = "flash_attention_2" if flash else "sdpa"
        config._experts_implementation = EXPERTS[0]
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
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
        return transformers_pieces(self.module)

    def forward(self, tokens: Any) -> Any:
        return self.module(tokens).logits

    def loss(self, tokens: Any, labels: Any) -> Any:
        import torch.nn.functional as F

        return F.cross_entropy(self.forward(tokens).flatten(0, 1).float(), labels.flatten())

    def probe(self) -> None:
        """Choose the first scan of `SCANS` that runs, and the fastest of `EXPERTS`."""
        self._choose_scan()
        batch = self.batch(min(CHOICE_TOKENS[self.device], self.config.seq_length))
        for name in EXPERTS:
            self.module.config._experts_implementation = name
            try:
                self._step(*batch)
                self.tried[name] = 1e3 * min(self._seconds(*batch, 3))
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


#: Name -> factory of the side, called with the device and the name of a dtype.
SIDES: dict[str, Callable[..., Side]] = {
    "plain": Ours,
    "mamba-ssm": partial(Ours, mamba_ssm=True),
    "hf": Transformers,
    "te": StockTE,
}
