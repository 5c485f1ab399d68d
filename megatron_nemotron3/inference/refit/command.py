"""`nemotron3 plan refit`: which weights a trainer sends to an engine. Needs no GPU, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.quantized import read_scales
from megatron_nemotron3.common.options import NEEDED, add_command, flag, json_flag, option
from megatron_nemotron3.common.output import Bar, count, print_json
from megatron_nemotron3.inference.refit.layouts import DTYPES, EngineLayout, Training
from megatron_nemotron3.models.command import ModelOptions, chosen_model

_MIB = 1 << 20
_TRANSFER = "transfer"
_transfer = partial(option, group=_TRANSFER)


@dataclass(frozen=True, kw_only=True)
class RefitOptions:
    """Options of `nemotron3 plan refit`."""

    which: ModelOptions
    source: str = option(
        "trainer layout: tp=,pp=,vpp=,ep=,etp=,cp=,dp= (default dp: the minimum that holds the experts)",
        "LAYOUT",
        default=NEEDED,
        spelling="--from",
    )
    target: str = option(
        "server layout, as the engine counts it: tp=,pp=,dp=,ep=,replicas=,mtp=,fp32_router=; "
        "mtp=0 leaves MTP out, fp32_router=1 sends router weights in FP32",
        "LAYOUT",
        default=NEEDED,
        spelling="--to",
    )
    engine: str = _transfer(
        "inference engine: vllm, sglang, or hf for the loader of any other (default vllm)",
        "ENGINE",
        default="vllm",
    )
    dtype: str = _transfer("weight dtype (default bfloat16)", default="bfloat16", choices=DTYPES)
    quantize: str | None = _transfer(
        "pack the weights for inference engines (engine hf): nvfp4, fp8, fp8-blockwise, or a recipe name",
        "RECIPE",
    )
    input_scales: Path | None = _transfer(
        "activation scales for --quantize: JSON, safetensors, or a quantized checkpoint", "PATH"
    )
    colocated: bool = flag("trainer rank r and server rank r are one process", group=_TRANSFER)
    buffer: int = _transfer("maximum size sent per rank and step (default 256)", "MIB", default=256, least=1)
    delta: str | None = _transfer(
        'plan only tensors whose Hugging Face names match, such as "mtp.*"', "PATTERN"
    )
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 plan refit`."""
    add_command(commands.add_parser("plan refit"), RefitOptions, refit)


def refit(options: RefitOptions) -> int:
    """Print the figures of the plan. Returns exit status 0."""
    config = chosen_model(options.which)
    for name, layout in (("--from", options.source), ("--to", options.target)):
        if not layout:
            raise ValueError(f"{name} '': give sizes, such as tp=8")
    training = Training.of(config, options.source)
    scales = read_scales(options.input_scales) if options.input_scales is not None else {}
    serving = EngineLayout.of(
        config,
        options.target,
        engine=options.engine,
        dtype=options.dtype,
        quantize=options.quantize,
        input_scales=tuple(scales.items()),
    )

    from megatron_nemotron3.inference.refit.planner import make_plan

    with Bar("plan", "transfers") as bar:
        plan = make_plan(
            training,
            serving,
            buffer=options.buffer * _MIB,
            colocated=options.colocated,
            only=options.delta,
            report=bar.to,
        )
    load = plan.load()
    if options.json:
        facts = {
            "training_ranks": training.layout.world_size,
            "serving_ranks": serving.size,
            "tensors": len(plan.names),
            "steps": plan.steps,
            "digest": plan.digest,
        }
        print_json(facts | load._asdict())
        return 0
    shared = f", {min(serving.size, training.layout.world_size):,} of them trainers" * plan.colocated
    print(f"trainer           {training}: {count(training.layout.world_size, 'rank')}")
    print(f"servers           {serving}: {count(serving.size, 'rank')}{shared}")
    print(f"tensors           {len(plan.names):,}, in {plan.steps:,} steps")
    print(f"sent              {load.total:,} bytes in {load.messages:,} messages")
    if plan.colocated:
        print(f"copied            {load.copied:,} bytes inside a process")
    print(f"busiest sender    {load.sent:,} bytes")
    print(f"busiest receiver  {load.received:,} bytes, what it holds")
    print(f"largest buffer    {load.space:,} bytes of {plan.buffer:,}")
    print(f"digest            {plan.digest}")
    return 0
