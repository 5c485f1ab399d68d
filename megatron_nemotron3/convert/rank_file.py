"""The files of a legacy checkpoint: whose they are, and which tensor lies where in them.

FOLDER/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Nothing is loaded: of a file only the headers and the pickle are read, without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint import read
from megatron_nemotron3.checkpoint.archive import ArchiveError, Record, crc_problem, read_at, records
from megatron_nemotron3.checkpoint.metadata import ITEM_SIZE, CheckpointError
from megatron_nemotron3.checkpoint.read import TensorLayout, opened
from megatron_nemotron3.checkpoint.unpickle import Inert, Refused, inert, loads
from megatron_nemotron3.convert.hf_folder import regular
from megatron_nemotron3.convert.places import plain, what_else

#: Larger pickles are not read; Ultra's is about 20 MB.
_LIMIT = 256 << 20
FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL = re.compile(r"model(0|[1-9]\d*)?")


class _Dict(dict[Any, Any]):
    """Stands for OrderedDict, whose instances carry attributes (`_metadata` of a module's state)."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


_TABLE: dict[tuple[str, str], Any] = {
    **read.DATA_TABLE,
    **read.TENSOR_TABLE,
    ("collections", "OrderedDict"): _Dict,
    ("_io", "BytesIO"): inert("BytesIO"),
    ("io", "BytesIO"): inert("BytesIO"),
}
_STUBS = (*read.DATA_STUBS, "megatron_nemotron3.")

#: Where a tensor lies in the file.
Stored = TensorLayout


@dataclass(frozen=True)
class RankFile:
    """What a rank wrote."""

    path: Path
    size: int
    #: Weights by plain name, of each virtual pipeline stage; one where there are none.
    models: tuple[dict[str, Stored], ...]
    #: All but weights and optimizer.
    common: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> RankFile:
        """Read the headers and the pickle of a file.

        Raises:
            CheckpointError: it is missing, damaged, or no checkpoint of a rank.
        """
        size = regular(path, path.parent)
        with opened(path) as descriptor:
            found = {record.name: record for record in records(descriptor, 0, size)}
            record = found.get("data.pkl")
            if record is None or record.size > _LIMIT:
                raise ArchiveError("it has no data.pkl of usual size")
            if record.crc and (problem := crc_problem(descriptor, record)):
                raise ArchiveError(problem)
            order = found.get("byteorder")
            if order and bytes(read_at(descriptor, order.offset, order.size)) != b"little":
                raise Refused("it is not little-endian")
            data = bytes(read_at(descriptor, record.offset, record.size))
        try:
            root = loads(data, _TABLE, stubs=_STUBS, persistent=read.storage_of)
            if not isinstance(root, dict):
                raise Refused(f"it holds a {type(root).__name__}, not the dict of a checkpoint")
            models = tuple(_weights(model, found) for model in _models(root))
        except (Refused, ArchiveError) as problem:
            raise CheckpointError(f"{path}: {problem}") from None
        common = {
            key: value
            for key, value in root.items()
            if isinstance(key, str) and not _MODEL.fullmatch(key) and key != "optimizer"
        }
        return cls(path, size, models, common)


def _models(root: dict[Any, Any]) -> list[Any]:
    """The models of a file: "model", or "model0", "model1", …"""
    if "model" in root:
        return [root["model"]]
    found: list[Any] = []
    while (key := f"model{len(found)}") in root:
        found.append(root[key])
    if not found:
        raise Refused(
            f"it holds no model; there are {', '.join(sorted(map(str, root)))[:200] or 'no entries'}"
        )
    return found


def _weights(model: Any, found: dict[str, Record]) -> dict[str, Stored]:
    if not isinstance(model, dict):
        raise Refused(f"its model is a {type(model).__name__}, not a dict of weights")
    weights = {}
    for key, value in model.items():
        if not isinstance(key, str):
            raise Refused(f"a weight's name is the {type(key).__name__} {key!r:.60}")
        if what_else(key) is not None:
            continue
        if not isinstance(value, read.PickledTensor):
            hint = "; models from before megatron-core are not read" if isinstance(value, dict) else ""
            raise Refused(f"{key} is a {type(value).__name__}, not a plain tensor{hint}")
        if plain(key) in weights:
            raise Refused(f"{key} is there twice, with and without the prefix of a wrapper")
        weights[plain(key)] = _place(key, value, found)
    return weights


def _place(key: str, tensor: Any, found: dict[str, Record]) -> Stored:
    record = found.get(f"data/{tensor.storage}")
    if record is None:
        raise ArchiveError(f"{key} lies in record 'data/{tensor.storage}', which is not there")
    begin = tensor.begin * ITEM_SIZE[tensor.dtype]
    inside = Stored(tensor.dtype, tensor.shape, tensor.stride, begin)
    first, length = inside.span(range(tensor.shape[0] if tensor.shape else 1))
    if first + length > record.size:
        raise ArchiveError(
            f"{key} needs {first + length:,} bytes of storage, record {record.name!r} has {record.size:,}"
        )
    return Stored(tensor.dtype, tensor.shape, tensor.stride, record.offset + first)


@dataclass(frozen=True)
class Rank:
    """A rank's place in the layout, and its file."""

    tp: int
    pp: int
    ep: int
    file: RankFile


def rank_folders(folder: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """(folder of a rank, its numbers as text), in order.

    Raises:
        CheckpointError: there is none, one is a link, or they are named for different layouts.
    """
    found = []
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if match := _FOLDER.fullmatch(path.name):
                if path.is_symlink():
                    raise CheckpointError(f"{path}: it is a link; give the folder it leads to, or copy it")
                found.append((path, tuple(number for number in match.groups() if number is not None)))
    if not found:
        raise CheckpointError(f"{folder}: it holds no mp_rank_… folders, so it is no legacy checkpoint")
    if len({len(numbers) for _, numbers in found}) > 1:
        raise CheckpointError(
            f"{folder}: {found[0][0].name} and {found[-1][0].name} are of two layouts: remove the stale ones"
        )
    return found


def open_ranks(folder: Path) -> list[Rank]:
    """The files of all ranks, by TP, PP and EP rank.

    Raises:
        CheckpointError: there is none, one is damaged, or the folders' names are of several layouts.
    """
    result = []
    pipeline: bool | None = None
    for path, numbers in rank_folders(folder):
        file = RankFile.open(path / FILE)
        if len(numbers) == 2 and pipeline is None:
            sizes = [argument(file, f"{kind}_model_parallel_size") for kind in ("pipeline", "expert")]
            if sizes.count(1) != 1:
                raise CheckpointError(
                    f"{file.path}: its arguments say PP={sizes[0]} and EP={sizes[1]}, so it cannot be told "
                    f"whether the last number of {path.name} is a pipeline or an expert rank"
                )
            pipeline = sizes[1] == 1
        tp, *rest = map(int, numbers)
        pp, ep = rest if len(rest) == 2 else (*rest, 0) if pipeline else (0, *rest, 0)[:2]
        result.append(Rank(tp, pp, ep, file))
    return result


def argument(file: RankFile, name: str) -> int | None:
    """A positive number among the stored arguments; None if it is not there."""
    arguments = file.common.get("args")
    value = arguments.field(name) if isinstance(arguments, Inert) else None
    return value if type(value) is int and value > 0 else None
