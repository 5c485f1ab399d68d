"""What Megatron makes of performance options that the rules refuse, as a sentence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.properties.measure import attempts, nothing, outcome
from tests.properties.step import Case, Outcome, Refusal

#: Words whose value would be refused if Megatron read it, and the words with which it does.
_IGNORED = (
    (("--recompute-modules", "moe_act"), ("--recompute-granularity", "selective")),
    (("--cuda-graph-modules", "moe_preprocess"), ("--cuda-graph-impl", "transformer_engine")),
    (("--offload-modules", "attn_proj"), ("--fine-grained-activation-offloading",)),
    (("--moe-flex-dispatcher-backend", "hybridep"), ("--moe-token-dispatcher-type", "flex")),
)


def without_effect(case: Case) -> str:
    """Each option alone trains as if it were not there; with the one that it needs it is refused."""
    alone = [replace(case, extra=words) for words, _ in _IGNORED]
    both = [replace(case, extra=(*words, *needed)) for words, needed in _IGNORED]
    cases = [replace(case, extra=()), *alone, *both]
    plain, *made = run_distributed(attempts, 1, cases, [nothing] * len(cases))[0]
    assert isinstance(plain, Outcome), plain
    assert all(result == plain for result in made[: len(alone)]), made
    read = made[len(alone) :]
    assert all(isinstance(result, Refusal) for result in read), read
    return f"trains the same with {len(alone)} such options, refuses all of them together with what they need"


def layer_offloading(case: Case) -> str:
    """The run with and without the option, and whether anything was kept on the CPU instead."""
    assert outcome(case) == outcome(replace(case, extra=()))
    import inspect

    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer import transformer_block

    has = ["offload_context" in inspect.getsource(module) for module in (transformer_block, hybrid_block)]
    assert has == [True, False], has
    return "the same run; the hybrid stack has no offload context"


def packed_replay(case: Case) -> str:
    """What a replay of an attention layer with the borders of documents ends in."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layer = SimpleNamespace(config=SimpleNamespace(cuda_graph_modules=[]))
    try:
        TransformerLayer._te_cuda_graph_replay(layer, packed_seq_params=object())
    except AssertionError as error:
        return f"replay: AssertionError: {str(error).split('. ')[0]}"
    return "replays"


def hybridep_groups(case: Case) -> str:
    """The nodes of the first expert group that is not in one NVLink domain."""
    from megatron.core.parallel_state import RankGenerator

    layout, domain = case.layout, 8
    ranks = RankGenerator(
        tp=layout.etp, ep=layout.ep, dp=layout.world_size // layout.expert_ranks, pp=1, cp=1,
        order="tp-cp-ep-dp-pp", rank_offset=0,
    ).get_ranks("tp-ep")  # fmt: skip
    crossing = next(group for group in map(sorted, ranks) if len({rank // domain for rank in group}) > 1)
    return f"ranks {crossing[0]} to {crossing[-1]} are an expert group, on NVLink domains 0 and 1"


def fused_router(case: Case) -> str:
    """The fused choice of experts."""
    import torch
    from megatron.core.transformer.moe import moe_utils

    assert not moe_utils.HAVE_TE
    try:
        moe_utils.topk_routing_with_score_function(torch.zeros(2, 4), 2, fused=True)
    except ValueError as error:
        return f"choosing experts: ValueError: {error}"
    return "chooses experts"
