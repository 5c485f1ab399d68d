"""Distillation of a student from a teacher of the family (docs/distill.md)."""
