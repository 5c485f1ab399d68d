"""Options in `extra` that fail with this family: alone, in combination, or in one version of Megatron."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

from megatron_nemotron3.launch import effects
from megatron_nemotron3.launch.architecture import MODEL, MOE, MTP
from megatron_nemotron3.launch.flag import parse, text
from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.parser import argument, listed, misused, unknown, unlisted
from megatron_nemotron3.launch.rule import ARGUMENTS, CONFIG, Rule, Severity
from megatron_nemotron3.launch.versions import DEFAULT
from megatron_nemotron3.models.stack_specs import has_spec

#: Options under which some tokens of a sequence do not count in the loss.
_MASKING = ("--sft", "--eod-mask-loss", "--rl-use-sequence-packing")
_PER_TOKEN = "--calculate-per-token-loss"
_LATENT_NORM = "--moe-use-norm-before-up-proj"
_FUSER = "--use-transformer-engine-op-fuser"
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"

#: Options that must be given through config, layout, schedule or backend, so that rules can see them.
_RESERVED = {
    "--spec": "backend",
    "--hybrid-layer-pattern": "config and layout",
    "--tensor-model-parallel-size": "layout.tp",
    "--sequence-parallel": "layout.sp",
    "--pipeline-model-parallel-size": "layout.pp",
    "--context-parallel-size": "layout.cp",
    "--expert-model-parallel-size": "layout.ep",
    "--expert-tensor-parallel-size": "layout.etp",
    "--micro-batch-size": "schedule.micro_batch_size",
    "--global-batch-size": "schedule.global_batch_size",
    "--seq-length": "schedule.seq_length",
    "--fp4-format": "precision",
    "--fp8-format": "precision",
    "--bf16": "precision",
    "--fp16": "precision",
}
#: Fields of a config that change how it is trained, not which weights it has or what they compute.
_COEFFICIENTS = (
    "config.init_method_std",
    "config.moe_router_bias_update_rate",
    "config.moe_aux_loss_coeff",
    "config.mtp_loss_scaling_factor",
)

#: Pipeline options of GPT models, which Megatron refuses or ignores with a layer pattern.
_GPT_LAYOUT = (
    "--num-layers",
    "--hybrid-override-pattern",
    "--mtp-hybrid-override-pattern",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-model-parallel-layout",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)

#: Packs documents into a row at boundaries that are not multiples of 2 * CP. `--sft` pads them.
_ISOLATING = "--dataloader-inter-document-masking"


def _unpadded(c: Launch) -> str:
    """Return the option that cuts rows over CP ranks where the layers cannot follow, or ""."""
    if _ISOLATING in c.options and c.backend != "torch":  # our layers can (layers/context_parallel.py)
        return _ISOLATING
    return c.first_of("--rl-use-sequence-packing") or ""


#: Its values are name patterns of parameters whose local gradients accumulate in FP32 regardless.
_FP32_LOCAL = "--ddp-param-name-patterns-for-fp32-local-accumulation"
_OUTPUT_LAYER = "module.output_layer.weight"


def _bf16_gradients(c: Launch) -> str:
    """Return the option that makes the output layer accumulate its gradient in BF16, or ""."""
    if any(p == "all" or fnmatchcase(_OUTPUT_LAYER, p) for p in c.options.get(_FP32_LOCAL, ())):
        return ""
    if "--grad-reduce-in-bf16" in c.options:
        return "--grad-reduce-in-bf16"
    dtypes = ("--main-grads-dtype", "--megatron-fsdp-main-grads-dtype")
    return next((f"{name} bf16" for name in dtypes if c.options.get(name) == ("bf16",)), "")


def _option(
    flag: str,
    reason: str,
    source: str,
    when: Callable[[Launch], object] = lambda c: True,
    severity: Severity = "error",
) -> Rule:
    """A rule, named after the flag, that is violated if `flag` is given and `when` is true."""
    return Rule(
        flag.removeprefix("--"),
        lambda c: flag in c.options and when(c),
        lambda c: f"{flag}: {reason}",
        source,
        severity,
    )


def _recomputed(c: Launch) -> tuple[str, ...]:
    return c.options.get("--recompute-modules") or ()


def _recompute(c: Launch) -> tuple[str, str]:
    """Return granularity and method; "" for one that is not given."""
    return c.option("--recompute-granularity", ""), c.option("--recompute-method", "")


def _recompute_chunk(c: Launch) -> str:
    return c.option("--recompute-num-layers", "1")


def _other_model(c: Launch) -> list[str]:
    """Return the options in `extra` that make another model than the config, with both values."""
    rows = {row.flag: row for row in (*MODEL, *MOE, *MTP)}
    found = []
    for name, values in c.options.items():
        row = rows.get(name)
        if row is None or row.origin in _COEFFICIENTS or not row.origin.startswith("config."):
            continue
        meant = row.value(c.config)
        if values != (text(meant),) and not (meant is True and not values):
            found.append(f"{name} {' '.join(values)}".strip() + f" replaces {row.origin}={meant}")
    return found


def _several_buckets(c: Launch) -> str:
    """Return why gradients are in more than one bucket, or ""."""
    if c.backend != "torch" or "--overlap-grad-reduce" in c.options:
        return "--overlap-grad-reduce"
    if c.config.has_mtp and c.layout.pp > 1:
        return f"the embedding that MTP shares at PP={c.layout.pp}"
    return ""


def _reserved(c: Launch) -> list[str]:
    """Return the options in `extra` that another setting decides."""
    own_stack = not has_spec(c.config)  # a model that may have a stack in a module of its own
    return [flag for flag in _RESERVED if flag in c.options and not (own_stack and flag == "--spec")]


def _effect(kind: str, c: Launch) -> str:
    """Say which options have an effect of a kind of `effects.SEVERITY`; "" if none has."""
    emitted: dict[str, tuple[str, ...]] = {_PER_TOKEN: ()} if c.config.has_mtp else {}
    return "; ".join(effects.sentences(kind, {**emitted, **c.options}, c.backend))


#: What each option of Megatron's parser does on this stack, by its row in options.json.
EFFECT_RULES = tuple(
    Rule(f"option-{kind}", partial(_effect, kind), partial(_effect, kind), "launch/options.json", severity)
    for kind, severity in effects.SEVERITY.items()
)

OPTION_RULES: tuple[Rule, ...] = (
    *EFFECT_RULES,
    Rule(
        "reserved-option",
        _reserved,
        lambda c: "; ".join(
            f"{flag} in extra would override a value that the rules checked: set {_RESERVED[flag]} instead"
            for flag in _reserved(c)
        ),
        "this package",
    ),
    Rule(
        "model-option",
        _other_model,
        lambda c: (
            f"{'; '.join(_other_model(c))}: rules, memory and conversion still count with the model "
            f"{c.config.name}: describe yours in a file (--model FILE)"
        ),
        "this package",
        "warning",
    ),
    Rule(
        "gpt-pipeline-option",
        lambda c: c.first_of(*_GPT_LAYOUT),
        lambda c: (
            f"{c.first_of(*_GPT_LAYOUT)} cannot be combined with --hybrid-layer-pattern, which already sets "
            "the pipeline stages: drop it"
        ),
        ARGUMENTS,
    ),
    Rule(
        "documents-cp",
        lambda c: _unpadded(c) and c.layout.cp > 1 and ("M" in c.kinds or c.config.has_mtp),
        lambda c: (
            f"{_unpadded(c)} with CP={c.layout.cp}: Megatron splits a row over CP ranks regardless of "
            "document boundaries, but Mamba and MTP assume that each document is split by itself: use cp=1"
            + (", or backend torch" if _unpadded(c) == _ISOLATING else ", or --sft, which pads documents")
        ),
        "megatron/core/ssm/mamba_context_parallel.py; Megatron-LM #6205, #4495",
    ),
    Rule(
        "packed-cp-torch",
        lambda c: "--sft" in c.options and c.layout.cp > 1 and c.backend == "torch" and not c.own_script,
        lambda c: (
            f"--sft with CP={c.layout.cp}: the stock script splits packed documents with Transformer "
            "Engine's CUDA library: use cp=1, backend te, or `nemotron3 train --conversations`"
        ),
        "megatron/core/utils.py",
    ),
    Rule(
        "recompute-layernorm-torch",
        # In other layers the norm is part of a linear and is never recomputed.
        lambda c: c.backend == "torch" and c.config.is_moe and "layernorm" in _recomputed(c),
        lambda c: (
            "--recompute-modules layernorm raises NameError in MoE layers without Transformer Engine: "
            "drop it, or use backend te"
        ),
        "megatron/core/tensor_parallel/random.py",
    ),
    Rule(
        "recompute-moe-act",
        lambda c: "moe_act" in _recomputed(c) and not (c.backend == "te" and c.config.is_moe),
        lambda c: (
            "--recompute-modules moe_act requires --moe-grouped-gemm, which requires Transformer Engine "
            "and MoE layers: drop it, or use backend te"
        ),
        CONFIG,
    ),
    Rule(
        "recompute-mtp",
        lambda c: c.config.has_mtp and _recompute(c) == ("full", "uniform") and _recompute_chunk(c) != "1",
        lambda c: (
            f"full uniform recompute in chunks of {_recompute_chunk(c)} layers does not cover an MTP block, "
            "which counts as one layer: use --recompute-num-layers 1"
        ),
        "megatron/core/transformer/multi_token_prediction.py",
    ),
    Rule(
        "padding-allgather",
        lambda c: (
            c.quantized
            and not c.emulate
            and c.config.is_moe
            and c.option("--moe-token-dispatcher-type", "alltoall") == "allgather"
        ),
        lambda c: (
            f"{c.precision} pads each expert's tokens, which the allgather dispatcher does not support: "
            "use --moe-token-dispatcher-type alltoall or flex"
        ),
        CONFIG,
    ),
    _option(
        "--moe-shared-expert-overlap",
        "Megatron does not support it for training with latent experts; drop it",
        "megatron/core/transformer/moe/moe_layer.py",
        # Our torch backend overlaps it itself (layers/latent_moe.py).
        lambda c: c.config.moe_latent_size and c.backend != "torch",
    ),
    _option(
        "--overlap-moe-expert-parallel-comm",
        "only GPT models implement its schedule, and a hybrid model fails in the first step; drop it",
        "megatron/core/pipeline_parallel/combined_1f1b.py",
    ),
    _option(
        _FUSER,
        "its expert path ignores per-module precision, so MTP would run in NVFP4; drop it",
        "megatron/core/transformer/moe/experts.py",
        lambda c: c.precision == "nvfp4" and c.config.has_mtp,
    ),
    _option(
        "--fp4-param-gather",
        "it converts parameters before the precision file is applied, so modules kept in BF16 become FP4 "
        "too; drop it",
        "Megatron-LM #2284, #5174",
    ),
    _option(
        "--moe-router-bias-update-rate",
        "at rate 0 the routers' biases stay as they are, and the auxiliary loss alone balances experts: give "
        "the model's rate, unless the router is frozen",
        "megatron/core/distributed/finalize_model_grads.py",
        lambda c: c.config.is_moe and float(c.option("--moe-router-bias-update-rate", "")) == 0,
        "note",
    ),
    _option(
        "--yaml-cfg",
        "it is broken in megatron-core 0.19 and does not configure hybrid models; use flags",
        "megatron/training/yaml_arguments.py",
    ),
    Rule(
        "grad-reduce-in-bf16",
        lambda c: c.config.has_mtp and _bf16_gradients(c),
        lambda c: (
            f"{_bf16_gradients(c)} accumulates the gradient of the output layer, which MTP shares, in BF16. "
            "When Ultra trained, this lost MTP's small contribution at about 8T tokens, and the MTP loss "
            "spiked until reduction was in FP32. Drop it (from --gpu: --without grad-reduce-in-bf16), or at "
            f"least accumulate locally in FP32: {_FP32_LOCAL} all"
        ),
        "Ultra report (arXiv 2606.15007)",
        "warning",
    ),
    _option(
        "--use-checkpoint-args",
        "the checkpoint's --spec and architecture replace the given ones; drop it to keep yours",
        "megatron/training/checkpointing.py",
        severity="warning",
    ),
    _option(
        "--moe-per-layer-logging",
        "Megatron logs all depths of a repeated MTP block's router under depth 1, and zero under the others",
        "megatron_nemotron3/layers/stack.py; Megatron-LM #7172",
        lambda c: (
            "E" in (c.config.mtp_pattern or "")
            and c.config.mtp_use_repeated_layer
            and c.config.mtp_num_layers > 1
        ),
        "warning",
    ),
    # Options and layouts that work separately and fail together.
    Rule(
        "masked-mean-cp",
        lambda c: (
            c.layout.cp > 1 and c.first_of(*_MASKING) and not c.config.has_mtp and _PER_TOKEN not in c.options
        ),
        lambda c: (
            f"{c.first_of(*_MASKING)} with CP={c.layout.cp}: CP ranks have different numbers of unmasked "
            f"tokens, and each averages the loss over its own: add {_PER_TOKEN}"
        ),
        "megatron/core/pipeline_parallel/schedules.py",
    ),
    Rule(
        "reshardable-buckets",
        lambda c: c.version == "0.19" and _RESHARDABLE in c.options and _several_buckets(c),
        lambda c: (
            f"{_RESHARDABLE} with gradients in several buckets ({_several_buckets(c)}): megatron-core 0.19 "
            "saves an optimizer state that is shifted by the padding between buckets: drop it and resume at "
            "the same TP and PP, or keep one bucket"
        ),
        "megatron/core/optimizer/distrib_optimizer.py; Megatron-LM #5077",
    ),
)

#: What the parser of the chosen version of megatron-core refuses.
PARSER_RULES: tuple[Rule, ...] = (
    Rule(
        "unknown-option",
        lambda c: unknown(c.options, c.version),
        lambda c: (
            f"the parser of megatron-core {c.version} does not accept "
            f"{listed(unknown(c.options, c.version))}: correct or drop it, or use a version that has it"
        ),
        ARGUMENTS,
    ),
    Rule(
        "option-value",
        lambda c: misused(parse(c.extra), c.version),
        lambda c: listed(misused(parse(c.extra), c.version), "; "),
        ARGUMENTS,
    ),
    Rule(
        "norm-before-up-proj",
        lambda c: c.config.moe_use_norm_before_up_proj and argument(_LATENT_NORM, c.version) is None,
        lambda c: (
            f"{c.config.name}: moe_use_norm_before_up_proj=True: megatron-core {c.version} has no "
            f"{_LATENT_NORM}: use 0.20"
        ),
        "Megatron-LM #6879",
    ),
    Rule(
        "option-unlisted",
        lambda c: unlisted(c.options, c.version),
        lambda c: (
            f"{listed(unlisted(c.options, c.version))}: the installed megatron-core has it, and the table "
            "of options does not: what it does on this stack is not known"
        ),
        "launch/options.json",
        "note",
    ),
)

#: What one supported version of megatron-core refuses and another accepts.
VERSION_RULES: tuple[Rule, ...] = (
    Rule(
        "mtp-without-te",
        lambda c: c.version == "0.20" and c.config.has_mtp and c.backend != "te",
        lambda c: (
            f"MTP on megatron-core {c.version} raises TypeError when it is built on a GPU without "
            f"Transformer Engine: install it, or use megatron-core {DEFAULT}; cpu_mode avoids it on a CPU"
        ),
        "megatron/core/tensor_parallel/inference_layers.py",
        "warning",
    ),
    _option(
        "--moe-use-grouped-tensor",
        f"NCCL EP (--moe-flex-dispatcher-backend ncclep) takes it only with {_FUSER}: add that, or drop it",
        f"{CONFIG} of 2026-08-22",
        lambda c: _FUSER not in c.options and c.option("--moe-flex-dispatcher-backend", "") == "ncclep",
        "warning",  # releases may take it: Megatron-Bridge 0.7.1 runs it
    ),
)
