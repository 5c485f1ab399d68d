"""How often the monitors run: the one place that reads NEMOTRON3_MONITOR. Standard library only."""

from __future__ import annotations

import os
import sys

VARIABLE = "NEMOTRON3_MONITOR"
#: Least interval nobody asked for: there the monitors cost less than 1 % (benchmarks/monitor.py).
LEAST_DEFAULT = 10


def parse_interval(text: str) -> int:
    """A number of iterations, 0 for off.

    Raises:
        ValueError: anything else.
    """
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{VARIABLE}={text!r}: give the interval in iterations, or 0 for off")
    return int(text)


def interval() -> int:
    """Iterations from one measurement to the next; 0: off.

    NEMOTRON3_MONITOR, if it is set. Else, inside a Megatron training script, its `--log-interval`, or the
    first multiple of it from `LEAST_DEFAULT` on. Else (a model built in a pipeline of somebody's own, where
    nobody asks for a report) off.

    Raises:
        ValueError: NEMOTRON3_MONITOR is not a number.
    """
    given = os.environ.get(VARIABLE, "")
    if given:
        return parse_interval(given)
    # Not imported for this: a script that trains has imported it, and parsed its options by now.
    global_vars = sys.modules.get("megatron.training.global_vars")
    if global_vars is None:
        return 0
    try:
        log_interval = int(global_vars.get_args().log_interval)
    except AssertionError:  # no options were parsed
        return 0
    return log_interval * -(-LEAST_DEFAULT // log_interval)


def asked_for() -> bool:
    """Whether NEMOTRON3_MONITOR itself asks for monitors, so that a reason for their absence is due."""
    return bool(os.environ.get(VARIABLE)) and interval() > 0
