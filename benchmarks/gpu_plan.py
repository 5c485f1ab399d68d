"""Stage `plan` of gpu.py: what `nemotron3 plan` says of the training steps that were just measured.

Memory is what a step adds where gradients exist before it: activations and temporary memory. Time is that of
forward and backward, without optimizer. The launch is one rank with one microbatch.
"""

from __future__ import annotations

import statistics
from typing import Any

from gpu_model import stack
from gpu_results import Results
from gpu_setting import Setting, Skipped

#: Side -> backend of the plan.
BACKENDS = {"plain": "torch", "mamba-ssm": "auto", "te": "te"}


def run(setting: Setting) -> None:
    """Compare every step of a Megatron side that has a result."""
    if setting.results is None:
        raise Skipped("no results are given: gpu.py gives them")
    results = Results(setting.results)
    gpu = gpu_of(results.runs[-1]["device"])
    found = 0
    for name, speed in results.rows("step.", "speed"):
        _, width, side = name.split(".")
        if side not in BACKENDS:
            continue
        model = next(row for stage, row in results.rows(name, "model") if stage == name)
        config = stack(width, tiny=setting.small).but(num_moe_experts=model["experts"])
        setting.emit("plan", width=width, side=side, **compared(config, BACKENDS[side], speed, gpu))
        found += 1
    if not found:
        raise Skipped("no training step has been measured")


def gpu_of(device: str) -> Any:
    """The GPU of the plan's table with that name; None if there is none."""
    from megatron_nemotron3.launch.plan.hardware import GPUS

    words = device.lower().split()
    return next((gpu for name, gpu in GPUS.items() if name in words), None)


def compared(config: Any, backend: str, speed: dict[str, Any], gpu: Any) -> dict[str, Any]:
    """Measured and planned bytes and seconds; no seconds for a device that the plan does not know."""
    from megatron_nemotron3.launch import Launch, TrainingSchedule
    from megatron_nemotron3.launch.plan.memory import memory
    from megatron_nemotron3.launch.plan.timing import Machine, step_time

    schedule = TrainingSchedule(seq_length=speed["tokens"], micro_batch_size=1, global_batch_size=1)
    launch = Launch(config=config, precision="bf16", backend=backend, schedule=schedule)
    held = memory(launch)
    row = {
        "bytes": speed["held"],
        "planned_bytes": sum(held.activations.values()) + held.recompute_peak + held.buffers,
        "seconds": statistics.median(speed["seconds"]),
        "planned_seconds": None,
    }
    if gpu is not None:
        step = step_time(launch, Machine(gpu))
        row["planned_seconds"] = step.products + step.memory + step.layers
    return row
