"""Stability monitors of a training run: router balance, residual stream, zero gradients, MTP.

    settings.py   how often monitors run; settings from environment variables
    hooks.py      steps to measure, DDP wrapper of a stack, agreement of ranks (also for `precision.observe`)
    watched.py    what one layer collects during a step (torch forward hooks)
    gradients.py  reduced gradients in Megatron's buffers, each element on one rank
    reduce.py     reduces the collected numbers over ranks
    attach.py     registers the hooks while a stack is built, and installs the tracker
    tracker.py    Megatron's public MoE metric tracker with these numbers added
    series.py     names of the series, and the log line
    alarms.py     warnings over time series: pure functions and one table of thresholds
    events.py     reads TensorBoard event files
    watch.py      `nemotron3 watch`: plots them

Definitions and use: docs/monitor.md.
"""
