"""`run.json`: which run a folder of checkpoints belongs to, so that a resumed run is not another one.

It records what the command line and the environment of a run decide: model, MTP, precision, tokenizer, data
and teacher; and, for information, everything else that changes numbers, and the versions. When a run goes
on, the first six are compared. Another model needs another folder; other changes must be requested by name,
and all of them are recorded with their step.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import time
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_nemotron3.common import record
from megatron_nemotron3.common.files import Unreadable, read_outside, write_json
from megatron_nemotron3.common.switches import BOOST, CONVERSATIONS, EMULATE, LORA, SFT_MEAN
from megatron_nemotron3.launch import boosting
from megatron_nemotron3.launch.architecture import MODEL, MOE, MTP
from megatron_nemotron3.launch.data_sets import digest_of
from megatron_nemotron3.launch.flag import from_first_option, parse
from megatron_nemotron3.models.lora import ARGUMENT, in_environment
from megatron_nemotron3.models.pattern import MTP_SEPARATOR
from megatron_nemotron3.models.stack_specs import stored_experts

NAME = "run.json"
#: Parts that may change in a folder on request: values of --change.
CHANGES = ("precision", "mtp", "tokenizer", "data", "teacher")
#: Option -> its value.
Part = dict[str, str]
Parts = dict[str, Part]


def add_change(parser: argparse._ActionsContainer) -> None:
    """Add --change."""
    parser.add_argument(
        "--change",
        action="append",
        choices=CHANGES,
        default=[],
        help="allow a change of this part when a run is continued; may be repeated",
    )


_LIMIT = 64 << 20
_PATTERN = "--hybrid-layer-pattern"
#: Width and top-k of each E layer where they differ, which no option but --spec states.
_EXPERTS = "experts of layers"
#: Options of a model's table that change no tensor and may be changed while it trains.
_TRAINING = frozenset(
    (
        *("--init-method-std", "--attention-dropout", "--hidden-dropout", "--moe-router-bias-update-rate"),
        *("--moe-aux-loss-coeff", "--moe-router-load-balancing-type", "--calculate-per-token-loss"),
    )
)
_MODEL = frozenset((_PATTERN, *(row.flag for row in MODEL + MOE))) - _TRAINING
_MTP = frozenset(row.flag for row in MTP) - _TRAINING
_PRECISION = ("--bf16", "--fp16", "--fp8-", "--fp4-", "--first-last-layers-bf16", "--num-layers-at-")
_PRECISION_FILE = "--te-precision-config-file"
_TOKENIZER = ("--tokenizer-", "--vocab-size", "--vocab-file", "--merge-file", "--tiktoken-")
_DATA = (
    *("--data-path", "--split", "--mock-data", "--data-args-path", "--per-split-data-args-path"),
    "--dataloader-inter-document-masking",
)
_DATA_PREFIX = ("--train-data-path", "--valid-data-path", "--test-data-path")
#: Begins the names of digests.
_CONTENT = "content of "
#: It decides in which order data are read. The default is Megatron's.
_SEED, _DEFAULT_SEED = "--seed", "1234"
#: Entries of tokenizer_config.json that decide about no token.
_NO_SETTING = ("transformers_version", "name_or_path")
#: Options that Megatron lets a run change in silence, and that change what it learns.
_NOTED = (
    *("--seq-length", "--weight-decay", "--clip-grad", "--adam-", "--optimizer", "--muon-", "--mtp-loss-"),
    *("--moe-aux-loss-coeff", "--moe-router-bias-update-rate", "--calculate-per-token-loss"),
    *("--attention-dropout", "--hidden-dropout"),
)
#: Options that say where to write, what to print, and when.
_QUIET = (
    *("--save", "--load", "--log-", "--eval-", "--tensorboard-", "--wandb-", "--exit-", "--data-cache-path"),
    *("--distributed-timeout", "--num-workers", "--verify-integrity", "--async-", "--ckpt-"),
)
#: What variables of TransformerEngine begin with: many change what it computes. Those with this end only say
#: how many SMs a kernel leaves to others, which depends on the GPU.
_TE_VARIABLES, _TE_SCHEDULING = "NVTE_", "SM_MARGIN"
_PACKAGES = ("megatron-nemotron3", "megatron-core", "torch", "transformer-engine")
#: Files of a tokenizer folder that decide about tokens.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
)


def parts_of(
    words: Sequence[str],
    environment: Mapping[str, str],
    name: str = "",
    contents: Mapping[str, bytes] | None = None,
    teacher: Part | None = None,
) -> Parts:
    """Return what a run is made of."""
    parts: Parts = {part: {} for part in ("model", *CHANGES, "launch")}
    if name:
        parts["model"]["name"] = name
    parts["teacher"] |= teacher or {}
    for flag in parse(from_first_option(words)):
        option, values = flag.name, " ".join(map(_normal, flag.values)) or "on"
        if option == _PATTERN:
            main, _, mtp = values.replace("|", "").partition(MTP_SEPARATOR)
            parts["model"][option] = main
            parts["mtp"][option] = mtp or "none"
        elif option in _MODEL:
            parts["model"][option] = values
        elif option in _MTP:
            parts["mtp"][option] = values
        elif option == _PRECISION_FILE:
            path = flag.values[0] if flag.values else ""
            content = (contents or {}).get(path)
            parts["precision"][option] = _hash_of(Path(path)) if content is None else _hash(content)
        elif option.startswith(_PRECISION):
            parts["precision"][option] = values
        elif option.startswith(_TOKENIZER):
            place = Path(" ".join(flag.values))
            parts["tokenizer"][option] = _hash_of(place) if flag.values and place.exists() else values
            if flag.values and place.is_dir():
                parts["tokenizer"][_CONTENT + "chat template and settings"] = _settings_of(place)
        elif option in _DATA_PREFIX or option == "--data-path":
            parts["data"][option] = " ".join(map(_data_set, flag.values))
            parts["data"][_CONTENT + option] = " ".join(map(_content, flag.values))
        elif option in _DATA:
            of_file = option.endswith("-args-path") and flag.values
            parts["data"][option] = _hash_of(Path(flag.values[0])) if of_file else values
        elif not option.startswith(_QUIET):
            parts["launch"][option] = values
        if option == "--spec" and (experts := stored_experts({"spec": flag.values})):
            parts["model"][_EXPERTS] = experts
    parts["data"][_SEED] = parts["launch"].pop(_SEED, _DEFAULT_SEED)
    if reading := environment.get(CONVERSATIONS):
        parts["data"][CONVERSATIONS] = reading
    if (mean := environment.get(SFT_MEAN, "tokens")) != "tokens":
        parts["data"][SFT_MEAN] = mean
    if (lora := in_environment(environment)) is not None:
        parts["model"][LORA] = lora.text()
    if (boost := boosting.in_environment(environment)) is not None:
        parts["mtp"][BOOST] = boost.text()
    parts["precision"] |= {
        name: value
        for name, value in sorted(environment.items())
        if value and (name == EMULATE or name.startswith(_TE_VARIABLES) and not name.endswith(_TE_SCHEDULING))
    }
    return parts


def parts_of_checkpoint(args: Mapping[str, Any]) -> Parts:
    """Return what the arguments in a checkpoint say about model and precision; other parts stay empty."""

    def found(options: Collection[str]) -> Part:
        values = {option: args.get(option[2:].replace("-", "_")) for option in options}
        return {
            option: "on" if value is True else _normal(str(value))
            for option, value in values.items()
            if type(value) in (bool, int, float, str) and value is not False
        }

    parts: Parts = {part: {} for part in ("model", *CHANGES, "launch")}
    parts["model"], parts["data"] = found(_MODEL), found((_SEED,))
    pattern = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        main, _, mtp = pattern.replace("|", "").partition(MTP_SEPARATOR)
        parts["model"][_PATTERN] = main
        parts["mtp"][_PATTERN] = mtp or "none"
    if isinstance(text := args.get(ARGUMENT), str):
        parts["model"][LORA] = text
    if isinstance(text := args.get(boosting.ARGUMENT), str):
        parts["mtp"][BOOST] = text
    if experts := stored_experts(args):
        parts["model"][_EXPERTS] = experts
    parts["precision"] = found(("--bf16", "--fp16"))
    for kind in ("fp8", "fp4"):
        if isinstance(value := args.get(kind), str):
            parts["precision"][f"--{kind}-format"] = value
    return parts


class RunManifest:
    """The `run.json` of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME
        self.content: dict[str, Any] = {}
        try:
            self.content = record.read(self.path)
            self.parts: Parts = {name: dict(part) for name, part in self.content["parts"].items()}
            list(self.content["changes"])
            # Older versions kept it elsewhere.
            seed = self.parts.setdefault("launch", {}).pop(_SEED, _DEFAULT_SEED)
            self.parts.setdefault("data", {}).setdefault(_SEED, seed)
        except FileNotFoundError:
            self.parts = {}
        except Unreadable:
            raise
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{self.path}: it is damaged: remove it, and the next start writes it without the old changes"
            ) from None

    def require_same(
        self, new: Parts, step: int, allowed: Collection[str], only: Collection[str], before: Parts
    ) -> None:
        """Check that a run which goes on is the run of this folder."""
        for part in (name for name in ("model", *CHANGES) if name in only and name not in allowed):
            old = self.parts.get(part) if self.content else before.get(part)
            if old is None:
                continue
            # Stored arguments do not say everything; what they do not say is not compared.
            changed = _changed(old, new[part], common=not self.content and part != "precision")
            if not changed:
                continue
            details = record.details(changed)
            if part == "model":
                raise ValueError(
                    f"{self.folder} holds a training of {old.get('name', 'another model')}, not of "
                    f"{new[part].get('name', 'this one')} ({details}): choose another --output"
                )
            was = "another " + ("order of its data" if list(changed) == [_SEED] else _TITLES[part])
            data = _changed(self.parts.get("data", {}), new["data"]) if "data" in only else {}
            if part == "tokenizer" and data:  # of one cause: another or no --text
                was, details = f"{was} and data set", f"{details}; {record.details(data)}"
            if part == "precision" and precision_name(old) != precision_name(new[part]):
                was = f"{precision_name(old)}, not {precision_name(new[part])}"
            if part == "teacher" and old.get("name") != new[part].get("name"):
                was = f"teacher {old.get('name', 'none')}, not {new[part].get('name', 'none')}"
            raise ValueError(
                f"{self.folder} was trained to step {step} with {was} ({details}): give --change {part} if "
                "that is meant, or choose another --output"
            )

    def write(self, new: Parts, step: int | None, command: str = "") -> list[str]:
        """Write the file, with what changed at `step` (None: the run begins); return lines to print."""
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        if step is not None and (name := self.parts.get("model", {}).get("name")):
            new = {**new, "model": {"name": name, **new["model"]}}  # a script has no name of a model
        versions = _versions()
        lines: list[str] = []
        if step is None or not self.content:
            content = {"format": 1, "begun": now, "changes": [], "versions": versions, "parts": new}
            if step is not None:
                content["begun"] = f"before step {step}"
                lines = [
                    f"{self.path} written: the folder had none, as older versions left it; tokenizer and "
                    f"data before step {step} are unknown and not compared"
                ]
        else:
            changes = list(self.content["changes"])
            old_parts = {**self.parts, "versions": dict(self.content.get("versions", {}))}
            for part, values in {**new, "versions": versions}.items():
                if changed := _changed(old_parts.get(part, {}), values):
                    changes.append({"step": step, "at": now, "part": part, "values": changed})
                    if part in CHANGES:
                        lines.append(f"{part} changes at step {step}: {record.details(changed)}")
                    elif noted := {name: both for name, both in changed.items() if name.startswith(_NOTED)}:
                        lines.append(f"other options change at step {step}: {record.details(noted)}")
            content = {**self.content, "versions": versions, "changes": changes, "parts": new}
        content |= {"command": command} if command else {}
        if content != self.content:
            write_json(self.path, content)
            self.content, self.parts = content, new
        return lines


