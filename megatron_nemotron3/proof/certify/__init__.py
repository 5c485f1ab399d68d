"""Prove on a CPU that a launch computes what one process computes: the smallest run with its structure, and a
certificate."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.proof.certify.ranks import initialize as initialize
    from megatron_nemotron3.proof.certify.ranks import run_distributed as run_distributed
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {"ranks": ["initialize", "run_distributed"]})
