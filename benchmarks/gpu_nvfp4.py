"""Stage `nvfp4` of gpu.py: a training step with emulated NVFP4 against the same step without.

The first 11 layers of Super at full width in BF16, without a BF16 tail, with 64 routed experts. That is what
a rank has at EP=8, and with the tokens of one sequence it does the work of such a rank. Kernels of the torch
backend are on in every case; quantizers are plain or compiled. Then single linears of the model: their three
matmuls, and the quantization of each operand.
"""

from __future__ import annotations

import os
from functools import partial

from common import in_turn
from gpu_setting import Setting
from nvfp4_model import LINEAR, Case, Switched, label, linear_row, peak

SIDES: dict[str, Case] = {"plain": (None, True), "torch": ("nvfp4", False), "compiled": ("nvfp4", True)}
EXPERTS, TOKENS, SMALL_TOKENS = 64, 8192, 32
ROUNDS = 5


def run(setting: Setting) -> None:
    """Measure plain, quantized by torch and by compiled passes; on a CPU the plain ones stand in for them."""
    os.environ["NEMOTRON3_GPU_KERNELS"] = "1"
    from gpu_model import stack
    from gpu_side import quiet
    from gpu_world import world

    quiet()
    config = stack("super", tiny=setting.small)
    config = config if setting.small else config.but(num_moe_experts=EXPERTS)
    tokens, rounds = (SMALL_TOKENS, 1) if setting.small else (TOKENS, ROUNDS)
    setting.emit("model", pattern=config.pattern, experts=config.num_moe_experts, tokens=tokens)
    with world(setting.device):
        _steps(setting, config, tokens, rounds)
        inner = config.mamba_num_heads * config.mamba_head_dim
        states = 2 * config.mamba_num_groups * config.mamba_state_dim
        in_proj = (tokens, config.hidden_size, 2 * inner + states + config.mamba_num_heads)
        shared = (tokens, config.hidden_size, config.moe_shared_expert_intermediate_size)
        for name, shape in (("in_proj", in_proj), ("shared FC1", shared)):
            for side in ("torch", "compiled"):
                _linear(setting, name, shape, side, rounds)


def _steps(setting: Setting, config: object, tokens: int, rounds: int) -> None:
    import torch
    from gpu_world import host_waits

    switched = Switched(config, torch.bfloat16, ["nvfp4"], 0, setting.device)
    calls = [partial(switched.step, case, tokens) for case in SIDES.values()]
    medians = dict(zip(SIDES, in_turn(calls, rounds + 1), strict=True))  # compilation takes a step or two
    for name, case in SIDES.items():
        setting.emit(
            "step",
            side=name,
            seconds=medians[name],
            ratio=medians[name] / medians["plain"],
            peak=switched.step(case, tokens, peak),
            waits=switched.step(case, tokens, host_waits),
        )


def _linear(setting: Setting, name: str, shape: tuple[int, int, int], side: str, rounds: int) -> None:
    import torch

    figures = linear_row(shape, setting.device, torch.bfloat16, 3 * rounds, SIDES[side][1])
    row = dict(zip(LINEAR, [label(shape), *figures], strict=True))
    setting.emit("linear", linear=name, quantizer=side, milliseconds=row)
