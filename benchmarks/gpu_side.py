"""A side of the stages `step` of gpu.py: one model in a process of its own."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

#: Warm-up steps, and tokens of the first step: they cover autotuning and the compilation of Triton kernels.
WARM_UP, PROBE_TOKENS = 2, 160
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
    """A model in BF16 on one device."""

    def __init__(self, device: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        quiet()
        self.device = device
        self._world = ExitStack()
        self.module: Any = None

    # -- the model ----------------------------------------------------------------------------

    def make(self) -> Any:
        """Create the module on the device, in BF16, with undefined weights."""
        raise NotImplementedError

    def pieces(self, gradients: bool = False) -> Iterator[tuple[str, Any]]:
        """Its tensors, or their gradients, under Hugging Face names: for `gpu_weights`."""
        raise NotImplementedError

    def forward(self, tokens: Any) -> Any:
        """Logits [1, s, vocabulary] of tokens [1, s]."""
        raise NotImplementedError

    def loss(self, tokens: Any, labels: Any) -> Any:
        """Mean cross-entropy."""
        raise NotImplementedError

    def settings(self) -> str:
        """Describe the implementations in use."""
        raise NotImplementedError

    # -- lifetime --------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """Memory of the device in bytes."""
        import torch

        if self.device == "cuda":
            return int(torch.cuda.get_device_properties(0).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def build(self, config: Any) -> str:
        """Make the model of `config`, run it once, and return its settings."""
        from gpu_world import world

        self._world.enter_context(world(self.device))
        self.config = config
        self.module = self.make().train()
        self._fill()
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

    def _fill(self, pinned: bool = False) -> None:
        from gpu_weights import fill

        fill(self.pieces(), pinned=pinned)

    def clean(self) -> None:
        """Free cached memory."""
        import torch

        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def batch(self, length: int) -> tuple[Any, Any]:
        """Tokens and labels [1, length]."""
        import torch

        generator = torch.Generator().manual_seed(length)
        stream = torch.randint(self.config.vocab_size, (1, length + 1), generator=generator).to(self.device)
        return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()

    # -- figures -----------------------------------------------------------------------------------

    def parity(self, length: int) -> dict[str, Any]:
        """Loss, and sketches of logits and gradients, with pinned routing.

        BF16 rounding could otherwise swap nearly equal experts. The logits are the last rows and part of the
        vocabulary.
        """
        import torch
        from gpu_weights import rounded, sketch, sketches

        self._fill(pinned=True)
        self.module.zero_grad(set_to_none=True)
        tokens, labels = self.batch(length)
        with torch.no_grad():
            logits = self.forward(tokens)[0, -LAST_ROWS:, ::VOCABULARY_STRIDE]
        found: dict[str, Any] = {"tokens": length, "logits": rounded(sketch("logits", logits))}
        del logits
        found["loss"] = self._step(tokens, labels).item()
        found["gradients"] = sketches(self.pieces(gradients=True))
        self.module.zero_grad(set_to_none=True)
        return found

    def measure(self, length: int, steps: int) -> dict[str, Any]:
        """Seconds of `steps` steps, loss, memory that a step adds, and its host waits; free routing.

        peak is the largest increase over the idle model, gradients included; held is the same where
        gradients exist before the step, as in Megatron's buffers: activations and temporary memory.
        """
        self._fill()
        tokens, labels = self.batch(length)
        for _ in range(WARM_UP):
            loss = self._step(tokens, labels).item()
        seconds = self._seconds(tokens, labels, steps)
        self.module.zero_grad(set_to_none=True)
        peak, held = (self._peak(partial(self._step, tokens, labels)) for _ in range(2))
        self.module.zero_grad(set_to_none=True)
        return {
            "tokens": length,
            "seconds": seconds,
            "loss": loss,
            "peak": peak,
            "held": held,
            "weights": sum(p.nbytes for p in self.module.parameters()),
            "waits": self._waits(tokens, labels),
        }

    def profile(self, length: int, rows: int) -> list[list[Any]]:
        """The operations that take most device time in one step: name, calls, milliseconds."""
        from torch.profiler import profile

        batch = self.batch(length)
        with profile() as run:
            self._step(*batch)
            self.clean()
        self.module.zero_grad(set_to_none=True)
        attribute = f"self_{'device' if self.device == 'cuda' else 'cpu'}_time_total"
        found = sorted(run.key_averages(), key=lambda event: -getattr(event, attribute))
        return [[e.key[:80], e.count, round(getattr(e, attribute) / 1e3, 3)] for e in found[:rows]]

    def _step(self, tokens: Any, labels: Any) -> Any:
        loss = self.loss(tokens, labels)
        loss.backward()
        return loss.detach()

    def _waits(self, tokens: Any, labels: Any) -> int:
        from gpu_world import host_waits

        return host_waits(partial(self._step, tokens, labels), self.device)

    def _seconds(self, tokens: Any, labels: Any, steps: int) -> list[float]:
        import torch

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

    def _peak(self, function: Callable[[], Any]) -> int:
        import torch
        from common import peak_memory

        if self.device != "cuda":
            return peak_memory(function)
        self.clean()
        torch.cuda.reset_peak_memory_stats()
        idle = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - idle)
