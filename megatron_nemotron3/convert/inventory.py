"""Every tensor of a model, on Hugging Face's side and on Megatron's, and how they are made of each other.

`links(config)` walks the name table over the places of the model. A link is the smallest set of tensors
that can be converted together: most have one tensor on each side, a stack of experts has one on Megatron's
and hundreds on HF's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megatron_nemotron3.convert import transforms
from megatron_nemotron3.convert.places import Names, Place, places, plain
from megatron_nemotron3.convert.plan import Plan, Shape
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import (
    DIALECTS,
    TORCH_DIST,
    NamedShape,
    Row,
    Spelling,
    rows_of,
    symbol_sizes,
)

#: Of the released checkpoints and of torch_dist folders of BF16 runs, but for rows marked `float32`.
BF16 = "bfloat16"


class Tensor(NamedTuple):
    """Name, shape and torch's name of the type."""

    name: str
    shape: Shape
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Link:
    """Tensors of both sides that are made of each other."""

    row: Row
    place: Place
    spelling: Spelling
    megatron: tuple[Tensor, ...]
    hf: tuple[Tensor, ...]
    head_dim: int

    def to_hf(self) -> Plan:
        """The plan that makes the HF tensors of the Megatron ones; `.inverse()` goes back."""
        rule = transforms.RULES[self.spelling.rule]
        return rule(_shapes(self.megatron), _shapes(self.hf), self.head_dim)


def links(
    config: Nemotron3Config,
    *,
    dialect: str = TORCH_DIST,
    dtype: str = BF16,
    padded_vocab_size: int | None = None,
) -> Iterator[Link]:
    """Every link of a model, in the order of the layers.

    Args:
        dialect: one of `tensors.DIALECTS`; rows without a spelling in it have their first.
        dtype: of all but the FP32 rows.
        padded_vocab_size: rows of Megatron's embedding and output layer; default: the vocabulary's.

    Raises:
        ValueError: an unknown dialect, or padding to less than the vocabulary.
    """
    if dialect not in DIALECTS:
        raise ValueError(f"unknown dialect {dialect!r}: use one of {', '.join(DIALECTS)}")
    yield from _links(config, lambda place, row: row.spelling(dialect), dtype, padded_vocab_size)


def links_of(
    config: Nemotron3Config,
    keys: Iterable[str],
    *,
    dtype: str = BF16,
    padded_vocab_size: int | None = None,
) -> Iterator[Link]:
    """The links of a model as a checkpoint with these weight keys spells them, dialects mixed or not.

    Names in the links are without the prefixes `places.plain` takes away.

    Raises:
        ValueError: a key that is no weight of the model, a tensor that is there twice, or tensors that are
            missing; the message counts them and names the first.
    """
    lookup = Names(config)
    found: dict[str, str] = {}  # plain name -> key
    spellings: dict[str, Spelling] = {}  # by the HF name, which is one for each link
    for key in keys:
        match, name = lookup.key(key), plain(key)
        assert match.spelling is not None
        other = spellings.setdefault(match.place.hf + match.row.hf[0].name, match.spelling)
        if other is not match.spelling or name in found:
            raise ValueError(
                f"Megatron keys {found.get(name, other.tensors[0].name)!r} and {key!r} are the same tensor"
            )
        found[name] = key
    result = list(
        _links(
            config,
            lambda place, row: spellings.get(place.hf + row.hf[0].name, row.spellings[0]),
            dtype,
            padded_vocab_size,
        )
    )
    missing = [t.name for link in result for t in link.megatron if t.name not in found]
    if missing:
        raise ValueError(
            f"{len(missing)} tensors of {config.name} are missing, the first is {missing[0]!r}"
            + _mtp_hint(config, missing, "mtp.")
        )
    yield from result


def hf_tensors(config: Nemotron3Config, *, dtype: str = BF16) -> list[Tensor]:
    """Every tensor of the model's Hugging Face checkpoint, MTP included."""
    return [tensor for link in links(config, dtype=dtype) for tensor in link.hf]


def megatron_tensors(
    config: Nemotron3Config,
    *,
    dialect: str = TORCH_DIST,
    dtype: str = BF16,
    padded_vocab_size: int | None = None,
) -> list[Tensor]:
    """Every weight of the model's Megatron checkpoint; `dialect="parameter"`: every parameter and buffer.

    torch_dist: global shapes, whatever the layout. Parameters: of a model on one rank.
    """
    found = links(config, dialect=dialect, dtype=dtype, padded_vocab_size=padded_vocab_size)
    return [tensor for link in found for tensor in link.megatron]


def check_hf(config: Nemotron3Config, shapes: Mapping[str, Shape]) -> None:
    """Refuse a Hugging Face checkpoint that is not, tensor by tensor, the model its config.json describes.

    Args:
        shapes: of all tensors of the checkpoint, by name.

    Raises:
        ValueError: tensors missing (a promised MTP block that has no weights is named as that), tensors the
            model does not have, or shapes that differ; with numbers and the first name of each.
    """
    expected = {tensor.name: tensor.shape for tensor in hf_tensors(config)}
    missing = [name for name in expected if name not in shapes]
    unknown = [name for name in shapes if name not in expected]
    differ = [name for name in expected if name in shapes and tuple(shapes[name]) != expected[name]]
    problems = []
    if missing:
        hint = _mtp_hint(config, missing, "mtp.")
        problems.append(f"{len(missing)} of {len(expected)} tensors are missing, first {missing[0]!r}{hint}")
    if unknown:
        problems.append(f"{len(unknown)} tensors are not the model's, first {unknown[0]!r}")
    if differ:
        name = differ[0]
        problems.append(
            f"{len(differ)} tensors have another shape, first {name!r}: {list(shapes[name])} instead of "
            f"{list(expected[name])}"
        )
    if problems:
        raise ValueError(f"{config.name}: " + "; ".join(problems))


def _mtp_hint(config: Nemotron3Config, missing: list[str], prefix: str) -> str:
    total = sum(name.startswith(prefix) for name in missing)
    if not total or total < len(missing):
        return ""
    return (
        f": the configuration promises {config.mtp_num_blocks} MTP block(s) {config.mtp_pattern!r} "
        "whose weights are not there. Some tools drop them (transformers' save_pretrained does): "
        "take the weights from the original, or give a configuration without MTP"
    )


def _links(
    config: Nemotron3Config,
    choose: Callable[[Place, Row], Spelling],
    dtype: str,
    padded_vocab_size: int | None,
) -> Iterator[Link]:
    if padded_vocab_size is not None and padded_vocab_size < config.vocab_size:
        raise ValueError(f"padded_vocab_size={padded_vocab_size} is less than vocab_size={config.vocab_size}")
    table = symbol_sizes(config, padded_vocab_size)

    def tensors(row: Row, stored: tuple[NamedShape, ...], prefix: str) -> tuple[Tensor, ...]:
        kind = "float32" if row.float32 else dtype
        result = []
        for one in stored:
            shape = tuple(table[symbol] for symbol in one.shape)
            copies = table["experts"] if "{e}" in one.name else 1
            for e in range(copies):
                result.append(Tensor(prefix + one.name.replace("{e}", str(e)), shape, kind))
        return tuple(result)

    for place in places(config):
        for row in rows_of(config, place.part):
            spelling = choose(place, row)
            megatron = tensors(row, spelling.tensors, place.megatron)
            hf = tensors(row, row.hf, place.hf)
            yield Link(row, place, spelling, megatron, hf, config.kv_channels)


def _shapes(tensors: tuple[Tensor, ...]) -> dict[str, Shape]:
    return {tensor.name: tensor.shape for tensor in tensors}
