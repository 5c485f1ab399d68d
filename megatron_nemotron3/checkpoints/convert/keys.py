"""Keys of a checkpoint: the row of the table a key belongs to, and masters.

With groups in the pattern (`M[*E]`, Megatron-LM #4798) the layers of a group share a number:

    decoder.layers.1.self_attention.…, decoder.layers.1.mlp.…   <->   backbone.layers.1.…, backbone.layers.2.…

How a torch_dist folder names the optimizer's FP32 master weights depends on the options of the run:

    plain optimizer                                    optimizer.state.fp32_param.<key>
    distributed, --dist-ckpt-optim-fully-reshardable   optimizer.state.param.<key>
    distributed, fully_sharded_model_space (old)       optimizer.state.fp32_param.<key>
    distributed, default (dp_reshardable)              optimizer.distributed.….bucket_idx_0.param (no names)

If the experts have an optimizer of their own, some of these begin with `chained_0.`; in a MIMO model all
begin with the name of a module, `mimo.language.`. The keys after the prefix are those of the weights, with
in_proj and conv1d in parts and experts stacked. Weights stored as float32 (FP32 runs, Megatron-FSDP, the
expert bias) have no master.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.checkpoints.convert.sources import SourceTensor
from megatron_nemotron3.checkpoints.metadata import DistTensor
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import MOST
from megatron_nemotron3.models.parameters import Prefix, prefixes
from megatron_nemotron3.models.pattern import MTP_SEPARATOR, HybridPattern
from megatron_nemotron3.models.tensors import ROWS, NamedShape, Row, Spelling, rows_of

#: The layer prefix of a Megatron name.
_PREFIX = re.compile(r"(?:decoder|mtp)\.layers\.[0-9]+\.(?:mtp_model_layer\.layers\.[0-9]+\.)?")
_LAYER = re.compile(r"(decoder|mtp\.layers\.[0-9]+\.mtp_model_layer)\.layers\.([0-9]+)\.(.+)")
#: Names that each layer of a kind has, and no other layer -> kind.
_TELLING = {
    "mixer.D": "M",
    "self_attention.linear_proj.weight": "*",
    "mlp.router.weight": "E",
    "mlp.linear_fc2.weight": "-",
}
_EXPERT = re.compile(r"(?:(?<=experts\.)|(?<=weight))(?:0|[1-9][0-9]*)(?=\.|\Z)")


@dataclass(frozen=True)
class Match:
    """The meaning of a name: a tensor of a row in a layer, and the expert it belongs to."""

    row: Row
    prefix: Prefix
    spelling: Spelling
    tensor: NamedShape
    expert: int | None


_RowEntry = tuple[Row, Spelling, NamedShape]
#: Prefixes that wrappers add to a key (fsdp_dtensor checkpoints, DDP, Float16Module).
_WRAPPERS = re.compile(r"^(?:(?:model|module)\.)+")
#: The same within the names of a MIMO model, each of whose modules has wrappers of its own.
_MIMO_WRAPPERS = re.compile(r"^(language_model\.|modality_submodules\.\w+\.)(?:module\.)+")
#: Older name of the layer stack in an MTP block.
_OLD_MTP = re.compile(r"^(mtp\.layers\.\d+\.)transformer_layer\.(?=layers\.)")

ADAPTER = "adapter"
#: Beginnings of the keys of an optimizer that is one of several: a MIMO model has one for each module.
_OWNER = r"(?:mimo\.\w+\.)?(?:chained_\d+\.)?"
#: Keys of a checkpoint folder that are not weights of the model.
NON_WEIGHTS = {
    "extra state": re.compile(r".*\._extra_state(?:/.*)?"),
    "optimizer": re.compile(rf"{_OWNER}optimizer\..*"),
    "quantizer": re.compile(r".*_quantizer\..*"),
    # Followed by "/" in torch_dist folders, by "." in torch_dcp and fsdp_dtensor folders.
    "training state": re.compile(
        r"(?:rng_state|rerun_state_machine(?:_state)?|common_state|opt_param_scheduler|args|iteration"
        r"|checkpoint_version|num_floating_point_operations_so_far)(?:[/.].*)?"
    ),
    # Of LoRA. Last, because the optimizer's state has the same ends.
    ADAPTER: re.compile(r".*\.adapter\.linear_(?:in|out)\.weight(?:\.\w+)?"),
}
_MASTER = re.compile(rf"{_OWNER}optimizer\.state\.(?:fp32_)?param\.(.+)")


def non_weight_kind(key: str) -> str | None:
    """Return the kind of `NON_WEIGHTS` a key belongs to; None if it should be a weight."""
    return next((what for what, pattern in NON_WEIGHTS.items() if pattern.fullmatch(key)), None)


def weight_of_master(key: str) -> str | None:
    """Return the plain name of the weight whose FP32 master `key` is; None if it is not a master."""
    match = _MASTER.fullmatch(key)
    return plain_name(match[1]) if match else None


def plain_name(key: str) -> str:
    """Return a key without the prefixes of wrappers, and with the present name of MTP's layer stack."""
    return _OLD_MTP.sub(r"\1mtp_model_layer.", _MIMO_WRAPPERS.sub(r"\1", _WRAPPERS.sub("", key)))


