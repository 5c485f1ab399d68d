"""The pattern language: against Megatron's own parser, and the stage cut against exhaustive search."""

from __future__ import annotations

from itertools import combinations
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.hybrid import hybrid_layer_allocation as megatron

from megatron_nemotron3.models import ULTRA
from megatron_nemotron3.models.config import MOST
from megatron_nemotron3.models.pattern import (
    KINDS,
    MOST_LAYERS,
    HybridPattern,
    count,
    cut,
    join_stages,
    parse,
    validate,
)

LAYERS = st.text("M*E-", min_size=1, max_size=8)
# Structured text, so that a good share is valid; then any text over the alphabet and two strangers.
WELL_FORMED = st.builds(
    lambda stages, mtp, depths, empty_tail: (
        "|".join(stages + [""] * (empty_tail and depths > 0)) + f"/{mtp}" * depths
    ),
    st.lists(LAYERS, min_size=1, max_size=4),
    LAYERS,
    st.integers(0, 3),
    st.booleans(),
)
ANY_TEXT = st.text("M*E-|/Xg", max_size=10)
#: Text with groups, of which a good share is valid.
GROUPED = st.lists(
    st.one_of(st.sampled_from("M*E-|"), st.text("M*E-|]", max_size=4).map(lambda inside: f"[{inside}]")),
    min_size=1,
    max_size=5,
).map("".join)
#: Megatron-LM #4798 knows groups; 0.19 and main of 2026-08-22 do not.
MEGATRON_GROUPS = hasattr(megatron, "is_layer_group")


def ours(text: str) -> HybridPattern | None:
    try:
        return parse(text)
    except ValueError:
        return None


def theirs(text: str) -> megatron.ParsedHybridPattern | None:
    try:
        return megatron.parse_hybrid_pattern(text)
    except ValueError:
        return None


@settings(max_examples=300)
@given(WELL_FORMED)
def test_megatron_builds_the_same_layers(text: str) -> None:
    parsed, reference = parse(text), megatron.parse_hybrid_pattern(text)
    assert str(parsed) == text
    assert join_stages(parsed.stages, parsed.mtp) == text
    assert (parsed.mtp_pattern, parsed.mtp_num_layers) == (reference.mtp_pattern, reference.mtp_num_depths)
    assert len(parsed.stages) == megatron.get_hybrid_total_pipeline_segment_count(text)
    assert parsed.num_layers == megatron.get_hybrid_total_layer_count(text)
    offset = 0
    for index, stage in enumerate(parsed.stages):  # without a pipeline group the virtual stage is the stage
        with patch.object(megatron, "log_on_each_pipeline_stage"):  # its log wants process groups
            layers, begin = megatron.select_pipeline_segment(reference.main_pattern, None, index)
        assert (layers, begin) == (list(stage), offset)
        offset += len(stage)
    assert count(text) == {k: megatron.get_hybrid_layer_counts(text)[k] for k in KINDS}


@settings(max_examples=500)
@given(ANY_TEXT)
def test_accepts_what_megatron_accepts_except_empty_parts(text: str) -> None:
    parsed, reference = ours(text), theirs(text)
    if parsed is not None:
        assert reference is not None
        assert reference.main_pattern == "|".join(parsed.stages)
        assert reference.mtp_pattern == parsed.mtp_pattern
    elif reference is not None and set(text) <= set("M*E-|/"):
        main, *mtp = text.split("/")
        stages = main.split("|")
        refused = not any(stages) or "" in stages[:-1] or (stages[-1] == "" and not mtp) or "" in mtp
        assert refused, f"Megatron accepts {text!r} and no part of it is empty"


@settings(max_examples=300)
@given(GROUPED)
def test_groups(text: str) -> None:
    """A group changes neither layers nor stages, and its layers share a number."""
    parsed = ours(text)
    if parsed is None:
        return
    plain = parse(text.replace("[", "").replace("]", ""))
    assert str(parsed) == text and (parsed.stages, parsed.mtp) == (plain.stages, plain.mtp)
    assert plain.numbers == tuple(range(plain.num_layers))
    assert len(set(parsed.numbers)) == parsed.num_layers - sum(
        end - first - 1 for first, end in parsed.groups
    )
    for first, end in parsed.groups:
        assert set(parsed.numbers[first:end]) == {parsed.numbers[first]}
        assert set(plain.main[first : end - 1]) <= set("M*-")


@pytest.mark.skipif(not MEGATRON_GROUPS, reason="this megatron-core has no groups (Megatron-LM #4798)")
@settings(max_examples=300)
@given(GROUPED)
def test_megatron_makes_the_same_groups(text: str) -> None:
    """Ours refuses in addition: empty stages, and layers of a group whose names would be one."""
    parsed = ours(text)
    try:
        segments = [megatron.validate_segment_layers(stage) for stage in text.split("|")]
    except ValueError:
        assert parsed is None
        return
    if parsed is not None:
        assert [megatron.flatten_layer_type_list(one) for one in segments] == [list(s) for s in parsed.stages]
        sizes = [megatron.get_layer_type_physical_count(item) for one in segments for item in one]
        assert parsed.numbers == tuple(n for n, size in enumerate(sizes) for _ in range(size))


@pytest.mark.skipif(MEGATRON_GROUPS, reason="this megatron-core has groups")
def test_megatron_without_groups_refuses_them() -> None:
    """So nothing is trained as something else; its message names the bracket."""
    with pytest.raises(ValueError, match=r"'\['"):
        megatron.parse_hybrid_pattern("M[*E]")


