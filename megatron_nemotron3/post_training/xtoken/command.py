"""`nemotron3 distill projection`: write and inspect the projection between two tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.common.files import require_output
from megatron_nemotron3.common.options import add_command, argument, flag, json_flag, option
from megatron_nemotron3.common.output import result, say

if TYPE_CHECKING:
    from megatron_nemotron3.train.teacher.projection import Projection
    from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary

_made = "projection"


@dataclass(frozen=True, kw_only=True)
class XTokenOptions:
    """Options of `nemotron3 distill projection`."""

    student: Path = argument(
        "folder with tokenizer.json, or a checkpoint or run with one", "STUDENT_TOKENIZER"
    )
    teacher: Path = argument("the same for the teacher", "TEACHER_TOKENIZER")
    output: Path | None = option("output file (default: none)", "FILE", group=_made)
    projection: Path | None = option("projection to inspect, in place of a new one", "FILE", group=_made)
    width: int | None = option("number of weights per token (default 4)", "N", group=_made, least=1, most=64)
    pieces: int | None = option(
        "pieces used of a token that the teacher splits (default 4)", "N", group=_made, least=1, most=64
    )
    no_joined: bool = flag("leave out the rule `joined`", group=_made)
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 distill projection`."""
    add_command(commands.add_parser("distill projection"), XTokenOptions, xtoken)


def xtoken(options: XTokenOptions) -> int:
    """Build or read the projection, print what it consists of, and write it. Exit status 0."""
    if options.output is not None:
        require_output(options.output, "--output", b"nemotron3-xtoken-")
    built = {name: value for name in ("width", "pieces") if (value := getattr(options, name)) is not None}
    building = [f"--{name}" for name in built]
    building += ["--no-joined"] * options.no_joined + ["--output"] * (options.output is not None)
    if options.projection is not None and building:
        raise ValueError(f"--projection reads a file, {building[0]} goes with a new one: drop one of them")
    from megatron_nemotron3.train.teacher.projection import Projection, read_for
    from megatron_nemotron3.train.teacher.vocabulary import ByteVocabulary, find

    student, teacher = ByteVocabulary(find(options.student)), ByteVocabulary(find(options.teacher))
    if options.projection is not None:
        projection = read_for(options.projection, student, teacher)
    else:
        projection = Projection.build(student, teacher, joined=not options.no_joined, **built)
    with result(options.json):
        _describe(student, teacher, projection)
        if options.output is not None:
            projection.save(options.output)
            say(f"projection   {options.output}", output=str(options.output))
    return 0


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
