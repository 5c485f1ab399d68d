"""Distillation across tokenizers (X-Token): docs/xtoken.md."""
