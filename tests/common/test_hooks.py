"""Hooks see the first forward of a model once, and leave."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from megatron_nemotron3.common.hooks import at_first_forward, until_first_forward


class Stack(torch.nn.Linear):
    """A module to look for."""


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[int, Any]:
    """Torch's global hooks, without those of models that other tests made."""
    found: OrderedDict[int, Any] = OrderedDict()
    monkeypatch.setattr(torch.nn.modules.module, "_global_forward_pre_hooks", found)
    return found


def test_the_first_module_of_a_class_is_seen_once(hooks: OrderedDict[int, Any]) -> None:
    seen: list[torch.nn.Module] = []
    handle = at_first_forward(Stack, seen.append)
    x, stack = torch.ones(1, 2), Stack(2, 2)
    torch.nn.Linear(2, 2)(x)
    assert seen == [] and len(hooks) == 1
    for _ in range(2):
        torch.nn.Sequential(stack)(x)
    assert seen == [stack] and not hooks
    handle.remove()
    at_first_forward(Stack, seen.append).remove()
    Stack(2, 2)(x)
    assert seen == [stack] and not hooks


def test_modules_around_a_stack_are_seen_until_its_forward_begins(hooks: OrderedDict[int, Any]) -> None:
    seen: list[torch.nn.Module] = []
    x, stack = torch.ones(1, 2), Stack(2, 2)
    around = torch.nn.Sequential(stack)
    until_first_forward(stack, seen.append)
    for _ in range(2):
        around(x)
    assert seen == [around, stack] and not hooks
    until_first_forward(Stack(2, 2), seen.append)  # gone at once
    around(x)
    assert len(seen) == 2 and not hooks