_TITLES = {name: name for name in CHANGES} | {"mtp": "MTP", "data": "data set", "teacher": "distillation"}


def precision_name(part: Mapping[str, str]) -> str:
    """Return the short name of a precision: "nvfp4 emulated"."""
    if EMULATE in part:
        return "nvfp4 emulated"
    for kind in ("fp4", "fp8"):
        if found := part.get(f"--{kind}-recipe") or part.get(f"--{kind}-format"):
            return found
    return next((name for name in ("bf16", "fp16") if f"--{name}" in part), "fp32")


def folder_of(save: Path) -> Path:
    """Return the folder of a run's manifest: next to `checkpoints/` of `nemotron3 train`, else in --save."""
    return save.parent if save.name == "checkpoints" and (save.parent / NAME).is_file() else save


def _changed(old: Part, new: Part, *, common: bool = False) -> record.Changed:
    found = record.differences(old, new, common=common)
    found.pop("name", None)  # one model may have several
    for name in [name for name in found if old.get(_CONTENT + name, "") == new.get(_CONTENT + name)]:
        del found[name]  # by another path
    for name in [name for name in found if name.startswith(_CONTENT)]:
        before, after = found.pop(name)
        if before is None or after is None or name.removeprefix(_CONTENT) in found:
            continue  # an older version recorded none, or the option says it
        one, other = before.split(), after.split()
        both = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
        found[name] = " ".join(a for a, _ in both), " ".join(b for _, b in both)
    return found


