"""Options in `extra` that are known not to work with this family. Standard library only."""

from __future__ import annotations

from collections.abc import Callable

from megatron_nemotron3.args.rule import Context, Rule, Severity

_ARGUMENTS = "megatron/training/arguments.py"

#: What the caller says through config, layout, schedule or backend, so that rules can see it.
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

#: Pipeline options of GPT models, which Megatron refuses or ignores beside a layer pattern.
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

#: Several documents in one row, with sequence boundaries.
_PACKED = ("--sft", "--dataloader-inter-document-masking", "--rl-use-sequence-packing")


def _option(
    flag: str,
    reason: str,
    source: str,
    when: Callable[[Context], object] = lambda c: True,
    severity: Severity = "error",
) -> Rule:
    """`flag` is given and `when` holds. The rule has the flag's name."""
    return Rule(
        flag.removeprefix("--"),
        lambda c: flag in c.options and when(c),
        lambda c: f"{flag}: {reason}",
        source,
        severity,
    )


def _dispatcher(c: Context) -> str:
    return (c.options.get("--moe-token-dispatcher-type") or ("alltoall",))[0]


OPTION_RULES: tuple[Rule, ...] = (
    Rule(
        "reserved-option",
        lambda c: c.first_of(*_RESERVED),
        lambda c: "; ".join(
            f"{flag} in extra would contradict what the rules checked: set it through {where}"
            for flag, where in _RESERVED.items()
            if flag in c.options
        ),
        "this package",
    ),
    Rule(
        "gpt-pipeline-option",
        lambda c: c.first_of(*_GPT_LAYOUT),
        lambda c: (
            f"{c.first_of(*_GPT_LAYOUT)} does not go with --hybrid-layer-pattern, whose cuts say where "
            "stages end: drop it"
        ),
        _ARGUMENTS,
    ),
    Rule(
        "packed-cp-mtp",
        lambda c: c.first_of(*_PACKED) and c.layout.cp > 1 and c.config.has_mtp,
        lambda c: (
            f"{c.first_of(*_PACKED)} with CP={c.layout.cp} and MTP: the MTP loss is silently wrong at "
            "sequence boundaries; use cp=1, or a config without MTP"
        ),
        "Megatron-LM #6205, #4495",
    ),
    Rule(
        "packed-cp-torch",
        lambda c: c.first_of(*_PACKED) and c.layout.cp > 1 and c.backend == "torch",
        lambda c: (
            f"{c.first_of(*_PACKED)} with CP={c.layout.cp}: the torch attention does not split packed "
            "sequences; use cp=1 or backend te"
        ),
        "megatron_nemotron3/layers/attention.py",
    ),
    Rule(
        "recompute-layernorm-torch",
        lambda c: c.backend == "torch" and "layernorm" in (c.options.get("--recompute-modules") or ()),
        lambda c: (
            "--recompute-modules layernorm raises NameError without TransformerEngine: drop it, or use "
            "backend te"
        ),
        "megatron/core/tensor_parallel/random.py",
    ),
    Rule(
        "padding-allgather",
        lambda c: c.quantized and c.config.is_moe and _dispatcher(c) == "allgather",
        lambda c: (
            f"{c.precision} pads each expert's tokens, which the allgather dispatcher cannot: "
            "use --moe-token-dispatcher-type alltoall or flex"
        ),
        "megatron/core/transformer/transformer_config.py",
    ),
    _option(
        "--moe-shared-expert-overlap",
        "not supported in training together with latent experts; drop it",
        "megatron/core/transformer/moe/moe_layer.py",
        # Our torch backend overlaps it itself (layers/latent_moe.py).
        lambda c: c.config.moe_latent_size and c.backend != "torch",
    ),
    _option(
        "--overlap-moe-expert-parallel-comm",
        "only GPT models implement its schedule, a hybrid fails in the first step; drop it",
        "megatron/core/pipeline_parallel/combined_1f1b.py",
    ),
    _option(
        "--use-transformer-engine-op-fuser",
        "its expert path ignores per-module precision, so MTP would run in NVFP4; drop it",
        "megatron/core/transformer/moe/experts.py",
        lambda c: c.precision == "nvfp4" and c.config.has_mtp,
    ),
    _option(
        "--fp4-param-gather",
        "made before the precision file is matched, so what it keeps BF16 becomes FP4 too; drop it",
        "Megatron-LM #2284, #5174",
    ),
    _option(
        "--yaml-cfg",
        "broken in megatron-core 0.19, it does not reach the hybrid; use flags",
        "megatron/training/yaml_arguments.py",
    ),
    _option(
        "--grad-reduce-in-bf16",
        "BF16 accumulation of the output layer's gradient, which MTP shares, lost MTP's small share of it in "
        "Ultra at about 8T tokens and the MTP loss spiked; FP32 reduction cured it",
        "Ultra report (arXiv 2606.15007)",
        lambda c: c.config.has_mtp,
        "warning",
    ),
    _option(
        "--use-checkpoint-args",
        "replaces --spec and the architecture with the checkpoint's",
        "megatron/training/checkpointing.py",
        severity="warning",
    ),
    _option(
        "--moe-per-layer-logging",
        "logs the MTP block's router under a wrong layer",
        "megatron/core/transformer/moe/router.py; Megatron-LM #7172",
        lambda c: c.config.has_mtp,
        "warning",
    ),
)
