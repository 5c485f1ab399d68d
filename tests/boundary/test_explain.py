"""Plans as text and as a dictionary."""

from __future__ import annotations

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.plan import make_plan
from megatron_nemotron3.boundary.traffic import explain

TEXT = """\
once: every row is sent once, in equal parts; groups of ranks gather the rest among themselves
crossing                   160 bytes (bound 160) in 5 messages
busiest rank                80 bytes (bound 80): rank 3
in groups                  480 bytes received from 1 gather
local                        0 bytes copied within a rank

lane  sending ranks  rows
   0  0                 7
   1  1                 1
   2  2                 0
   3  3                 8

lane  receiving ranks  rows  then
   0  4-7                16  all-gather of 4 rows each

sender  receiver  rows  bytes  pieces
     0         4     4     40       1
     0         5     3     30       1
     1         5     1     10       1
     3         6     4     40       1
     3         7     4     40       1

rank  sends  bound  receives  bound  gathers
   0     70     70         0      0        0
   1     10     10         0      0        0
   2      0      0         0      0        0
   3     80     80         0      0        0
   4      0      0        40     40      120
   5      0      0        40     40      120
   6      0      0        40     40      120
   7      0      0        40     40      120"""


def test_the_text_of_a_plan() -> None:
    plan = make_plan(Layout.of(dp=4), Layout.of(tp=4, offset=4), [7, 1, 0, 8], row_bytes=10)
    assert explain(plan) == TEXT


def test_the_way_back_and_shared_ranks_are_told() -> None:
    plan = make_plan(Layout.of(), Layout.of(tp=2, offset=1), [3], row_bytes=10)
    assert "broadcast from 1" in explain(plan)
    assert "in 1 message\n" in explain(plan.backward)
    shared = explain(make_plan(Layout.of(dp=2), Layout.of(tp=2), [3, 4], row_bytes=10))
    assert shared.startswith("copies: the modules share ranks")
    assert "local                       70 bytes" in shared and "70 bytes (bound 70) in 2 messages" in shared


def test_long_tables_show_both_ends() -> None:
    plan = make_plan(Layout.of(dp=256), Layout.of(tp=8, dp=128, offset=256), [256] * 256, row_bytes=5376)
    text = explain(plan, lines=5).splitlines()
    assert len(text) < 50 and max(map(len, text)) <= 100
    assert "… 251 more …" in text and "… 1,275 more …" in text
    assert text[-1].split()[0] == "1279" and "   0  0               256" in text
    assert "… 1,279 more" in explain(plan, lines=1)
    assert "more" not in explain(plan, lines=2000).partition("bytes copied")[2]