_DECODER_LAYER = re.compile(r"(.*\bdecoder\.layers\.)(\d+)\.(.+)")


def numbered_by_layer(keys: Iterable[str], pattern: HybridPattern) -> dict[str, str]:
    """Map keys of a checkpoint whose groups are numbered as one layer to keys with every layer's own number.

    Keys of optimizer state are mapped, too. A key that fits no layer of its group stays as it is.
    """
    layers: dict[tuple[int, str], int] = {}
    for layer, (number, kind) in enumerate(zip(pattern.numbers, pattern.main, strict=True)):
        of_kind = (t.name for row in ROWS if row.part == kind for s in row.spellings for t in s.tensors)
        layers |= {(number, name.partition(".")[0]): layer for name in of_kind}
    found: dict[str, str] = {}
    for key in keys:
        match = _DECODER_LAYER.fullmatch(key)
        own = match and layers.get((int(match[2]), match[3].partition(".")[0]))
        new = f"{match[1]}{own}.{match[3]}" if match and own is not None else key
        if new in found:
            raise ValueError(f"{found[new]!r} and {key!r} are the same tensor of the pattern {pattern}")
        found[new] = key
    return {key: new for new, key in found.items()}


def pattern_of_names(keys: Iterable[str], args: Mapping[str, Any]) -> str | None:
    """Return the pattern, without pipeline cuts, of the model whose weights have these keys.

    None unless the layers are numbered without a gap, each is of one kind, and blocks of MTP are alike. How
    often MTP is applied is in `args`, the stored arguments.
    """
    stacks: dict[str, dict[int, str]] = {}
    for key in keys:
        if (match := _LAYER.fullmatch(plain_name(key))) and (kind := _TELLING.get(match[3])):
            layers, number = stacks.setdefault(match[1], {}), int(match[2])
            layers[number] = layers.get(number, "") + kind
    texts = ["".join(kind for _, kind in sorted(layers.items())) for _, layers in sorted(stacks.items())]
    sizes = [(len(layers), max(layers) + 1) for _, layers in sorted(stacks.items())]
    if "decoder" not in stacks or sizes != [(len(text), len(text)) for text in texts]:
        return None
    main, *blocks = texts
    depths = args.get("mtp_num_layers") or (0 if args.get("mtp_use_repeated_layer") else len(blocks))
    possible = range(1, MOST["mtp_num_layers"] + 1) if blocks else (0,)
    if type(depths) is not int or depths not in possible or len({*blocks}) > 1:
        return None
    return MTP_SEPARATOR.join((main, *blocks[:1] * depths))


