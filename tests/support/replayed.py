"""A CUDA graph without a GPU: operations are recorded once and repeated on the same tensors.

As on a GPU, the recording freezes all that Python decided (numbers, shapes, which tensors), results are
written to the memory of the recording, and the recorded step itself counts as not run. So a step that depends
on a Python value or on a tensor that is replaced gives wrong results from the second replay on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Recording(TorchDispatchMode):
    """Operations in their order: (function, arguments, tensors that it returned)."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func.name() != "aten::_local_scalar_dense", "a value is read on the host"
        result = func(*args, **kwargs)
        returned = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.operations.append((func, args, kwargs, returned))
        return result

    def replay(self) -> None:
        for func, args, kwargs, returned in self.operations:
            given = {
                t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
            }
            again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for old, new in zip(returned, again, strict=True):
                if old.untyped_storage().data_ptr() not in given:  # no view, and not changed in place
                    old.copy_(new)


def record(run: Callable[[], None], changed: Sequence[Tensor], *_: Any) -> Callable[[], None]:
    """Record a step, undo it, and return its replay; `changed`: what it changes and reads again."""
    before, recording = [tensor.clone() for tensor in changed], _Recording()
    with recording:
        run()
    for tensor, old in zip(changed, before, strict=True):
        tensor.copy_(old)

    def replay() -> None:
        with torch.inference_mode():
            recording.replay()

    return replay
