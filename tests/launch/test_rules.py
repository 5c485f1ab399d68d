"""Every rule fires where it should, names numbers and a cure, and is silent on the published launches."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import (
    BACKENDS,
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


#: Rule -> arguments of check that violate it in another way than the run of tests/properties/evidence.py, and
#: what the message must contain. That every rule fires is in tests/properties/test_refused.py,
#: and what it says on docs/reference/rules.md.
VIOLATED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba-groups-tp": ({"layout": layout(tp=16)}, "mamba_num_groups=8 .* TP=16: use TP 1, 2, 4, 8$"),
    "schedule-unknown": ({"schedule": published(models.get("lightning"))}, "train, lr, min_lr"),
    "wsd-decay-length": (
        {"extra": ("--train-samples", "1000", "--lr", "1e-3", "--lr-decay-style", "WSD")},
        "WSD with lr=1e-3 needs the length of the decay phase: set lr_wsd_decay_samples$",
    ),
    "fp8-bf16-layers-pipeline": (
        {"precision": "mxfp8", "layout": layout(pp=8)},
        "14 BF16 .* layers/PP=11.*--num-layers-at-end-in-bf16 11",
    ),
    "delayed-recompute": (
        {"precision": "fp8-delayed", "backend": "te", "extra": (*SELECTIVE, "moe_act", "layernorm")},
        "recomputing moe_act and layernorm: drop them from",
    ),
    "quantized-hardware": (
        {"precision": "mxfp8", "backend": "te", "compute_capability": (9, 0)},
        r"mxfp8 .* 10\.0 or 10\.3; this one has 9\.0: use precision fp8-tensorwise, .*, or --emulate",
    ),
    "emulate-other": (
        {"precision": "bf16", "backend": "te", "emulate": True},
        "bf16 on backend te and emulates nvfp4: use precision nvfp4 and backend torch",
    ),
    "weight-alignment": (
        {"config": NANO_4B, "layout": layout(tp=8), "precision": "mxfp8", "backend": "te"},
        r"in_proj.weight \[2188, 3136\]",
    ),
    "reshardable-buckets": (
        {"extra": ("--dist-ckpt-optim-fully-reshardable",), "backend": "te"},
        r"several buckets \(--overlap-grad-reduce\)",
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
    {"extra": ("--dataloader-inter-document-masking",), "layout": layout(cp=2), "backend": "torch"},
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


@pytest.mark.parametrize("name", VIOLATED)
def test_rule_fires(name: str) -> None:
    arguments, message = VIOLATED[name]
    found = violations(arguments)
    assert name in found
    assert re.search(message, found[name].message, re.S), found[name].message


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


def test_the_cure_has_the_unit_of_the_run() -> None:
    """Megatron takes lengths in one unit only."""
    given = ["--lr", "1e-3", "--lr-decay-style", "WSD", "--train-iters", "9"]
    (found,) = [
        one for one in check(Launch.of(TINY, layout(), extra=given)) if one.rule == "wsd-decay-length"
    ]
    assert found.message.endswith("set lr_wsd_decay_iters")


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
