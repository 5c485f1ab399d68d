"""What was published of each model's pre-training, option by option, to compare a command line with.

`reference` returns the published value of every option that a source states. Numbers of the model come from
the catalog for every model; layout, schedule and precision for the models whose pre-training has a public
launch script, and layout and schedule of the phases after it as far as their reports state them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron_nemotron3.launch.architecture import MODEL, MOE, MTP, emit
from megatron_nemotron3.launch.flags import flags
from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.launch.phases import PUBLISHED, phase
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.stack_specs import MODULE, spec_name
from megatron_nemotron3.precision.formats import FORMATS

#: In place of a value: the option is not passed; the switch is passed.
NOT_PASSED = "not passed"
ON = "on"

#: Megatron-core whose option names and defaults are compared with.
VERSION = "0.19"
#: The same for models that this version cannot build.
_LATER = "0.20"
SCRIPT = "NVIDIA's public launch script"
_RELEASE_TEST = "NVIDIA's release test of Super (Megatron-LM tests/functional_tests/test_cases/nemotron)"
_FILE = "--te-precision-config-file"


def version_of(config: Nemotron3Config) -> str:
    """Return the minor version of megatron-core whose options a model is compared with."""
    return _LATER if config.moe_use_norm_before_up_proj else VERSION


@dataclass(frozen=True, kw_only=True)
class PublishedOption:
    """The published value of one option."""

    #: As typed; `ON` for a switch, `NOT_PASSED` for what the model or its recipe does not have.
    value: str
    section: str
    #: In one word: "model", "family", "layout", "schedule" or "precision".
    origin: str
    #: "config.hidden_size", "layout.tp", ...
    field: str
    source: str
    #: Whether another value makes another model, rather than the same one trained in another way.
    of_model: bool = False
    #: Whether to report a command line that does not pass the option.
    required: bool = True


@dataclass(frozen=True)
class PublicLaunch:
    """The public launch of a model, without its layout and its schedule: a row of `published.json`."""

    #: "3072 H100", in words.
    machines: str
    #: Precision of the whole run, from the model's report.
    precision: str
    precision_source: str
    report: str
    #: Options in place of those that `flags` emits.
    options: Mapping[str, str]
    #: NAME=value of the variables that it exports.
    environment: Sequence[str]
    #: What no option can express.
    notes: Sequence[str]


LAUNCHES = {model: PublicLaunch(**found["launch"]) for model, found in PUBLISHED.items()}

#: Why another value may matter, for options where a source says so.
WHY: dict[str, str] = {
    "--fp4-format": "Ultra's loss in NVFP4 was within 0.4 % of BF16's on average (arXiv 2606.15007)",
    _FILE: (
        "nemotron3 precision NAME --output FILE writes it; with --fp4-format but without the file, attention "
        "and latent projections, MTP and Mamba's out_proj become NVFP4, too (Super report, table 3)"
    ),
    "--num-layers-at-end-in-bf16": "needed for stable training in NVFP4 (arXiv 2509.25149, E)",
    "--mtp-use-repeated-layer": "without it every depth has its own block; released checkpoints store one",
    "--expert-tensor-parallel-size": "Megatron's default is TP (megatron/training/arguments.py)",
}

# Rows of `architecture` that describe training rather than the model.
_RECIPE = ("--calculate-per-token-loss", "--moe-token-dispatcher-type")

#: Options that this family does not have, and what it has instead.
_FOREIGN: dict[str, str] = {
    "--swiglu": "squared ReLU, ungated",
    "--quick-geglu": "squared ReLU, ungated",
    "--add-qkv-bias": "no linear bias",
    "--qk-layernorm": "no QK norm",
    "--qk-l2-norm": "no QK norm",
    "--apply-layernorm-1p": "plain RMSNorm",
    "--moe-expert-capacity-factor": "no expert capacity",
    "--moe-input-jitter-eps": "no jitter",
}
#: No group routing: Megatron's None, or one group of all experts.
_ONE_GROUP = ("--moe-router-num-groups", "--moe-router-group-topk")


def has_launch(config: Nemotron3Config, name: str) -> bool:
    """Whether a public launch script of this phase is known; only pre-training has one."""
    return name == "published" and config.name in LAUNCHES


def shown(values: tuple[str, ...]) -> str:
    """Return the values of a passed option as one text."""
    return " ".join(values) or ON


def reference(config: Nemotron3Config, name: str = "published") -> dict[str, PublishedOption]:
    """Return option -> published value, for the options that a source states."""
    return {**dict(_model_references(config)), **dict(_phase_references(config, name))}


def _model_references(config: Nemotron3Config) -> Iterator[tuple[str, PublishedOption]]:
    row = partial(
        PublishedOption, section="architecture", source=config.source or "the catalog", of_model=True
    )
    pattern = "config.pattern" + (", config.mtp_pattern" if config.has_mtp else "")
    yield "--hybrid-layer-pattern", row(value=config.full_pattern, origin="model", field=pattern)
    numbers = {
        "--num-layers": (config.num_layers, "config.num_layers"),
        "--vocab-size": (config.vocab_size, "config.vocab_size"),
        "--padded-vocab-size": (config.vocab_size, "config.vocab_size"),
    }
    for name, (number, field) in numbers.items():
        yield name, row(value=str(number), origin="model", field=field, required=False)
    sequence = row(value=str(config.seq_length), origin="model", field="config.seq_length", of_model=False)
    yield "--seq-length", sequence
    for rows, present in ((MODEL, True), (MOE, config.is_moe), (MTP, config.has_mtp)):
        for line in rows:
            if line.flag in _RECIPE and not present:
                continue
            found = emit(line.flag, line.value(config), "architecture", line.origin) if present else []
            value = shown(found[0].values) if found else NOT_PASSED
            origin = "family" if line.origin == "family" else "model"
            option = row(value=value, origin=origin, field=line.origin)
            if line.flag in _RECIPE:
                option = replace(option, of_model=False, source=_RELEASE_TEST)
            yield line.flag, option
    if config.moe_layers is not None:
        # No other option says what the layers' experts are.
        stack = f"{MODULE} {spec_name(config, 'te')}"
        yield "--spec", row(value=stack, origin="model", field="config.moe_layers")
    family = partial(row, origin="family")
    if config.is_moe:
        yield "--moe-router-dtype", family(value="fp32", field="family")
        for name in _ONE_GROUP:
            yield name, family(value="1", field="family", required=False)
    for name, why in _FOREIGN.items():
        yield name, family(value=NOT_PASSED, field=f"family: {why}", required=False)


def _phase_references(config: Nemotron3Config, name: str) -> Iterator[tuple[str, PublishedOption]]:
    """Layout, schedule and precision of a published phase, as far as they are stated."""
    launch = LAUNCHES.get(config.name)
    if launch is None:
        return
    described, launched = phase(config, name), has_launch(config, name)
    described_launch = Launch(
        config=config,
        layout=described.layout or ParallelLayout(),
        precision=launch.precision if launched else "bf16",
        backend="te",
        schedule=described.schedule,
        extra=described.options,
        te_precision_config_file="FILE" if launched and launch.precision == "nvfp4" else None,
        megatron_core=version_of(config),
    )
    emitted = flags(described_launch)
    words = {"layout", "precision", "distributed_optimizer", "schedule", "extra"}
    if not launched:
        words -= {"precision", "distributed_optimizer"} | (set() if described.layout else {"layout"})
    options = dict(launch.options) if launched else {}
    unstated = _UNSTATED if launched else _UNSTATED + _PRETRAINING
    for flag in emitted:
        word, _, field = flag.origin.partition(".")
        sequence = flag.name == "--seq-length" and described.schedule.seq_length
        stated = word in words and flag.section != "architecture" and field not in unstated
        if not (stated or sequence or (launched and flag.name in _RECIPE[1:])):
            continue
        source = launch.precision_source if word == "precision" else SCRIPT if launched else launch.report
        yield (
            flag.name,
            PublishedOption(
                value=options.pop(flag.name, shown(flag.values)),
                # Options of a phase are "extra" to `flags`.
                section="optimization" if flag.section == "extra" else flag.section,
                origin={"distributed_optimizer": "layout", "extra": "schedule"}.get(word, word),
                field="schedule" if word == "extra" else flag.origin,
                source=source,
            ),
        )
    for option, value in options.items():
        row = PublishedOption(
            value=value, section="parallelism", origin="family", field="launch", source=SCRIPT
        )
        yield option, row
    if launched:
        passed, source = {flag.name for flag in emitted}, launch.precision_source
        row = PublishedOption(
            value=NOT_PASSED, section="precision", origin="precision", field="precision", source=source
        )
        yield from dict.fromkeys(_precision_options(config) - passed, replace(row, required=False)).items()


#: Fields of a schedule that no launch script or report states (schedule.py) ...
_UNSTATED = ("eval_interval", "eval_iters", "save_interval", "log_interval")
#: ... and those that are stated for pre-training only.
_PRETRAINING = ("micro_batch_size", "weight_decay", "adam_beta1", "adam_beta2", "clip_grad")


def _precision_options(config: Nemotron3Config) -> set[str]:
    names = {"--fp16"}
    for precision in FORMATS:
        launch = Launch(
            config=config,
            precision=precision,
            backend="te",
            te_precision_config_file="FILE",
            megatron_core=version_of(config),
        )
        names |= {flag.name for flag in flags(launch) if flag.origin == "precision"}
    return names
