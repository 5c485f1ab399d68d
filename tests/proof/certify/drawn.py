"""Legal launches that nobody picked: model, layout and options that no rule refuses, in Megatron's words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from megatron_nemotron3.launch.rules import RuleError
from tests.properties.step import Case
from tests.properties.strategies import cases, errors

#: Worlds of the launches; the proxy has at most 8 ranks.
WORLDS = (2, 4, 8, 8, 12, 16, 16, 32, 32, 64, 64)
_PACKED = ("--sft", "--calculate-per-token-loss")
_DOCUMENTS = ("--dataloader-inter-document-masking",)


@dataclass(frozen=True)
class RandomLaunch:
    """A command line and its world."""

    words: tuple[str, ...]
    world_size: int
    vocab_size: int


@st.composite
def launches(draw: Callable[[Any], Any]) -> RandomLaunch:
    """A launch that no rule refuses."""
    case = draw(cases(draw(st.sampled_from(WORLDS))))
    precision, backend = draw(
        st.sampled_from((("fp32", "torch"), ("bf16", "torch"), ("bf16", "te"), ("nvfp4", "te")))
    )
    options = (*case.extra, *_data(draw, case), *_optimizer(draw, case), *_router(draw, case))
    if precision == "nvfp4":
        case = _wide(case)
    case = replace(
        case,
        precision=precision,
        backend=backend,
        gpu=draw(st.sampled_from((None, "gb200", "h100"))) if backend == "te" else None,
        extra=options,
        te_precision_config_file="precision.yaml" if precision == "nvfp4" else None,
    )
    assume(not errors(case))
    try:
        words = case.argv()
    except RuleError:  # a rule about a part that `errors` has at its default
        assume(False)
    return RandomLaunch(tuple(words), case.layout.world_size, case.config.vocab_size)


def _data(draw: Callable[[Any], Any], case: Case) -> tuple[str, ...]:
    """Packing, masks and what the loss is divided by."""
    return draw(  # type: ignore[no-any-return]
        st.sampled_from(((), (), ("--calculate-per-token-loss",), ("--eod-mask-loss",), _PACKED, _DOCUMENTS))
    )


def _optimizer(draw: Callable[[Any], Any], case: Case) -> tuple[str, ...]:
    """Communication that overlaps, several instances, and what a step does."""
    words: tuple[str, ...] = ()
    if draw(st.booleans()):
        words += ("--overlap-grad-reduce",)
        words += ("--overlap-param-gather",) if case.distributed_optimizer and draw(st.booleans()) else ()
    copies = case.layout.dp * case.layout.cp
    if case.distributed_optimizer and copies % 2 == 0 and draw(st.booleans()):
        words += ("--num-distributed-optimizer-instances", "2")
    words += draw(st.sampled_from(((), ("--clip-grad", "0.5"), ("--weight-decay", "0.1"))))
    return words


def _router(draw: Callable[[Any], Any], case: Case) -> tuple[str, ...]:
    """What else the router does."""
    words: tuple[str, ...] = ()
    if not case.config.is_moe:
        return words
    words += draw(st.sampled_from(((), ("--moe-z-loss-coeff", "1e-3"))))
    words += draw(st.sampled_from(((), (), ("--moe-router-dtype", "fp32"))))
    return words


def _wide(case: Case) -> Case:
    """The case with widths and tokens in blocks of 32, as 4-bit products need them."""
    config = case.config
    names = ("hidden_size", "kv_channels", "mamba_head_dim", "dense_ffn_hidden_size", "moe_ffn_hidden_size")
    names += ("moe_shared_expert_intermediate_size", "moe_latent_size")
    wide = {name: 32 * value for name in names if (value := getattr(config, name)) is not None}
    groups = config.mamba_num_groups
    state = {"mamba_state_dim": 32, "mamba_num_heads": 32 * config.mamba_num_heads // groups * groups}
    schedule = replace(case.schedule, seq_length=32 * case.schedule.seq_length)
    return replace(case, config=config.but(**wide, **state), schedule=schedule)
