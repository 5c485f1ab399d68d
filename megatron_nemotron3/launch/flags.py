"""What to tell Megatron: a launch becomes the options of the stock `pretrain_hybrid.py`.

Megatron's parser refuses unknown options; `versions` knows which version has which.

The backends:

auto   for a GPU with or without Transformer Engine. The spec chooses an implementation per module.
       Slower than te: no fused permutation, no fused gradient accumulation.
te     for a GPU with Transformer Engine: every fused path. Without the package the run fails.
torch  for any device, without Transformer Engine and Apex. The launcher sets gloo, CPU initialization and
       worker processes.

The parser of Megatron 0.19 (run on a machine without GPU and Transformer Engine) accepts `--moe-latent-size`
with `--transformer-impl local`. `--moe-grouped-gemm` asks CUDA for its compute capability and raises without
a GPU. `--moe-permute-fusion`, `--fp8-format` with MoE, and `--fp4-format` raise without Transformer Engine.

The router computes in FP32 in every precision (`--moe-router-dtype fp32` for every MoE model). Flags alone
cannot describe nvfp4, the table of `precision.table`: attention projections, latent projections and MTP stay
in BF16 and Mamba's output projection is in MXFP8. A `--te-precision-config-file` states that per module;
`nemotron3 precision NAME --output FILE` writes it. Without the file Megatron silently quantizes all of
them to NVFP4. So a rule requires the file, unless `allow_plain_nvfp4=True` asks for exactly that. With
`emulate` Megatron is asked for BF16, and linears of the torch backend compute NVFP4 by the same file and the
same BF16 layers: Megatron refuses `--fp4-format` without Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_nemotron3.launch import rules
from megatron_nemotron3.launch.architecture import architecture_flags, emit
from megatron_nemotron3.launch.flag import Flag, parse
from megatron_nemotron3.launch.launch import Launch, TrainingData
from megatron_nemotron3.launch.layout import cut_pattern
from megatron_nemotron3.launch.schedule import TrainingSchedule
from megatron_nemotron3.precision.formats import FORMATS
from megatron_nemotron3.precision.table import bf16_layers

_Items = Iterable[tuple[str, object, str]]
#: (option, values)
_Options = list[tuple[str, tuple[object, ...]]]

# Gradient accumulation fusion needs Apex for the output layer, which no spec can replace.
_EVERYWHERE = ("--no-create-attention-mask-in-dataloader",)
_FLAGS: dict[str, tuple[str, ...]] = {
    "auto": ("--no-gradient-accumulation-fusion",),
    "te": (
        "--transformer-impl transformer_engine",
        # NVIDIA's files disagree (flash, fused); auto takes what is installed, flash first.
        "--attention-backend auto",
        "--cross-entropy-loss-fusion",
        "--cross-entropy-fusion-impl native",
    ),
    "torch": (
        "--transformer-impl local",
        "--attention-backend unfused",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-persist-layer-norm",
        "--no-bias-dropout-fusion",
    ),
}
_TE_MOE_FLAGS = ("--moe-grouped-gemm", "--moe-permute-fusion", "--use-fused-weighted-squared-relu")


def flags(launch: Launch) -> list[Flag]:
    """Return the flags of a launch, by section.

    They are the same on every machine if the launch names its `megatron_core`.

    Returns:
        Flags in the order of `flag.SECTIONS`. `to_argv` turns them into words, `render` into text.

    Raises:
        RuleError: one or more rules of severity "error" are violated; all are listed.
    """
    rules.enforce(launch)
    schedule = launch.schedule or TrainingSchedule()
    pattern = cut_pattern(launch.config, launch.layout, launch.seq_length)
    result = [
        *architecture_flags(launch.config, launch.layout, pattern, launch.seq_length, launch.backend),
        *_section("parallelism", _parallelism_items(launch)),
        *_section("precision", _precision_items(launch)),
        *_section("optimization", _optimization_items(launch, schedule)),
        *_section("data", _data_items(launch.data)),
        *_section("logging", _logging_items(schedule, launch.data)),
    ]
    if (tuned := launch.tuned) is not None:
        result = [flag for flag in result if flag.name not in {*tuned.removed, *tuned.options}]
        origin = f"gpu.{tuned.recipe}"
        result += [Flag(name, values, "performance", origin) for name, values in tuned.options.items()]
    given = parse(launch.extra)
    replaced = {flag.name for flag in given}
    return [flag for flag in result if flag.name not in replaced] + given


def _section(section: str, items: _Items) -> list[Flag]:
    return [flag for name, value, origin in items for flag in emit(name, value, section, origin)]


def _parallelism_items(launch: Launch) -> _Items:
    layout = launch.layout
    yield "--tensor-model-parallel-size", layout.tp, "layout.tp"
    yield "--sequence-parallel", layout.sequence_parallel, "layout.sp"
    # Virtual stages need no flag: Megatron counts the cuts of the pattern.
    yield "--pipeline-model-parallel-size", layout.pp, "layout.pp"
    yield "--context-parallel-size", layout.cp, "layout.cp"
    if launch.config.is_moe:
        yield "--expert-model-parallel-size", layout.ep, "layout.ep"
        yield "--expert-tensor-parallel-size", layout.etp, "layout.etp"
        # No --moe-shared-expert-overlap: Megatron refuses it together with latent experts.
        yield "--moe-token-dispatcher-type", "alltoall", "family"
    yield "--use-distributed-optimizer", launch.distributed_optimizer, "distributed_optimizer"
    if launch.backend != "torch":
        yield "--overlap-grad-reduce", launch.distributed_optimizer, "backend"
        yield "--overlap-param-gather", launch.distributed_optimizer, "backend"


def _precision_items(launch: Launch) -> _Items:
    for name, values in _precision_values(launch):
        yield name, values or True, "precision"
    if launch.config.is_moe:
        yield "--moe-router-dtype", "fp32", "family"


def _precision_values(launch: Launch) -> _Options:
    if launch.precision == "fp32":  # Megatron's default: no option
        return []
    options: _Options = [("--bf16", ())]
    if launch.precision == "bf16":
        return options
    fmt = FORMATS[launch.precision]
    if not launch.emulate:
        options += fmt.options
    if fmt.bf16_layers and not (launch.emulate and launch.emulate.packed):
        # NVIDIA's MXFP8 test of Super keeps NVFP4's tail. Both counts default to 1 in Megatron.
        kept = bf16_layers(launch.config, launch.precision)
        options += [
            ("--first-last-layers-bf16", ()),
            ("--num-layers-at-start-in-bf16", (kept.start,)),
            ("--num-layers-at-end-in-bf16", (kept.end,)),
        ]
    if launch.config.is_moe and not launch.emulate:  # pad every expert's tokens to the GEMM's alignment
        options.append(("--moe-router-padding-for-quantization", ()))
    if launch.te_precision_config_file:
        options.append(("--te-precision-config-file", (launch.te_precision_config_file,)))
    return options


def backend_arguments(backend: str) -> list[str]:
    """Return the arguments that a backend needs for any model."""
    return [word for line in _FLAGS[backend] + _EVERYWHERE for word in line.split()]


def _optimization_items(launch: Launch, schedule: TrainingSchedule) -> _Items:
    unit = schedule.unit
    for field in ("micro_batch_size", "global_batch_size"):
        yield f"--{field.replace('_', '-')}", getattr(schedule, field), f"schedule.{field}"
    for length in ("train", "lr_warmup", "lr_decay", "lr_wsd_decay"):
        name = f"{length}_{unit}"
        yield f"--{name.replace('_', '-')}", getattr(schedule, name), f"schedule.{name}"
    fields = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad")
    wsd = schedule.lr_decay_style == "WSD"
    # A warmup-stable-decay schedule needs the length of its decay; without it the caller completes the flags.
    styles = () if wsd and not schedule.length("lr_wsd_decay") else ("lr_decay_style",)
    for field in (*fields, *styles, *(("lr_wsd_decay_style",) if wsd and styles else ())):
        yield f"--{field.replace('_', '-')}", getattr(schedule, field), f"schedule.{field}"
    moe = _TE_MOE_FLAGS if launch.config.is_moe and launch.backend == "te" else ()
    for name, *values in (line.split() for line in (*_FLAGS[launch.backend], *moe, *_EVERYWHERE)):
        yield name, tuple(values) or True, "backend"


def _data_items(data: TrainingData | None) -> _Items:
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


def _logging_items(schedule: TrainingSchedule, data: TrainingData | None) -> _Items:
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
