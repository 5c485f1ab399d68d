"""What Megatron must be told: layouts, schedules, precisions, flags, and the rules they obey.

Standard library only. `flags` is the function; its module is `megatron_nemotron3.args.flags`.
"""

from megatron_nemotron3.args.backend import BACKENDS
from megatron_nemotron3.args.data import TrainingData, mock_data
from megatron_nemotron3.args.flag import Flag, render, to_argv
from megatron_nemotron3.args.flags import flags
from megatron_nemotron3.args.layout import ParallelLayout, published_layout
from megatron_nemotron3.args.pipeline import cut_pattern
from megatron_nemotron3.args.precision import PRECISIONS, bf16_tail
from megatron_nemotron3.args.rule import Rule, Violation
from megatron_nemotron3.args.rules import RULES, RuleError, check
from megatron_nemotron3.args.schedule import TrainingSchedule, adjusted, published, smoke

__all__ = [
    "BACKENDS",
    "PRECISIONS",
    "RULES",
    "Flag",
    "ParallelLayout",
    "Rule",
    "RuleError",
    "TrainingData",
    "TrainingSchedule",
    "Violation",
    "adjusted",
    "bf16_tail",
    "check",
    "cut_pattern",
    "flags",
    "mock_data",
    "published",
    "published_layout",
    "render",
    "smoke",
    "to_argv",
]
