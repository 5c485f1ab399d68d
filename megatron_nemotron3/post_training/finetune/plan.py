"""`nemotron3 finetune --plan`: whether the training fits on the GPUs, before anything else is done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from megatron_nemotron3.checkpoints.remote import local
from megatron_nemotron3.common.output import count
from megatron_nemotron3.launch import Launch, ParallelLayout, check
from megatron_nemotron3.launch.plan.hardware import GIB, GPUS, RESERVE
from megatron_nemotron3.launch.plan.options import Recompute
from megatron_nemotron3.launch.plan.report import memory_classes
from megatron_nemotron3.launch.plan.search import worst_memory
from megatron_nemotron3.models import LoRASettings
from megatron_nemotron3.models.command import model
from megatron_nemotron3.post_training.finetune import inputs
from megatron_nemotron3.train.processes import machines

#: Most GPUs of a layout that is proposed, and its tensor-parallel sizes.
_MOST, _TP = 1024, (1, 2, 4, 8)
#: Linears with an adapter for every routed expert.
_OF_EXPERTS = ("linear_fc1", "linear_fc2")

#: Options of the command, and the launch with adapters that they describe.
Change = tuple[str, Launch, LoRASettings | None]


def plan(options: Any, layout: ParallelLayout, lora: LoRASettings | None) -> int:
    """Print the memory of the fullest rank. Exit status 0 if it fits, else 1.

    options: `FinetuneOptions`.
    """
    launch = _launch(options, layout, lora)
    inputs.require_possible(launch, lora)
    name, size = _gpu(options.gpu, layout.world_size)
    held, limit = worst_memory(launch, lora), size - RESERVE
    fits = held.total <= limit
    trained = "all weights" if lora is None else f"LoRA of {'+'.join(lora.targets)}, dim {lora.dim}"
    how = f"{trained}, {layout}, {launch.precision}, sequences of {launch.seq_length:,} tokens"
    print(f"{options.source}: {how}")
    print("memory of the fullest rank, GiB")
    for part, number in {**memory_classes(held), "all": held.total}.items():
        print(f"  {part:26} {number / GIB:>7.2f}")
    print(
        f"{'fits' if fits else 'does not fit'}: {held.total / GIB:.1f} of {limit / GIB:.1f} GiB on {name} "
        f"({RESERVE / GIB:.0f} GiB kept for CUDA, NCCL and fragments)"
    )
    if not fits:
        cures = [*_fitting(_changes(launch, lora), limit)]
        cures += islice(_fitting(_layouts(options, launch, lora), limit), 1)
        print("what would fit:" if cures else "neither LoRA nor recomputation nor another layout would fit")
        for cure in cures:
            print(f"  {cure}")
    if (whole := inputs.whole_weights(launch)) > limit:
        print(f"held-out loss: measured in this layout, without an answer: {whole / GIB:.1f} GiB of weights")
    return 0 if fits else 1


def _launch(options: Any, layout: ParallelLayout, lora: LoRASettings | None) -> Launch:
    """The launch for the model of the folder, of which no weight is read, or of a name of the catalog."""
    from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face

    mtp, length = vars(options.mtp), options.seq_length
    with local(options.source, download=False) as source:
        if source.exists() and length is None and all(file.is_file() for file in options.conversations):
            found = inputs.check(options, lora, source)
            return inputs.launch_of(options, found.config, layout, found.seq_length)
        if source.exists():
            config = open_hugging_face(source, **mtp).config
        elif any(value is not None for value in mtp.values()):
            raise ValueError(f"{options.source}: --mtp-from and --mtp-num-layers need its folder")
        else:
            config = model(str(options.source))
    if length is None:
        length = inputs.default_length(inputs.MOST, config, layout)
        print(f"sequence length  {length:,}, the most without --seq-length: no conversations were read")
    return inputs.launch_of(options, config, layout, length)


def _gpu(name: str | None, ranks: int) -> tuple[str, float]:
    """(name, bytes) of the GPU of that name, or of this machine's, which must suffice for the ranks."""
    if name is not None:
        return name, GPUS[name].memory
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"--plan: torch sees no GPU here: give --gpu, one of {', '.join(GPUS)}")
    machines(ranks, "cuda")
    found = torch.cuda.get_device_properties(0)
    return found.name, found.total_memory


def _changes(launch: Launch, lora: LoRASettings | None) -> Iterator[Change]:
    """Changes that leave the layout as it is."""
    words = Recompute("full").flags()
    again, recomputed = f"-- {' '.join(words)}", replace(launch, extra=(*launch.extra, *words))
    yield again, recomputed, lora
    if lora is None:
        yield "--lora", launch, LoRASettings()
        lora = LoRASettings()
    left = tuple(target for target in lora.targets if target not in _OF_EXPERTS)
    if left and left != lora.targets:
        fewer = replace(lora, targets=left)
        adapters = f"--lora dim={lora.dim},alpha={lora.alpha:g},targets={'+'.join(left)}"
        yield adapters, launch, fewer
        yield f"{adapters} {again}", recomputed, fewer


def _layouts(options: Any, launch: Launch, lora: LoRASettings | None) -> Iterator[Change]:
    """Layouts of as many GPUs and more: experts are divided over all, other weights over few or none."""
    gpus, config = launch.layout.world_size, launch.config
    while gpus <= _MOST:
        for tp in (size for size in _TP if gpus % size == 0):
            ep = math.gcd(gpus, config.num_moe_experts or 1)
            layout = ParallelLayout(tp=tp, ep=ep, dp=gpus // tp)
            words = [f"--{name} {size}" for name, size in vars(layout).items() if name != "sp" and size != 1]
            yield " ".join(words), inputs.launch_of(options, config, layout, launch.seq_length), lora
        gpus *= 2


def _fitting(changes: Iterator[Change], limit: float) -> Iterator[str]:
    for words, launch, lora in changes:
        held = worst_memory(launch, lora).total
        if held <= limit and all(violation.severity != "error" for violation in check(launch)):
            yield f"{words}   {held / GIB:.1f} GiB on {count(launch.layout.world_size, 'GPU')}"
