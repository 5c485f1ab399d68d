"""`nemotron3 xtoken`: write and inspect the projection between the vocabularies of two tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.common.files import read_outside, require_output
from megatron_nemotron3.common.options import add_command, argument, flag, json_flag, option, repeated
from megatron_nemotron3.common.output import result, say

if TYPE_CHECKING:
    from megatron_nemotron3.train.teacher.projection import Projection
    from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary

#: Longest --text that is read, in bytes.
_MOST = 16 << 20


_made, _shown = "the projection", "what is shown"


@dataclass(frozen=True, kw_only=True)
class XTokenOptions:
    """Options of `nemotron3 xtoken`."""

    student: Path = argument(
        "a folder with tokenizer.json, or a checkpoint or run that has one", "STUDENT_TOKENIZER"
    )
    teacher: Path = argument("the same of the teacher", "TEACHER_TOKENIZER")
    output: Path | None = option("where to write it (default: nowhere)", "FILE", group=_made)
    projection: Path | None = option("inspect this file, do not build one", "FILE", group=_made)
    width: int | None = option("weights kept of a token (default 4)", "N", group=_made, least=1, most=64)
    pieces: int | None = option(
        "tokens that count of a text that the teacher splits (4)", "N", group=_made, least=1, most=64
    )
    no_joined: bool = flag("leave out the rule joined", group=_made)
    token: list[str] = repeated("the weights of this token (repeatable)", "TEXT", group=_shown)
    text: str | None = option("text file, whose spans are counted", "PATH", group=_shown)
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 xtoken`."""
    add_command(commands.add_parser("xtoken"), XTokenOptions, xtoken)


def xtoken(options: XTokenOptions) -> int:
    """Build or read the projection, print what it consists of, and write it. Exit status 0."""
    if options.output is not None:
        require_output(options.output, "--output")
    built = {name: value for name in ("width", "pieces") if (value := getattr(options, name)) is not None}
    building = [f"--{name}" for name in built]
    building += ["--no-joined"] * options.no_joined + ["--output"] * (options.output is not None)
    if options.projection is not None and building:
        raise ValueError(f"--projection reads a file, {building[0]} goes with a new one: drop one of them")
    text = None
    if options.text is not None:
        if not Path(options.text).is_file():
            raise ValueError(f"--text {options.text} is not a file: give a text file")
        text = read_outside(options.text, limit=_MOST)
    from megatron_nemotron3.train.teacher.projection import Projection, read_for
    from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary, find

    student, teacher = ByteVocabulary(find(options.student)), ByteVocabulary(find(options.teacher))
    wanted = [_token(student, text) for text in options.token]
    if options.projection is not None:
        projection = read_for(options.projection, student, teacher)
    else:
        projection = Projection.build(student, teacher, joined=not options.no_joined, **built)
    with result(options.json):
        _describe(student, teacher, projection)
        for token in wanted:
            _describe_token(student, teacher, projection, token)
        if text is not None:
            _describe_spans(student, teacher, text)
        if options.output is not None:
            projection.save(options.output)
            say(f"projection   {options.output}", output=str(options.output))
    return 0


def _token(student: ByteVocabulary, text: str) -> int:
    found = student.ids.get(text.encode())
    if found is None:
        pieces = student.encode([text.encode()])[0] or []
        raise ValueError(
            f"--token {text!r} is not a token of {student.path}, which splits it into "
            f"{', '.join(map(student.name, pieces)) or 'nothing'}: give one of these"
        )
    return found


def _describe(student: ByteVocabulary, teacher: ByteVocabulary, projection: Projection) -> None:
    import numpy as np

    from megatron_nemotron3.train.teacher.projection import COMMON, RULES

    for role, one in (("student", student), ("teacher", teacher)):
        say(
            f"{role}      {one.path}: {len(one):,} tokens, {one.digest[:16]}",
            **{role: {"path": str(one.path), "tokens": len(one), "digest": one.digest}},
        )
    say("tokens of the student by rule", rules=projection.counts)
    for rule, meaning in RULES.items():
        say(f"  {rule:<8}{projection.counts.get(rule, 0):>10,}   {meaning}")
    kept = projection.tokens >= 0
    unreached = projection.teacher_size - len(np.unique(projection.tokens[kept]))
    say(f"weights      {int(kept.sum()):,}, at most {projection.tokens.shape[1]} of a token")
    say(f"unreached    {unreached:,} tokens of the teacher", weights=int(kept.sum()), unreached=unreached)
    pairs, strict = len(projection.common()[0]), set(projection.common(1.0)[0].tolist())
    say(f"h-kl pairs   {pairs:,} with a weight of {COMMON} or more, {len(strict):,} with all of it")
    spelled = [(i, (token or b"").strip()) for i, token in enumerate(student.tokens)]
    numerals = [i for i, digits in spelled if digits.isdigit() and len(digits) > 1]
    apart = sum(i not in strict for i in numerals)
    hint = ": use p-kl" * (apart > 0)
    say(f"numerals     {len(numerals):,} of several digits, {apart:,} of them in no pair{hint}")
    say(pairs=pairs, strict_pairs=len(strict), numerals=len(numerals), unpaired_numerals=apart)


def _describe_token(
    student: ByteVocabulary, teacher: ByteVocabulary, projection: Projection, token: int
) -> None:
    row = zip(projection.tokens[token].tolist(), projection.weights[token].tolist())
    weights = {teacher.name(i): round(weight, 6) for i, weight in row if i >= 0}
    listed = ", ".join(f"{name} {weight:.4f}" for name, weight in weights.items()) or "no token"
    name = student.name(token)
    say(f"{name} -> {listed}", token_weights=[{"token": name, "weights": weights}])


def _describe_spans(student: ByteVocabulary, teacher: ByteVocabulary, text: bytes) -> None:
    from megatron_nemotron3.post_training.xtoken.align import Aligner

    aligner = Aligner(student, teacher)
    ids = student.encode([text])[0] or []
    others = aligner.retokenize(ids)
    spans = aligner.spans(ids, others)
    single = sum(len(s) == len(t) == 1 for s, t in spans)
    outside = len(ids) - sum(len(s) for s, _ in spans)
    line = (
        f"spans        {len(spans):,} of {len(ids):,} tokens of the student and {len(others):,} of the "
        f"teacher; {single:,} are one token on each side, {outside:,} tokens of the student are in none"
    )
    sizes = {"spans": len(spans), "student": len(ids), "teacher": len(others)}
    say(line, spans={**sizes, "single": single, "outside": outside})
