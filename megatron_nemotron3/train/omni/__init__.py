"""Nemotron 3 Nano Omni in Megatron's MIMO model: encoders, projectors, and how it is built."""
