"""Every rule fires where it should, names numbers and a cure, and is silent on the published launches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import (
    BACKENDS,
    RULES,
    Launch,
    ParallelLayout,
    RuleError,
    TrainingSchedule,
    check,
    flags,
    published,
    published_layout,
)
from megatron_nemotron3.launch.launch import PRECISIONS
from megatron_nemotron3.precision.formats import FORMATS

SUPER = models.get("super")
ULTRA = models.get("ultra")
NANO_4B = models.get("nano-4b")
TINY = models.get("super-tiny")
WSD = TrainingSchedule(
    global_batch_size=16, train_iters=100, lr=1e-3, min_lr=1e-5, lr_decay_iters=100, lr_wsd_decay_iters=10
)
FILE = "precision.yaml"
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
FSDP = ("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor", "--data-parallel-sharding-strategy")
INSTANCES = ("--num-distributed-optimizer-instances", "2")
OUTER = ("--outer-dp-sharding-strategy", "optim")
FULL_RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method")


def layout(**sizes: Any) -> ParallelLayout:
    return ParallelLayout(**sizes)


#: rule -> (arguments of check that violate it, what the message must contain)
VIOLATED: dict[str, tuple[dict[str, Any], str]] = {
    "model-option": ({"extra": ["--num-experts", "64"]}, "--num-experts 64 replaces .*=512"),
    "pattern-dash": ({"config": NANO_4B.but(pattern="-M*")}, "starts with '-'"),
    "heads-tp": ({"config": SUPER.but(num_attention_heads=36), "layout": layout(tp=8)}, "36 .* TP=8"),
    "query-groups-tp": (
        {"config": SUPER.but(num_attention_heads=24, num_query_groups=6), "layout": layout(tp=4)},
        "num_query_groups=6 and TP=4",
    ),
    "qkv-tp": (
        {
            "config": SUPER.but(num_attention_heads=6, num_query_groups=1, hidden_size=4098),
            "layout": layout(tp=3),
        },
        "1024 rows, not divisible by TP=3",
    ),
    "mamba-heads-tp": (
        {"config": SUPER.but(mamba_num_heads=36, mamba_num_groups=4), "layout": layout(tp=8)},
        "mamba_num_heads=36 .* TP=8.* TP 1, 2, 3, 4",
    ),
    "mamba-groups-tp": ({"layout": layout(tp=16)}, "mamba_num_groups=8 .* TP=16: use TP 1, 2, 4, 8$"),
    "dense-ffn-tp": ({"config": NANO_4B.but(dense_ffn_hidden_size=12546), "layout": layout(tp=4)}, "12546"),
    "shared-expert-tp": (
        {"config": SUPER.but(moe_shared_expert_intermediate_size=5377), "layout": layout(tp=2)},
        "5377 .* TP=2",
    ),
    "expert-ffn-etp": ({"layout": layout(etp=5, dp=5)}, "moe_ffn_hidden_size=2688 .* ETP=5"),
    "experts-ep": ({"layout": layout(ep=3, dp=3)}, "num_moe_experts=512 .* EP=3"),
    "mtp-hidden-tp": ({"config": SUPER.but(hidden_size=4100), "layout": layout(tp=8)}, "4100 .* TP=8"),
    "vocabulary-tp": ({"config": SUPER.but(vocab_size=131073), "layout": layout(tp=2)}, "131073 .* TP=2"),
    "mamba-heads-cp": ({"layout": layout(tp=8, cp=32)}, "16 heads per rank, not divisible by CP=32"),
    "mamba-groups-cp": (
        {"config": SUPER.but(mamba_num_heads=144, mamba_num_groups=6), "layout": layout(cp=4)},
        "6 groups per rank; neither that number nor CP=4 divides",
    ),
    "experts-without-moe": ({"config": NANO_4B, "layout": layout(ep=2, dp=2)}, "EP=2 .* ep=1"),
    "expert-grid": ({"layout": layout(tp=2, ep=64, dp=8)}, "TP.CP.DP=16 .* ETP.EP=64: .* multiple of 32"),
    "layers-pipeline": ({"layout": layout(pp=16, vpp=8)}, "88 layers .* PP.VPP=128"),
    "vpp-without-pp": ({"layout": layout(vpp=2)}, "VPP=2 .* PP=1"),
    "moe-tp-without-sp": ({"layout": layout(tp=2, sp=False)}, "TP=2"),
    "sp-without-tp": ({"layout": layout(sp=True)}, "TP=1"),
    "sequence-cp": ({"layout": layout(cp=4), "schedule": TrainingSchedule(seq_length=100)}, "100 .* 8"),
    "sequence-sp": ({"layout": layout(tp=8), "schedule": TrainingSchedule(seq_length=100)}, "100 .* CP.TP=8"),
    "conv-kernel": ({"config": SUPER.but(mamba_conv_kernel=3)}, "mamba_conv_kernel=3"),
    "gated-norm-epsilon": ({"config": SUPER.but(layernorm_epsilon=1e-6)}, "epsilon=1e-06: .*: use 1e-05"),
    "global-batch": ({"layout": layout(dp=3), "schedule": WSD}, "16 .* micro_batch_size.DP=3"),
    "vpp-microbatches": (
        {"layout": layout(pp=3, vpp=2), "schedule": WSD},
        "groups of 3.*a step has 16.*multiple of 3",
    ),
    "learning-rate-order": (
        {"schedule": TrainingSchedule(train_iters=9, lr=1e-5, min_lr=1e-3, lr_wsd_decay_iters=1)},
        "0.001 exceeds lr=1e-05",
    ),
    "warmup-length": (
        {"schedule": TrainingSchedule(train_iters=9, lr_warmup_iters=9)},
        "lr_warmup_iters=9 .* 9",
    ),
    "wsd-decay-length": (
        {"schedule": TrainingSchedule(train_samples=9, lr=1e-3, min_lr=0.0)},
        "lr=0.001 .* lr_wsd_decay_samples",
    ),
    "schedule-unknown": ({"schedule": published(models.get("lightning"))}, "train, lr, min_lr"),
    "nvfp4-without-file": ({"precision": "nvfp4"}, "te_precision_config_file=PATH"),
    "precision-file-torch": (
        {"te_precision_config_file": FILE, "backend": "torch"},
        "no effect in bf16 on the torch backend: .*--precision nvfp4 --emulate",
    ),
    "precision-file-unused": ({"te_precision_config_file": FILE}, "bf16"),
    "bf16-layers-range": (
        {
            "precision": "nvfp4",
            "te_precision_config_file": FILE,
            "extra": ("--num-layers-at-end-in-bf16", "500"),
        },
        "500 at the end of 88",
    ),
    "fp8-bf16-layers-pipeline": (
        {"precision": "mxfp8", "layout": layout(pp=8)},
        "14 BF16 .* layers/PP=11.*--num-layers-at-end-in-bf16 11",
    ),
    "fp8-torch": ({"precision": "fp8-blockwise", "backend": "torch"}, "backend te, or precision bf16"),
    "delayed-bf16-layers": (
        {"precision": "fp8-delayed", "backend": "te", "extra": ("--first-last-layers-bf16",)},
        "with delayed scaling: drop --first-last-layers-bf16, or use precision fp8-tensorwise",
    ),
    "delayed-recompute": (
        {
            "precision": "fp8-delayed",
            "backend": "te",
            "extra": ("--recompute-granularity", "selective", "--recompute-modules", "moe_act", "layernorm"),
        },
        "recomputing moe_act and layernorm: drop them from",
    ),
    "fp8-param-gather": (
        {"precision": "nvfp4", "te_precision_config_file": FILE, "extra": ("--fp8-param-gather",)},
        "needs an FP8 recipe, not nvfp4",
    ),
    "blockwise-alignment": (
        {"config": models.get("nano"), "precision": "fp8-blockwise", "backend": "te"},
        r"multiples of 128; .*in_proj.weight \[10304, 2688\]",
    ),
    "partial-blocks": (
        {
            "config": models.get("super-tiny"),
            "precision": "mxfp8",
            "backend": "torch",
            "emulate": True,
        },
        r"in_proj.weight \[784, 128\] \(multiples of 32\)",
    ),
    "nvfp4-torch": (
        {"precision": "nvfp4", "backend": "torch", "te_precision_config_file": FILE},
        "exist only in Transformer Engine.*emulate=True",
    ),
    "quantized-hardware": (
        {"precision": "mxfp8", "backend": "te", "compute_capability": (9, 0)},
        r"mxfp8 .* 10\.0 or 10\.3; this one has 9\.0: use precision fp8-tensorwise, .*, or emulate=True",
    ),
    "emulate-other": (
        {"precision": "bf16", "backend": "te", "emulate": True},
        "bf16 on backend te and emulates nvfp4: use precision nvfp4 and backend torch",
    ),
    "weight-alignment": (
        {"config": NANO_4B, "layout": layout(tp=8), "precision": "mxfp8", "backend": "te"},
        r"in_proj.weight \[2188, 3136\]",
    ),
    "fp4-row-alignment": (
        {"layout": layout(tp=8), "precision": "nvfp4", "te_precision_config_file": FILE},
        r"in_proj.weight \[2320, 4096\]",
    ),
    "token-alignment": (
        {
            "precision": "nvfp4",
            "te_precision_config_file": FILE,
            "schedule": TrainingSchedule(seq_length=8),
        },
        "8 tokens .* 16",
    ),
    "reserved-option": ({"extra": ("--seq-length", "1")}, "--seq-length .* schedule.seq_length"),
    "gpt-pipeline-option": ({"extra": ("--num-layers", "88")}, "--num-layers"),
    "documents-cp": (
        {"layout": layout(cp=2), "extra": ("--dataloader-inter-document-masking",)},
        "inter-document-masking with CP=2",
    ),
    "masked-mean-cp": (
        {"config": models.get("nano"), "layout": layout(cp=2), "extra": ("--eod-mask-loss",)},
        "--eod-mask-loss with CP=2.*add --calculate-per-token-loss",
    ),
    "reshardable-buckets": (
        {"extra": ("--dist-ckpt-optim-fully-reshardable",), "backend": "te"},
        r"several buckets \(--overlap-grad-reduce\)",
    ),
    "packed-cp-torch": (
        {"config": models.get("nano"), "layout": layout(cp=2), "extra": ("--sft",), "backend": "torch"},
        "--sft with CP=2",
    ),
    "recompute-layernorm-torch": (
        {"extra": ("--recompute-modules", "core_attn", "layernorm"), "backend": "torch"},
        "--recompute-modules layernorm",
    ),
    "recompute-moe-act": ({"extra": ("--recompute-modules", "moe_act")}, "backend te"),
    "recompute-mtp": (
        {"extra": (*FULL_RECOMPUTE, "uniform", "--recompute-num-layers", "4")},
        "chunks of 4 layers",
    ),
    "padding-allgather": (
        {
            "precision": "mxfp8",
            "backend": "te",
            "extra": ("--moe-token-dispatcher-type", "allgather"),
        },
        "alltoall or flex",
    ),
    "moe-shared-expert-overlap": ({"extra": ("--moe-shared-expert-overlap",)}, "drop it"),
    "overlap-moe-expert-parallel-comm": ({"extra": ("--overlap-moe-expert-parallel-comm",)}, "drop it"),
    "use-transformer-engine-op-fuser": (
        {
            "extra": ("--use-transformer-engine-op-fuser",),
            "precision": "nvfp4",
            "te_precision_config_file": FILE,
        },
        "MTP",
    ),
    "fp4-param-gather": ({"extra": ("--fp4-param-gather",)}, "drop it"),
    "yaml-cfg": ({"extra": ("--yaml-cfg", "x")}, "use flags"),
    "grad-reduce-in-bf16": ({"extra": ("--grad-reduce-in-bf16",)}, "Ultra .* FP32"),
    "use-checkpoint-args": ({"extra": ("--use-checkpoint-args",)}, "--spec"),
    "moe-per-layer-logging": ({"extra": ("--moe-per-layer-logging",)}, "MTP"),
    "option-without-effect": (
        {"extra": ("--recompute-modules", "moe")},
        "--recompute-modules has no effect: .*--recompute-granularity selective",
    ),
    "cpu-offloading-num-layers": ({"extra": ("--cpu-offloading-num-layers", "1")}, "offloads nothing"),
    "packed-graphs": (
        {"extra": ("--sft", "--cuda-graph-impl", "transformer_engine"), "backend": "te"},
        "--sft with CUDA graphs of attention.*--cuda-graph-impl none",
    ),
    "hybridep-domain": (
        {
            "config": SUPER.but(num_moe_experts=6, moe_router_topk=2),
            "layout": layout(dp=12, ep=6),
            "backend": "te",
            "gpu": "h100",
        },
        r"EP\*ETP=6.*NVLink on h100 connects 8",
    ),
    "activation-offloading": (
        {
            "extra": ("--fine-grained-activation-offloading", "--offload-modules", "moe_act"),
            "backend": "torch",
        },
        "the backend is torch.*or use backend te",
    ),
    "optimizer-types": ({"extra": ("--exp-avg-dtype", "bf16")}, "add it"),
    "precision-aware-optimizer": (
        {"extra": ("--use-precision-aware-optimizer",), "backend": "torch"},
        "the backend is torch and the distributed optimizer is on",
    ),
    "moe-router-fusion": ({"extra": ("--moe-router-fusion",), "backend": "torch"}, "use backend te"),
    "fsdp-pipeline": ({"layout": layout(pp=2), "extra": (*FSDP, "optim")}, "with PP=2.*use PP 1"),
    "fsdp-expert-dp": (
        {
            "config": models.get("nano"),
            "layout": layout(dp=8, ep=8),
            "schedule": WSD,
            "extra": (*FSDP, "optim_grads"),
        },
        r"EP\*ETP=8\) and 2 micro-batches.*add --calculate-per-token-loss",
    ),
    "fsdp-mtp-recompute": (
        {"extra": (*FSDP, "optim_grads_params", *FULL_RECOMPUTE, "uniform", "--recompute-num-layers", "1")},
        "2 MTP depths.*core_attn, moe_act",
    ),
    "hsdp-overlap": (
        {"layout": layout(dp=4), "extra": (*FSDP, "optim_grads", *INSTANCES), "backend": "torch"},
        "2: without --overlap-grad-reduce.*add it",
    ),
    "optimizer-instances": (
        {"layout": layout(dp=2, ep=2), "extra": INSTANCES},
        "--num-distributed-optimizer-instances 2 divides not all of .*: use .* 1$",
    ),
    "hsdp-outer-norm": (
        {"layout": layout(dp=4), "extra": (*FSDP, "optim_grads_params", *INSTANCES, *OUTER), "backend": "te"},
        "2 and --outer-dp-sharding-strategy optim: .*use --outer-dp-sharding-strategy no_shard, or --clip",
    ),
}

#: Options that are harmless without what makes them harmful.
HARMLESS: list[dict[str, Any]] = [
    {
        "config": models.get("nano"),
        "layout": layout(dp=8, ep=8),
        "schedule": WSD,
        "extra": (*FSDP, "optim_grads", "--calculate-per-token-loss"),
    },
    {
        "config": models.get("nano"),
        "layout": layout(dp=8, ep=4),
        "schedule": WSD,
        "extra": (*FSDP, "optim_grads"),
    },
    {"extra": (*FSDP, "optim", *FULL_RECOMPUTE, "uniform", "--recompute-num-layers", "1")},
    {"layout": layout(dp=4), "extra": (*FSDP, "optim_grads", *INSTANCES), "backend": "te"},
    {
        "layout": layout(dp=4),
        "extra": (*FSDP, "optim_grads_params", *INSTANCES, *OUTER, "--clip-grad", "0"),
        "backend": "te",
    },
    {"layout": layout(dp=4), "extra": (*FSDP, "optim_grads_params", *OUTER), "backend": "te"},
    {"config": models.get("nano"), "extra": ("--moe-shared-expert-overlap",)},
    {"config": models.get("nano"), "extra": ("--grad-reduce-in-bf16",)},
    {"config": NANO_4B.but(pattern="-")},
    {
        "config": models.get("nano"),
        "extra": ("--sft", "--calculate-per-token-loss"),
        "layout": layout(cp=2),
        "backend": "te",
    },
    {
        "config": models.get("nano"),
        "extra": ("--sft", "--calculate-per-token-loss"),
        "layout": layout(cp=2),
        "backend": "torch",
        "own_script": True,
    },
    {"extra": ("--dist-ckpt-optim-fully-reshardable",), "backend": "torch"},
    {"extra": ("--dataloader-inter-document-masking",)},
    {"extra": (*SELECTIVE, "moe_act"), "backend": "te"},
    {"config": NANO_4B, "extra": (*SELECTIVE, "layernorm"), "backend": "torch"},
    {"config": models.get("nano"), "layout": layout(dp=8, ep=8), "backend": "te", "gpu": "h100"},
    {"config": models.get("nano"), "layout": layout(dp=16, ep=16), "backend": "te", "gpu": "h100"},
    {"extra": ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"), "backend": "te"},
    {
        "extra": ("--sft", "--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "mamba"),
        "backend": "te",
    },
    {"extra": (*FULL_RECOMPUTE, "uniform", "--recompute-num-layers", "1")},
    {"extra": (*FULL_RECOMPUTE, "block", "--recompute-num-layers", "4")},
    {
        "layout": layout(pp=3, vpp=2),
        "schedule": WSD,
        "extra": ("--microbatch-group-size-per-virtual-pipeline-stage", "6"),
    },
    {"extra": ("--sft",)},
    {"extra": ("--use-transformer-engine-op-fuser",)},
    {"extra": ("--moe-token-dispatcher-type", "allgather")},
    {"precision": "nvfp4", "allow_plain_nvfp4": True, "backend": "te"},
    {"precision": "nvfp4", "extra": ("--te-precision-config-file=x",), "backend": "te"},
    {"precision": "nvfp4", "te_precision_config_file": FILE, "compute_capability": (10, 3)},
    {"compute_capability": (9, 0)},
    {
        "precision": "nvfp4",
        "te_precision_config_file": FILE,
        "backend": "torch",
        "emulate": True,
        "compute_capability": (9, 0),
        # Nobody pads where nothing is quantized for hardware, and no row is read in 32s.
        "layout": layout(tp=8),
        "extra": ("--moe-token-dispatcher-type", "allgather"),
    },
    {"schedule": TrainingSchedule(), "extra": ("--train-iters", "5", "--lr", "1", "--min-lr", "0")},
]


def violations(arguments: dict[str, Any]) -> dict[str, Any]:
    rest = dict(arguments)
    found = check(Launch.of(rest.pop("config", SUPER), rest.pop("layout", None), **rest))
    return {violation.rule: violation for violation in found}


def test_every_rule_is_tested() -> None:
    assert {rule.name for rule in RULES} == set(VIOLATED)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("name", VIOLATED)
def test_rule_fires(name: str) -> None:
    arguments, message = VIOLATED[name]
    found = violations(arguments)
    assert name in found
    assert re.search(message, found[name].message, re.S), found[name].message
    severity = next(rule.severity for rule in RULES if rule.name == name)
    assert found[name].severity == severity
    arguments = {"config": SUPER, "layout": ParallelLayout(), **arguments}
    config, where = arguments.pop("config"), arguments.pop("layout")
    if severity == "error":
        with pytest.raises(RuleError, match=re.escape(name)):
            flags(Launch.of(config, where, **arguments))
    elif not any(violation.severity == "error" for violation in found.values()):
        assert flags(Launch.of(config, where, **arguments))


@pytest.mark.parametrize("name", ["nano", "super", "ultra"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_silent_on_published_launches(name: str, precision: str, backend: str) -> None:
    """Ultra's 2 KV groups at TP 8 included: Megatron gathers them."""
    config = models.get(name)
    where = published_layout(config)
    assert where is not None
    file = FILE if precision == "nvfp4" else None
    found = check(
        Launch.of(
            config,
            where,
            precision=precision,
            backend=backend,
            schedule=published(config),
            te_precision_config_file=file,
        )
    )
    # in_proj's width is no multiple of 128, in Super and Ultra where it is divided over TP.
    expected = ["blockwise-alignment"] if precision == "fp8-blockwise" else []
    if backend == "torch" and precision in FORMATS:
        expected.insert(0, f"{FORMATS[precision].kind.replace('fp4', 'nvfp4')}-torch")
    assert [violation.rule for violation in found] == expected


