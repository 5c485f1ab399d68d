"""Where the rows of the name table stand in a model: one place for each layer, with its two prefixes.

Megatron numbers MTP blocks and the layers in them; Hugging Face numbers all MTP layers in one line:

    mtp.layers.o.mtp_model_layer.layers.i.…   <->   mtp.layers.{o * P + i}.…     P layers a block
    mtp.layers.o.enorm.weight                 <->   mtp.layers.{o * P}.enorm.weight
    mtp.layers.o.final_layernorm.weight       <->   mtp.layers.{o * P + P - 1}.final_layernorm.weight
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import NamedShape, Row, Spelling, rows_of

#: What a name in a layer begins with, on either side.
_PREFIX = re.compile(r"(?:decoder|backbone|mtp)\.layers\.[0-9]+\.(?:mtp_model_layer\.layers\.[0-9]+\.)?")
_EXPERT = re.compile(r"(?:(?<=experts\.)|(?<=weight))(?:0|[1-9][0-9]*)(?=\.|\Z)")


#: Ultra has 110 layers, 25,600 experts.
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 1_000_000


@dataclass(frozen=True)
class Place:
    """One layer, or the model itself: the part of the table that stands there, and what names begin with."""

    part: str
    megatron: str
    hf: str


@dataclass(frozen=True)
class Match:
    """What a name is: a tensor of a row at a place, and of which expert."""

    row: Row
    place: Place
    #: None for a Hugging Face name.
    spelling: Spelling | None
    tensor: NamedShape
    expert: int | None


_Entry = tuple[Row, Spelling | None, NamedShape]
_Table = dict[str, list[_Entry]]


def places(config: Nemotron3Config) -> Iterator[Place]:
    """Every place of a model, in the order of the layers: model, decoder, MTP blocks.

    Raises:
        ValueError: more layers or experts than any model has, as a hostile configuration may say.
    """
    layers = len(config.pattern) + config.mtp_num_blocks * len(config.mtp_pattern or "")
    experts = layers * (config.num_moe_experts or 1)
    if layers > _MOST_LAYERS or experts > _MOST_EXPERTS:
        raise ValueError(
            f"{config.name}: {layers:,} layers with {config.num_moe_experts or 0:,} experts each are more "
            f"than are looked at: {_MOST_LAYERS:,} layers, {_MOST_EXPERTS:,} experts in all"
        )
    yield Place("model", "", "")
    for layer, kind in enumerate(config.pattern):
        yield Place(kind, f"decoder.layers.{layer}.", f"backbone.layers.{layer}.")
    inner = config.mtp_pattern or ""
    for block in range(config.mtp_num_blocks):
        prefix, first = f"mtp.layers.{block}.", block * len(inner)
        yield Place("mtp_in", prefix, f"mtp.layers.{first}.")
        for layer, kind in enumerate(inner):
            yield Place(kind, f"{prefix}mtp_model_layer.layers.{layer}.", f"mtp.layers.{first + layer}.")
        yield Place("mtp_out", prefix, f"mtp.layers.{first + len(inner) - 1}.")


#: What wrappers put before a key (fsdp_dtensor checkpoints, DDP and Float16Module), and MTP's older name.
_WRAPPERS = re.compile(r"^(?:(?:model|module)\.)+")
_OLD_MTP = re.compile(r"^(mtp\.layers\.\d+\.)transformer_layer\.(?=layers\.)")

#: Keys of a checkpoint folder that are no weights of the model.
OTHER = {
    "extra state": re.compile(r".*\._extra_state(?:/.*)?"),
    "optimizer": re.compile(r"(?:chained_\d+\.)?optimizer\..*"),
    "quantizer": re.compile(r".*_quantizer\..*"),
    # Below a "/" in torch_dist folders, below a "." in those of torch_dcp and fsdp_dtensor.
    "training state": re.compile(
        r"(?:rng_state|rerun_state_machine(?:_state)?|common_state|opt_param_scheduler|args|iteration"
        r"|checkpoint_version|num_floating_point_operations_so_far)(?:[/.].*)?"
    ),
}
#: `param`: as --dist-ckpt-optim-fully-reshardable writes them; `fp32_param`: the plain optimizer, and the
#: distributed one's older fully_sharded_model_space.
_MASTER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_)?param\.(.+)")


def what_else(key: str) -> str | None:
    """Which of `OTHER` a key is; None: it should be a weight."""
    return next((what for what, pattern in OTHER.items() if pattern.fullmatch(key)), None)


def master_of(key: str) -> str | None:
    """The weight of which `key` is the optimizer's FP32 master copy; None if it is none."""
    match = _MASTER.fullmatch(key)
    return plain(match[1]) if match else None


def plain(key: str) -> str:
    """A key without the prefixes of wrappers, MTP's inner stack under its present name."""
    return _OLD_MTP.sub(r"\1mtp_model_layer.", _WRAPPERS.sub("", key))


class Names:
    """Looks names up in the table, for one model."""

    def __init__(self, config: Nemotron3Config) -> None:
        self.config = config
        self._megatron: dict[str, list[Place]] = {}
        self._hf: dict[str, list[Place]] = {}
        for place in places(config):
            self._megatron.setdefault(place.megatron, []).append(place)
            self._hf.setdefault(place.hf, []).append(place)
        parts = dict.fromkeys(place.part for place in places(config))
        self._keys, self._names = {}, {}
        for part in parts:
            table = rows_of(config, part)
            self._keys[part] = _table((r, s, t) for r in table for s in r.spellings for t in s.tensors)
            self._names[part] = _table((r, None, t) for r in table for t in r.hf)

    def key(self, name: str) -> Match:
        """The row of a Megatron key or parameter name, in any dialect of the table.

        Raises:
            ValueError: no row, or more than one, or an expert the model does not have.
        """
        return self._find("Megatron key", plain(name), self._megatron, self._keys)

    def hf(self, name: str) -> Match:
        """The row of a Hugging Face name.

        Raises:
            ValueError: as for `key`.
        """
        return self._find("Hugging Face tensor", name, self._hf, self._names)

    def _find(self, what: str, name: str, where: dict[str, list[Place]], table: dict[str, _Table]) -> Match:
        start = match[0] if (match := _PREFIX.match(name)) else ""
        rest = name[len(start) :]
        number = _EXPERT.search(rest)
        expert = int(number[0]) if number else None
        # With {e} where a number stands: how the table writes what there is one of for each expert.
        form = rest if number is None else f"{rest[: number.start()]}{{e}}{rest[number.end() :]}"
        found = [
            Match(row, place, spelling, tensor, expert)
            for place in where.get(start, ())
            for row, spelling, tensor in table[place.part].get(form, ())
            if ("{e}" in tensor.name) == (number is not None)
        ]
        if len(found) != 1:
            layers = f"{self.config.full_pattern!r} of {self.config.name}"
            raise ValueError(
                f"{what} {name!r}: {len(found)} rows of the name table fit a model with the layers {layers}, "
                "expected one: is it another model, or a name this version does not know?"
            )
        experts = self.config.num_moe_experts or 0
        if found[0].expert is not None and found[0].expert >= experts:
            raise ValueError(f"{what} {name!r}: expert {found[0].expert} of a model with {experts}")
        return found[0]


def _table(entries: Iterable[_Entry]) -> _Table:
    table: _Table = {}
    for entry in entries:
        table.setdefault(entry[2].name, []).append(entry)
    return table
