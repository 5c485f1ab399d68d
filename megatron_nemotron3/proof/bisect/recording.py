"""The file that holds what one system computed for some sequences of tokens.

It is a dict that `torch.load(weights_only=True)` reads:

    format      "nemotron3-recording-1"
    system      who computed it, free text: "megatron", "vllm 0.12", …
    model       name of the model, or None
    dtype       of the computation, as torch names it
    sequences   a list of dicts with the fields of `Sequence`

Layers are numbered as in the model's pattern, from 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.metadata import ArchiveError, StoredObject
from megatron_nemotron3.checkpoints.read import MappedFile, records
from megatron_nemotron3.checkpoints.trust import problem_of
from megatron_nemotron3.common.files import atomic, open_outside
from megatron_nemotron3.models import Nemotron3Config

FORMAT = "nemotron3-recording-1"
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "nvfp4")
#: Longest name of a system.
_NAME = 200
#: Largest log-probability; rounding in BF16 leaves values above 0.
_LARGEST = 0.05


@dataclass
class Sequence:
    """One sequence of s tokens.

    Attributes:
        ids: [s], int64.
        prompt: number of tokens that were not scored before the first scored one.
        logprobs: [s - first], FP32: natural logarithm of the probability of ids[t] given ids[:t], at
            temperature 1, for t from `first` on. NaN and infinities are what the system computed.
        routing: layer -> experts [s, topk], int32, in any order; a row of -1 was not recorded.
        hidden: layer -> the residual stream after that layer [s, d]; a row of NaN was not recorded.
        mtp_logprobs: depth from 1 on -> [s - max(prompt, 1 + depth)], FP32: of ids[t], predicted by MTP from
            the hidden state of token t - 1 - depth and the embeddings of the tokens between.
    """

    ids: Tensor
    prompt: int
    logprobs: Tensor
    routing: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    mtp_logprobs: dict[int, Tensor] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """Position of the first token with a log-probability."""
        return max(self.prompt, 1)


@dataclass
class Recording:
    """What one system computed."""

    system: str
    dtype: str
    sequences: list[Sequence]
    model: str | None = None


def read(path: Path | str) -> Recording:
    """Read a recording.

    Raises:
        ValueError: the file cannot be read, is no recording, or a tensor has a wrong shape or type. The
            message names file, sequence and cure.
    """
    data, size = _loaded(Path(path))
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found != FORMAT:
        raise ValueError(f"{path}: not a recording: its format is {found!r}, {FORMAT!r} is expected")
    known = {f.name for f in fields(Sequence)}
    try:
        listed = data["sequences"]
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise ValueError("sequences must be a list of dicts")
        for number, one in enumerate(listed):
            if unknown := one.keys() - known:
                raise ValueError(f"sequence {number}: unknown field {min(map(str, unknown))!r}")
            if missing := [name for name in ("ids", "prompt", "logprobs") if name not in one]:
                raise ValueError(f"sequence {number}: the field {missing[0]!r} is missing: record it again")
        _require_whole(listed, size)
        sequences = [Sequence(**one) for one in listed]
        recording = Recording(data["system"], data["dtype"], sequences, data.get("model"))
        check(recording)
    except KeyError as problem:
        raise ValueError(f"{path}: the field {problem} is missing: record it again") from None
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{path}: {problem}") from None
    return recording


def _loaded(path: Path) -> tuple[Any, int]:
    """What a file holds, and its bytes. Nothing is decompressed; the CRC32 of each record is compared."""
    try:
        with open_outside(path) as file:
            begin = file.read(2)
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror or problem}") from None
    try:
        if begin != b"PK":
            raise ArchiveError("nothing that torch.save writes" if begin else "it is empty")
        archive = MappedFile(path)
        for record in records(archive, StoredObject(path.name, 0, archive.size)):
            if record.crc:  # torch can be told to write none
                record.check(archive)
        if found := problem_of(path):  # torch itself compares objects without end
            raise ArchiveError(found)
        return torch.load(path, map_location="cpu", weights_only=True), archive.size
    except ArchiveError as problem:
        reason = str(problem)
    except Exception:  # of pickles, many kinds, and none says what to do
        reason = "it holds more than tensors, numbers and texts"
    raise ValueError(f"{path}: not a readable recording, {reason}: record it again")


def _require_whole(listed: list[dict[Any, Any]], size: int) -> None:
    """Raise ValueError for a tensor that has not all its elements in a file of `size` bytes."""
    claimed = 0
    for number, one in enumerate(listed):
        held = [(name, v) for name, v in one.items() if not isinstance(v, dict)]
        held += [
            (f"{name} of {key}", v) for name, d in one.items() if isinstance(d, dict) for key, v in d.items()
        ]
        for name, t in held:
            claimed += t.numel() * t.element_size() if isinstance(t, Tensor) else 0
            if claimed > size:
                where = f"sequence {number}: {name}: the tensors"
                raise ValueError(f"{where} have {claimed:,} bytes or more, the file {size:,}")


def write(path: Path | str, recording: Recording) -> None:
    """Write a recording; the file appears when it is complete.

    Raises:
        ValueError: as `check`; or the folder does not exist.
    """
    check(recording)
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    sequences = [{name: _own(value) for name, value in vars(s).items()} for s in recording.sequences]
    with atomic(path) as partial:
        torch.save({"format": FORMAT} | vars(recording) | {"sequences": sequences}, partial)


def _own(value: Any) -> Any:
    """A tensor in memory of its own: a view would be saved with all it is a part of."""
    if isinstance(value, dict):
        return {key: _own(one) for key, one in value.items()}
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


#: What is wrong, in words; the first one is reported.
Problems = Iterator[str]


def check(recording: Recording) -> None:
    """Check everything that can be checked without the model.

    Raises:
        ValueError: a field has a wrong type or shape; the message names the sequence.
    """
    for problem in _problems(recording):
        raise ValueError(problem)


def _problems(recording: Recording) -> Problems:
    if not isinstance(recording.system, str) or not 0 < len(recording.system) <= _NAME:
        yield f"system must be a name of at most {_NAME} characters, such as 'megatron'"
    if recording.model is not None and not isinstance(recording.model, str):
        yield "model must be a name or None"
    if recording.dtype not in DTYPES:
        yield f"dtype {recording.dtype!r} must be one of {', '.join(DTYPES)}"
    if not recording.sequences:
        yield "there is no sequence: record at least one"
    for number, one in enumerate(recording.sequences):
        yield from (f"sequence {number}: {problem}" for problem in _of_sequence(one))


def _of_sequence(s: Sequence) -> Problems:
    yield from _of_tensor("ids", s.ids, torch.int64, (None,))
    tokens = len(s.ids)
    if type(s.prompt) is not int or s.prompt < 0 or s.first >= tokens:
        yield f"prompt {s.prompt!r} of {tokens} tokens: it must leave a token to score, and one before it"
    if int(s.ids.min()) < 0:
        yield f"token id {int(s.ids.min())} is negative"
    yield from _of_tensor("logprobs", s.logprobs, torch.float32, (tokens - s.first,))
    yield from _of_layers("routing", s.routing, torch.int32, (tokens, None))
    yield from _of_layers("hidden", s.hidden, None, (tokens, None))
    yield from _of_layers("mtp_logprobs", s.mtp_logprobs, torch.float32, (None,))
    scored = {"logprobs": s.logprobs}
    for depth, values in s.mtp_logprobs.items():
        name, length = f"mtp_logprobs of depth {depth}", max(0, tokens - max(s.prompt, 1 + depth))
        yield from _of_tensor(name, values, torch.float32, (length,))
        scored[name] = values
    for name, values in scored.items():
        if (above := values[values > _LARGEST]).numel():
            yield (
                f"{name}: {len(above)} values are above 0, the largest {above.max():.4g}: give natural "
                "logarithms of probabilities"
            )


def _of_layers(name: str, given: Any, dtype: torch.dtype | None, shape: tuple[int | None, ...]) -> Problems:
    if not isinstance(given, Mapping) or not all(type(n) is int and n >= 0 for n in given):
        yield f"{name} must be a dict from numbers from 0 on to tensors"
    for number, tensor in given.items():
        yield from _of_tensor(f"{name} of {number}", tensor, dtype, shape)


def _of_tensor(name: str, t: Any, dtype: torch.dtype | None, shape: tuple[int | None, ...]) -> Problems:
    if not isinstance(t, Tensor):
        yield f"{name} must be a tensor, not {type(t).__name__}"
    right = t.is_floating_point() if dtype is None else t.dtype == dtype
    expected = "a floating-point type" if dtype is None else str(dtype).removeprefix("torch.")
    if not right:
        yield f"{name} is {str(t.dtype).removeprefix('torch.')}, {expected} is expected"
    if len(t.shape) != len(shape) or any(n not in (None, have) for n, have in zip(shape, t.shape)):
        expected_shape = ", ".join("any" if n is None else str(n) for n in shape)
        yield f"{name} has shape {list(t.shape)}, [{expected_shape}] is expected"


def check_model(recording: Recording, config: Nemotron3Config) -> None:
    """Check that a recording can be one of this model."""
    for number, s in enumerate(recording.sequences):
        for problem in _of_model(s, config):
            raise ValueError(f"{recording.system}, sequence {number}: {problem}")


def _of_model(s: Sequence, config: Nemotron3Config) -> Problems:
    pattern, model = config.pattern, config.name
    if (largest := int(s.ids.max())) >= config.vocab_size:
        yield (
            f"token id {largest} is outside the vocabulary of {model}, {config.vocab_size} entries: was it "
            "recorded with another model?"
        )
    for name, layers in (("routing", s.routing), ("hidden", s.hidden)):
        if layers and max(layers) >= len(pattern):
            yield (
                f"{name} of layer {max(layers)}: {model} has {len(pattern)} layers, numbered from 0 "
                f"({pattern})"
            )
    for layer, experts in s.routing.items():
        where, sizes = f"routing of layer {layer}", config.at(layer)
        if pattern[layer] != "E":
            yield (
                f"{where}, which is {pattern[layer]!r} in {pattern}: give the layer's number in the pattern, "
                "not the number among the E layers"
            )
        if experts.shape[1] != sizes.moe_router_topk:
            yield (
                f"{where} has {experts.shape[1]} experts per token, {model} selects {sizes.moe_router_topk}"
            )
        least, most = int(experts.min()), int(experts.max())
        if least < -1 or most >= (sizes.num_moe_experts or 0):
            yield f"{where} names experts from {least} to {most}, {model} has {sizes.num_moe_experts}"
    for layer, hidden in s.hidden.items():
        if hidden.shape[1] != config.hidden_size:
            yield f"hidden of layer {layer} has width {hidden.shape[1]}, {model} has {config.hidden_size}"
    if s.mtp_logprobs and not 1 <= min(s.mtp_logprobs) <= max(s.mtp_logprobs) <= config.mtp_num_layers:
        yield (
            f"mtp_logprobs of depths {sorted(s.mtp_logprobs)}; {model} has {config.mtp_num_layers} depths, "
            "numbered from 1"
        )


def check_same(trainer: Recording, engine: Recording) -> None:
    """Check that two recordings are of the same tokens."""
    cure = "record the same sequences in the same order"
    if len(trainer.sequences) != len(engine.sequences):
        raise ValueError(
            f"{trainer.system} has {len(trainer.sequences)} sequences, {engine.system} "
            f"{len(engine.sequences)}: {cure}"
        )
    for number, (a, b) in enumerate(zip(trainer.sequences, engine.sequences)):
        n = min(len(a.ids), len(b.ids))
        differ = (a.ids[:n] != b.ids[:n]).nonzero().flatten()
        if len(differ) or len(a.ids) != len(b.ids):
            at = int(differ[0]) if len(differ) else n
            raise ValueError(
                f"sequence {number}: the tokens differ from position {at} on ({len(a.ids)} tokens of "
                f"{trainer.system}, {len(b.ids)} of {engine.system}): {cure}"
            )