@pytest.mark.parametrize(
    ("name", "sizes", "seq_length"),
    [
        ("nano", {"cp": 8, "tp": 8, "ep": 8, "pp": 4}, 524288),
        ("super", {"cp": 64, "tp": 2, "ep": 64}, 1048576),
        ("ultra", {"cp": 32, "tp": 8, "ep": 128, "pp": 2}, 1048576),
    ],
)
def test_silent_on_published_long_context(name: str, sizes: dict[str, int], seq_length: int) -> None:
    """More context-parallel ranks than Mamba groups a rank: Megatron replicates the groups."""
    schedule = TrainingSchedule(
        seq_length=seq_length, train_iters=1, lr=1e-5, min_lr=1e-5, lr_wsd_decay_iters=1
    )
    assert (
        check(Launch.of(models.get(name), layout(**sizes), precision="bf16", backend="te", schedule=schedule))
        == []
    )


@pytest.mark.parametrize("name", models.names())
def test_silent_on_tiny_models(name: str) -> None:
    tiny = models.get(f"{name}-tiny")
    for where in (layout(), layout(tp=2, dp=2), layout(pp=2, vpp=2), layout(cp=2), layout(tp=4)):
        assert check(Launch.of(tiny, where)) == []


@pytest.mark.parametrize("arguments", HARMLESS, ids=str)
def test_silent_where_harmless(arguments: dict[str, Any]) -> None:
    assert violations(arguments) == {}


