"""Distillation of a student from a teacher of the family (docs/distill.md).

divergence  how far two models' next-token distributions are apart, over a vocabulary shared by TP ranks
"""
