"""Prove on a CPU that a launch computes what one process computes: the smallest run with its structure, and a
certificate."""
