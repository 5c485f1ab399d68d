"""What is special about checkpoints in torch's own format (fsdp_dtensor, torch_dcp).

They have neither common.pt nor `common_state`: each entry of the state is an object of its own in the index,
`args`, `iteration`, `checkpoint_version`, …, pickled by torch.save.

Their tensors are the parameters, not the parts torch_dist makes of them. Under tensor parallelism that
matters for Mamba's: a rank holds [z_r | x_r | B_r | C_r | dt_r] of in_proj, and what is stored as one tensor
is one rank's rows behind another's, [z_0 | x_0 | … | z_1 | x_1 | …]. Megatron-FSDP puts it into no other
order, so such a checkpoint loads at the TP it was written with, and has to be put in order here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_nemotron3.checkpoint.metadata import ITEM_SIZE, CheckpointError, CheckpointIndex
from megatron_nemotron3.checkpoint.read import stored_object
from megatron_nemotron3.checkpoint.unpickle import Inert
from megatron_nemotron3.convert import sharding
from megatron_nemotron3.convert.places import Names, what_else
from megatron_nemotron3.convert.plan import Plan
from megatron_nemotron3.convert.stored import Block, Layout, Source, SourceTensor
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.tensors import symbol_sizes

_NAMES = ("args", "iteration", "checkpoint_version")


def dcp_state(index: CheckpointIndex) -> dict[str, Any]:
    """What `read.common_state` gives for torch_dist folders: classes as `Inert`; entries may lack.

    Raises:
        CheckpointError: an entry is damaged or names something that is not data.
    """
    state: dict[str, Any] = {}
    for name in _NAMES:
        if (place := index.objects.get(name)) is None:
            continue
        state[name] = stored_object(index.folder, place, name)
    return state


def in_order(source: Source, config: Nemotron3Config, state: dict[str, Any]) -> Source:
    """The source with Mamba's tensors in the order of the table's rows: [z | x | B | C | dt], [x | B | C].

    Changes nothing where they are stored in parts (torch_dist), or TP was 1.

    Args:
        state: of `dcp_state`; its "args" know TP.

    Raises:
        CheckpointError: TP is unknown, or does not divide the model's Mamba layers.
    """
    lookup, table = Names(config), symbol_sizes(config)
    changed: dict[str, SourceTensor] = {}
    tp: int | None = None
    for key, tensor in source.tensors.items():
        if what_else(key) is not None:
            continue
        try:
            match = lookup.key(key)
        except ValueError:  # the inventory will say so, unless it is allowed to be unused
            continue
        if match.row.tp != "parts" or match.spelling is match.row.spellings[0]:
            continue
        tp = _tensor_parallel(source, state) if tp is None else tp
        if tensor.shape != tuple(table[symbol] for symbol in match.tensor.shape):
            continue  # another model, which the inventory says better
        try:
            plan = sharding.split(match.row, config, tp=tp)
        except ValueError as problem:
            raise CheckpointError(f"{source.folder}: written at TP={tp}, but {problem}") from None
        assert plan is not None
        changed[key] = SourceTensor(tensor.dtype, tensor.shape, _reordered(tensor, plan))
    return Source(source.folder, {**source.tensors, **changed}, source.files) if changed else source


def _tensor_parallel(source: Source, state: dict[str, Any]) -> int:
    arguments = state.get("args")
    tp = arguments.field("tensor_model_parallel_size") if isinstance(arguments, Inert) else None
    if type(tp) is not int or tp < 1:
        raise CheckpointError(
            f"{source.folder}: the order of Mamba's in_proj rows depends on the TP it was written at, which "
            f"the stored arguments do not tell (tensor_model_parallel_size={tp!r}): save it as --ckpt-format "
            "torch_dist"
        )
    return tp


def _reordered(tensor: SourceTensor, plan: Plan) -> tuple[Block, ...]:
    """The blocks of a tensor stored rank by rank, cut and moved to where `plan` says their rows belong."""
    blocks = []
    for piece in plan.pieces:
        (first, last), (begin, _) = piece.source_slices[0], piece.destination_slices[0]
        stored = int(piece.destination) * plan.destinations[piece.destination][0] + begin
        for block in tensor.blocks:
            low = max(stored, block.offsets[0])
            high = min(stored + last - first, block.offsets[0] + block.sizes[0])
            if low < high:
                where = partial(_from_row, block, low - block.offsets[0], ITEM_SIZE[tensor.dtype])
                offsets = (first + low - stored, *block.offsets[1:])
                blocks.append(Block(offsets, (high - low, *block.sizes[1:]), where))
    return tuple(blocks)


def _from_row(block: Block, row: int, item: int) -> Layout:
    found = block.layout()
    return Layout(found.path, found.offset + row * found.stride[0] * item, found.stride)
