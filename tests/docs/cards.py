"""Verification cards: docs/verification.md, from docs/verification.toml.

python -m tests.docs.cards > docs/verification.md

A card is a claim that a page makes, the command that shows it, what it was run with, when, and what came
out; or why nobody could run it. A card has a date and a result, or it is unverified, nothing between.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "verification.toml"
PAGE = TABLE.with_suffix(".md")

_HEAD = """\
# Verification cards

What this project says of itself, with the command that shows it, what it was run with, when, and what came
out. What nobody could run yet is *unverified*, with the reason. The date is that of the run, or where a page
gives none that of the commit that brought the figures. Commands are run from the root of a checkout;
`-m "not full"` is the part of the tests that `make test` runs.

Generated: `python -m tests.docs.cards > docs/verification.md`, from docs/verification.toml; a test holds that
files, tests and subcommands in a command exist and that a result's figures stand on the page it names.

| | verified | unverified |
|-|-:|-:|
"""


@dataclass(frozen=True)
class Card:
    """One claim."""

    area: str
    claim: str
    command: str
    #: What it ran with, or would have to.
    versions: str
    #: The page of docs/ that makes the claim.
    where: str
    date: datetime.date | None = None
    result: str = ""
    #: Why there is no result.
    unverified: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a card that is neither verified nor unverified, or both."""
        if bool(self.result) == bool(self.unverified) or bool(self.result) != bool(self.date):
            raise ValueError(f"'{self.claim}': give a date and a result, or the reason in `unverified`")

    @property
    def verified(self) -> bool:
        return bool(self.result)


def cards(text: str) -> tuple[Card, ...]:
    """Cards of a TOML text, in order. Raises ValueError or TypeError for a card with wrong fields."""
    table: dict[str, Any] = tomllib.loads(text)
    named: dict[str, str] = table["versions"]
    found = []
    for area in table["area"]:
        for fields in area["card"]:
            word, *rest = re.split(r"(?=[,;])", fields["versions"], maxsplit=1)
            versions = "".join((named.get(word, word), *rest))
            found.append(Card(**{**fields, "area": area["name"], "versions": versions}))
    return tuple(found)


def markdown(found: tuple[Card, ...]) -> str:
    """The page."""
    areas = list(dict.fromkeys(card.area for card in found))
    lines = []
    for area in areas:
        verified = sum(card.verified for card in found if card.area == area)
        lines.append(f"| {area} | {verified} | {sum(card.area == area for card in found) - verified} |")
    total = sum(card.verified for card in found)
    lines.append(f"| all | {total} | {len(found) - total} |")
    for area in areas:
        lines += ["", f"## {area}"]
        for card in found:
            if card.area == area:
                lines += ["", *_card(card)]
    return _HEAD + "\n".join(lines) + "\n"


def _card(card: Card) -> list[str]:
    status = f"verified {card.date}" if card.verified else "unverified"
    return [
        f"### {card.claim}",
        "",
        "```bash",
        card.command,
        "```",
        "",
        f"- **{status}**: {card.result or card.unverified}",
        f"- {'with' if card.verified else 'needs'}: {card.versions}",
        f"- page: [{card.where}]({card.where})",
    ]


if __name__ == "__main__":
    print(markdown(cards(TABLE.read_text(encoding="utf-8"))), end="")
