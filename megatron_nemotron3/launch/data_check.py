"""What is wrong with the data of a command line, before a process starts.

Megatron finds it after minutes, on all ranks: an empty part of a split makes it count epochs for ever, a
weight of 0 ends in a bare AssertionError, and data sets without weights are read once, so that a longer run
ends in the middle.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_nemotron3.common.files import not_writable, read_outside
from megatron_nemotron3.launch.data_sets import (
    NAMES,
    SPLITS,
    Blend,
    Options,
    SplitPart,
    blends,
    conversations_in,
    cut,
    digest_of,
    parts_of,
)
from megatron_nemotron3.launch.flag import is_known, values_by_name
from megatron_nemotron3.launch.rule import Severity, Violation
from megatron_nemotron3.launch.schedule import STEPWISE, BatchSizes

_SOURCE = "megatron/core/datasets/blended_megatron_dataset_builder.py"
_PHASES = "--phase-transition-iterations"
#: Options of a run that ends before its steps are done.
_ENDING = ("--exit-interval", "--exit-duration-in-mins")
#: A script with this option reads data of its own kind, and checks them.
_OMNI = "--omni-encoders"
#: Megatron's default.
_EVAL_ITERS = 100
#: Without one of these the script that packs conversations ends, so each line is a row.
_PACKING = {"--sft-tokenizer-prompt-format": ("default",), "--calculate-per-token-loss": ()}
#: Seconds that a copy of a data set and its index may take, and bytes of a description.
_COPYING, _LIMIT = 60.0, 1 << 20
#: And these scripts never pack them.
_STOCK = ("pretrain_hybrid.py", "pretrain_mamba.py", "pretrain_gpt.py")


def require(words: Sequence[str], rows: Mapping[str, int] | None = None, script: str = "") -> list[str]:
    """Raise ValueError at the first problem of the data of a command line; return warnings.

    Args:
        rows: of each file of conversations, where they are known.
        script: that reads the data, if it is known.
    """
    options = values_by_name(words)
    if "--sft" in options and os.path.basename(script) in _STOCK:
        options.pop("--calculate-per-token-loss", None)
    warnings = []
    for severity, problem in _problems(options, rows or {}, elsewhere=False):
        if severity == "error":
            raise ValueError(problem)
        if severity == "warning":
            warnings.append(problem)
    return warnings


def violations(words: Sequence[str]) -> list[Violation]:
    """Return the problems; of data sets that are not on this machine only what the words say."""
    options = values_by_name(words)
    if not all(is_known(options.get(name, ())) for name in (*NAMES, STEPWISE)):
        return []
    found = _problems(options, {}, elsewhere=True)
    return [Violation("data", severity, problem, _SOURCE) for severity, problem in found]


def _problems(options: Options, rows: Mapping[str, int], elsewhere: bool) -> Iterator[tuple[Severity, str]]:
    """Yield how bad it is, and what is wrong, with its numbers and the cure."""
    if _OMNI in options:
        return
    if _PHASES in options and "--train-samples" not in options:
        yield "error", f"{_PHASES} without --train-samples, and Megatron would end in a TypeError: give them"
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
            yield from (("note", text) for text in check.notes)
    except OSError as problem:
        if not (elsewhere and isinstance(problem, FileNotFoundError)):
            yield "error", f"{problem.filename}: {problem.strerror}"
    except ValueError as problem:
        yield "error", str(problem)


class _Check:
    """One blend, with the command line that reads it."""

    def __init__(self, blend: Blend, options: Options, rows: Mapping[str, int]) -> None:
        self.blend, self.options, self.rows = blend, options, dict(rows)
        self.conversations = "--sft" in options
        packing = all(options.get(name) == values for name, values in _PACKING.items())
        #: Whether each line of a file of conversations is a row.
        self.unpacked = self.conversations and not packing and not rows
        self.warnings: list[str] = []
        self.notes: list[str] = []
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
        yield from self._outdated()
        if self.conversations:
            yield from self._count_rows()
        if self.unpacked and blend.weights is None and len(blend.prefixes) > 1:
            yield (
                f"{blend.option} names {len(blend.prefixes)} files of conversations without weights, and "
                "Megatron's --sft would end in an AssertionError: give weights"
            )
        if self.conversations and not all(prefix in self.rows for prefix in blend.prefixes):
            return
        needed = self._needed()
        parts = [self._parts(prefix, needed) for prefix in blend.prefixes]
        for name, of_sets, samples in zip(SPLITS, zip(*parts, strict=True), needed, strict=True):
            yield from self._of_split(name, of_sets, samples)

    def _count_rows(self) -> Iterator[str]:
        """Files of conversations whose rows are not known; of one that is packed only whether it is empty."""
        for prefix in self.blend.prefixes:
            if prefix in self.rows:
                continue
            lines = conversations_in(prefix)
            if lines == 0:
                yield f"{self.blend.option}: {prefix} has no conversation: write one in each line"
            if self.unpacked and lines is not None:
                self.rows[prefix] = lines

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
            key = (size, *map(digest_of, self._files(prefix)))
            first = before.setdefault(key, number)
            if first != number:
                both = blend.weights and blend.weights[first] + blend.weights[number]
                yield (
                    f"{blend.option}: {blend.prefixes[first]} and {prefix} are one data set, whose rows "
                    "would repeat: give it once" + (f", with weight {both:g}" if both else "")
                )

    def _outdated(self) -> Iterator[str]:
        """Megatron's index of the samples of a data set: older than the data, or without a place."""
        given, now = self.options.get("--data-cache-path"), time.time()
        for prefix in () if self.conversations else self.blend.prefixes:
            changed, place = os.path.getmtime(prefix + ".idx"), f'"dataset_path": "{prefix}"'.encode()
            if not given and (held := not_writable(Path(prefix))) and not Path(prefix, "cache").is_dir():
                yield (
                    f"{self.blend.option}: Megatron writes the index of the samples to {prefix}/cache, and "
                    f"{held} is not writable: give --data-cache-path DIR"
                )
            folders = [Path(given[0])] if given else [*Path(prefix, "cache").glob("*_indices")]
            for found in (file for folder in folders for file in folder.glob("*-description.txt")):
                # A time to come says nothing.
                if found.stat().st_mtime + _COPYING < changed <= now and place in read_outside(
                    found, limit=_LIMIT
                ):
                    yield (
                        f"{self.blend.option}: {prefix}.idx was changed after Megatron indexed its samples, "
                        f"and would be read by the old index: remove {found.parent}"
                    )
                    break

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
                if self.unpacked and needed == 0:
                    return
                then = "end at the first one" if self.unpacked else "hang"
                yield (
                    f"{share} none of the {part.of} {of} of {part.prefix}, and Megatron would {then}: use "
                    f"more {of} or a larger share"
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
        if self.conversations and needed and name == SPLITS[0]:
            self._judge_rows(parts, needed, have)
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

    def _judge_rows(self, parts: Sequence[SplitPart | None], needed: int, have: int) -> None:
        """How often the rows of a training are read, and whether they repeat within a step."""
        step = self._batches().largest
        if have < step:
            self.warnings.append(
                f"{self.blend.option} gives {have} rows for training, and a step takes {step}: rows repeat "
                "within a step: use more conversations or a smaller --global-batch-size"
            )
        weights = self.blend.weights or [1.0 if part is None else part.documents for part in parts]
        for part, weight in zip(parts, weights, strict=True):
            if part is not None:
                taken = needed * weight / sum(weights)
                self.notes.append(
                    f"of {needed:,} samples for training {taken:,.0f} come from the {part.documents:,} rows "
                    f"of {part.prefix}: {taken / part.documents:.3g} epochs"
                )

    def _once(self) -> bool:
        """Whether rows are read once. Data sets with weights, and one alone, are read as often as needed."""
        cyclic = self.options.get("--dataloader-type") == ("cyclic",)
        return self.blend.weights is None and len(self.blend.prefixes) > 1 and not cyclic

    def _batch(self) -> int:
        return self._number("--global-batch-size") or 0

    def _batches(self) -> BatchSizes:
        """The batch of each step; --rampup-batch-size changes none, because Megatron does not read it.

        Raises:
            ValueError: Megatron would refuse the schedule.
        """
        schedule = (self.options.get(STEPWISE) or ("",))[0]
        if schedule and self._batch():
            raise ValueError(f"{STEPWISE} and --global-batch-size both say the batch: give one")
        return BatchSizes.read(schedule, self.length) if schedule else BatchSizes(((0, self._batch()),))

    def _needed(self) -> list[int | None]:
        """Samples that the run takes of each split; None: not known, or all."""
        options, batches = self.options, self._batches()
        if not batches.largest or any(name in options for name in _ENDING):
            return [None] * len(SPLITS)
        samples, steps = self._number("--train-samples"), self._number("--train-iters")
        if samples is not None:
            steps = batches.taken(samples=samples)[0] if STEPWISE in options else samples // self._batch()
        train = None if steps is None or "--skip-train" in options else batches.taken(steps)[1]
        if train and samples is not None and _PHASES in options:
            train = self._shortest_phase(samples)
        interval = self._number("--eval-interval")
        if not interval or steps is None:  # needed for a run that evaluates
            return [train, None, None]
        skipped = (self._number("--start-eval-at-iter") or 0) // interval
        times = 1 if "--skip-train" in options else max(0, steps // interval + 1 - skipped)
        evaluated = self._number("--eval-iters") if "--eval-iters" in options else _EVAL_ITERS
        batch = self._number("--eval-global-batch-size") or self._batch()
        if evaluated is None or not batch:  # with a schedule it is the micro-batch times DP
            return [train, None, None]
        test = evaluated * batch
        return [train, None if "--full-validation" in options else times * test, test]

    def _shortest_phase(self, samples: int) -> int | None:
        """Samples that a phase takes at least; which phase the run is in, a checkpoint says."""
        words = "".join(self.options[_PHASES]).split(",")
        if not self._batch() or not all(word.strip().isdecimal() for word in words):
            return None
        ends = sorted({0, samples, *(int(word) * self._batch() for word in words)})
        return min(end - start for start, end in itertools.pairwise(ends))

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
