"""The projection between two vocabularies, and its file.

The file is in the safetensors format: `tokens` [student's tokens, width] int32, tokens of the teacher with
the largest weight first, -1 where there are fewer; `weights` of the same shape, float32. Its metadata names
both tokenizers by digest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.checkpoints.convert.hf_folder import read_safetensors_header, safetensors_header
from megatron_nemotron3.checkpoints.metadata import CheckpointError
from megatron_nemotron3.common.files import atomic, open_outside
from megatron_nemotron3.train.teacher import rules
from megatron_nemotron3.train.teacher.tokens import ByteVocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = "nemotron3-xtoken-1"
#: Least weight of a token's first entry with which H-KL pairs the two tokens.
COMMON = 0.6


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
        """Apply the string rules; `options` are those of `rules.rows`."""
        import numpy as np

        found = rules.rows(student, teacher, **options)
        width = max(1, max((len(row.weights) for row in found), default=1))
        tokens = np.full((len(found), width), -1, np.int32)
        weights = np.zeros((len(found), width), np.float32)
        for i, row in enumerate(found):
            for j, (token, weight) in enumerate(row.weights):
                tokens[i, j], weights[i, j] = token, weight
        counted = Counter(row.rule for row in found)
        counts = {rule: counted[rule] for rule in rules.RULES}
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
                f"{path} is not a projection: `nemotron3 xtoken … --output FILE` writes one"
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
        stated = {rule: about.get(f"rule_{rule}", "") for rule in rules.RULES}
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
