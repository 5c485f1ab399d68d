"""Options of a run of a few steps on mock data. Needs neither torch nor megatron."""

from __future__ import annotations

from typing import Any

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingData, TrainingSchedule, flags, to_argv
from megatron_nemotron3.models import Nemotron3Config


def short_schedule(steps: int, **changes: Any) -> TrainingSchedule:
    """`steps` steps of 4 sequences of 64 tokens, each logged; no evaluation, no save."""
    values: dict[str, Any] = {
        "seq_length": 64,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "train_iters": steps,
        "lr": 3e-3,
        "min_lr": 1e-4,
        "lr_decay_iters": steps,
        "lr_wsd_decay_iters": 1,
        "eval_iters": 0,
        "eval_interval": 100,
        "log_interval": 1,
        "save_interval": 100,
    }
    return TrainingSchedule(**{**values, **changes})


def mock_argv(
    config: Nemotron3Config,
    layout: ParallelLayout,
    schedule: TrainingSchedule,
    extra: tuple[str, ...] = (),
    **data: Any,
) -> list[str]:
    """Megatron's command line for `config` (of 255 words) on mock data: torch backend, FP32.

    Args:
        data: other fields of TrainingData, such as `save` and `load`.
    """
    given = TrainingData(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=255, **data)
    return to_argv(
        flags(
            Launch.of(
                config, layout, precision="fp32", backend="torch", schedule=schedule, data=given, extra=extra
            )
        )
    )
