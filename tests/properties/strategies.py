"""Small models, layouts and options that nobody picked. Mostly the layout divides the sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingSchedule, check
from megatron_nemotron3.models import Nemotron3Config
from tests.properties.step import Case

#: Ranks of the largest world.
MAX_RANKS = 8
_FULL = ("--recompute-granularity", "full")
_MODULES = ("core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm")
#: What recompute can be: nothing, some kind of module, or whole layers.
RECOMPUTE: tuple[tuple[str, ...], ...] = (
    *((),) * 6,
    *(("--recompute-granularity", "selective", "--recompute-modules", name) for name in _MODULES),
    (*_FULL, "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    (*_FULL, "--recompute-method", "uniform", "--recompute-num-layers", "2"),
    (*_FULL, "--recompute-method", "block", "--recompute-num-layers", "1"),
    (*_FULL, "--recompute-method", "block", "--recompute-num-layers", "2"),
)


def draw_many(strategy: st.SearchStrategy[Any], number: int, draw: int | None = None) -> list[Any]:
    """The same `number` examples every time. For runs too dear to be shrunk.

    Hypothesis likes to change an example a little and try again; of six one is taken.

    Args:
        draw: seed of the draw; None: Hypothesis's own, of the strategy.
    """
    found: list[Any] = []

    @(seed(draw) if draw is not None else lambda function: function)
    @settings(
        max_examples=6 * number,
        derandomize=draw is None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found[5::6]


def multiples(of: int, most: int) -> st.SearchStrategy[int]:
    """`of` times 1 to `most`; one draw in eight ignores `of`."""
    return st.integers(0, 7).flatmap(
        lambda die: st.integers(1, most).map(lambda n: n * of) if die else st.integers(1, most * of)
    )


@st.composite
def layouts(draw: Callable[[Any], Any], ranks: int) -> ParallelLayout:
    """A layout of exactly `ranks` ranks."""
    sizes = dict.fromkeys(("tp", "cp", "pp", "dp"), 1)
    left = ranks
    for name in draw(st.permutations(sorted(sizes))):
        sizes[name] = draw(st.sampled_from([d for d in (1, 2, 3, 4) if left % d == 0]))
        left //= sizes[name]
    sizes["dp"] *= left
    grid = sizes["tp"] * sizes["cp"] * sizes["dp"]
    etp = draw(st.sampled_from([d for d in (1, 1, 2, 4) if grid % d == 0]))
    ep = draw(st.sampled_from([d for d in (1, 1, 2, 3, 4, 8) if grid % (d * etp) == 0]))
    vpp = draw(st.sampled_from((1, 1, 2, 3))) if sizes["pp"] > 1 else 1
    return ParallelLayout(**sizes, ep=ep, etp=etp, vpp=vpp)


@st.composite
def configs(draw: Callable[[Any], Any], layout: ParallelLayout) -> Nemotron3Config:
    """A model of up to eight decoder layers and two MTP depths."""
    tp, moe = layout.tp, layout.expert_ranks > 1
    # Two letters of one kind in a row are as good as any; a model that needs experts has them.
    pattern = draw(st.text("M*E-", min_size=max(1, layout.stages), max_size=max(4, layout.stages + 2)))
    mtp_pattern = draw(st.none() | st.sampled_from(("*E", "*", "M", "-", "ME*-")))
    if moe and "E" not in pattern + (mtp_pattern or ""):
        pattern = pattern[:-1] + "E"
    groups = draw(multiples(tp, 2))
    heads_per_group = draw(st.integers(1, 3)) * layout.cp
    query_groups = draw(st.sampled_from([g for g in range(1, 9) if g % tp == 0 or tp % g == 0]))
    experts = layout.ep * draw(st.integers(1, 4))
    hidden = 8 * draw(multiples(tp, 3))
    return Nemotron3Config(
        name="made-up",
        title="made up",
        pattern=pattern,
        hidden_size=hidden,
        vocab_size=draw(st.integers(20, 60)),
        num_attention_heads=query_groups * tp * draw(st.integers(1, 2)),
        num_query_groups=query_groups,
        kv_channels=draw(st.sampled_from((2, 4, 6))),
        mamba_num_heads=groups * heads_per_group,
        mamba_num_groups=groups,
        mamba_head_dim=draw(st.sampled_from((2, 4, 5))),
        mamba_state_dim=draw(st.sampled_from((1, 4, 7))),
        dense_ffn_hidden_size=draw(multiples(tp, 12)),
        num_moe_experts=experts,
        moe_router_topk=draw(st.integers(1, experts)),
        moe_ffn_hidden_size=draw(multiples(layout.etp, 8)),
        moe_shared_expert_intermediate_size=draw(multiples(tp, 8)),
        moe_latent_size=draw(st.none() | st.integers(1, 12)),
        moe_router_topk_scaling_factor=draw(st.sampled_from((1.0, 2.5))),
        moe_aux_loss_coeff=draw(st.sampled_from((0.0, 1e-2))),
        mtp_pattern=mtp_pattern,
        mtp_num_layers=draw(st.integers(1, 2)) if mtp_pattern else 0,
        mtp_use_repeated_layer=draw(st.booleans()),
        init_method_std=0.1,
    )


@st.composite
def cases(draw: Callable[[Any], Any], ranks: int) -> Case:
    """Anything, accepted by the rules or not."""
    layout = draw(layouts(ranks))
    config = draw(configs(layout))
    micro = draw(st.integers(1, 2))
    microbatches = draw(multiples(layout.pp if layout.vpp > 1 else 1, 2))
    schedule = TrainingSchedule(
        seq_length=draw(multiples(2 * layout.cp * layout.tp, 4)),
        micro_batch_size=micro,
        global_batch_size=micro * layout.dp * microbatches,
        train_iters=2,
        lr=1e-3,
        min_lr=1e-4,
        lr_decay_iters=2,
        lr_wsd_decay_iters=1,
    )
    dispatcher = draw(st.sampled_from(("alltoall", "allgather"))) if config.is_moe else None
    extra = (
        *(("--moe-token-dispatcher-type", dispatcher) if dispatcher else ()),
        *draw(st.sampled_from(RECOMPUTE)),
    )
    return Case(
        config=config,
        layout=layout,
        schedule=schedule,
        precision=draw(st.sampled_from(("fp32", "fp32", "fp32", "bf16"))),
        distributed_optimizer=draw(st.booleans()),
        extra=extra,
    )


def errors(case: Case) -> list[str]:
    """Names of the rules that refuse the case."""
    options = case.options()
    options.pop("distributed_optimizer")
    return [v.rule for v in check(Launch.of(case.config, case.layout, **options)) if v.severity == "error"]


@st.composite
def accepted(draw: Callable[[Any], Any], ranks: int) -> Case:
    """A case that no rule refuses."""
    case = draw(cases(ranks))
    assume(not errors(case))
    return case


@st.composite
def refused(draw: Callable[[Any], Any], ranks: int) -> Case:
    """A case that exactly one rule refuses, so that a refusal of Megatron's is about the same thing."""
    case = draw(cases(ranks))
    assume(len(errors(case)) == 1)
    return case


@st.composite
def misfits(draw: Callable[[Any], Any]) -> Case:
    """A model in a layout that was drawn for another one: sizes mostly do not fit."""
    case = draw(cases(draw(st.sampled_from((1, 2, 4, 6, 8)))))
    return replace(case, layout=draw(layouts(draw(st.sampled_from((2, 3, 4, 6, 8, 12))))))
