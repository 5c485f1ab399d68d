"""A legacy checkpoint folder as a source: one torch.save file a rank, merged by the partition rules.

FOLDER/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Megatron writes the suffix of the pipeline rank where PP > 1, that of the expert rank where EP > 1. A file
holds a rank's own parameters under the names of its own modules: layers and experts are numbered from 0 on
each rank. Here they get the numbers and shapes they have in the whole model, and stay where they are: a
tensor is blocks of files, nothing is loaded.

Layers are counted in the files, stage by stage (with virtual stages: stage v of rank p is the v * PP + p-th
of the model), so it does not matter how a run had divided them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.metadata import ITEM_SIZE, CheckpointError
from megatron_nemotron3.convert import sharding
from megatron_nemotron3.convert.places import Match, Names
from megatron_nemotron3.convert.plan import Plan, Slices, extent, whole
from megatron_nemotron3.convert.rank_file import (
    FILE,
    Rank,
    RankFile,
    Stored,
    argument,
    open_ranks,
    rank_folders,
)
from megatron_nemotron3.convert.stored import Block, Layout, Source, SourceTensor, row_major
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import Row, symbol_sizes

_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(0|[1-9]\d*)\.")
#: Parameters of all experts of a rank side by side (`--moe-use-legacy-grouped-gemm`, up to 0.16): the name
#: of one expert's, and the symbols of its shape as stored, [in, out] instead of [out, in].
_SIDE_BY_SIDE = {
    "mlp.experts.weight1": ("mlp.experts.linear_fc1.weight{e}", "latent", "ffn"),
    "mlp.experts.weight2": ("mlp.experts.linear_fc2.weight{e}", "ffn", "latent"),
}
#: Bytes compared at once.
_BLOCK = 1 << 20


def common_state(folder: Path) -> dict[str, Any]:
    """What is stored beside weights and optimizer: "args" (`Inert`), "iteration", "checkpoint_version", ….

    Raises:
        CheckpointError: there is no legacy checkpoint, or its first file is damaged.
    """
    return RankFile.open(rank_folders(folder)[0][0] / FILE).common


def open_mp_rank(
    folder: Path,
    config: Nemotron3Config,
    *,
    check_replicas: bool = False,
    allow_unused: Sequence[str] = (),
) -> Source:
    """The weights of a legacy folder (`iter_0000100`), global in name and shape, where they lie.

    Names are those of `named_parameters()` of the whole model (the dialects "parameter", "separate norm",
    "conv1d module", "sequential experts" of the name table). The vocabulary is as padded as it was.

    Args:
        config: the model; a pattern or a size that is not the files' is refused. Its `vocab_size` is not
            looked at.
        check_replicas: read what several ranks hold whole from all of them, and refuse differences.
            Otherwise the first rank's is taken.
        allow_unused: patterns of names that may be left out, with layers numbered over the whole model.

    Raises:
        CheckpointError: files are missing, damaged or hold another model; the message names file and cure.
    """
    ranks = open_ranks(folder)
    rows = next((m[_EMBEDDING].shape[0] for m in ranks[0].file.models if _EMBEDDING in m), 0)
    padded = rows * (1 + max(rank.tp for rank in ranks))
    return _Merger(folder, config, ranks, padded).source(check_replicas, allow_unused)


@dataclass(frozen=True)
class _Held:
    """A parameter as one rank holds it; for an expert, `match.expert` is its number on the rank."""

    rank: Rank
    match: Match
    stored: Stored


class _Merger:
    """Puts the files of all ranks together."""

    def __init__(self, folder: Path, config: Nemotron3Config, ranks: list[Rank], padded: int) -> None:
        self.folder, self.config, self.ranks = folder, config, ranks
        self.tp, self.pp, self.ep = (1 + max(getattr(r, axis) for r in ranks) for axis in ("tp", "pp", "ep"))
        self._check_ranks()
        self._lookup = Names(config)
        self._sizes = symbol_sizes(config, padded)
        self._plans: dict[tuple[int, int], Plan | None] = {}

    def source(self, check_replicas: bool, allow_unused: Sequence[str]) -> Source:
        held: dict[str, list[_Held]] = {}
        for rank, name, stored in self._numbered():
            if any(fnmatchcase(name, pattern) for pattern in allow_unused):
                continue
            try:
                match = self._lookup.key(name)
            except ValueError as problem:
                raise CheckpointError(f"{rank.file.path}: {problem}") from None
            if match.expert is not None:
                experts = self._experts_of_a_rank()
                if match.expert >= experts:
                    raise CheckpointError(
                        f"{rank.file.path}: {name} is expert {match.expert} of a rank, but "
                        f"num_moe_experts={self.config.num_moe_experts} are {experts} a rank at EP={self.ep}"
                    )
                name = match.place.megatron + match.tensor.name.replace(
                    "{e}", str(rank.ep * experts + match.expert)
                )
            held.setdefault(name, []).append(_Held(rank, match, stored))
        tensors = {name: self._merge(name, copies, check_replicas) for name, copies in held.items()}
        files = {str(rank.file.path.relative_to(self.folder)): rank.file.size for rank in self.ranks}
        return Source(self.folder, tensors, files)

    def _check_ranks(self) -> None:
        """Every rank of TP x PP has a file, every expert rank as well (not every pair of the two)."""
        for axes in (("tp", "pp"), ("ep", "pp")):
            there = {tuple(getattr(rank, axis) for axis in axes) for rank in self.ranks}
            sizes = tuple(getattr(self, axis) for axis in axes)
            for first in range(sizes[0]):
                for second in range(sizes[1]):
                    if (first, second) not in there:
                        raise CheckpointError(
                            f"{self.folder}: the folder of {axes[0].upper()} rank {first}, PP rank {second} "
                            f"is missing; the others are of {axes[0].upper()}={sizes[0]}, PP={sizes[1]}"
                        )
        for axis, kind in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
            said = argument(self.ranks[0].file, f"{kind}_model_parallel_size")
            if said is not None and said != getattr(self, axis):
                raise CheckpointError(
                    f"{self.folder}: written with {axis.upper()}={said}, but the folders there are of "
                    f"{axis.upper()}={getattr(self, axis)}: copy all mp_rank_… folders"
                )

    def _experts_of_a_rank(self) -> int:
        experts = self.config.num_moe_experts or 0
        if experts % self.ep:
            raise CheckpointError(
                f"{self.folder}: num_moe_experts={experts} of {self.config.name} is not divisible by "
                f"EP={self.ep}: is it another model?"
            )
        return experts // self.ep

    def _numbered(self) -> Iterator[tuple[Rank, str, Stored]]:
        """Every weight of every file, layers numbered over the whole model."""
        counts: dict[tuple[int, int], dict[str, int]] = {}
        chunks = {len(rank.file.models) for rank in self.ranks}
        if len(chunks) > 1:
            raise CheckpointError(f"{self.folder}: files hold {sorted(chunks)} virtual pipeline stages")
        for rank in self.ranks:
            for virtual, model in enumerate(rank.file.models):
                here = _layer_counts(rank.file.path, model)
                if counts.setdefault((virtual, rank.pp), here) != here:
                    raise CheckpointError(
                        f"{rank.file.path}: it has {here} layers, another rank of its pipeline stage "
                        f"{counts[virtual, rank.pp]}"
                    )
        offsets, reached = {}, {"decoder": 0, "mtp": 0}
        for stage, here in sorted(counts.items()):
            offsets[stage] = dict(reached)
            reached = {stack: n + here.get(stack, 0) for stack, n in reached.items()}
        if reached["decoder"] != len(self.config.pattern):
            raise CheckpointError(
                f"{self.folder}: the files hold {reached['decoder']} layers, {self.config.name} has "
                f"{len(self.config.pattern)}: is it another model?"
            )
        for rank in self.ranks:
            for virtual, model in enumerate(rank.file.models):
                for key, stored in model.items():
                    name = _renumbered(key, offsets[virtual, rank.pp])
                    yield from ((rank, one, part) for one, part in self._apart(name, stored, rank))

    def _apart(self, name: str, stored: Stored, rank: Rank) -> Iterator[tuple[str, Stored]]:
        """The experts of a parameter that holds all of a rank's; any other as it is."""
        found = next((entry for entry in _SIDE_BY_SIDE.items() if name.endswith(entry[0])), None)
        if found is None:
            yield name, stored
            return
        experts = self._experts_of_a_rank()
        suffix, (one, axis_in, axis_out) = found
        etp = self._etp(rank)
        rows, columns = (self._sizes[axis] // (etp if axis == "ffn" else 1) for axis in (axis_in, axis_out))
        if prod(stored.shape) != experts * rows * columns or stored.stride != row_major(stored.shape):
            raise CheckpointError(
                f"{rank.file.path}: {name} has shape {list(stored.shape)}, {experts} experts of "
                f"{rows} x {columns} are expected"
            )
        for e in range(experts):
            begin = stored.offset + e * rows * columns * ITEM_SIZE[stored.dtype]
            part = replace(stored, shape=(columns, rows), stride=(1, columns), offset=begin)
            yield name.removesuffix(suffix) + one.replace("{e}", str(e)), part

    def _etp(self, rank: Rank) -> int:
        etp = argument(rank.file, "expert_tensor_parallel_size") or self.tp
        if etp > self.tp or self.tp % etp:
            raise CheckpointError(
                f"{rank.file.path}: written with ETP={etp} and TP={self.tp}. Megatron names legacy files "
                "by TP and EP rank, so files of several expert-tensor ranks overwrote each other: weights "
                "are lost. Save with --ckpt-format torch_dist"
            )
        return etp

    def _merge(self, name: str, copies: list[_Held], check_replicas: bool) -> SourceTensor:
        """One global tensor; `copies` are what the ranks hold of it."""
        first = copies[0]
        row, routed = first.match.row, first.match.row.routed
        size = self._etp(first.rank) if routed else self.tp
        plan = self._plan(row, size)
        shape = tuple(self._sizes[symbol] for symbol in first.match.tensor.shape)
        parts: dict[int, _Held] = {}
        for one in copies:
            # The first stage's: where MTP needs the embedding again, the last stage has it, too.
            part = 0 if plan is None else one.rank.tp % size
            kept = parts.setdefault(part, one)
            self._check(name, one, shape if plan is None else plan.destinations[str(part)], first)
            if kept is not one and check_replicas:
                _compare(name, kept, one)
        if missing := set(range(1 if plan is None else size)) - set(parts):
            raise CheckpointError(
                f"{self.folder}: {name} is in the file of {first.rank.file.path.parent.name}, but not in "
                f"that of {'expert-' * routed}tensor rank {min(missing)} of {size}"
            )
        if plan is None:
            return SourceTensor(first.stored.dtype, shape, (_block(first, whole(shape), whole(shape)),))
        blocks = tuple(
            _block(parts[int(piece.destination)], piece.source_slices, piece.destination_slices)
            for piece in plan.pieces
        )
        return SourceTensor(first.stored.dtype, shape, blocks)

    def _plan(self, row: Row, size: int) -> Plan | None:
        if (id(row), size) not in self._plans:
            padded = self._sizes["padded_vocab"]
            try:
                self._plans[id(row), size] = sharding.split(
                    row, self.config, tp=size, etp=size, padded_vocab_size=padded
                )
            except ValueError as problem:
                raise CheckpointError(f"{self.folder}: {problem}: is it another model?") from None
        return self._plans[id(row), size]

    def _check(self, name: str, one: _Held, shape: tuple[int, ...], first: _Held) -> None:
        if one.stored.shape != shape:
            raise CheckpointError(
                f"{one.rank.file.path}: {name} has shape {list(one.stored.shape)}, {self.config.name} has "
                f"{list(shape)} at TP={self.tp}: is it another model?"
            )
        if one.stored.dtype != first.stored.dtype or one.match.spelling is not first.match.spelling:
            raise CheckpointError(
                f"{one.rank.file.path}: {name} is {one.stored.dtype}, in {first.rank.file.path} it is "
                f"{first.stored.dtype} or has another name"
            )


def _renumbered(name: str, offsets: Mapping[str, int]) -> str:
    """A name with its layer's number raised by what its stack has in front of this stage."""
    if (match := _LAYER.match(name)) is None:
        return name
    return f"{match[1]}.layers.{int(match[2]) + offsets[match[1]]}.{name[match.end() :]}"


def _layer_counts(path: Path, model: Mapping[str, Stored]) -> dict[str, int]:
    """Stack -> its layers in one file, which must be numbered 0, 1, …"""
    found: dict[str, set[int]] = {}
    for key in model:
        if match := _LAYER.match(key):
            found.setdefault(match[1], set()).add(int(match[2]))
    for stack, numbers in found.items():
        if max(numbers) + 1 != len(numbers):
            gap = min(set(range(max(numbers))) - numbers)
            raise CheckpointError(f"{path}: {stack}.layers.{max(numbers)} is there, layer {gap} is not")
    return {stack: len(numbers) for stack, numbers in sorted(found.items())}


def _block(held: _Held, whole_slices: Slices, rank_slices: Slices) -> Block:
    """[rank_slices] of what a rank holds, which is [whole_slices] of the tensor."""
    stored = held.stored
    begin = sum(a * step for (a, _), step in zip(rank_slices, stored.stride))
    layout = Layout(held.rank.file.path, stored.offset + begin * ITEM_SIZE[stored.dtype], stored.stride)
    return Block(tuple(a for a, _ in whole_slices), extent(whole_slices), layout)


def _compare(name: str, one: _Held, other: _Held) -> None:
    """Refuse two ranks' copies of a parameter that differ; reads both in bands of rows."""
    sources = []
    for held in (one, other):
        slices = whole(held.stored.shape)
        tensor = SourceTensor(held.stored.dtype, held.stored.shape, (_block(held, slices, slices),))
        sources.append(Source(held.rank.file.path.parent, {name: tensor}, {}))
    shape = one.stored.shape
    rows = max(1, _BLOCK // max(1, prod(shape[1:]) * ITEM_SIZE[one.stored.dtype]))
    try:
        for start in range(0, shape[0], rows):
            band = ((start, min(start + rows, shape[0])), *((0, n) for n in shape[1:]))
            a, b = (source.read(name, band) for source in sources)
            if not (a == b).all():
                raise CheckpointError(
                    f"{other.rank.file.path}: {name} differs from that in {one.rank.file.path}, although "
                    "both ranks hold it whole: the run had gone out of step; without the check the first "
                    "rank's is taken"
                )
    finally:
        for source in sources:
            source.close()