def test_all_errors_are_listed_at_once() -> None:
    with pytest.raises(RuleError) as caught:
        flags(
            Launch.of(
                ULTRA, layout(tp=16, ep=3, sp=False), extra=("--yaml-cfg", "x", "--grad-reduce-in-bf16")
            )
        )
    names = [violation.rule for violation in caught.value.violations]
    assert names == ["mamba-groups-tp", "experts-ep", "expert-grid", "moe-tp-without-sp", "yaml-cfg"]
    assert all(f"[{name};" in str(caught.value) for name in names)
    assert isinstance(caught.value, ValueError)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="fp16.*bf16, fp32, nvfp4, mxfp8"):
        check(Launch.of(SUPER, layout(), precision="fp16"))
    with pytest.raises(ValueError, match="cuda.*auto, te, torch"):
        check(Launch.of(SUPER, layout(), precision="bf16", backend="cuda"))


def test_every_width_of_experts_is_split() -> None:
    """Puzzle's widths are 1280 to 2688, and MTP's 2688: their greatest common divisor is 128."""
    puzzle = models.get("puzzle")
    assert "expert-ffn-etp" not in {v.rule for v in check(Launch.of(puzzle, layout(tp=8, etp=128, dp=128)))}
    narrow = puzzle.but(moe_layers=((1284, 4), *puzzle.expert_sizes[1:]))
    own_mtp = puzzle.but(moe_ffn_hidden_size=2690)
    for config, width, etp in ((puzzle, 1280, 3), (narrow, 1284, 8), (own_mtp, 2690, 4)):
        launch = Launch.of(config, layout(tp=2, etp=etp, dp=etp), extra=["--spec", "mine", "spec"])
        (found,) = (v for v in check(launch) if v.rule == "expert-ffn-etp")
        assert f"moe_ffn_hidden_size={width} is not divisible by ETP={etp}" in found.message


def test_every_width_of_experts_fills_blocks() -> None:
    puzzle = models.get("puzzle")
    assert not [
        v for v in check(Launch.of(puzzle, layout(), precision="mxfp8", backend="te")) if "block" in v.message
    ]
    odd = puzzle.but(moe_layers=(*puzzle.expert_sizes[:-1], (2056, 18)))
    launch = Launch.of(odd, layout(), precision="mxfp8", backend="te", extra=["--spec", "mine", "spec"])
    (found,) = (v for v in check(launch) if "quantizes in blocks" in v.message)
    assert "mixer.experts.{e}.up_proj.weight [2056, 1024]" in found.message
    assert found.message.count("[2056, 1024]") == 1