def _normal(value: str) -> str:
    """One spelling of a number: "1e-05" for "0.00001"."""
    try:
        return repr(int(value))
    except ValueError:
        pass
    try:
        return repr(float(value))
    except ValueError:
        return value


def _hash_of(path: Path) -> str:
    """Hash of a file, or of the files in a tokenizer's folder that decide about tokens."""
    if not path.is_dir():
        return _hash(read_outside(path, limit=_LIMIT))
    files = [path / name for name in _TOKENIZER_FILES if (path / name).exists()]
    return _hash(b"".join(_hash(read_outside(file, limit=_LIMIT)).encode() for file in files))


def _hash(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _data_set(word: str) -> str:
    """Name and sizes of a data set; a word that names none, such as a weight, as it is."""
    sizes = []
    for suffix in (".bin", ".idx"):
        try:
            sizes.append(str(Path(word + suffix).stat().st_size))
        except OSError:
            return _normal(word)
    return f"{Path(word).name}({'+'.join(sizes)} bytes)"


def _content(word: str) -> str:
    """Digest and name of a data set or a file of rows; another word as it is."""
    files = [word + suffix for suffix in (".bin", ".idx") if Path(word + suffix).is_file()]
    if not files and not Path(word).is_file():
        return _normal(word)
    return f"{_hash(''.join(map(digest_of, files or [word])).encode())[7:19]}:{Path(word).name}"


def _settings_of(folder: Path) -> str:
    """Hash of what a tokenizer's folder says besides its tokens: template, special tokens, what is added."""
    found = []
    for name in ("tokenizer_config.json", "chat_template.jinja", "added_tokens.json"):
        data = read_outside(folder / name, limit=_LIMIT) if (folder / name).is_file() else b""
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(data)
            data = json.dumps({key: said[key] for key in sorted(said) if key not in _NO_SETTING}).encode()
        found.append(_hash(data))
    return _hash("".join(found).encode())


def _versions() -> Part:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
