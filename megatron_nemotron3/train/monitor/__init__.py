"""Stability monitors of a training run: router balance, residual stream, zero gradients, MTP.

Definitions and use: docs/monitor.md.
"""
