"""The page of the results that `python -m tests.upstream` wrote."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

RESULTS = Path(__file__).parent / "results"

#: Why a test does not pass with our stack -> what its message contains. The first that fits counts.
REASONS = (
    ("more than one rank: one process runs here", r"world.?size|requires? .*(ranks|GPUs)|group size"),
    (
        "MLA, DSA or gated delta net, which Nemotron 3 does not have",
        r"of a kind that the spec does not build|IdentityOp",
    ),
    ("mamba-ssm, which needs a GPU", r"[Mm]amba.?SSM|mamba.ssm|causal.conv1d"),
    ("TransformerEngine", r"[Tt]ransformer.?[Ee]ngine|\bTE[A-Z]?\w*|HAVE_TE"),
    (
        "inference with Megatron's engine; ours is `nemotron3 generate`",
        r"training and evaluation only|flash attn|inference",
    ),
    ("a GPU", r"CUDA|cuda|NVIDIA|nccl|GPU"),
    (
        "biases of linears, gated or other activations, which Nemotron 3 does not have",
        r"--disable-bias-linear|--squared-relu",
    ),
)

_BLOCK = (
    "the test builds Megatron's GPT block, which our spec does not enter, and looks for our MoE layer in it"
)
_MOE = "transformer/moe/test_moe_layer.py::TestInterleaveTransformerBlock::test_interleave_transformer_block"
#: Tests that pass with the stock stack and not with ours -> why.
OTHERWISE = {
    **{f"{_MOE}[{case}]": _BLOCK for case in ("2", "moe_layer_freq1", "moe_layer_freq2")},
    "transformer/moe/test_routers.py::TestTop2Router::test_aux_loss": (
        "the test changes the configuration after the layer is built, whose router has a copy in our layer"
    ),
    "transformer/moe/test_shared_experts.py::TestSharedExperts::test_shared_expert_forward_backward"
    "[1-1-alltoall]": "the test looks for the stream of Megatron's shared-expert overlap; ours is another",
    "transformer/moe/test_shared_experts.py::TestSharedExperts::"
    "test_shared_expert_glu_linear_offset_overlap_parity": (
        "the test calls the steps of Megatron's shared-expert overlap one by one; ours is another"
    ),
}


def reason(message: str) -> str:
    """Return the first of `REASONS` that fits a message, or else the message."""
    return next(
        (why for why, pattern in REASONS if re.search(pattern, message)), message[:100] or "no message"
    )


def markdown() -> str:
    """The page."""
    lines = [
        "# Megatron's unit tests: with the stock stack and with ours",
        "",
        "Megatron's unit tests of the parts that this package replaces need a GPU. Here they run on a CPU,",
        "unchanged: once with the stock stack, once with our torch backend in place of what it replaces (the",
        "names are in `tests/upstream/upstream_plugin.py`). One process, no TransformerEngine, no mamba-ssm.",
        "",
        "```",
        "make test-upstream MEGATRON_LM_DIR=/path/to/Megatron-LM",
        "```",
        "",
        "runs both. `python -m tests.docs.pages` generates this page from `tests/upstream/results`.",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        lines += ["", *_version(json.loads(path.read_text(encoding="utf-8")))]
    return "\n".join(lines) + "\n"


def _version(found: dict) -> list[str]:
    tests: dict[str, list[list[str]]] = found["tests"]
    lines = [f"## megatron-core {found['version']}, revision {found['revision'][:12]}", ""]
    lines += ["| file | tests | stock passes | ours passes |", "|-|-:|-:|-:|"]
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    rows = [
        (file, [outcomes for name, outcomes in tests.items() if name.partition("::")[0] == file])
        for file in files
    ]
    for file, outcomes in [*rows, ("all", list(tests.values()))]:
        passed = [sum(pair[at][0] == "passed" for pair in outcomes) for at in (0, 1)]
        lines.append(f"| {file} | {len(outcomes)} | {passed[0]} | {passed[1]} |")
    lost = [name for name, (stock, ours) in tests.items() if stock[0] == "passed" and ours[0] != "passed"]
    lines += ["", f"Tests that pass with the stock stack and not with ours: {len(lost) or 'none'}."]
    lines += [""] if lost else []
    lines += [f"* `{name}`: {_cell(OTHERWISE.get(name) or reason(tests[name][1][1]))}" for name in lost]
    left: dict[str, Counter[str]] = {}
    for name, (_, ours) in tests.items():
        if ours[0] != "passed":
            left.setdefault(reason(ours[1]), Counter())[re.sub(r"\[.*", "", name)] += 1
    lines += ["", "What does not pass with ours, by what it needs:"]
    for why, names in sorted(left.items(), key=lambda item: -item[1].total()):
        lines += ["", f"**{_cell(why)}** ({names.total()})", ""]
        lines += [f"* `{name}`" + (f" ({count} cases)" if count > 1 else "") for name, count in names.items()]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
