"""What to tell Megatron: a `Launch`, its flags, and the rules that it must obey."""

from megatron_nemotron3.launch.boosting import Boost
from megatron_nemotron3.launch.flag import Flag, render, to_argv
from megatron_nemotron3.launch.flags import flags
from megatron_nemotron3.launch.launch import BACKENDS, PRECISIONS, Launch, TrainingData, mock_data
from megatron_nemotron3.launch.layout import ParallelLayout, cut_pattern
from megatron_nemotron3.launch.phases import published, published_layout
from megatron_nemotron3.launch.rule import Rule, Violation
from megatron_nemotron3.launch.rules import RULES, RuleError, check
from megatron_nemotron3.launch.schedule import TrainingSchedule, adjusted, smoke

__all__ = [
    "BACKENDS",
    "PRECISIONS",
    "RULES",
    "Boost",
    "Flag",
    "Launch",
    "ParallelLayout",
    "Rule",
    "RuleError",
    "TrainingData",
    "TrainingSchedule",
    "Violation",
    "adjusted",
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
