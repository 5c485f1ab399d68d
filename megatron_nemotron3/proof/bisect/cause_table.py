"""All causes that are tried."""

from __future__ import annotations

from megatron_nemotron3.proof.bisect.causes import Cause, model_causes
from megatron_nemotron3.proof.bisect.causes_attention import attention_causes
from megatron_nemotron3.proof.bisect.causes_experts import expert_causes
from megatron_nemotron3.proof.bisect.causes_mamba import mamba_causes


def table() -> list[Cause]:
    """All causes."""
    return [*mamba_causes(), *attention_causes(), *expert_causes(), *model_causes()]
