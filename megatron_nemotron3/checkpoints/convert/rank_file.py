"""The files of a legacy checkpoint: the rank that wrote each file, and the tensors in it.

FOLDER/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Tensors are not loaded: only the headers and the pickle of a file are read, without torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints import read
from megatron_nemotron3.checkpoints.archive import Record
from megatron_nemotron3.checkpoints.convert.hf_folder import regular_file_size
from megatron_nemotron3.checkpoints.convert.keys import ADAPTER, non_weight_kind, plain_name
from megatron_nemotron3.checkpoints.metadata import CheckpointError, StoredObject, printable
from megatron_nemotron3.checkpoints.read import TensorLayout, opened
from megatron_nemotron3.checkpoints.unpickle import Inert, Refused, inert, loads

#: Largest pickle that is read, in bytes; Ultra's has about 20 MB.
_LIMIT = 256 << 20
FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_MODEL = re.compile(r"model(0|[1-9]\d*)?")


class _Dict(dict[Any, Any]):
    """Stand-in for OrderedDict, whose instances have attributes (`_metadata` of a module's state)."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


_RANK_FILE_TABLE: dict[tuple[str, str], Any] = {
    **read.DATA_TABLE,
    **read.TENSOR_TABLE,
    ("collections", "OrderedDict"): _Dict,
    ("_io", "BytesIO"): inert("BytesIO"),
    ("io", "BytesIO"): inert("BytesIO"),
}
_RANK_FILE_STUBS = (*read.DATA_STUBS, "megatron_nemotron3.")


@dataclass(frozen=True)
class RankFile:
    """The file of one rank."""

    path: Path
    size: int
    #: Weights by plain name, for each virtual pipeline stage (one if there are none).
    models: tuple[dict[str, TensorLayout], ...]
    #: Everything except weights and optimizer.
    common: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> RankFile:
        """Read the headers and the pickle of a file.

        Raises:
            CheckpointError: it is missing, damaged, or not the checkpoint of a rank.
        """
        size = regular_file_size(path, path.parent)
        with opened(path) as descriptor:
            data, found = read.read_pickle(descriptor, StoredObject(path.name, 0, size), _LIMIT)
            root = loads(data, _RANK_FILE_TABLE, stubs=_RANK_FILE_STUBS, persistent=read.storage_of)
            if not isinstance(root, dict):
                raise Refused(f"it holds a {type(root).__name__}, not the dict of a checkpoint")
            models = tuple(_weights_of(model, found) for model in _models_of(root))
        common = {
            key: value
            for key, value in root.items()
            if isinstance(key, str) and not _MODEL.fullmatch(key) and key != "optimizer"
        }
        return cls(path, size, models, common)


def _models_of(root: dict[Any, Any]) -> list[Any]:
    """Return the models of a file: "model", or "model0", "model1", …"""
    if "model" in root:
        return [root["model"]]
    found: list[Any] = []
    while (key := f"model{len(found)}") in root:
        found.append(root[key])
    if not found:
        keys = ", ".join(sorted(printable(str(key)) for key in root))
        raise Refused(f"it holds no model; its entries are {keys[:200] or 'none'}")
    return found


def _weights_of(model: Any, found: dict[str, Record]) -> dict[str, TensorLayout]:
    if not isinstance(model, dict):
        raise Refused(f"its model is a {type(model).__name__}, not a dict of weights")
    weights = {}
    for key, value in model.items():
        if not isinstance(key, str) or not key.isprintable():
            raise Refused(f"the name of a weight is the {type(key).__name__} {key!r:.60}")
        if (kind := non_weight_kind(key)) is not None:
            if kind == ADAPTER:
                raise Refused(f"{key} is of a LoRA adapter: train it with --ckpt-format torch_dist")
            continue
        if not isinstance(value, read.PickledTensor):
            hint = "; models older than megatron-core are not read" if isinstance(value, dict) else ""
            raise Refused(f"{key} is a {type(value).__name__}, not a plain tensor{hint}")
        if plain_name(key) in weights:
            raise Refused(f"{key} occurs twice, with and without the prefix of a wrapper")
        weights[plain_name(key)] = read.locate_tensor(key, value, found)
    _check_places(weights)
    return weights


def _check_places(weights: dict[str, TensorLayout]) -> None:
    """Refuse two weights that share bytes: the model has no tied weights."""
    reached, last = 0, ""
    for (first, length), name in sorted((layout.whole, name) for name, layout in weights.items()):
        if first < reached and length:
            raise Refused(f"{last} and {name} are in the same bytes of the file, from {first:,}")
        if length:
            reached, last = first + length, name


@dataclass(frozen=True)
class Rank:
    """The file of a rank, and the rank's position in the parallel layout."""

    tp: int
    pp: int
    ep: int
    file: RankFile


def rank_folders(folder: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """List (folder of a rank, the numbers in its name), sorted.

    Raises:
        CheckpointError: there is none, one is a link, or the names belong to different layouts.
    """
    found = []
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if match := _FOLDER.fullmatch(path.name):
                if path.is_symlink():
                    raise CheckpointError(f"{path}: it is a link: give the folder it points to, or copy it")
                found.append((path, tuple(number for number in match.groups() if number is not None)))
    if not found:
        raise CheckpointError(f"{folder}: it holds no mp_rank_… folders, so it is not a legacy checkpoint")
    if len({len(numbers) for _, numbers in found}) > 1:
        raise CheckpointError(
            f"{folder}: {found[0][0].name} and {found[-1][0].name} belong to "
            "different layouts: remove the stale folders"
        )
    return found


def open_ranks(folder: Path) -> list[Rank]:
    """Open the files of all ranks.

    Raises:
        CheckpointError: there is none, one is damaged, or the names of the folders are ambiguous.
    """
    result = []
    pipeline: bool | None = None
    for path, numbers in rank_folders(folder):
        file = RankFile.open(path / FILE)
        if len(numbers) == 2 and pipeline is None:
            sizes = [argument(file, f"{kind}_model_parallel_size") for kind in ("pipeline", "expert")]
            if sizes.count(1) != 1:
                raise CheckpointError(
                    f"{file.path}: its arguments have PP={sizes[0]} and EP={sizes[1]}, so the last number of "
                    f"{path.name} may be a pipeline rank or an expert rank"
                )
            pipeline = sizes[1] == 1
        tp, *rest = map(int, numbers)
        pp, ep = rest if len(rest) == 2 else (*rest, 0) if pipeline else (0, *rest, 0)[:2]
        result.append(Rank(tp, pp, ep, file))
    return result


def argument(file: RankFile, name: str) -> int | None:
    """Return a positive number from the stored arguments; None if it is not there."""
    arguments = file.common.get("args")
    value = arguments.field(name) if isinstance(arguments, Inert) else None
    return value if type(value) is int and value > 0 else None
