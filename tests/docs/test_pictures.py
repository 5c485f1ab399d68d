"""The pictures say what Megatron does with a layout, and their text fits. test_pages.py: they are fresh."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_nemotron3.launch import Launch, ParallelLayout, check
from megatron_nemotron3.layers.context_parallel import zigzag
from megatron_nemotron3.models import NANO, SUPER, ULTRA
from tests.docs import pictures
from tests.docs.svg import WIDTH, Canvas

LAYOUTS = (pictures.SMALL, pictures.PUBLISHED, ParallelLayout(tp=4, cp=1, pp=2, dp=6, ep=2, etp=4))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_are_where_megatron_puts_them(layout: ParallelLayout) -> None:
    """Ranks that differ in one dimension alone are a process group of it."""
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    routed = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=order)
    for generator, names in (
        (dense, {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}),
        (routed, {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}),
    ):
        for theirs, ours in names.items():
            for group in generator.get_ranks(theirs):
                places = [pictures.place(layout, rank) for rank in group]
                assert [place[ours] for place in places] == list(range(getattr(layout, ours)))
                others = set(names.values()) - {ours}
                assert all(place[name] == places[0][name] for place in places for name in others)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_of_the_sequence_are_what_a_rank_reads(layout: ParallelLayout) -> None:
    if layout.cp == 1:
        return
    for cp in range(layout.cp):
        parts = [int(position) + 1 for position in zigzag((0, 2 * layout.cp), layout.cp, cp)]
        assert pictures._chunks(layout, cp) == f"{parts[0]} and {parts[1]}"


@pytest.mark.parametrize(("config", "layout"), [(SUPER, pictures.SMALL), (NANO, pictures.PUBLISHED)], ids=str)
def test_the_layouts_can_be_launched(config, layout: ParallelLayout) -> None:
    assert [found for found in check(Launch.of(config, layout)) if found.severity == "error"] == []


def test_every_layer_is_drawn() -> None:
    drawn = [
        text.text
        for text in ElementTree.fromstring(pictures.patterns()).iter("{http://www.w3.org/2000/svg}text")
        if text.text in tuple("M*E")
    ]
    legend = "M*E"
    layers = "".join(config.pattern + (config.mtp_pattern or "") for config in (NANO, SUPER, ULTRA))
    assert "".join(drawn) == legend + layers


def test_text_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="shorten it"):
        Canvas("").box(0, 0, 60, 20, "M", "a text that is too wide")
    with pytest.raises(ValueError, match="shorten it"):
        Canvas("").text(WIDTH - 20, 10, "cut off")
