"""Core attention through `torch.nn.functional.scaled_dot_product_attention`.

Megatron's `SelfAttention` calls this module. Megatron's own `DotProductAttention` materializes [b, heads, s,
s] and refuses packed sequences and context parallelism.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_nemotron3.layers.context_parallel import (
    cu_seqlens,
    document_borders,
    gathered_positions,
    is_cut_whole,
    pack_positions,
    query_pieces,
)
from megatron_nemotron3.layers.functional import attention_of_any_length, causal_attention
from megatron_nemotron3.precision.settings import library_kernels_enabled

try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn
except ImportError:  # torch < 2.10
    _varlen_attn = None  # type: ignore[assignment]


class TorchCoreAttention(MegatronModule):
    """Causal grouped-query attention without positional embedding; scale 1 / sqrt(kv_channels)."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(f"attention mask {attn_mask_type.name}: the torch backend supports causal only")
        if config.softmax_type != "vanilla" or config.window_size is not None:
            raise ValueError(
                f"softmax_type={config.softmax_type!r}, window_size={config.window_size}: the torch "
                "backend supports full softmax attention only"
            )
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = groups.cp
        # Upstream's checkpoint code prefers a module's own group to the global one.
        self.tp_group = groups.tp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Queries [s, b, heads / tp, c], keys and values [s, b, kv heads / tp, c] -> [s, b, heads / tp * c].

        Packed: [t, heads / tp, c], [t, kv heads / tp, c] -> [t, 1, heads / tp * c], as Megatron expects it.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias: models of this family have none, and it is not supported")
        if packed_seq_params is not None:
            with attention_of_any_length(query.device):
                return self._packed(query, key, value, packed_seq_params)
        cp = self.cp_group.size()
        if cp > 1:  # gathers keys and values, which are small (2 KV heads)
            positions = gathered_positions([0, query.shape[0] * cp], cp, query.device)
            key, value = self._in_sequence(key, value, positions)
        # [s, b, h, c] -> [b, h, s, c]
        out = self._attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))
        return out.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of a document: this rank's q [b, h, s / cp, c]; k, v [b, g, s, c] in sequence."""
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        if cp == 1:
            return self._causal(q, k, v)
        # Of each of this rank's two chunks the last query sees the last key up to its end.
        ends = [(chunk + 1) * k.shape[2] // (2 * cp) for chunk in (rank, 2 * cp - 1 - rank)]
        pieces = zip(q.chunk(2, 2), ends, strict=True)
        return torch.cat([self._causal(part, k[:, :, :end], v[:, :, :end]) for part, end in pieces], 2)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of [b, h, s, c] each, in which the last query sees the last key."""
        dropout = self.dropout if self.training else 0.0
        own_stream = dropout and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if own_stream else nullcontext():
            return causal_attention(q, k, v, dropout_p=dropout, scale=self.softmax_scale)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        """Attention of documents that follow each other along the token axis, each separately."""
        cp = self.cp_group.size()
        if cp == 1 and self._takes_device_borders(query):
            return _flash_packed(query, key, value, cu_seqlens(packed), self.softmax_scale).flatten(1)
        borders = document_borders(packed, query.shape[0] * cp)
        if is_cut_whole(packed):
            return self._packed_whole(query, key, value, borders)
        if cp > 1:
            positions = pack_positions(packed, query.shape[0] * cp, cp, query.device)
            key, value = self._in_sequence(key, value, positions)
        pieces = []
        for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            if end == start:
                continue
            own = slice(start // cp, end // cp)
            # [t, h, c] -> [1, h, t, c]
            q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query[own], key[start:end], value[start:end]))
            pieces.append(self._attend(q, k, v).squeeze(0).transpose(0, 1))
        return torch.cat(pieces).flatten(1)

    def _packed_whole(self, query: Tensor, key: Tensor, value: Tensor, borders: Tensor) -> Tensor:
        """The same where context-parallel ranks hold chunks of the row, not of each document."""
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        key, value = self._in_sequence(key, value, gathered_positions(borders[[0, -1]], cp, query.device))
        outputs = []
        for own, seen in query_pieces(borders, cp, rank):
            # [t, h, c] -> [1, h, t, c]
            q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query[own], key[seen], value[seen]))
            outputs.append(self._causal(q, k, v).squeeze(0).transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _takes_device_borders(self, query: Tensor) -> bool:
        """Whether flash attention computes all documents in one launch, with their borders on the device."""
        dropout = self.dropout if self.training else 0.0
        return bool(
            query.is_cuda
            and library_kernels_enabled()
            and _varlen_attn is not None
            and query.dtype in (torch.bfloat16, torch.float16)
            and query.shape[-1] % 8 == 0
            and query.shape[-1] <= 256
            and not dropout
        )

    def _in_sequence(self, key: Tensor, value: Tensor, positions: Tensor) -> list[Tensor]:
        """All keys and values, [s / cp, ...] -> [s, ...]; `positions` [s] are in the order of ranks."""
        order = positions.argsort()
        gathered = (
            gather_from_sequence_parallel_region(t.contiguous(), group=self.cp_group) for t in (key, value)
        )
        return [t.index_select(0, order) for t in gathered]


def _flash_packed(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scale: float) -> Tensor:
    """Causal attention of all documents of a pack in one launch; the host does not wait."""
    total = query.shape[0]
    ends = torch.nn.functional.pad(borders.to(torch.int32), (0, 1), value=total)
    return _varlen_attn(query, key, value, ends, ends, total, total, scale=scale, window_size=(-1, 0))  # type: ignore[return-value]
