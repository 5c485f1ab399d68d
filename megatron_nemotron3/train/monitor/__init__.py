"""Stability monitors of a training run: router balance, residual stream, zero gradients, MTP.

    settings.py   how often monitors run; settings from environment variables
    watched.py    what one layer collects during a step (torch forward hooks)
    reduce.py     reduces the collected numbers over ranks
    attach.py     registers the hooks while a stack is built, and installs the tracker
    tracker.py    Megatron's public MoE metric tracker with these numbers added
    signs.py      signs of faults: pure functions over the series, and one table of thresholds
    rules.py      what a sign means, and what to do
    alarms.py     which of it is printed, and when: one line for one fault
    events.py     reads TensorBoard event files
    watch.py      `nemotron3 watch`: plots them

Names of the series and the log line are in `models/series.py`. Definitions and use: docs/monitor.md.
"""
