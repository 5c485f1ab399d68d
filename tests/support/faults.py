"""Faults of a training run, made in a model while it trains. Each takes effect from the next step on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor

Hooks = list[Any]


def routers(model: torch.nn.Module) -> list[Any]:
    """The routers of the decoder, in order."""
    decoder: Any = model.decoder
    return [m.router for layer in decoder.layers for m in layer.modules() if isinstance(m, BaseMoELayer)]


def favor(router: Any, count: int, probe: Callable[[], None]) -> None:
    """Overwrite a router's weight so that every token prefers its first `count` experts."""
    sign = torch.full((router.weight.shape[0], 1), -1.0)
    sign[:count] = 1.0
    direction = _direction(router, probe)
    with torch.no_grad():
        router.weight.copy_(8 * sign * direction)


def shun(router: Any, count: int, probe: Callable[[], None]) -> None:
    """Overwrite the rows of `count` experts in a router's weight so that no token prefers them."""
    direction = _direction(router, probe)
    with torch.no_grad():
        router.weight[:count] = -20 * direction


def _direction(router: Any, probe: Callable[[], None]) -> Tensor:
    """The direction that all inputs of a router are on one side of, by least squares.

    Args:
        probe: runs a forward.
    """
    seen: list[Tensor] = []
    handle = router.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))
    probe()
    handle.remove()
    x = seen[0].reshape(-1, router.weight.shape[1]).double()
    direction = torch.linalg.lstsq(x, torch.ones(len(x), 1, dtype=torch.float64)).solution[:, 0]
    return direction.to(router.weight.dtype)


def no_gradients(layer: torch.nn.Module) -> Hooks:
    """Zero the gradients of all weights of a layer."""
    return [p.register_hook(torch.zeros_like) for p in layer.parameters() if p.requires_grad]


def louder(layer: torch.nn.Module, factor: float) -> Hooks:
    """Multiply the residual stream behind a layer, which the norms of later layers take out again."""

    def multiply(_module: Any, _inputs: Any, output: Any) -> Any:
        return (factor * output[0], *output[1:]) if isinstance(output, tuple) else factor * output

    return [layer.register_forward_hook(multiply, prepend=True)]


@contextmanager
def until_removed(hooks: Hooks) -> Iterator[None]:
    """Remove hooks after the block."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
