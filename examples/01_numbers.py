"""Print a model's parameter count, its first flags, and why a layout is refused. Imports no torch."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # this checkout, if the package is not installed

from megatron_nemotron3.launch import Launch, ParallelLayout, RuleError, flags
from megatron_nemotron3.models import count, get

config = get("super")
size = count(config)
print(f"{config.title}: {config.num_layers} layers, {size.stored:,} elements in a checkpoint")

for flag in flags(Launch.of(config, ParallelLayout(tp=2, ep=64, dp=64), backend="te"))[:6]:
    print(flag)

try:
    flags(Launch.of(config, ParallelLayout(tp=16)))
except RuleError as refused:
    print(refused)
