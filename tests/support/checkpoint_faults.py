"""Defects of saving and loading. Each is called on a rank before anything is built."""

from __future__ import annotations

from typing import Any


def forget_steps() -> None:
    """A loaded optimizer begins to count its steps again, so Adam's bias correction is that of step 1."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load = DistributedOptimizer.load_state_dict

    def forgetful(self: Any, state: Any) -> None:
        load(self, state)
        for group in state["optimizer"]["param_groups"]:
            group["step"] = 0

    DistributedOptimizer.load_state_dict = forgetful


def stored_states_only() -> None:
    """Random numbers follow from the states that Megatron stores."""
    from megatron_nemotron3.layers import draws

    draws.seed_all = lambda *_: None  # type: ignore[assignment]


def hang_in_the_last_rank() -> None:
    """The last rank never begins."""
    import os
    import time

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(1000)


def die_in_the_last_rank() -> None:
    """The last rank fails when training begins."""
    import os

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        raise OSError("no space left on a device")
