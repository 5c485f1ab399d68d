"""How often the monitors run."""

from __future__ import annotations

from megatron_nemotron3.common.switches import MONITOR, EnvironmentSetting, megatron_options

#: Smallest default interval: from there on the monitors cost less than 1 % (benchmarks/monitor.py).
LEAST_DEFAULT = 10


def parse_interval(text: str) -> int:
    """A number of iterations, 0 for off."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{MONITOR}={text!r}: give the interval in iterations, or 0 for off")
    return int(text)


#: Value: the interval in iterations, 0 for off, None for the default.
_INTERVAL = EnvironmentSetting(MONITOR, lambda text: parse_interval(text) if text else None)
#: Context manager: inside it monitors run every so many iterations (0: off, None: the default).
monitoring = _INTERVAL.using


def interval() -> int:
    """Iterations from one measurement to the next; 0 for off.

    The value of `monitoring` or NEMOTRON3_MONITOR counts first. Without one, a Megatron training script is
    monitored at the first multiple of its `--log-interval` that is at least `LEAST_DEFAULT`. A model built in
    any other pipeline is not monitored, because nothing there requests a report.
    """
    given = _INTERVAL.current()
    if given is not None:
        return given
    options = megatron_options()
    if options is None:
        return 0
    log_interval = int(options.log_interval)
    return log_interval * -(-LEAST_DEFAULT // log_interval)


def requested() -> bool:
    """Whether the user set an interval, so that a reason for the absence of monitors must be printed."""
    return bool(_INTERVAL.current())
