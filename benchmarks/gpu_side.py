"""A side of train_step_gpu.py: one model in a process of its own."""

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

#: Warm-up steps, and tokens of the first one: they cover autotuning and the compilation of Triton kernels.
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
    """A model in BF16. Between turns it holds no device memory except the CUDA context."""

    def __init__(self, device: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        quiet()
        self.device = device
        self._world = ExitStack()
        self._has_world = False
        self.module: Any = None

    # -- the model ----------------------------------------------------------------------------

    def make(self) -> Any:
        """Create the module on the device, in BF16, with undefined weights."""
        raise NotImplementedError

    def pieces(self) -> Iterator[tuple[str, Any]]:
        """Its tensors under Hugging Face names, for `gpu_weights.fill`."""
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
        """Replace the model by one of `config`, run it once, and return its settings."""
        from gpu_weights import Storages
        from gpu_world import world

        if not self._has_world:
            self._world.enter_context(world(self.device))
            self._has_world = True
        self.module = None
        self.clean()
        self.config = config
        self.module = self.make().train()
        self._storages = Storages(self.module)
        try:
            self._fill()
            self.probe()
        finally:
            self._sleep()
        return self.settings()

    def close(self) -> None:
        """Destroy the process groups; not needed in a process that ends."""
        self._world.close()

    def probe(self) -> None:
        """Run one short step; raises if the settings do not work here."""
        self._step(*self.batch(PROBE_TOKENS))

    def _wake(self, pinned: bool = False) -> None:
        self._storages.allocate()
        self._fill(pinned)

    def _fill(self, pinned: bool = False) -> None:
        from gpu_weights import fill

        fill(self.pieces(), pinned=pinned)

    def _sleep(self) -> None:
        if self.module is not None:
            self.module.zero_grad(set_to_none=True)
            self._storages.release()
        self.clean()

    def clean(self) -> None:
        """Free cached memory; after an error, call it when nothing refers to the failed step any more."""
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

    def logits(self, length: int) -> Any:
        """Logits of the last rows and part of the vocabulary as a NumPy array, with pinned routing."""
        import torch

        try:
            self._wake(pinned=True)
            with torch.no_grad():
                rows = self.forward(self.batch(length)[0])[0, -LAST_ROWS:, ::VOCABULARY_STRIDE]
                return rows.float().cpu().numpy()
        finally:
            self._sleep()

    def measure(self, length: int, steps: int) -> dict[str, Any]:
        """Measure the seconds of `steps` steps, the memory added by a step, its host waits, and the loss."""
        try:
            self._wake()
            tokens, labels = self.batch(length)
            for _ in range(WARM_UP):
                loss = self._step(tokens, labels).item()
            seconds = self._seconds(tokens, labels, steps)
            self.module.zero_grad(set_to_none=True)
            peak = self._peak(partial(self._step, tokens, labels))
            self.module.zero_grad(set_to_none=True)
            return {
                "seconds": seconds,
                "peak": peak,
                "waits": self._waits(tokens, labels),
                "weights": self._storages.nbytes,
                "loss": loss,
            }
        finally:
            self._sleep()

    def profile(self, length: int, rows: int) -> str:
        """torch's table of the operations that take most device time in one step."""
        from torch.profiler import profile

        try:
            self._wake()
            batch = self.batch(length)
            for _ in range(WARM_UP):
                self._step(*batch)
            with profile() as run:
                self._step(*batch)
                self.clean()
            order = f"self_{self.device}_time_total"
            return str(run.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=60))
        finally:
            self._sleep()

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
