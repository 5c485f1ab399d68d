"""Every tensor of a model on both sides, and the mappings between Hugging Face's tensors and Megatron's.

`mappings(config)` applies the table of tensors to every layer of the model. A mapping is the smallest set of
tensors that can be converted together. Most have one tensor on each side; a stack of experts is one tensor in
Megatron and hundreds in HF.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from megatron_nemotron3.checkpoints.convert import transforms
from megatron_nemotron3.checkpoints.convert.config_keys import MTP_BLOCKS, MTP_LAYERS, QUANTIZATION
from megatron_nemotron3.checkpoints.convert.keys import NameLookup, plain_name
from megatron_nemotron3.checkpoints.convert.plan import CopyPlan, Shape
from megatron_nemotron3.checkpoints.folders import HF_CONFIG as CONFIG
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import Prefix, prefixes
from megatron_nemotron3.models.tensors import DIALECTS, TORCH_DIST, Row, Spelling, rows_of, symbol_sizes

#: Type of released checkpoints and of torch_dist folders of BF16 runs, except for rows marked `float32`.
BF16 = "bfloat16"
#: Types that weights may be stored in.
WEIGHT_TYPES = ("bfloat16", "float16", "float32", "float64")
_NUMBER = re.compile(r"\b\d+\b")


class Tensor(NamedTuple):
    """Name, shape, and torch's dtype name."""

    name: str
    shape: Shape
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class TensorMapping:
    """Tensors of both sides that are converted into each other."""

    row: Row
    prefix: Prefix
    spelling: Spelling
    megatron: tuple[Tensor, ...]
    hf: tuple[Tensor, ...]

    def to_hf(self) -> CopyPlan:
        """Return the plan that makes the HF tensors from Megatron's; `.inverse()` goes back."""
        megatron, hf = ({tensor.name: tensor.shape for tensor in side} for side in (self.megatron, self.hf))
        return transforms.RULES[self.spelling.rule](megatron, hf, self.prefix.config.kv_channels)


def mappings(
    config: Nemotron3Config,
    *,
    dialect: str = TORCH_DIST,
    dtype: str = BF16,
    padded_vocab_size: int | None = None,
    spellings: Mapping[str, Spelling] | None = None,
) -> Iterator[TensorMapping]:
    """Yield every mapping of a model, in the order of the layers.

    `spellings` are those of rows that the dialect does not decide, by the mapping's first HF name.
    """
    if dialect not in DIALECTS:
        raise ValueError(f"unknown dialect {dialect!r}: use one of {', '.join(DIALECTS)}")
    if padded_vocab_size is not None and padded_vocab_size < config.vocab_size:
        raise ValueError(f"padded_vocab_size={padded_vocab_size} is less than vocab_size={config.vocab_size}")
    for prefix in prefixes(config):
        sizes = symbol_sizes(prefix.config, padded_vocab_size)
        for row in rows_of(config, prefix.part):
            spelling = (spellings or {}).get(prefix.hf + row.hf[0].name) or row.spelling(dialect)
            yield joined(prefix, row, spelling, sizes, "float32" if row.float32 else dtype)


def mappings_of(
    config: Nemotron3Config, keys: Iterable[str], *, padded_vocab_size: int | None = None
) -> list[TensorMapping]:
    """Return the mappings of a model in the spelling of a checkpoint with these weight keys.

    The checkpoint may mix dialects. The mappings use plain names (`keys.plain_name`).
    """
    lookup = NameLookup(config)
    found: dict[str, str] = {}  # plain name -> key
    spellings: dict[str, Spelling] = {}  # by the first HF name, which is unique for each mapping
    for key in keys:
        match, name = lookup.key(key), plain_name(key)
        other = spellings.setdefault(match.prefix.hf + match.row.hf[0].name, match.spelling)
        if other is not match.spelling or name in found:
            raise ValueError(
                f"Megatron keys {found.get(name, other.tensors[0].name)!r} and {key!r} are the same tensor"
            )
        found[name] = key
    result = list(mappings(config, padded_vocab_size=padded_vocab_size, spellings=spellings))
    missing = [t.name for mapping in result for t in mapping.megatron if t.name not in found]
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of {config.name} are missing, the first is {missing[0]!r}"
            + _mtp_hint(config, missing)
        )
    return result


def hf_tensors(config: Nemotron3Config, *, dtype: str = BF16) -> list[Tensor]:
    """List every tensor of the model's Hugging Face checkpoint, including MTP."""
    return [tensor for mapping in mappings(config, dtype=dtype) for tensor in mapping.hf]


