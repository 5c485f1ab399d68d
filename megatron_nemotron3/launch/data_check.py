"""What is wrong with the data of a command line, before a process starts.

Megatron finds it after minutes, on all ranks: an empty part of a split makes it count epochs for ever, a
weight of 0 ends in a bare AssertionError, and data sets without weights are read once, so that a longer run
ends in the middle.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron_nemotron3.launch.data_sets import (
    NAMES,
    SPLITS,
    Blend,
    Options,
    SplitPart,
    blends,
    cut,
    edges,
    parts_of,
)
from megatron_nemotron3.launch.flag import is_known, values_by_name
from megatron_nemotron3.launch.rule import Severity, Violation

_SOURCE = "megatron/core/datasets/blended_megatron_dataset_builder.py"
#: Options with which the samples of a run are not the product of its steps and its batch.
_GROWING = ("--rampup-batch-size", "--step-batch-size-schedule", "--phase-transition-iterations")
#: And those of a run that ends before its steps are done.
_ENDING = ("--exit-interval", "--exit-duration-in-mins")
#: A script with this option reads data of its own kind, and checks them.
_OMNI = "--omni-encoders"
#: Megatron's default.
_EVAL_ITERS = 100


def require(words: Sequence[str], rows: Mapping[str, int] | None = None) -> list[str]:
    """Raise ValueError at the first problem of the data of a command line; return warnings.

    Args:
        rows: of each file of conversations, where they are known.
    """
    warnings = []
    for severity, problem in _problems(values_by_name(words), rows or {}, elsewhere=False):
        if severity == "error":
            raise ValueError(problem)
        warnings.append(problem)
    return warnings


def violations(words: Sequence[str]) -> list[Violation]:
    """Return the problems; of data sets that are not on this machine only what the words say."""
    options = values_by_name(words)
    if not all(is_known(options.get(name, ())) for name in NAMES):
        return []
    found = _problems(options, {}, elsewhere=True)
    return [Violation("data", severity, problem, _SOURCE) for severity, problem in found]


def _problems(options: Options, rows: Mapping[str, int], elsewhere: bool) -> Iterator[tuple[Severity, str]]:
    """Yield how bad it is, and what is wrong, with its numbers and the cure."""
    if _OMNI in options:
        return
    try:
        found = blends(options)
        if found and "--skip-train" not in options and all(blend.bounds[0] is None for blend in found):
            given = f"--split {found[0].split}" if found[0].split else found[0].option
            why = "leaves nothing to train on, and Megatron would end without a step: give it some"
            yield "error", f"{given} {why}"
        for blend in found:
            check = _Check(blend, options, rows)
            yield from (("error", problem) for problem in check.problems(elsewhere))
            yield from (("warning", text) for text in check.warnings)
    except OSError as problem:
        if not (elsewhere and isinstance(problem, FileNotFoundError)):
            yield "error", f"{problem.filename}: {problem.strerror}"
    except ValueError as problem:
        yield "error", str(problem)


class _Check:
    """One blend, with the command line that reads it."""

    def __init__(self, blend: Blend, options: Options, rows: Mapping[str, int]) -> None:
        self.blend, self.options, self.rows = blend, options, rows
        self.conversations = "--sft" in options
        self.warnings: list[str] = []
        #: Tokens of a sample; without the option at least one and its label.
        self.length = self._number("--seq-length") or 1

    def problems(self, elsewhere: bool) -> Iterator[str]:
        blend = self.blend
        if blend.bounds[1] and blend.weights and "--full-validation" in self.options:
            yield f"--full-validation reads each set once, and {blend.option} gives weights: drop one of them"
        files = [path for prefix in blend.prefixes for path in self._files(prefix)]
        missing = [path for path in files if not os.path.isfile(path)]
        if missing and not elsewhere and not any(map(_is_other, blend.prefixes)):
            what = "file of conversations" if self.conversations else ".bin and .idx, without ending"
            yield f"{blend.option}: there is no file {missing[0]}: give the path of a {what}"
        if missing:
            return
        yield from self._repeated()
        if self.conversations and not all(prefix in self.rows for prefix in blend.prefixes):
            return
        needed = self._needed()
        parts = [self._parts(prefix, needed) for prefix in blend.prefixes]
        for name, of_sets, samples in zip(SPLITS, zip(*parts, strict=True), needed, strict=True):
            yield from self._of_split(name, of_sets, samples)

    def _files(self, prefix: str) -> list[str]:
        return [prefix] if self.conversations else [prefix + ".bin", prefix + ".idx"]

    def _repeated(self) -> Iterator[str]:
        """Data sets that are the same: by another path, a link, or a copy."""
        blend = self.blend
        sizes = [tuple(os.path.getsize(path) for path in self._files(prefix)) for prefix in blend.prefixes]
        alike, before = Counter(sizes), dict[tuple[object, ...], int]()
        for number, (prefix, size) in enumerate(zip(blend.prefixes, sizes, strict=True)):
            if alike[size] == 1:
                continue
            key = (size, *(hashlib.sha256(edges(path)).digest() for path in self._files(prefix)))
            first = before.setdefault(key, number)
            if first != number:
                both = blend.weights and blend.weights[first] + blend.weights[number]
                yield (
                    f"{blend.option}: {blend.prefixes[first]} and {prefix} are one data set, whose rows "
                    "would repeat: give it once" + (f", with weight {both:g}" if both else "")
                )

    def _parts(self, prefix: str, needed: Sequence[int | None]) -> list[SplitPart | None]:
        bounds = self.blend.bounds
        if self.conversations:
            rows = self.rows[prefix]
            cuts = [cut(bound, rows) for bound in bounds]
            return [None if part is None else SplitPart(prefix, len(part), rows, None) for part in cuts]
        samples = [(count or 1) if self._once() else 1 for count in needed]
        return parts_of(prefix, bounds, [count * self.length + 1 for count in samples])

    def _of_split(self, name: str, parts: Sequence[SplitPart | None], needed: int | None) -> Iterator[str]:
        blend, have = self.blend, 0
        apart = name == SPLITS[1] and "--multiple-validation-sets" in self.options
        once = self._once() and not apart
        for part in parts:
            if part is None:
                return
            of = "rows" if self.conversations else "documents"
            share = f"--split {blend.split} gives {name}" if blend.split else f"{blend.option} gives {name}"
            if not part.documents:
                yield (
                    f"{share} none of the {part.of} {of} of {part.prefix}, and Megatron would hang: use more "
                    f"{of} or a larger share"
                )
                return
            samples = part.samples(self.length)
            if not samples:
                text = (
                    f"{share} {part.documents} of the {part.of} documents of {part.prefix}, {part.tokens} "
                    f"tokens, and a sample takes {self.length + 1}"
                )
                if once or not needed:
                    yield f"{text}: use more text, a larger share or a shorter --seq-length"
                    return
                self.warnings.append(f"{text}: the same text repeats in each of its samples")
            have += samples
        mixed = len(parts) > 1 or blend.weights and blend.split
        if needed == 0 and name == SPLITS[0] and (given := self._number("--train-samples")):
            yield (
                f"--train-samples {given} is less than --global-batch-size {self._batch()}, and Megatron "
                "would end without a step: give more"
            )
        elif needed == 0 and mixed:
            yield (
                f"the run takes no {name} sample, and Megatron fails at a mixture of none: give {name} no "
                "data, or let it take some (--eval-iters, --train-iters)"
            )
        elif needed and have < needed and once:
            less = f"at most {have // self._batch()} steps" if name == SPLITS[0] else "less evaluation"
            yield (
                f"{blend.option} names {len(parts)} sets without weights, which Megatron reads once: {have:,}"
                f" samples for {name}, and the run takes {needed:,}: give weights, more data or {less}"
            )

    def _once(self) -> bool:
        """Whether rows are read once. Data sets with weights, and one alone, are read as often as needed."""
        cyclic = self.options.get("--dataloader-type") == ("cyclic",)
        return self.blend.weights is None and len(self.blend.prefixes) > 1 and not cyclic

    def _batch(self) -> int:
        return self._number("--global-batch-size") or 0

    def _needed(self) -> list[int | None]:
        """Samples that the run takes of each split; None: not known, or all."""
        batch, options = self._batch(), self.options
        if not batch or any(name in options for name in (*_GROWING, *_ENDING)):
            return [None] * len(SPLITS)
        samples = self._number("--train-samples")
        steps = self._number("--train-iters") if samples is None else samples // batch
        train = None if steps is None or "--skip-train" in options else steps * batch
        interval = self._number("--eval-interval")
        if not interval or steps is None:  # needed for a run that evaluates
            return [train, None, None]
        skipped = (self._number("--start-eval-at-iter") or 0) // interval
        times = 1 if "--skip-train" in options else max(0, steps // interval + 1 - skipped)
        evaluated = self._number("--eval-iters") if "--eval-iters" in options else _EVAL_ITERS
        if evaluated is None:
            return [train, None, None]
        test = evaluated * (self._number("--eval-global-batch-size") or batch)
        return [train, None if "--full-validation" in options else times * test, test]

    def _number(self, name: str) -> int | None:
        word = (self.options.get(name) or ("",))[0]
        return int(word) if word.isascii() and word.isdecimal() else None


def _is_other(prefix: str) -> bool:
    """Whether this names data of another kind: of an object store, a pattern of names, or other files."""
    return (
        "://" in prefix
        or any(sign in prefix for sign in "*?[")
        or os.path.exists(prefix)
        and not prefix.endswith((".bin", ".idx"))
    )
