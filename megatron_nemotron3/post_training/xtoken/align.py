"""The teacher's tokens of the student's text, and the spans whose borders both tokenizations share.

Both sequences spell the same bytes, so a border is shared where the two have spelled equally many. The spans
between neighbouring shared borders are the finest that consist of whole tokens on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING

from megatron_nemotron3.train.teacher.projection import special_pairs
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary

if TYPE_CHECKING:
    import torch

#: First symbol of a special token; smaller ones are bytes.
_SPECIAL = 0x10000


@dataclass(frozen=True)
class Alignment:
    """The span of the token that each position predicts.

    Attributes:
        student: number of the span by position of the student, -1 for none; any shape, int64.
        teacher: the same for the teacher's positions.
        spans: number of spans; each has positions on both sides.
        sizes: positions of each span on the two sides, [spans] each; None: counted here.
    """

    student: torch.Tensor
    teacher: torch.Tensor
    spans: int
    sizes: Sequence[torch.Tensor] = ()

    def __post_init__(self) -> None:
        import torch

        if self.sizes:  # those of a whole, which need not lie in this part
            return
        counts = [torch.bincount(ids.flatten() + 1)[1:] for ids in (self.student, self.teacher)]
        for side, found in zip(("student", "teacher"), counts):
            if len(found) != self.spans or not found.all():
                raise ValueError(f"alignment of {self.spans} spans: the {side}'s positions do not cover them")
        object.__setattr__(self, "sizes", counts)


class Aligner:
    """Retokenizes the student's sequences for a teacher and aligns the two."""

    def __init__(self, student: ByteVocabulary, teacher: ByteVocabulary) -> None:
        self.student, self.teacher = student, teacher
        #: Special tokens of the student that the teacher has; others spell nothing.
        self.pairs = special_pairs(student, teacher)

    def retokenize(self, ids: Sequence[int]) -> list[int]:
        """Return the teacher's tokens of the same text, with its special tokens in the same places.

        Text that no token of the teacher can spell is left out.
        """
        texts: list[list[int]] = [[]]
        between: list[int] = []
        for token in ids:
            if token in self.pairs:
                between.append(self.pairs[token])
                texts.append([])
            else:
                texts[-1].append(token)
        parts = self.teacher.encode(map(self.student.text, texts))
        result = list(parts[0] or [])
        for special, part in zip(between, parts[1:]):
            result += [special, *(part or [])]
        return result

    def spans(self, student: Sequence[int], teacher: Sequence[int]) -> list[tuple[range, range]]:
        """Return the tokens of each span, by their places in the two sequences.

        Where the sequences spell different text, only its common beginning and end have spans; pairs of
        special tokens, if they are the same in both, separate texts.
        """
        ours = [
            chr(_SPECIAL + self.pairs[i]) if i in self.pairs else _symbols(self.student, i) for i in student
        ]
        paired = set(self.pairs.values())
        theirs = [chr(_SPECIAL + i) if i in paired else _symbols(self.teacher, i) for i in teacher]
        ours_special = [place for place, text in enumerate(ours) if text[:1] >= chr(_SPECIAL)]
        theirs_special = [place for place, text in enumerate(theirs) if text[:1] >= chr(_SPECIAL)]
        if [ours[i] for i in ours_special] != [theirs[i] for i in theirs_special]:
            ours_special = theirs_special = []
        found: list[tuple[range, range]] = []
        s = t = 0
        for s_end, t_end in zip([*ours_special, len(ours)], [*theirs_special, len(theirs)]):
            found += _shared(ours, range(s, s_end), theirs, range(t, t_end))
            if s_end < len(ours) and ours_special:
                found.append((range(s_end, s_end + 1), range(t_end, t_end + 1)))
            s, t = s_end + 1, t_end + 1
        return found

    def batch(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, Alignment]:
        """Return the teacher's input for the student's sequences, and the alignment of the predictions.

        Args:
            sequences: ids of [b, s + 1]: the student's tokens and the last label. The logits at a position
                predict the next id.

        Returns:
            tokens [b, m] int64, padded with token 0 at their end, and the alignment of [b, s] with [b, m].
        """
        import torch

        others = [self.retokenize(ids) for ids in sequences]
        tokens = torch.zeros(len(sequences), max(1, max(map(len, others)) - 1), dtype=torch.int64)
        ours, theirs = torch.full((len(sequences), len(sequences[0]) - 1), -1), torch.full_like(tokens, -1)
        count = 0
        for row, (ids, other) in enumerate(zip(sequences, others)):
            count = self._fill((tokens[row], ours[row], theirs[row]), ids, other, count)
        return tokens, Alignment(ours, theirs, count)

    def pack(
        self, documents: Sequence[tuple[int, Sequence[int]]], length: int, each: int
    ) -> tuple[torch.Tensor, list[int], Alignment]:
        """Return the teacher's row for a packed row of the student, document by document.

        Args:
            documents: place of each in the student's row; its tokens, with the last label if it has one.
            length: of the student's row, s.
            each: the teacher's documents are padded to multiples of this.

        Returns:
            tokens [1, m] int64, the borders of the teacher's documents from 0 to m, and the alignment of
            [1, s] with [1, m].
        """
        import torch

        others = [self.retokenize(ids) for _, ids in documents]
        borders = [0]
        for other in others:
            borders.append(borders[-1] - (1 - max(2, len(other))) // each * each)
        tokens, ours = torch.zeros(1, borders[-1], dtype=torch.int64), torch.full((1, length), -1)
        theirs, count = torch.full_like(tokens, -1), 0
        for (place, ids), other, start in zip(documents, others, borders):
            places = tokens[0, start:], ours[0, place:], theirs[0, start:]
            count = self._fill(places, ids, other, count)
        return tokens, borders, Alignment(ours, theirs, count)

    def _fill(
        self,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        student: Sequence[int],
        teacher: Sequence[int],
        count: int,
    ) -> int:
        """Write the teacher's input, and a span's number to the positions that predict its tokens."""
        import torch

        tokens, ours, theirs = places
        tokens[: max(0, len(teacher) - 1)] = torch.tensor(teacher[:-1], dtype=torch.int64)
        for s, t in self.spans(student, teacher):
            if s.start and t.start:
                ours[s.start - 1 : s.stop - 1] = theirs[t.start - 1 : t.stop - 1] = count
                count += 1
        return count


def _symbols(vocabulary: ByteVocabulary, token: int) -> str:
    return vocabulary.text([token]).decode("latin-1")


def _shared(
    ours: Sequence[str], our_range: range, theirs: Sequence[str], their_range: range
) -> Iterator[tuple[range, range]]:
    """Spans of two stretches of tokens. Tokens that spell nothing are in no span."""
    a, ends_a = _ends(ours, our_range)
    b, ends_b = _ends(theirs, their_range)
    same = a == b
    first = len(a) if same else len(commonprefix([a, b]))
    last = 0 if same else min(len(commonprefix([a[::-1], b[::-1]])), min(len(a), len(b)) - first)
    tail_a, tail_b = len(a) - last, len(b) - last
    # Shared borders: bytes spelled by each, and whether they are counted from the end.
    borders = [(0, 0, False)]
    if tail_a == 0 and tail_b in ends_b:
        borders.append((0, tail_b, True))
    for end in ends_a:
        if end <= first and end in ends_b:
            borders.append((end, end, False))
        elif end > first and end >= tail_a and end - tail_a + tail_b in ends_b:
            borders.append((end, end - tail_a + tail_b, True))
    for (a0, b0, tail), (a1, b1, same_side) in pairwise(borders):
        if tail == same_side:
            yield (
                range(_start(ours, ends_a.get(a0, our_range.start - 1)), ends_a[a1] + 1),
                range(_start(theirs, ends_b.get(b0, their_range.start - 1)), ends_b[b1] + 1),
            )


def _ends(tokens: Sequence[str], places: range) -> tuple[str, dict[int, int]]:
    """The text, and the place of the token that ends at each of its borders."""
    parts, ends, length = [], {}, 0
    for place in places:
        if tokens[place]:
            parts.append(tokens[place])
            length += len(tokens[place])
            ends[length] = place
    return "".join(parts), ends


def _start(tokens: Sequence[str], before: int) -> int:
    """The first place after `before` whose token spells something."""
    return next(place for place in range(before + 1, len(tokens)) if tokens[place])
