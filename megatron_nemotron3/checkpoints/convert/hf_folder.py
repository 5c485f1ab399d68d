"""Tensor source for Hugging Face checkpoint folders: config.json, and one or more safetensors files.

An index can name any file, and a file can be a link. Only files of the folder itself, or of the blobs of a
snapshot in Hugging Face's cache, are read.

    8 bytes: length of the JSON, little-endian ‖ JSON, padded with spaces ‖ elements of all tensors

The safetensors package memory-maps a file to read it, and needs all tensors of a file in memory to write it.
Here files are read and written in bands, so this module reads and writes headers itself. Tests compare both
directions with the package.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megatron_nemotron3.checkpoints.convert.config_keys import QUANTIZATION
from megatron_nemotron3.checkpoints.convert.omni_config import is_omni
from megatron_nemotron3.checkpoints.convert.sources import (
    Block,
    FileSource,
    Location,
    SourceTensor,
    TensorSource,
    row_major,
)
from megatron_nemotron3.checkpoints.folders import HF_CONFIG as CONFIG
from megatron_nemotron3.checkpoints.folders import HF_INDEX as INDEX
from megatron_nemotron3.checkpoints.folders import HF_SINGLE as SINGLE
from megatron_nemotron3.checkpoints.metadata import (
    ITEM_SIZE,
    CheckpointError,
    explained,
    read_json,
    regular_file_size,
)
from megatron_nemotron3.checkpoints.read import MappedFile
from megatron_nemotron3.common.files import first_repeated
from megatron_nemotron3.common.output import count

#: The file that ModelOpt's exporter writes next to config.json.
HF_QUANT_CONFIG = "hf_quant_config.json"
#: What follows the root of the decoder's tensors, in all spellings -> in the table.
_ROOTS = {"layers": "layers", "norm_f": "norm_f", "embeddings": "embeddings", "embedding": "embeddings"}
_ROOTED = re.compile(rf"^(?:backbone|model)\.({'|'.join(_ROOTS)})\.")
#: The same after the names of modules around the model.
_WRAPPED = re.compile(rf"^((?:\w+\.)+?)(?:backbone|model)\.(?:{'|'.join(_ROOTS)})\.")
_MULTIMODAL = "model of text and other inputs, of which only the language model is of this family"
#: What to do where only a language model will do.
TAKEN_OUT = "not supported here (`nemotron3 convert … --only language` takes the language model out)"
#: Pattern of an architecture or a model_type -> what it is.
_OTHER_KINDS = (
    (r"(?i)DeciLM", "Puzzle model of DeciLM's form, whose blocks are attention with an MLP"),
    (r"(?i)omni", f"Nemotron Omni model, a {_MULTIMODAL}"),
    (r"(?i)(?:^|[_-])vl(?:[_-]|$)", f"Nemotron VL model, a {_MULTIMODAL}"),
)
#: Weights as pickles, which are not read.
_PICKLED = re.compile(r"pytorch_model.*\.bin")
#: Keys of such configurations.
_PARTS = (
    *("vision_config", "audio_config", "sound_config", "llm_config", "text_config"),
    *("vit_hidden_size", "img_context_token_id", "image_token_id"),
)


def read_config(folder: Path, *, omni: bool = False) -> dict[str, Any]:
    """Read config.json, with the quantization that hf_quant_config.json states if config.json states none.

    ModelOpt before 0.31 wrote it there only.
    """
    data = read_json(folder / CONFIG)
    if QUANTIZATION not in data and os.path.lexists(folder / HF_QUANT_CONFIG):
        data[QUANTIZATION] = read_json(folder / HF_QUANT_CONFIG)
    if omni and is_omni(data):
        return data
    if kind := _other_kind(data):
        cure = TAKEN_OUT if is_omni(data) else "not supported"
        raise CheckpointError(f"{folder / CONFIG}: it is a {kind}: {cure}")
    return data


def _other_kind(data: Mapping[str, Any]) -> str | None:
    """Name a model of the family's wider circle that `Nemotron3Config` cannot describe."""
    names = data.get("architectures")
    named = [name for name in (names if isinstance(names, list) else []) if isinstance(name, str)]
    named.append(str(data.get("model_type")))
    for pattern, kind in _OTHER_KINDS:
        if name := next((name for name in named if re.search(pattern, name)), None):
            return f"{kind} ({name:.60})"
    if key := next((key for key in _PARTS if key in data), None):
        return f"{_MULTIMODAL} ({key})"
    return None


