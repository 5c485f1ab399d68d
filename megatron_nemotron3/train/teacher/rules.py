"""String rules: which tokens of the teacher a token of the student stands for, and with which weights.

The rules and their numbers are those of NeMo-RL's tools (tools/x_token at 7ea279a), by the authors of
X-Token, arXiv 2605.21699; docs/xtoken.md says where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_nemotron3.train.teacher.tokens import ByteVocabulary

#: Weight of a piece, relative to the piece before it.
DECAY = 0.1
#: Pieces of a token that count, and weights of a row that are kept.
PIECES = 4
WIDTH = 4

#: The rules, in the order in which they are tried.
SPECIAL, SAME, SPLIT, JOINED, NONE = "special", "same", "split", "joined", "none"
RULES = {
    SPECIAL: "a special token with the same name or role",
    SAME: "the token with the same bytes",
    SPLIT: "the tokens that the teacher splits its text into",
    JOINED: "tokens of the teacher that the student splits into it and others",
    NONE: "no token of the teacher",
}


class TokenWeights(NamedTuple):
    """Weights of one token of the student: (token of the teacher, weight), largest first, of sum 1."""

    rule: str
    weights: tuple[tuple[int, float], ...]


def special_pairs(student: ByteVocabulary, teacher: ByteVocabulary) -> dict[int, int]:
    """Special token of the student -> that of the teacher with its name, or else its role."""
    names = {teacher.tokens[i]: i for i in sorted(teacher.special, reverse=True)}
    pairs = {i: names[name] for i in student.special if (name := student.tokens[i]) in names}
    for role, i in student.roles.items():
        if role in teacher.roles:
            pairs.setdefault(i, teacher.roles[role])
    return pairs


def rows(
    student: ByteVocabulary,
    teacher: ByteVocabulary,
    *,
    pieces: int = PIECES,
    width: int = WIDTH,
    joined: bool = True,
) -> list[TokenWeights]:
    """Apply the rules to every token of the student."""
    special = special_pairs(student, teacher)
    found: dict[int, dict[int, float]] = dict(_split(student, teacher, pieces))
    split = set(found)
    for token, parts in _split(teacher, student, pieces) if joined else ():
        for part, weight in parts.items():
            own = found.setdefault(part, {})
            own[token] = own.get(token, 0.0) + weight
    result = []
    for token, content in enumerate(student.tokens):
        if token in special:
            row = TokenWeights(SPECIAL, ((special[token], 1.0),))
        elif token in student.special or not content:
            row = TokenWeights(NONE, ())
        elif (same := teacher.ids.get(content)) is not None:
            row = TokenWeights(SAME, ((same, 1.0),))
        elif token in found:
            kept = sorted(found[token].items(), key=lambda pair: (-pair[1], pair[0]))[:width]
            total = sum(weight for _, weight in kept)
            rule = SPLIT if token in split else JOINED
            row = TokenWeights(rule, tuple((t, weight / total) for t, weight in kept))
        else:
            row = TokenWeights(NONE, ())
        result.append(row)
    return result


def _split(
    source: ByteVocabulary, target: ByteVocabulary, pieces: int
) -> Iterator[tuple[int, dict[int, float]]]:
    """Ordinary tokens of `source` that `target` lacks, with the weights of the tokens that spell them."""
    ordinary = ((i, text) for i, text in enumerate(source.tokens) if text and i not in source.special)
    lacking = [(i, text) for i, text in ordinary if text not in target.ids]
    for (i, _), ids in zip(lacking, target.encode(text for _, text in lacking)):
        weights: dict[int, float] = {}
        total = sum(DECAY**place for place in range(len((ids or [])[:pieces])))
        for place, part in enumerate((ids or [])[:pieces]):
            weights[part] = weights.get(part, 0.0) + DECAY**place / total
        if weights:
            yield i, weights
