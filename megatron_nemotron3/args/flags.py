"""What to tell Megatron: config + layout + precision + backend + schedule -> flags.

Standard library only. They are options of the stock `pretrain_hybrid.py` (of `pretrain_mamba.py` in
megatron-core 0.17), whose parser refuses unknown ones: `versions` knows which version has which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_nemotron3.args import rules
from megatron_nemotron3.args.architecture import architecture_flags, emit
from megatron_nemotron3.args.backend import backend_flags
from megatron_nemotron3.args.data import TrainingData
from megatron_nemotron3.args.flag import Flag, parse
from megatron_nemotron3.args.layout import ParallelLayout
from megatron_nemotron3.args.pipeline import cut_pattern
from megatron_nemotron3.args.precision import precision_flags
from megatron_nemotron3.args.schedule import TrainingSchedule
from megatron_nemotron3.models import Nemotron3Config

_Items = Iterable[tuple[str, object, str]]


def flags(
    config: Nemotron3Config,
    layout: ParallelLayout | None = None,
    *,
    precision: str = "bf16",
    backend: str = "auto",
    schedule: TrainingSchedule | None = None,
    data: TrainingData | None = None,
    extra: Sequence[str] = (),
    te_precision_config_file: str | None = None,
    allow_plain_nvfp4: bool = False,
    emulate: bool = False,
    compute_capability: tuple[int, int] | None = None,
    distributed_optimizer: bool = True,
    megatron_core: str | None = None,
) -> list[Flag]:
    """The flags, by section. Pure: the same arguments, with `megatron_core`, give the same flags anywhere.

    Args:
        config: the model.
        layout: None: one rank.
        precision: "bf16", "fp32", "mxfp8" or "nvfp4".
        backend: "auto", "te" or "torch" (`backend.py` says which is for what).
        schedule: `schedule.published(config)`, `schedule.smoke(config)` or your own. None: the batch, length
            and learning rate are left to the caller, and only `--micro-batch-size 1` is emitted.
        data: None: no data flags; the caller appends its own.
        extra: more words for Megatron's command line. An option given here replaces the one emitted.
        te_precision_config_file: path of the per-module precision file; nvfp4 requires it.
        allow_plain_nvfp4: nvfp4 without the file, which quantizes more than the published recipe.
        emulate: nvfp4 computed by the torch backend's linears on any device, instead of on FP4 hardware.
        compute_capability: of the GPU that will train, (10, 0) for a B200; None: not known here.
        distributed_optimizer: also at dp=1, as in NVIDIA's launches: its checkpoints do not load into the
            plain optimizer, so a run started without could not grow later.
        megatron_core: version the flags are for, "0.18" or "main"; None: the installed one, else 0.19.

    Returns:
        Flags in the order of `flag.SECTIONS`. `to_argv` makes words of them, `render` text.

    Raises:
        RuleError: one or more rules of severity "error" are violated; all are listed.
        ValueError: an unknown precision, backend or megatron-core, or `extra` that starts with a value.
    """
    layout = layout or ParallelLayout()
    rules.enforce(
        config,
        layout,
        precision,
        backend,
        schedule,
        extra=extra,
        te_precision_config_file=te_precision_config_file,
        allow_plain_nvfp4=allow_plain_nvfp4,
        emulate=emulate,
        compute_capability=compute_capability,
        megatron_core=megatron_core,
    )
    schedule = schedule or TrainingSchedule()
    seq_length = schedule.seq_length or config.seq_length
    result = [
        *architecture_flags(config, layout, cut_pattern(config, layout, seq_length), seq_length, backend),
        *_section("parallelism", _parallelism(config, layout, backend, distributed_optimizer)),
        *_section("precision", _precision(config, precision, te_precision_config_file, emulate)),
        *_section("optimization", _optimization(config, schedule, backend)),
        *_section("data", _data(data)),
        *_section("logging", _logging(schedule, data)),
    ]
    given = parse(extra)
    replaced = {flag.name for flag in given}
    return [flag for flag in result if flag.name not in replaced] + given


def _section(section: str, items: _Items) -> list[Flag]:
    return [flag for name, value, origin in items for flag in emit(name, value, section, origin)]


def _parallelism(
    config: Nemotron3Config, layout: ParallelLayout, backend: str, distributed_optimizer: bool
) -> _Items:
    yield "--tensor-model-parallel-size", layout.tp, "layout.tp"
    yield "--sequence-parallel", layout.sequence_parallel, "layout.sp"
    # Virtual stages need no flag: Megatron counts the cuts of the pattern.
    yield "--pipeline-model-parallel-size", layout.pp, "layout.pp"
    yield "--context-parallel-size", layout.cp, "layout.cp"
    if config.is_moe:
        yield "--expert-model-parallel-size", layout.ep, "layout.ep"
        yield "--expert-tensor-parallel-size", layout.etp, "layout.etp"
        # No --moe-shared-expert-overlap: Megatron refuses it together with latent experts.
        yield "--moe-token-dispatcher-type", "alltoall", "family"
    yield "--use-distributed-optimizer", distributed_optimizer, "distributed_optimizer"
    if backend != "torch":
        yield "--overlap-grad-reduce", distributed_optimizer, "backend"
        yield "--overlap-param-gather", distributed_optimizer, "backend"


def _precision(config: Nemotron3Config, precision: str, file: str | None, emulate: bool) -> _Items:
    for name, values in precision_flags(config, precision, file, emulate):
        yield name, values or True, "precision"
    if config.is_moe:
        yield "--moe-router-dtype", "fp32", "family"


def _optimization(config: Nemotron3Config, schedule: TrainingSchedule, backend: str) -> _Items:
    unit = schedule.unit
    for field in ("micro_batch_size", "global_batch_size"):
        yield f"--{field.replace('_', '-')}", getattr(schedule, field), f"schedule.{field}"
    for length in ("train", "lr_warmup", "lr_decay", "lr_wsd_decay"):
        name = f"{length}_{unit}"
        yield f"--{name.replace('_', '-')}", getattr(schedule, name), f"schedule.{name}"
    fields = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad")
    wsd = schedule.lr_decay_style == "WSD"
    # Warmup-stable-decay without the length of its decay is no schedule yet: the caller completes it.
    styles = () if wsd and not schedule.length("lr_wsd_decay") else ("lr_decay_style",)
    for field in (*fields, *styles, *(("lr_wsd_decay_style",) if wsd and styles else ())):
        yield f"--{field.replace('_', '-')}", getattr(schedule, field), f"schedule.{field}"
    for name, values in backend_flags(config, backend):
        yield name, values or True, "backend"


def _data(data: TrainingData | None) -> _Items:
    fields = (
        "data_path",
        "split",
        "data_cache_path",
        "mock_data",
        "tokenizer_type",
        "tokenizer_model",
        "vocab_size",
    )
    for field in fields if data else ():
        yield f"--{field.replace('_', '-')}", getattr(data, field) or None, f"data.{field}"


def _logging(schedule: TrainingSchedule, data: TrainingData | None) -> _Items:
    yield "--log-interval", schedule.log_interval, "schedule.log_interval"
    yield "--log-throughput", True, "default"
    yield "--eval-interval", schedule.eval_interval, "schedule.eval_interval"
    yield "--eval-iters", schedule.eval_iters, "schedule.eval_iters"
    if data and data.save:
        yield "--save", data.save, "data.save"
        yield "--save-interval", schedule.save_interval, "schedule.save_interval"
    if data and data.load:
        yield "--load", data.load, "data.load"
    if data and data.tensorboard_dir:
        yield "--tensorboard-dir", data.tensorboard_dir, "data.tensorboard_dir"