def open_hf(folder: Path) -> FileSource:
    """Open every tensor of the folder; only the headers of its files are read."""
    if not os.path.lexists(folder / INDEX):
        if not os.path.lexists(folder / SINGLE):
            raise CheckpointError(f"{folder}: {_without_weights(os.listdir(folder))}")
        return open_files(folder, [SINGLE])
    listed = _weight_map(folder)
    if os.path.lexists(folder / SINGLE) and SINGLE not in listed.values():
        raise CheckpointError(
            f"{folder}: it has {SINGLE}, which transformers reads, and {INDEX} with "
            f"{len(set(listed.values())):,} other files: remove the one that is not the model"
        )
    source = open_files(folder, sorted(set(listed.values())), listed)
    if missing := [tensor for tensor in listed if tensor not in source.tensors]:
        raise CheckpointError(
            f"{folder / INDEX}: {len(missing)} tensors are in no file, first {missing[0]!r:.100}"
        )
    return source


def _without_weights(names: Iterable[str]) -> str:
    """Say what a folder with neither an index nor a single file is, and the cure."""
    names = set(names)
    if names & {"adapter_config.json", "adapter_model.safetensors"}:
        return "it is a LoRA adapter without a model: give the model, and the adapter as --adapter"
    if shards := sorted(name for name in names if name.endswith(".safetensors")):
        number = count(len(shards), "file")
        return f"the index is missing: it has {number} like {shards[0]} and no {INDEX}: copy it here"
    if pickles := sorted(name for name in names if _PICKLED.fullmatch(name)):
        return (
            f"it has {pickles[0]} and no safetensors: save it as safetensors (transformers: from_pretrained, "
            "then save_pretrained)"
        )
    return f"it has neither {SINGLE} nor {INDEX}: is it a Megatron checkpoint?"


def open_files(folder: Path, names: Sequence[str], listed: Mapping[str, str] | None = None) -> FileSource:
    """Open every tensor of some safetensors files of a folder; `listed` says which file holds which."""
    tensors: dict[str, SourceTensor] = {}
    sizes = {name: regular_file_size(folder / name, folder) for name in names}
    for name in names:
        path = folder / name
        for tensor, entry in read_safetensors_header(path)[0].items():
            if tensor in tensors:
                raise CheckpointError(f"{path}: {tensor!r:.100} is in another file of the folder as well")
            if listed is not None and listed.get(tensor) != name:
                other = f"{listed.get(tensor)!r:.100}"
                raise CheckpointError(f"{path}: it holds {tensor!r:.100}, which {INDEX} has in {other}")
            tensors[tensor] = header_tensor(path, entry)
    return FileSource(folder, tensors, sizes)


def open_file(path: Path) -> FileSource:
    """Open every tensor of one safetensors file, which may be a link."""
    real = Path(os.path.realpath(path))
    return open_files(real.parent, [real.name])


