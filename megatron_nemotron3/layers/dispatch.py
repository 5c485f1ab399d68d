"""All-to-all token dispatch that also runs where there is no CUDA stream to copy on.

Upstream's dispatcher copies the split sizes to the host on a side stream. On a CPU there is no device
copy to make, so upstream leaves them tensors and the exchange raises TypeError (megatron-core 0.16 to
0.19). Everything else is upstream's.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher


class AlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """`--moe-token-dispatcher-type alltoall` for CUDA (unchanged) and CPU tensors."""

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if tokens_per_expert is None or tokens_per_expert.is_cuda or self.routing_map.is_cuda:
            return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        if point == self.cuda_dtoh_point and not self.drop_and_pad:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if isinstance(splits, torch.Tensor):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert
