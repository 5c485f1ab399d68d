"""Two systems disagree on log-probabilities: which deviates from the checkpoint, and why (docs/bisect.md)."""

from typing import TYPE_CHECKING

from megatron_nemotron3.common import lazy

if TYPE_CHECKING:
    from megatron_nemotron3.proof.bisect.engine import of_sglang as of_sglang
    from megatron_nemotron3.proof.bisect.engine import of_vllm as of_vllm
    from megatron_nemotron3.proof.bisect.engine import sequence as sequence
    from megatron_nemotron3.proof.bisect.recompute import Recomputation as Recomputation
    from megatron_nemotron3.proof.bisect.record import Recorder as Recorder
    from megatron_nemotron3.proof.bisect.recording import Recording as Recording
    from megatron_nemotron3.proof.bisect.recording import read as read
    from megatron_nemotron3.proof.bisect.recording import write as write
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            "engine": ["of_sglang", "of_vllm", "sequence"],
            "recompute": ["Recomputation"],
            "record": ["Recorder"],
            "recording": ["Recording", "read", "write"],
        },
    )
