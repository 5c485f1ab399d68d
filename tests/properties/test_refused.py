"""What the rules refuse Megatron refuses too or computes wrongly, or the table says why none can tell."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from megatron_nemotron3.launch import RULES, Launch, RuleError, check, flags, versions
from megatron_nemotron3.launch.rules_options import _GPT_LAYOUT
from megatron_nemotron3.models import count
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.properties.entries import Refused, Wrong
from tests.properties.evidence import EVIDENCE
from tests.properties.measure import _GPT_VALUES, attempts, nothing
from tests.properties.step import Case, Refusal
from tests.properties.strategies import draw_many, errors, refused

#: Rule -> what it says of its run: the numbers, and the cure.
MESSAGES = {
    "model-option": "--moe-ffn-hidden-size 16 replaces .*=4",
    "pattern-dash": "starts with '-'",
    "heads-tp": "3 .* TP=2",
    "query-groups-tp": "num_query_groups=3 and TP=2",
    "qkv-tp": "32 rows, not divisible by TP=3",
    "mamba-heads-tp": "mamba_num_heads=3 .* TP=2.* TP 1, 3",
    "mamba-groups-tp": "mamba_num_groups=1 .* TP=2: use TP 1$",
    "dense-ffn-tp": "dense_ffn_hidden_size=7",
    "shared-expert-tp": "=5 .* TP=2",
    "expert-ffn-etp": "moe_ffn_hidden_size=3 .* ETP=2",
    "experts-ep": "num_moe_experts=3 .* EP=2",
    "mtp-hidden-tp": "hidden_size=15 .* TP=2",
    "vocabulary-tp": "vocab_size=33 .* TP=2",
    "mamba-heads-cp": "3 heads per rank, not divisible by CP=2",
    "mamba-groups-cp": "3 groups per rank; neither that number nor CP=2 divides",
    "experts-without-moe": "EP=2 .* ep=1",
    "expert-grid": "TP.CP.DP=2 .* ETP.EP=4: .* multiple of 4",
    "layers-pipeline": "1 layers .* PP.VPP=2",
    "vpp-without-pp": "VPP=2 .* PP=1",
    "moe-tp-without-sp": "TP=2",
    "sp-without-tp": "TP=1",
    "sequence-cp": "seq_length=6 .* multiple of 4",
    "sequence-sp": "seq_length=7 .* CP.TP=2",
    "conv-kernel": "mamba_conv_kernel=3",
    "gated-norm-epsilon": "epsilon=0.001: .*: use 1e-05",
    "global-batch": "=3 .* micro_batch_size.DP=2",
    "vpp-microbatches": "groups of 2.*a step has 3.*multiple of 2",
    "learning-rate-order": "0.001 exceeds lr=1e-05",
    "warmup-length": "lr_warmup_iters=2 .* 2",
    "wsd-decay-length": "lr=0.001 .* lr_wsd_decay_iters",
    "schedule-unknown": "no source states train",
    "nvfp4-without-file": "te_precision_config_file=PATH",
    "precision-file-torch": "no effect in bf16 on the torch backend: .*--precision nvfp4 --emulate",
    "precision-file-unused": "bf16",
    "bf16-layers-range": "500 at the end of 4",
    "fp8-bf16-layers-pipeline": "3 BF16 .* layers/PP=2.*--num-layers-at-end-in-bf16 2",
    "fp8-torch": "backend te, or emulate=True",
    "delayed-bf16-layers": "with delayed scaling: drop --first-last-layers-bf16, or use precision fp8-tens",
    "delayed-recompute": "recomputing layernorm: drop it from",
    "fp8-param-gather": "needs an FP8 recipe, not fp32",
    "blockwise-alignment": r"multiples of 128; .*in_proj.weight \[352, 64\]",
    "partial-blocks": r"in_proj.weight \[52, 16\] \(multiples of 32\)",
    "nvfp4-torch": "exist only in Transformer Engine.*emulate=True",
    "quantized-hardware": r"nvfp4 .* 10\.0 or 10\.3; this one has 9\.0: use precision fp8-.*emulate=True",
    "emulate-other": "nvfp4 on backend auto and emulates nvfp4: use precision nvfp4 and backend torch",
    "weight-alignment": r"in_proj.weight \[52, 16\]",
    "fp4-row-alignment": r"up_proj.weight \[48, 64\]",
    "token-alignment": "8 tokens .* 16",
    "reserved-option": "--seq-length .* schedule.seq_length",
    "gpt-pipeline-option": "--num-layers",
    "documents-cp": "inter-document-masking with CP=2",
    "masked-mean-cp": "--eod-mask-loss with CP=2.*add --calculate-per-token-loss",
    "reshardable-buckets": r"several buckets \(the embedding that MTP shares at PP=2\)",
    "packed-cp-torch": "--sft with CP=2",
    "recompute-layernorm-torch": "--recompute-modules layernorm",
    "recompute-moe-act": "backend te",
    "recompute-mtp": "chunks of 2 layers",
    "padding-allgather": "alltoall or flex",
    "moe-shared-expert-overlap": "drop it",
    "overlap-moe-expert-parallel-comm": "drop it",
    "use-transformer-engine-op-fuser": "MTP",
    "fp4-param-gather": "drop it",
    "yaml-cfg": "use flags",
    "grad-reduce-in-bf16": "Ultra .* FP32",
    "use-checkpoint-args": "--spec",
    "moe-per-layer-logging": "MTP",
    "option-without-effect": "--recompute-modules has no effect: .*--recompute-granularity selective",
    "cpu-offloading-num-layers": "offloads nothing",
    "packed-graphs": "--sft with CUDA graphs of attention.*--cuda-graph-impl none",
    "hybridep-domain": r"EP\*ETP=6.*NVLink on h100 connects 8",
    "activation-offloading": "the backend is torch.*or use backend te",
    "optimizer-types": "add it",
    "precision-aware-optimizer": "the backend is torch and the distributed optimizer is on",
    "moe-router-fusion": "use backend te",
    "fsdp-pipeline": "with PP=2.*use PP 1",
    "fsdp-expert-dp": r"EP\*ETP=2\) and 2 micro-batches.*add --calculate-per-token-loss",
    "fsdp-mtp-recompute": "2 MTP depths.*core_attn, moe_act",
    "hsdp-overlap": "2: without --overlap-grad-reduce.*add it",
    "hsdp-outer-norm": "2 and --outer-dp-sharding-strategy optim: .*use --outer-dp-sharding-strategy no_",
    "optimizer-instances": "--num-distributed-optimizer-instances 2 divides not all of .*: use .* 1$",
}


def launch(case: Case) -> Launch:
    options = case.options()
    options.pop("distributed_optimizer")
    return Launch.of(case.config, case.layout, **options)


def test_every_rule_has_evidence() -> None:
    names = [rule.name for rule in RULES]
    assert set(names) == set(EVIDENCE) == set(MESSAGES) and len(set(names)) == len(names)


@pytest.mark.parametrize("rule", EVIDENCE)
def test_the_run_is_about_this_rule(rule: str) -> None:
    """The rule fires with its numbers and a cure; an error ends `flags`, a warning does not."""
    evidence = EVIDENCE[rule]
    asked = launch(evidence.case)
    found = {violation.rule: violation for violation in check(asked)}
    assert set(found) == {rule, *evidence.along}
    assert re.search(MESSAGES[rule], found[rule].message, re.S), found[rule].message
    severity = next(one.severity for one in RULES if one.name == rule)
    assert found[rule].severity == severity
    if severity == "error":
        with pytest.raises(RuleError, match=re.escape(rule)):
            flags(asked)
    elif not any(violation.severity == "error" for violation in found.values()):
        assert flags(asked)


@functools.cache
def made(ranks: int) -> dict[str, Any]:
    """Rule -> what Megatron made of its run on that many ranks, on the first."""
    names = [n for n, e in EVIDENCE.items() if isinstance(e, Refused) and e.case.layout.world_size == ranks]
    entries = [EVIDENCE[name] for name in names]
    pretend = [entry.pretend for entry in entries if isinstance(entry, Refused)]
    found = run_distributed(attempts, ranks, [entry.case for entry in entries], pretend)
    return dict(zip(names, found[0], strict=True))


@pytest.mark.parametrize("rule", [name for name, e in EVIDENCE.items() if isinstance(e, Refused)])
def test_megatron_refuses_too(rule: str) -> None:
    evidence = EVIDENCE[rule]
    assert isinstance(evidence, Refused)
    result = made(evidence.case.layout.world_size)[rule]
    assert isinstance(result, Refusal), result
    assert result.stage == evidence.stage
    assert evidence.message in result.message


@pytest.mark.parametrize("rule", [name for name, e in EVIDENCE.items() if isinstance(e, Wrong)])
def test_megatron_computes_something_else(rule: str) -> None:
    from megatron.core import __version__

    if rule == "reshardable-buckets" and versions.minor(__version__) != "0.19":
        pytest.skip("mended after 0.19, where the rule no longer holds")
    evidence = EVIDENCE[rule]
    assert isinstance(evidence, Wrong)
    assert evidence.measured(evidence.case) == evidence.shown


def test_every_gpt_option_is_tried() -> None:
    assert set(_GPT_VALUES) == set(_GPT_LAYOUT)


def is_wrong(case: Case, result: Any) -> bool:
    """Refused, or another number of weights than meant."""
    return isinstance(result, Refusal) or result.parameters != count(case.config).trainable


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "number"),
    [(2, 80), (4, 80)],
)
def test_random_runs_that_are_refused_do_not_work(ranks: int, number: int) -> None:
    """On one pipeline stage, where a rank that gives up leaves none waiting for it."""
    cases = draw_many(refused(ranks).filter(lambda case: case.layout.pp == 1), number)
    results = run_distributed(attempts, ranks, cases, [nothing] * number)[0]
    works = {str(c): errors(c) for c, result in zip(cases, results, strict=True) if not is_wrong(c, result)}
    assert not works