def check_types(folder: Path, types: Mapping[str, str], *, alike: bool = False) -> None:
    """Check that the weights of a checkpoint have types of weights."""
    kinds: dict[str, Counter[str]] = {}
    for name, dtype in types.items():
        if dtype not in WEIGHT_TYPES:
            raise ValueError(
                f"{folder}: {name} is {dtype}, and nothing says that weights are quantized; they are "
                + ", ".join(WEIGHT_TYPES)
            )
        kinds.setdefault(_NUMBER.sub("N", name), Counter())[dtype] += 1
    for kind, found in kinds.items() if alike else ():
        if len(found) > 1:
            (most, count), *_ = found.most_common()
            name = next(n for n, dtype in types.items() if dtype != most and _NUMBER.sub("N", n) == kind)
            raise ValueError(
                f"{folder}: {name} is {types[name]}, {count:,} others of its kind are {most}: give --dtype "
                "to write one type"
            )


def check_hf(config: Nemotron3Config, shapes: Mapping[str, Shape], mtp_file: str = "") -> None:
    """Check that a Hugging Face checkpoint contains exactly the tensors of its config.json.

    `mtp_file` is a file of the folder that holds MTP and that no index lists, if there is one.
    """
    expected = {tensor.name: tensor.shape for tensor in hf_tensors(config)}
    missing = [name for name in expected if name not in shapes]
    hint = _mtp_hint(config, missing, mtp_file) if missing else ""
    check_shapes(config.name, expected, shapes, hint, _cure_of_unknown(config, set(shapes) - set(expected)))


def _cure_of_unknown(config: Nemotron3Config, unknown: set[str]) -> str:
    if any(name.endswith(("_scale", "_scale_2", "_packed")) for name in unknown):
        return (
            f": weights are quantized, and {CONFIG} has no {QUANTIZATION}: copy it, or hf_quant_config.json, "
            "from where they were quantized, and give --dequantize"
        )
    if config.has_mtp or not unknown or not all(name.startswith("mtp.") for name in unknown):
        return ""
    return (
        f": {CONFIG} does not state MTP: set {MTP_BLOCKS} to its number of blocks and {MTP_LAYERS[0]} to the "
        'layers of one ("*E" in the releases), or leave MTP out by --mtp-num-layers 0'
    )


def check_shapes(
    name: str, expected: Mapping[str, Shape], shapes: Mapping[str, Shape], hint: str = "", cure: str = ""
) -> None:
    """Check that tensors are exactly the expected ones; `hint` is for missing, `cure` for unknown ones."""
    missing = [one for one in expected if one not in shapes]
    unknown = [one for one in shapes if one not in expected]
    differ = [one for one in expected if one in shapes and tuple(shapes[one]) != expected[one]]
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(expected)} tensors are missing, first {missing[0]!r}{hint}")
    if unknown:
        problems.append(f"{len(unknown)} tensors do not belong to the model, first {unknown[0]!r}{cure}")
    if differ:
        first = differ[0]
        problems.append(
            f"{len(differ)} tensors have another shape, first {first!r}: {list(shapes[first])} instead of "
            f"{list(expected[first])}"
        )
    if problems:
        raise ValueError(f"{name}: " + "; ".join(problems))


def _mtp_hint(config: Nemotron3Config, missing: list[str], file: str = "") -> str:
    if not all(name.startswith("mtp.") for name in missing):
        return ""
    where = f"{file}, which no index lists, has MTP: " if file else "the original checkpoint has them: "
    return (
        f": the configuration has {config.mtp_num_blocks} MTP block(s) {config.mtp_pattern!r} whose weights "
        f"are missing. Some tools drop them (transformers' save_pretrained does); {where}"
        f"--mtp-from {file or 'DIR'} takes them from there, --mtp-num-layers 0 converts without MTP"
    )


def joined(
    prefix: Prefix, row: Row, spelling: Spelling, sizes: Mapping[str, int], dtype: str
) -> TensorMapping:
    """Join both sides of a row; `sizes` are the numbers behind the symbols of its shapes."""
    sides = []
    for start, stored in ((prefix.megatron, spelling.tensors), (prefix.hf, row.hf)):
        tensors = []
        for one in stored:
            shape = tuple(sizes[symbol] for symbol in one.shape)
            for e in range(sizes["experts"] if "{e}" in one.name else 1):
                tensors.append(Tensor(start + one.name.replace("{e}", str(e)), shape, dtype))
        sides.append(tuple(tensors))
    return TensorMapping(row, prefix, spelling, *sides)
