"""Tensor source for legacy checkpoint folders: one torch.save file per rank, merged into global tensors.

FOLDER/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Megatron writes the suffix of the pipeline rank if PP > 1, and that of the expert rank if EP > 1. A file holds
the parameters of one rank under the names of its modules: every rank numbers layers and experts from 0. This
module gives them their global numbers and shapes. A global tensor consists of blocks of files; nothing is
loaded.

Layers are counted in the files, stage by stage (virtual stage v of rank p is stage v * PP + p of the model),
so any division of layers over stages is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert import transforms
from megatron_nemotron3.checkpoints.convert.keys import Match, NameLookup
from megatron_nemotron3.checkpoints.convert.plan import Plan, Slices, bands, extent, whole
from megatron_nemotron3.checkpoints.convert.rank_file import (
    FILE,
    Rank,
    RankFile,
    argument,
    open_ranks,
    rank_folders,
)
from megatron_nemotron3.checkpoints.convert.sources import (
    Block,
    FileSource,
    Location,
    SourceTensor,
    row_major,
)
from megatron_nemotron3.checkpoints.metadata import ITEM_SIZE, CheckpointError
from megatron_nemotron3.checkpoints.read import TensorLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import Row, symbol_sizes

_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(0|[1-9]\d*)\.")
#: Parameters that hold all experts of a rank side by side (`--moe-use-legacy-grouped-gemm`, up to 0.16) ->
#: the name of one expert's parameter, and the symbols of its stored shape, [in, out] instead of [out, in].
_SIDE_BY_SIDE = {
    "mlp.experts.weight1": ("mlp.experts.linear_fc1.weight{e}", "latent", "ffn"),
    "mlp.experts.weight2": ("mlp.experts.linear_fc2.weight{e}", "ffn", "latent"),
}
#: Bytes compared per step.
_BLOCK = 1 << 20


def common_state(folder: Path) -> dict[str, Any]:
    """Read everything except weights and optimizer: "args" (`Inert`), "iteration", ….

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
) -> FileSource:
    """Open the weights of a legacy folder (`iter_0000100`) under global names and in global shapes.

    Names are those of `named_parameters()` of the whole model (dialects "parameter", "separate norm",
    "conv1d module" and "sequential experts" of the table). The vocabulary keeps its padding.

    Args:
        config: the model. A pattern or size that differs from the files' is refused; `vocab_size` is ignored.
        check_replicas: read replicated parameters from all ranks and refuse differences. Otherwise the first
            rank's copy is taken.
        allow_unused: patterns of names that may be left out, with global layer numbers.

    Raises:
        CheckpointError: files are missing, damaged, or hold another model. The message names file and cure.
    """
    ranks = open_ranks(folder)
    rows = next((m[_EMBEDDING].shape[0] for m in ranks[0].file.models if _EMBEDDING in m), 0)
    padded = rows * (1 + max(rank.tp for rank in ranks))
    return _Merger(folder, config, ranks, padded).source(check_replicas, allow_unused)


@dataclass(frozen=True)
class _Shard:
    """The shard of a parameter on one rank; for an expert, `match.expert` is its number on that rank."""

    rank: Rank
    match: Match
    layout: TensorLayout