class NameLookup:
    """Look up Megatron's names of one model in the table of tensors."""

    def __init__(self, config: Nemotron3Config) -> None:
        self.config = config
        self._prefixes: dict[str, list[Prefix]] = {}
        #: Part of the table -> name without prefix -> its rows.
        self._rows: dict[str, dict[str, list[_RowEntry]]] = {}
        for prefix in prefixes(config):
            self._prefixes.setdefault(prefix.megatron, []).append(prefix)
            if prefix.part in self._rows:
                continue
            by_name = self._rows[prefix.part] = {}
            for row in rows_of(config, prefix.part):
                for spelling in row.spellings:
                    for tensor in spelling.tensors:
                        by_name.setdefault(tensor.name, []).append((row, spelling, tensor))

    def key(self, name: str) -> Match:
        """Find the row of a Megatron key or parameter name, in any dialect of the table."""
        name = plain_name(name)
        start = match[0] if (match := _PREFIX.match(name)) else ""
        rest = name[len(start) :]
        number = _EXPERT.search(rest)
        expert = int(number[0]) if number else None
        # The table writes {e} in place of the number of the expert.
        form = rest if number is None else f"{rest[: number.start()]}{{e}}{rest[number.end() :]}"
        found = [
            Match(row, prefix, spelling, tensor, expert)
            for prefix in self._prefixes.get(start, ())
            for row, spelling, tensor in self._rows[prefix.part].get(form, ())
            if ("{e}" in tensor.name) == (number is not None)
        ]
        if len(found) != 1:
            layers = f"{self.config.full_pattern!r} of {self.config.name}"
            raise ValueError(
                f"Megatron key {name!r}: {len(found)} rows of the name table fit a model with the layers "
                f"{layers}, expected one: is it another model (give --model, and --tiny for a tiny one), or "
                "a name this version does not know?"
            )
        experts = self.config.num_moe_experts or 0
        if expert is not None and expert >= experts:
            raise ValueError(f"Megatron key {name!r}: expert {expert} of a model with {experts}")
        return found[0]


_BUCKET = re.compile(rf"{_OWNER}optimizer\.distributed\..*\.(?:param|fp32_param|param_state)(?:/.*)?")
_RESHARD = (
    "load the checkpoint in Megatron with the layout that wrote it and save again with "
    "--dist-ckpt-optim-fully-reshardable"
)


def master_keys(
    tensors: Mapping[str, DistTensor | SourceTensor], *, optional: str | None = None
) -> dict[str, str]:
    """Map the plain name of each weight to the key of its FP32 master. Float32 weights may be absent."""
    weights = {plain_name(key): key for key in tensors if non_weight_kind(key) is None}
    found: dict[str, str] = {}
    for key in tensors:
        if (name := weight_of_master(key)) is None:
            continue
        if name in found:
            raise ValueError(f"{found[name]!r} and {key!r} are masters of the same weight")
        found[name] = key
    if stray := [name for name in found if name not in weights]:
        raise ValueError(
            f"{len(stray)} of {len(found)} FP32 masters belong to no weight of the checkpoint, the first is "
            f"{found[stray[0]]!r}"
        )
    if missing := [
        name
        for name, key in weights.items()
        if name not in found
        and tensors[key].dtype != "float32"
        and (optional is None or not name.startswith(optional))
    ]:
        raise ValueError(_missing_masters_message(len(missing), len(weights), missing[0], tensors))
    for name, key in found.items():
        if tensors[key].shape != tensors[weights[name]].shape or tensors[key].dtype != "float32":
            raise ValueError(
                f"{key!r} is {tensors[key].dtype} {list(tensors[key].shape)}, but the weight it should be a "
                f"master of has shape {list(tensors[weights[name]].shape)}"
            )
    return found


def _missing_masters_message(
    missing: int, total: int, first: str, tensors: Mapping[str, DistTensor | SourceTensor]
) -> str:
    why = "the checkpoint holds no optimizer state with names (saved with --no-save-optim, or a release): "
    if buckets := sum(_BUCKET.fullmatch(key) is not None for key in tensors):
        why = f"the distributed optimizer saved them in {buckets} bucket(s), which only a run with the same "
        why += f"parallel layout can interpret. To export them, {_RESHARD}; or "
    elif any(non_weight_kind(key) == "optimizer" for key in tensors):
        why = (
            f"the optimizer state covers only some of the weights. If it was saved that way, {_RESHARD}; or "
        )
    return (
        f"{missing} of {total} weights have no FP32 master that can be identified by name, first {first!r}: "
        f"{why}leave --from-optimizer-master out"
    )
