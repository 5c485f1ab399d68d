"""Pruning: what matters least in a model, and what is left without it (docs/compression.md)."""
