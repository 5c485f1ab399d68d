"""Which tokens of a batch are padding, for the routers of all layers, in whose balance it must not count.

The mask is the `padding_mask` of the caller, or follows from the padded borders of a pack
(`cu_seqlens_q_padded`). Megatron 0.19 gives it to the decoder's layers alone, not to MTP, and does not cut it
over TP ranks.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_nemotron3.layers.context_parallel import TokenPlaces

#: Mask of the decoder stack that ran last in this process, for the MTP layers that run right after it.
_of_decoder: Tensor | None = None


def hand_to_mtp(mask: Tensor | None) -> None:
    """Keep the decoder's mask [b, s_local] for its MTP layers; HybridModel calls them with none."""
    global _of_decoder
    _of_decoder = mask


def of_decoder() -> Tensor | None:
    """Mask [b, s_local] of the decoder stack that ran last."""
    return _of_decoder


def local_mask(
    given: Tensor | None,
    packed: PackedSeqParams | None,
    hidden: Tensor,
    sequence_parallel: bool,
    groups: ProcessGroupCollection,
) -> Tensor | None:
    """This rank's padding mask [b, s_local], True for padding; None if all tokens are real or unknown.

    Args:
        given: `padding_mask` of the model: [b, s / cp], or cut over tensor-parallel ranks already.
        hidden: [s_local, b, d] input of the layers.
    """
    tp = groups.tp.size() if sequence_parallel else 1
    local, tokens = hidden.shape[0], hidden.shape[0] * tp
    mask = given
    if mask is None:
        mask = padding_of_pack(packed, tokens, groups.cp.size(), groups.cp.rank(), hidden.device)
    if mask is None or mask.shape[1] == local:
        return mask
    if mask.shape[1] != tokens:
        raise ValueError(
            f"padding_mask {list(mask.shape)} does not fit {tokens} tokens per rank of a row: pass this "
            "context-parallel rank's part [b, s / cp]"
        )
    return mask[:, groups.tp.rank() * local :][:, :local]


def padding_of_pack(
    packed: PackedSeqParams | None, tokens: int, cp: int, rank: int, device: torch.device
) -> Tensor | None:
    """The mask [1, tokens] of packed documents with padding between them, or None if they have none.

    Tokens after the last padded border are padding. The host does not wait. `tokens` are this rank's.
    """
    if packed is None or packed.cu_seqlens_q is None:
        return None
    if packed.cu_seqlens_q_padded is None or packed.cu_seqlens_q_padded is packed.cu_seqlens_q:
        return None
    return ~TokenPlaces.of(packed, tokens, cp, rank, device).real[None]
