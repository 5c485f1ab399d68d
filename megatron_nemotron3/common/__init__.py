"""What every other part builds on: no Megatron, no model, no torch at import."""
