"""One whole training step of any model in any layout, from flags to the optimizer, on this rank.

The way is that of `proof.certify.world`, with Megatron's globals around it, which its learning rate wants,
and one world for many cases. Weights and tokens are a function of their global place, so the same model in
another layout must give the same loss, the same MTP losses and the same gradient norm.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.training import arguments, global_vars
from megatron.training import training as loop

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule, flags, rules, to_argv
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.certify import case as certify
from megatron_nemotron3.proof.certify import ranks, tensors, world
from megatron_nemotron3.train.build import megatron_args

#: Standard deviation of the tokens' embeddings and of every matrix; others by the end of their name.
STD = 0.1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: the fields of a `Launch`."""

    config: Nemotron3Config
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    schedule: TrainingSchedule
    precision: str = "fp32"
    backend: str = "torch"
    distributed_optimizer: bool = True
    extra: tuple[str, ...] = ()
    te_precision_config_file: str | None = None
    emulate: bool = False
    compute_capability: tuple[int, int] | None = None
    gpu: str | None = None

    def argv(self) -> list[str]:
        """The words of Megatron's command line. Raises RuleError."""
        return to_argv(flags(Launch.of(self.config, self.layout, **self.options())))

    def options(self) -> dict[str, Any]:
        """Everything but config and layout, as `Launch.of` takes it."""
        fields = (f.name for f in dataclasses.fields(self))
        return {name: getattr(self, name) for name in fields if name not in ("config", "layout")}

    def __str__(self) -> str:
        shown = {
            f.name: value
            for f in dataclasses.fields(Nemotron3Config)
            if f.name not in ("name", "title", "init_method_std")
            and (value := getattr(self.config, f.name)) != f.default
        }
        batch = self.schedule.micro_batch_size, self.schedule.global_batch_size
        return (
            f"{self.layout}; {shown}; {self.precision} {self.backend} "
            f"distributed_optimizer={self.distributed_optimizer} batch={batch} "
            f"seq_length={self.schedule.seq_length} {' '.join(self.extra)}"
        )


@dataclass(frozen=True)
class Outcome:
    """What a step left behind, equal on all ranks but for `mtp` (last stage, else None)."""

    loss: float
    mtp: tuple[float, ...] | None
    grad_norm: float
    #: Elements of all trainable tensors of the model, from the global shapes of its checkpoint.
    parameters: int
    #: Rows of the embedding, padding included.
    vocabulary: int


@dataclass(frozen=True)
class Refusal:
    """Megatron's own answer, and how far the run got."""

    #: "arguments", "groups", "model" or "step".
    stage: str
    #: The exception's class and message.
    message: str


@contextlib.contextmanager
def rules_off() -> Iterator[None]:
    """`flags` emits what the rules refuse."""
    with mock.patch.object(rules, "enforce", lambda *_, **__: []):
        yield


@cache
def _parser() -> Any:
    import argparse

    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    return parser


def parse(argv: list[str], world_size: int) -> Any:
    """Megatron's arguments, validated. Building its parser takes most of the time: once per process."""
    parser = _parser()
    with mock.patch.object(arguments, "add_megatron_arguments", lambda _: parser):
        return megatron_args(argv, world_size)


#: (ranks, what Megatron calls it) -> process group, of the world that is the key's last part.
_groups: dict[tuple[Any, ...], Any] = {}


def _new_group(make: Callable[..., Any], ranks: list[int] | None = None, **options: Any) -> Any:
    """A group with these ranks and this purpose, made once: gloo keeps the threads of those it has made."""
    world = torch.distributed.group.WORLD
    key = (tuple(ranks or ()), options.get("group_desc"), world)
    if any(known[-1] is not world for known in _groups):
        _groups.clear()
    if key not in _groups:
        _groups[key] = make(ranks, **options)
    return _groups[key]


@contextlib.contextmanager
def megatron(argv: list[str], world_size: int, reached: list[str]) -> Iterator[Any]:
    """Megatron's globals and process groups as its `initialize_megatron` makes them, gone afterwards."""
    args = parse(argv, world_size)
    args.padded_vocab_size = args.padded_vocab_size or _padded_vocabulary(args)
    try:
        global_vars.set_args(args)
        global_vars._set_timers(args)
        if args.global_batch_size:
            init_num_microbatches_calculator(
                torch.distributed.get_rank(),
                None,
                args.global_batch_size,
                args.micro_batch_size,
                args.data_parallel_size,
                False,
            )
        reached.append("groups")
        ranks.initialize(
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            vpp=args.virtual_pipeline_model_parallel_size,
            cp=args.context_parallel_size,
            ep=args.expert_model_parallel_size,
            etp=args.expert_tensor_parallel_size,
            optimizer_instances=args.num_distributed_optimizer_instances,
            seed=args.seed,
        )
        yield args
    finally:
        destroy_moe_metrics_tracker()
        MTPLossLoggingHelper.tracker = {}
        destroy_num_microbatches_calculator()
        global_vars.destroy_global_vars()
        parallel_state.destroy_model_parallel()


