"""Spans of two tokenizations, and the teacher's batch."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron_nemotron3.post_training.xtoken.align import Aligner
from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary
from tests.post_training.xtoken.tokenizers_of import TEXT

NAMES = ("packs", "splits", "sentence")


@pytest.fixture(scope="module")
def vocabularies(folders: dict[str, Path]) -> dict[str, ByteVocabulary]:
    return {name: ByteVocabulary(folder) for name, folder in folders.items()}


def _borders(vocabulary: ByteVocabulary, ids: list[int]) -> list[int]:
    """Bytes spelled before each token, and by all: a definition that shares nothing with the code."""
    return [sum(len(vocabulary.text([i])) for i in ids[:end]) for end in range(len(ids) + 1)]


@pytest.mark.parametrize("student", NAMES)
@pytest.mark.parametrize("teacher", NAMES)
def test_spans_are_the_finest(vocabularies: dict[str, ByteVocabulary], student: str, teacher: str) -> None:
    """On texts cut at any byte: every shared border ends a span, and only those."""
    ours, theirs = vocabularies[student], vocabularies[teacher]
    aligner, draw = Aligner(ours, theirs), random.Random(0)
    data = "".join(TEXT).encode()
    for _ in range(20):
        first = draw.randrange(len(data) - 90)
        ids = ours.encode([data[first : first + draw.randrange(1, 90)]])[0]
        assert ids is not None
        others = aligner.retokenize(ids)
        assert theirs.text(others) == ours.text(ids)
        a, b = _borders(ours, ids), _borders(theirs, others)
        shared = sorted(set(a) & set(b))
        spans = aligner.spans(ids, others)
        assert [(a[s.start], a[s.stop]) for s, _ in spans] == list(zip(shared, shared[1:]))
        assert [(b[t.start], b[t.stop]) for _, t in spans] == list(zip(shared, shared[1:]))


def test_special_tokens(vocabularies: dict[str, ByteVocabulary]) -> None:
    """Those that both have are spans; the student's own spell nothing."""
    ours, theirs = vocabularies["packs"], vocabularies["splits"]
    aligner = Aligner(ours, theirs)
    one, two = ours.encode([b"of 201 cats", b"12 dogs"])
    end, mask = 0, 1
    ids = [*one, end, mask, *two, end]
    others = aligner.retokenize(ids)
    eos = theirs.roles["eos_token"]
    assert others == [*theirs.encode([b"of 201 cats"])[0], eos, *theirs.encode([b"12 dogs"])[0], eos]
    spans = aligner.spans(ids, others)
    assert [(ids[s.start], others[t.start]) for s, t in spans if ids[s.start] == end] == [(end, eos)] * 2
    inside = {place for s, _ in spans for place in s}
    assert set(range(len(ids))) - inside == {ids.index(mask)}


def test_texts_that_differ(vocabularies: dict[str, ByteVocabulary]) -> None:
    """Only the common beginning and end have spans; a text that was cut keeps its beginning."""
    ours, theirs = vocabularies["packs"], vocabularies["splits"]
    aligner = Aligner(ours, theirs)
    ids, others = ours.encode([b"cats of 201 dogs ran"])[0], theirs.encode([b"cats in 201 dogs ran"])[0]
    spelled = [
        (ours.text(ids[s.start : s.stop]), theirs.text(others[t.start : t.stop]))
        for s, t in aligner.spans(ids, others)
    ]
    assert all(a == b for a, b in spelled)
    said = b"".join(a for a, _ in spelled)
    assert said.startswith(b"cats") and said.endswith(b"dogs ran") and b"of" not in said
    assert aligner.spans(ids, aligner.retokenize(ids)[:3]) == aligner.spans(ids, aligner.retokenize(ids))[:3]
    assert aligner.spans(ids, []) == []
    # A space in front of the teacher's text alone.
    spaced = theirs.encode([b" 201 dogs"])[0]
    plain = ours.encode([b"201 dogs"])[0]
    assert (
        b"".join(ours.text(plain[s.start : s.stop]) for s, _ in aligner.spans(plain, spaced)) == b"201 dogs"
    )


def test_batch(vocabularies: dict[str, ByteVocabulary]) -> None:
    """Positions are those of the prediction: logits at i are of token i + 1; the first token has none."""
    ours, theirs = vocabularies["packs"], vocabularies["splits"]
    aligner = Aligner(ours, theirs)
    rows = [ours.encode([text.encode()])[0][:12] for text in (TEXT[0], TEXT[1])]
    tokens, alignment = aligner.batch(rows)
    assert tokens.shape == alignment.teacher.shape and alignment.student.shape == (2, 11)
    for row, ids in enumerate(rows):
        others = aligner.retokenize(ids)
        length = len(others) - 1
        assert tokens[row, :length].tolist() == others[:-1] and not tokens[row, length:].any()
        for span in alignment.student[row].unique().tolist():
            if span >= 0:
                a = [ids[i + 1] for i in (alignment.student[row] == span).nonzero().flatten()]
                b = [others[i + 1] for i in (alignment.teacher[row] == span).nonzero().flatten()]
                assert ours.text(a) == theirs.text(b) != b""
    assert sorted(set(alignment.student.flatten().tolist()) - {-1}) == list(range(alignment.spans))
