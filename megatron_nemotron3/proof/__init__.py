"""Proofs: of a launch against one process, and of two systems against the checkpoint they ran."""
