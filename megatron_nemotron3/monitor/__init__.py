"""Stability monitors of a training run: router balance, residual stream, zero gradients, MTP.

    settings.py   NEMOTRON3_MONITOR: how often
    watched.py    what one layer collects during a step (torch forward hooks)
    gradients.py  zeros in the reduced gradients of a layer's weights
    reduce.py     the numbers of all ranks, over the groups they belong to
    attach.py     puts hooks on a stack when it is built, and the tracker in Megatron's place
    tracker.py    Megatron's public MoE metric tracker with these numbers added
    series.py     names of the series, and the few of them that go into the log line
    alarms.py     warnings over time series: pure functions and one table of thresholds
    events.py     reads TensorBoard event files
    watch.py      `nemotron3 watch`: plots them

Definitions and use: docs/monitor.md.
"""
