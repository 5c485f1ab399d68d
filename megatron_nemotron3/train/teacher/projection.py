"""The projection between two vocabularies: the string rules that give its weights, and its file.

The rules and their numbers are those of NeMo-RL's tools (tools/x_token at 7ea279a), by the authors of
X-Token, arXiv 2605.21699; docs/post_training.md says where they differ.

The file is in the safetensors format: `tokens` [student's tokens, width] int32, tokens of the teacher with
the largest weight first, -1 where there are fewer; `weights` of the same shape, float32. Its metadata names
both tokenizers by digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_nemotron3.checkpoints.convert.hf_folder import read_safetensors_header, safetensors_header
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.common.files import atomic, open_outside
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = "nemotron3-xtoken-1"
#: Least weight of a token's first entry with which H-KL pairs the two tokens.
COMMON = 0.6
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


@dataclass(frozen=True, eq=False)
class Projection:
    """Weights W[s, t]: the share of the student's token s that counts as the teacher's token t.

    Attributes:
        tokens: [student's tokens, width] int32, -1 where a row has fewer weights.
        weights: float32 of the same shape; a row sums to 1, or to 0 if no token of the teacher fits.
        teacher_size: number of the teacher's tokens.
        student_digest, teacher_digest: `ByteVocabulary.digest` of the two.
        counts: tokens of the student by the rule that gave their row.
    """

    tokens: NDArray[np.int32]
    weights: NDArray[np.float32]
    teacher_size: int
    student_digest: str = ""
    teacher_digest: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    #: What the loss makes of the weights for a shard, by the shard.
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def student_size(self) -> int:
        return len(self.tokens)

    @classmethod
    def build(cls, student: ByteVocabulary, teacher: ByteVocabulary, **options: Any) -> Projection:
        """Apply the string rules; `options` are those of `rows`."""
        import numpy as np

        found = rows(student, teacher, **options)
        width = max(1, max((len(row.weights) for row in found), default=1))
        tokens = np.full((len(found), width), -1, np.int32)
        weights = np.zeros((len(found), width), np.float32)
        for i, row in enumerate(found):
            for j, (token, weight) in enumerate(row.weights):
                tokens[i, j], weights[i, j] = token, weight
        counted = Counter(row.rule for row in found)
        counts = {rule: counted[rule] for rule in RULES}
        return cls(tokens, weights, len(teacher), student.digest, teacher.digest, counts)

    def common(self, threshold: float = COMMON) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Pair tokens of the student, rising, with their first token of the teacher: H-KL's common set.

        `threshold`: least weight of that token. If several tokens of the student share one, the largest
        weight counts, then the lowest id.
        """
        import numpy as np

        students = np.flatnonzero((self.tokens[:, 0] >= 0) & (self.weights[:, 0] >= threshold))
        teachers, weights = self.tokens[students, 0].astype(np.int64), self.weights[students, 0]
        order = np.lexsort((students, -weights, teachers))
        kept = np.sort(order[np.unique(teachers[order], return_index=True)[1]])
        return students[kept].astype(np.int64), teachers[kept]

    def save(self, path: Path) -> None:
        import numpy as np

        shape = self.tokens.shape
        about = {
            "format": FORMAT,
            "student": self.student_digest,
            "teacher": self.teacher_digest,
            "teacher_size": str(self.teacher_size),
            **{f"rule_{rule}": str(count) for rule, count in self.counts.items()},
        }
        header = safetensors_header([("tokens", "int32", shape), ("weights", "float32", shape)], about)
        with atomic(path) as temporary, open(temporary, "wb") as file:
            file.write(header)
            file.write(np.ascontiguousarray(self.tokens, "<i4").tobytes())
            file.write(np.ascontiguousarray(self.weights, "<f4").tobytes())

    @classmethod
    def load(cls, path: Path) -> Projection:
        """Read a file that `save` wrote; CheckpointError if it is none."""
        import numpy as np

        entries, about = read_safetensors_header(path)
        if about.get("format") != FORMAT or set(entries) != {"tokens", "weights"}:
            raise CheckpointError(
                f"{path} is not a projection: `nemotron3 distill projection … --output FILE` writes one"
            )
        tokens, weights = entries["tokens"], entries["weights"]
        known, size = (tokens.dtype, weights.dtype) == ("int32", "float32"), about.get("teacher_size", "")
        known &= len(tokens.shape) == 2 and tokens.shape == weights.shape and 0 not in tokens.shape
        if not (known and size.isdecimal() and len(size) < 10):
            raise CheckpointError(f"{path}: damaged: {tokens} and {weights} are no projection")
        with open_outside(path) as file:

            def array(entry: Any, kind: str) -> NDArray[Any]:
                file.seek(entry.offset)
                data = file.read(4 * entry.shape[0] * entry.shape[1])
                return np.frombuffer(data, kind).reshape(entry.shape)

            ids, values = array(tokens, "<i4"), array(weights, "<f4")
        if ids.min() < -1 or ids.max() >= int(size) or not (values >= 0).all():
            raise CheckpointError(
                f"{path}: damaged: tokens outside of -1 to {int(size) - 1}, or weights below 0"
            )
        sums = values.sum(1)
        if not ((abs(sums - 1) < 1e-5) | (sums == 0)).all() or (values[ids < 0] != 0).any():
            raise CheckpointError(f"{path}: damaged: a row of weights sums to neither 0 nor 1")
        stated = {rule: about.get(f"rule_{rule}", "") for rule in RULES}
        counts = {rule: int(count) for rule, count in stated.items() if count.isdecimal() and len(count) < 10}
        return cls(ids, values, int(size), about.get("student", ""), about.get("teacher", ""), counts)


def read_for(path: Path, student: ByteVocabulary, teacher: ByteVocabulary) -> Projection:
    """Read a projection for these tokenizers.

    Raises:
        ValueError: it is for others, or cannot be read.
    """
    found = Projection.load(path)
    for role, digest, given in (
        ("student", found.student_digest, student),
        ("teacher", found.teacher_digest, teacher),
    ):
        if digest != given.digest:
            raise ValueError(
                f"{path} is for another tokenizer of the {role} than {given.path}: write one with nemotron3 "
                f"xtoken {student.path} {teacher.path} --output FILE"
            )
    return found