def _padded_vocabulary(args: Any) -> int:
    """The vocabulary as Megatron pads it for these arguments."""
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    size: int = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
    )
    return size


def attempt(case: Case, look: Callable[[list[Any], Any], Any] | None = None) -> Any:
    """`train_step`, or the `Refusal` it ends in. What one rank cannot build is refused on all."""
    reached = ["arguments"]
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return train_step(case, look, reached)
    except (Exception, SystemExit) as error:
        text = output.getvalue().splitlines()[-1:] if isinstance(error, SystemExit) else [str(error)]
        return Refusal(
            (reached or ["arguments"])[-1], f"{type(error).__name__}: {' '.join(''.join(text).split())}"
        )


def train_step(
    case: Case, look: Callable[[list[Any], Any], Any] | None = None, reached: list[str] | None = None
) -> Any:
    """Build the model, take one step, and return its `Outcome`, or what `look(model, args)` returns.

    Args:
        reached: the stages that are entered are appended.
    """
    reached = [] if reached is None else reached
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        argv = [*case.argv(), "--vocab-size", str(case.config.vocab_size)]
        new_group = partial(_new_group, torch.distributed.new_group)
        stack.enter_context(mock.patch.object(torch.distributed, "new_group", new_group))
        stack.enter_context(mock.patch.dict(os.environ))  # Megatron writes its attention backend there
        args = stack.enter_context(megatron(argv, case.layout.world_size, reached))
        reached.append("model")
        training = _training(case, args)
        chunks = _together(lambda: world.wrapped(training, args))
        parameters = _set_weights(chunks)
        reached.append("step")
        outcome = Outcome(
            parameters=parameters,
            vocabulary=args.padded_vocab_size,
            **_step(world.TrainingRun(training, None, (chunks, args))),
        )
        return outcome if look is None else look(chunks, args)


def _training(case: Case, args: Any) -> certify.TrainingCase:
    """What a run of `certify` needs beside the arguments. Their sizes count: options may change them."""
    # Tokens below every vocabulary drawn: a padded one must see the same ones.
    vocabulary = min(20, case.config.vocab_size)
    return certify.TrainingCase(
        config=case.config.but(vocab_size=vocabulary),
        layout=case.layout,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        sequences=args.global_batch_size,
        mask="none",
    )


def _together(build: Callable[[], Any]) -> Any:
    """What `build` returns; if it raises on one rank, that is raised on all."""
    result, error = None, None
    try:
        result = build()
    except Exception as caught:
        error = caught
    errors: list[Exception | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(errors, error)
    for found in errors:
        if found is not None:
            raise error or found
    return result


def _step(run: world.TrainingRun) -> dict[str, Any]:
    scheduler = loop.get_optimizer_param_scheduler(run.optimizer)
    loss = run.forward_backward(0)
    mtp = tuple(total / run.case.microbatches for total in world.mtp_losses())
    grad_norm = run.step()
    scheduler.step(run.args.global_batch_size)
    for parameter in (p for chunk in run.chunks for p in chunk.parameters()):
        assert torch.isfinite(parameter).all(), "a weight is not finite after the step"
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return {"grad_norm": grad_norm, "loss": loss, "mtp": mtp if last else None}


def _set_weights(chunks: list[Any]) -> int:
    """Give every tensor the values its checkpoint key and place say; return the model's elements.

    Upstream's own check before a save proves that the ranks' shards cover every tensor exactly once.
    """
    held = tensors.sharded(chunks)
    validate_sharding_integrity(determine_global_metadata(held)[1])
    shapes = {t.key: tuple(t.global_shape) for t in held}
    tensors.load(chunks, {key: _tensor(key, shape) for key, shape in shapes.items()})
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, shapes)
    merged = {key: shape for part in everywhere for key, shape in part.items() if "expert_bias" not in key}
    return sum(torch.Size(shape).numel() for shape in merged.values())


@cache
def _tensor(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    draw = torch.randn(shape, generator=generator)
    name = key.rsplit(".", 1)[-1]
    if name == "expert_bias":
        return torch.zeros(shape)
    if name == "A_log":
        return draw.sigmoid().mul(15).add(1).log()
    if name == "dt_bias":
        return draw.mul(0.5).sub(3)
    if name == "D" or "norm" in key:
        return draw.mul(STD).add(1)
    return draw.mul(STD)
