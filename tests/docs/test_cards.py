"""docs/reference/verification.md says what its table says, and the table names what exists."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from megatron_nemotron3.cli.table import COMMANDS
from tests.docs.cards import PAGE, ROOT, TABLE, Card, cards
from tests.docs.commands import missing

CARDS = cards(TABLE.read_text(encoding="utf-8"))
EACH = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.claim[:50])
#: Figures in a result or a page: 1.2e-05, 31,577,940,288, 0.49, 23. Not the 4 of FP4, nor the 2 of "TP 2".
FIGURE = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?(?![\w.]*\w)")


def subcommands() -> set[str]:
    """What may stand behind `nemotron3`."""
    return set(COMMANDS)


def figures(text: str) -> set[str]:
    """Numbers with a decimal point, an exponent or more than two digits."""
    found = {match.rstrip(",") for match in FIGURE.findall(text)}
    return {figure for figure in found if len(figure.replace(",", "")) > 2}


@EACH
def test_what_the_command_names_exists(card: Card) -> None:
    assert missing(card.command, ROOT, subcommands()) == []


@EACH
def test_figures_of_the_result_stand_on_the_page(card: Card) -> None:
    page = (ROOT / "docs" / card.where).read_text(encoding="utf-8")
    assert sorted(figures(card.result) - figures(page)) == [], card.where


@EACH
def test_versions_and_dates(card: Card) -> None:
    assert card.versions and card.claim and not card.claim.endswith(".")
    if card.date is not None:
        assert datetime.date(2026, 11, 21) <= card.date <= datetime.date.today()


def test_claims_are_said_once() -> None:
    assert len({card.claim for card in CARDS}) == len(CARDS) >= 30


def test_what_needs_a_gpu_is_unverified_unless_it_ran_on_one() -> None:
    """What ran on one has its command in the section of docs/measurements.md, which says on which."""
    page = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    section = page.partition("\n## On a GPU\n")[2].partition("\n## ")[0]
    gpu = re.compile(r"\bGPUs?\b(?<!without a GPU)|H[12]00|NCCL|-m gpu|--device cuda")
    found = [card for card in CARDS if gpu.search(f"{card.versions} {card.command}")]
    assert len(found) > 10
    for card in found:
        if card.verified:
            assert card.command in section and card.versions.startswith("one H200"), card.claim


def test_a_card_without_a_result_is_not_called_verified() -> None:
    for card in CARDS:
        block = PAGE.read_text(encoding="utf-8").partition(f"### {card.claim}\n")[2].partition("\n### ")[0]
        assert ("**verified" in block) == card.verified == bool(card.result and card.date)
        assert ("**unverified**" in block) != card.verified


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("make nothing", "make has no target nothing"),
        ("A=1 nemotron3 fly super", "nemotron3 has no command fly"),
        ("OMP_NUM_THREADS=1 python -m tests.docs.nothing", "no module tests.docs.nothing"),
        ("make lint && pytest tests/docs/test_nothing.py", "no file tests/docs/test_nothing.py"),
        ("pytest tests/docs/test_cards.py::test_nothing", "no test test_nothing in tests/docs/test_cards.py"),
    ],
)
def test_what_does_not_exist_is_found(command: str, words: str, tmp_path: Path) -> None:
    assert missing(command, ROOT, subcommands()) == [words]