class _Merger:
    """Merges the files of all ranks."""

    def __init__(self, folder: Path, config: Nemotron3Config, ranks: list[Rank], padded: int) -> None:
        self.folder, self.config, self.ranks = folder, config, ranks
        self.tp, self.pp, self.ep = (1 + max(getattr(r, axis) for r in ranks) for axis in ("tp", "pp", "ep"))
        self._check_ranks()
        self._lookup, self._padded = NameLookup(config), padded
        self._sizes: dict[int, dict[str, int]] = {}
        self._plans: dict[tuple[int, int, int], Plan | None] = {}

    def source(self, check_replicas: bool, allow_unused: Sequence[str]) -> FileSource:
        shards: dict[str, list[_Shard]] = {}
        for rank, name, layout in self._global_weights():
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
                        f"num_moe_experts={self.config.num_moe_experts} is {experts} per rank at EP={self.ep}"
                    )
                name = match.prefix.megatron + match.tensor.name.replace(
                    "{e}", str(rank.ep * experts + match.expert)
                )
            shards.setdefault(name, []).append(_Shard(rank, match, layout))
        tensors = {name: self._merge(name, copies, check_replicas) for name, copies in shards.items()}
        files = {str(rank.file.path.relative_to(self.folder)): rank.file.size for rank in self.ranks}
        return FileSource(self.folder, tensors, files)

    def _check_ranks(self) -> None:
        """Check that every (TP, PP) and every (EP, PP) rank has a file; not every (TP, EP) pair does."""
        for axes in (("tp", "pp"), ("ep", "pp")):
            there = {tuple(getattr(rank, axis) for axis in axes) for rank in self.ranks}
            sizes = tuple(getattr(self, axis) for axis in axes)
            for first in range(sizes[0]):
                for second in range(sizes[1]):
                    if (first, second) not in there:
                        raise CheckpointError(
                            f"{self.folder}: the folder of {axes[0].upper()} rank {first}, PP rank {second} "
                            f"is missing; the other folders have {axes[0].upper()}={sizes[0]}, PP={sizes[1]}"
                        )
        for axis, kind in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
            said = argument(self.ranks[0].file, f"{kind}_model_parallel_size")
            if said is not None and said != getattr(self, axis):
                raise CheckpointError(
                    f"{self.folder}: written with {axis.upper()}={said}, but its folders have "
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

    def _global_weights(self) -> Iterator[tuple[Rank, str, TensorLayout]]:
        """Yield every weight of every file, with global layer numbers."""
        counts: dict[tuple[int, int], dict[str, int]] = {}
        chunks = {len(rank.file.models) for rank in self.ranks}
        if len(chunks) > 1:
            raise CheckpointError(
                f"{self.folder}: its files have different numbers of virtual stages: {sorted(chunks)}"
            )
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
                for key, layout in model.items():
                    name = _renumbered(key, offsets[virtual, rank.pp])
                    yield from ((rank, one, part) for one, part in self._per_expert(name, layout, rank))

    def _per_expert(self, name: str, layout: TensorLayout, rank: Rank) -> Iterator[tuple[str, TensorLayout]]:
        """Split a parameter that holds all experts of a rank; yield any other parameter as it is."""
        found = next((entry for entry in _SIDE_BY_SIDE.items() if name.endswith(entry[0])), None)
        if found is None:
            yield name, layout
            return
        experts = self._experts_of_a_rank()
        suffix, (one, axis_in, axis_out) = found
        etp, sizes = self._etp(rank), self._sizes_of(self._lookup.layer(name))
        rows, columns = (sizes[axis] // (etp if axis == "ffn" else 1) for axis in (axis_in, axis_out))
        if prod(layout.shape) != experts * rows * columns or layout.stride != row_major(layout.shape):
            raise CheckpointError(
                f"{rank.file.path}: {name} has shape {list(layout.shape)}, expected {experts} "
                f"experts of {rows} x {columns}"
            )
        for e in range(experts):
            begin = layout.offset + e * rows * columns * ITEM_SIZE[layout.dtype]
            part = replace(layout, shape=(columns, rows), stride=(1, columns), offset=begin)
            yield name.removesuffix(suffix) + one.replace("{e}", str(e)), part

    def _etp(self, rank: Rank) -> int:
        etp = argument(rank.file, "expert_tensor_parallel_size") or self.tp
        if etp > self.tp or self.tp % etp:
            raise CheckpointError(
                f"{rank.file.path}: written with ETP={etp} and TP={self.tp}. Megatron names legacy files "
                "by TP and EP rank, so the expert-tensor ranks overwrote each other's files, and weights are "
                "lost: save with --ckpt-format torch_dist"
            )
        return etp

    def _merge(self, name: str, copies: list[_Shard], check_replicas: bool) -> SourceTensor:
        """Merge the shards or copies of a parameter into one global tensor."""
        first = copies[0]
        row, routed = first.match.row, first.match.row.routed
        size = self._etp(first.rank) if routed else self.tp
        config = first.match.prefix.config
        plan = self._split_plan(row, config, size)
        shape = tuple(self._sizes_of(config)[symbol] for symbol in first.match.tensor.shape)
        parts: dict[int, _Shard] = {}
        for one in copies:
            # Keep the first stage's copy; the last stage has the embedding as well if MTP needs it.
            part = 0 if plan is None else one.rank.tp % size
            kept = parts.setdefault(part, one)
            self._check_shard(name, one, shape if plan is None else plan.destinations[str(part)], first)
            if kept is not one and check_replicas:
                _compare_copies(name, kept, one)
        if missing := set(range(1 if plan is None else size)) - set(parts):
            raise CheckpointError(
                f"{self.folder}: {name} is in the file of {first.rank.file.path.parent.name}, but not in "
                f"that of {'expert-' * routed}tensor rank {min(missing)} of {size}"
            )
        if plan is None:
            return SourceTensor(first.layout.dtype, shape, (_shard_block(first, whole(shape), whole(shape)),))
        blocks = tuple(
            _shard_block(parts[int(piece.destination)], piece.source_slices, piece.destination_slices)
            for piece in plan.pieces
        )
        return SourceTensor(first.layout.dtype, shape, blocks)

    def _sizes_of(self, config: Nemotron3Config) -> dict[str, int]:
        """Return the sizes of a layer's symbols. Layers that are alike share one config."""
        if id(config) not in self._sizes:
            self._sizes[id(config)] = symbol_sizes(config, self._padded)
        return self._sizes[id(config)]

    def _split_plan(self, row: Row, config: Nemotron3Config, size: int) -> Plan | None:
        key = (id(row), id(config), size)
        if key not in self._plans:
            try:
                self._plans[key] = transforms.split_parameter(
                    row, config, tp=size, etp=size, padded_vocab_size=self._padded
                )
            except ValueError as problem:
                raise CheckpointError(f"{self.folder}: {problem}: is it another model?") from None
        return self._plans[key]

    def _check_shard(self, name: str, one: _Shard, shape: tuple[int, ...], first: _Shard) -> None:
        if one.layout.shape != shape:
            raise CheckpointError(
                f"{one.rank.file.path}: {name} has shape {list(one.layout.shape)}, {self.config.name} has "
                f"{list(shape)} at TP={self.tp}: is it another model?"
            )
        if one.layout.dtype != first.layout.dtype or one.match.spelling is not first.match.spelling:
            raise CheckpointError(
                f"{one.rank.file.path}: {name} is {one.layout.dtype}, in {first.rank.file.path} it is "
                f"{first.layout.dtype} or has another name"
            )


def _renumbered(name: str, offsets: Mapping[str, int]) -> str:
    """Add to the layer number of a name the number of layers that precede this stage in its stack."""
    if (match := _LAYER.match(name)) is None:
        return name
    return f"{match[1]}.layers.{int(match[2]) + offsets[match[1]]}.{name[match.end() :]}"


def _layer_counts(path: Path, model: Mapping[str, TensorLayout]) -> dict[str, int]:
    """Count the layers of each stack in one file; they must be numbered 0, 1, …"""
    found: dict[str, set[int]] = {}
    for key in model:
        if match := _LAYER.match(key):
            found.setdefault(match[1], set()).add(int(match[2]))
    for stack, numbers in found.items():
        if max(numbers) + 1 != len(numbers):
            gap = min(set(range(max(numbers))) - numbers)
            raise CheckpointError(f"{path}: {stack}.layers.{max(numbers)} exists, but layer {gap} is missing")
    return {stack: len(numbers) for stack, numbers in sorted(found.items())}


def _shard_block(held: _Shard, whole_slices: Slices, rank_slices: Slices) -> Block:
    """Return [rank_slices] of a rank's shard as the block [whole_slices] of the global tensor."""
    layout = held.layout
    begin = sum(a * step for (a, _), step in zip(rank_slices, layout.stride))
    offset = layout.offset + begin * ITEM_SIZE[layout.dtype]
    location = Location(held.rank.file.path, offset, layout.stride, layout.record)
    return Block(tuple(a for a, _ in whole_slices), extent(whole_slices), location)


def _compare_copies(name: str, one: _Shard, other: _Shard) -> None:
    """Check that two ranks' copies of a parameter are equal; both are read in bands of rows."""
    sources = []
    for held in (one, other):
        slices = whole(held.layout.shape)
        tensor = SourceTensor(held.layout.dtype, held.layout.shape, (_shard_block(held, slices, slices),))
        sources.append(FileSource(held.rank.file.path.parent, {name: tensor}, {}))
    try:
        for band in bands(whole(one.layout.shape), _BLOCK // ITEM_SIZE[one.layout.dtype]):
            a, b = (source.read(name, band) for source in sources)
            if not (a == b).all():
                raise CheckpointError(
                    f"{other.rank.file.path}: {name} differs from its copy in {one.rank.file.path}, although "
                    "it is replicated, so the ranks had diverged. Without this check, the first rank's copy "
                    "is taken"
                )
    finally:
        for source in sources:
            source.close()