def test_numbers_of_groups() -> None:
    assert parse("M[*E]|[M*-]E/*E").numbers == (0, 1, 1, 2, 2, 2, 3)
    assert parse("M[*E]|[M*-]E/*E").groups == ((1, 3), (3, 6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("M[*E", r"the group \[\*E is not closed"),
        ("M*E]", "'\\]' at position 3 .* closes no group"),
        ("M[]", "'\\]' at position 2 .* closes an empty group"),
        ("[M[*]]", "'\\[' at position 2 .* opens a group inside a group"),
        ("[M|*]", "'\\|' at position 2 .* cuts a group"),
        ("[E*]", "'\\*' at position 2 .* follows E"),
        ("[MM]", "'M' at position 2 .* same names in a checkpoint"),
        ("[-E]", "'E' at position 2 .* same names in a checkpoint"),
        ("M/[*E]", "'\\[' at position 2"),
    ],
)
def test_errors_of_groups(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_megatron_refuses_strangers_too() -> None:
    with pytest.raises(ValueError, match="'X' at position 2 .*use M \\* E -"):
        validate("MEX")
    assert theirs("MEX") is None
    # Legal in Megatron, not layer kinds of this family.
    assert theirs("MG") is not None and ours("MG") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no decoder layer"),
        ("/*E", "no decoder layer"),
        ("M||E", "stage 1 of 3 is empty"),
        ("|ME", "stage 0 of 2 is empty"),
        ("ME|", "stage 1 of 2 is empty"),
        ("ME/", "MTP depth 1 is empty"),
        ("ME/*E/*M", "depth 1 is '\\*E' but depth 2 is '\\*M'"),
        ("ME/*|E", "'\\|' at position 4"),
        ("ME/*E/*x", "'x' at position 7"),
    ],
)
def test_errors_say_where(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_empty_pattern_and_cuts_are_no_layers() -> None:
    with pytest.raises(ValueError, match="empty layer pattern"):
        validate("")
    with pytest.raises(ValueError, match="'\\|' at position 1"):
        validate("M|E")


def test_last_stage_may_hold_mtp_alone() -> None:
    assert parse("MEM|*E|/*E/*E") == HybridPattern(("MEM", "*E", ""), ("*E", "*E"))
    assert join_stages(["MEM", "*E"], ["*E", "*E"]) == "MEM|*E/*E/*E"
    with pytest.raises(ValueError, match="stage 1 of 2 is empty"):
        join_stages(["MEM", ""])


@settings(max_examples=150)
@given(
    st.text("M*E-", min_size=1, max_size=9),
    st.integers(1, 9),
    st.fixed_dictionaries({kind: st.integers(0, 9) for kind in KINDS}),
    st.integers(0, 20),
)
def test_cut_is_the_best_of_all_cuts(pattern: str, stages: int, cost: dict[str, int], last: int) -> None:
    if stages > len(pattern):
        with pytest.raises(ValueError, match=f"cannot cut {len(pattern)} layers into {stages} stages"):
            cut(pattern, stages, [cost[kind] for kind in pattern])
        return

    def quality(segments: tuple[str, ...]) -> tuple[int, int]:
        costs = [sum(cost[kind] for kind in segment) for segment in segments]
        costs[-1] += last
        return max(costs), sum(len(segment) ** 2 for segment in segments)

    every = [
        tuple(pattern[a:b] for a, b in zip((0, *at), (*at, len(pattern)), strict=True))
        for at in combinations(range(1, len(pattern)), stages - 1)
    ]
    result = cut(pattern, stages, [cost[kind] for kind in pattern], last_stage_extra=last)
    assert "".join(result) == pattern and len(result) == stages and all(result)
    assert quality(result) == min(map(quality, every))


def test_cut_with_fractional_costs_is_not_fooled_by_rounding() -> None:
    # 0.1 + 0.2 + 0.3 differs from 0.3 + 0.2 + 0.1 in the last bit: still a tie, broken by layer counts.
    assert cut("M*E" * 4, 4, [0.1, 0.2, 0.3] * 4) == ("M*E",) * 4


def test_cut_with_given_costs() -> None:
    equal = cut(ULTRA.pattern, 8, [1.0] * len(ULTRA.pattern))
    assert [len(s) for s in equal] == [14, 14, 14, 14, 13, 13, 13, 13]
    assert [len(s) for s in cut("M" * 16, 4, [1.0] * 16, last_stage_extra=4)] == [5, 5, 5, 1]
    with pytest.raises(ValueError, match="into 0 stages: use 1 to 2"):
        cut("ME", 0, [1.0, 1.0])
    assert cut("EEEE", 2, [3, 1, 1, 1]) == ("E", "EEE")
    with pytest.raises(ValueError, match="cost of 'M' is -1.0"):
        cut("MM", 2, [-1.0, 1.0])
    with pytest.raises(ValueError, match="1 costs given for the 2 layers of pattern 'MM'"):
        cut("MM", 2, [1.0])
    with pytest.raises(ValueError, match="last_stage_extra is nan"):
        cut("MM", 2, [1.0, 1.0], last_stage_extra=float("nan"))


def test_sizes_of_which_tables_are_made_have_limits() -> None:
    """Published models have a tenth of them; costs are counted layer by layer."""
    validate("M" * MOST_LAYERS)
    with pytest.raises(ValueError, match="layer pattern of 1,000,000 layers: a model has at most 1,280"):
        validate("M" * 1_000_000)
    for field in MOST:
        with pytest.raises(ValueError, match=f"{field}=1,000,000,000: the tables of a model have at most"):
            ULTRA.but(**{field: 10**9})