def other_files(folder: Path, files: Iterable[str]) -> dict[str, int]:
    """Return the readable safetensors files of a folder besides `files`: name -> its MTP tensors."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in files and os.path.realpath(path) not in files:
            with contextlib.suppress(CheckpointError):
                found[path.name] = sum(
                    name.startswith("mtp.") for name in open_files(folder, [path.name]).tensors
                )
    return found


def without_prefix(source: FileSource) -> TensorSource:
    """Take off what a wrapper of the model, as of peft or torch.compile, has put before all names."""
    found = next(filter(None, map(_WRAPPED.match, source.tensors)), None)
    if found is None or not all(name.startswith(found[1]) for name in source.tensors):
        return source
    tensors = {name.removeprefix(found[1]): tensor for name, tensor in source.tensors.items()}
    return FileSource(source.folder, tensors, source.files, source.opened)


def table_names(folder: Path, names: Iterable[str], root: str) -> dict[str, str]:
    """Map the table's name of each tensor to its name in the folder.

    transformers calls `root` "model" in memory, and writes `backbone.embedding.weight` (5.15.1, for a model
    that was made from a configuration).
    """
    result: dict[str, str] = {}
    for name in names:
        table = _ROOTED.sub(lambda match: f"{root}.{_ROOTS[match[1]]}.", name)
        if table in result:
            raise CheckpointError(f"{folder}: {result[table]!r:.100} and {name!r:.100} are the same tensor")
        result[table] = name
    return result


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: it has no weight_map")
    for tensor, name in listed.items():
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {tensor!r:.100} is said to be in {name!r:.100}: expected the plain name of a "
                ".safetensors file of the folder"
            )
        if "\0" in name:
            raise CheckpointError(f"{path}: {tensor!r:.100} is in a file whose name has a null byte")
    return listed


# -- headers of safetensors files ------------------------------------------------------------------

_HEADER_LENGTH = struct.Struct("<Q")
#: Longest header that is read, in bytes: the 51,023 tensors of Ultra need 6 MB. The package allows 100 MB.
HEADER_LIMIT = 32 << 20

#: safetensors' name -> torch's.
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HeaderEntry(NamedTuple):
    """A tensor in a safetensors header: torch's dtype name, shape, and file offset of its elements."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_safetensors_header(path: Path) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Read the tensors of a file by name, in file order, and its `__metadata__`."""
    with explained(path):
        file = MappedFile(path)
        size = file.size
        if size < _HEADER_LENGTH.size:
            raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
        (length,) = _HEADER_LENGTH.unpack(file(0, _HEADER_LENGTH.size))
        if length > min(HEADER_LIMIT, size - _HEADER_LENGTH.size):
            raise CheckpointError(
                f"{path}: its header has {length:,} bytes, the file {size:,}: at most {HEADER_LIMIT:,} "
                "are read"
            )
        text = bytes(file(_HEADER_LENGTH.size, length))
    try:
        return _parse_header(text, _HEADER_LENGTH.size + length, size)
    except ValueError as problem:
        raise CheckpointError(f"{path}: {problem}") from None


def header_tensor(path: Path, entry: HeaderEntry) -> SourceTensor:
    """Return the tensor of a header entry as a tensor of a source."""
    location = Location(path, entry.offset, row_major(entry.shape))
    return SourceTensor(entry.dtype, entry.shape, (Block((0,) * len(entry.shape), entry.shape, location),))


def _parse_header(text: bytes, begin: int, size: int) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    if not text.startswith(b"{"):
        raise ValueError(f"its header begins with {text[:8]!r}, not with a JSON object")
    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError:
        raise ValueError("its header is not UTF-8") from None
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    metadata = data.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its __metadata__ is not an object of strings")
    entries: dict[str, HeaderEntry] = {}
    reached = 0
    spans = ((*_parse_header_entry(name, entry), name) for name, entry in data.items())
    for first, last, dtype, shape, name in sorted(spans):
        entries[name] = HeaderEntry(dtype, shape, begin + first)
        if first != reached:
            what = "overlaps the tensor before it" if first < reached else "leaves a gap before it"
            raise ValueError(f"{name!r} at byte {first:,} of the data {what}, which ends at {reached:,}")
        reached = last
    if begin + reached != size:
        raise ValueError(f"its tensors end at byte {begin + reached:,}, the file at {size:,}")
    return entries, metadata


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"{first_repeated(pairs)!r:.100} occurs twice")
    return result


def _parse_header_entry(name: str, entry: Any) -> tuple[int, int, str, tuple[int, ...]]:
    """Return first and last byte, dtype and shape."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r:.100} is {entry!r:.80}: expected dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(f"{name!r:.100} has the type {kind!r:.40}: known are {', '.join(DTYPES)}")
    if not _is_list_of_naturals(shape):
        raise ValueError(f"{name!r:.100} has the shape {shape!r:.80}")
    if not _is_list_of_naturals(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r:.100} has the data_offsets {offsets!r:.80}")
    need = prod(shape) * ITEM_SIZE[DTYPES[kind]]
    if offsets[1] - offsets[0] != need:
        raise ValueError(
            f"{name!r:.100}, {kind} {shape}, needs {need:,} bytes and is given {offsets[1] - offsets[0]:,}"
        )
    return offsets[0], offsets[1], DTYPES[kind], tuple(shape)


def _is_list_of_naturals(values: Any) -> bool:
    short = isinstance(values, list) and len(values) < 64
    return short and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def safetensors_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the header of a file with these (name, dtype, shape), whose elements follow in this order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    reached = 0
    for name, dtype, shape in tensors:
        stop = reached + prod(shape) * ITEM_SIZE[dtype]
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [reached, stop]}
        reached = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)  # elements begin at a multiple of 8 bytes
    return _HEADER_LENGTH.pack(len(text)) + text
