"""Mixture-of-experts layer with an optional latent width (LatentMoE, arXiv 2601.18089), without TE.

    x [s, b, d] --router--------------------------------> which k of N experts, with what weight
      |
      +--fc1_latent_proj--> [s, b, l] --dispatch--> experts --combine--> [s, b, l] --fc2_latent_proj--+
      |                                                                                               |
      +--shared expert (width d, no dispatch)---------------------------------------------------------+--> y

Tokens travel between expert-parallel ranks at width l, which is d / 4 in the published models.

Upstream's `MoELayer` computes this, but it asserts TE for the two projections and refuses to overlap the
shared expert with the dispatch if there is a latent width. The subclass replaces these two parts; router,
dispatch, recompute and checkpoint names are upstream's.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_nemotron3.layers.linear import DuplicatedLinear


class CountingRouter(TopKRouter):
    """Upstream's router, with exact load counts in BF16 training and with padding tokens.

    Megatron's Float16Module casts every buffer to BF16. Upstream casts `expert_bias` back to FP32 but not
    `local_tokens_per_expert`: its counts stop at 256 and the bias update sees wrong loads.
    """

    def _maintain_float32_expert_bias(self) -> None:
        super()._maintain_float32_expert_bias()
        counts = self.local_tokens_per_expert
        if counts is not None and counts.dtype != torch.float32:
            counts.data = counts.data.float()

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count the tokens of each expert, without padding.

        Upstream 0.19 multiplies the map [t, N] by a mask [t], which is an error unless t is 1 or N.
        """
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        super()._apply_expert_bias(routing_map)

    #: Tokens of the micro-batch that are not padding, per rank of the sequence; set while `routing` runs.
    _real_tokens: torch.Tensor | None = None

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Upstream's choice and losses for logits [s, b, N]; `padding_mask` [s, b] is True for padding."""
        if padding_mask is not None and self.calculate_per_token_loss and self.is_aux_loss_enabled():
            real = (~padding_mask).sum().float()
            torch.distributed.all_reduce(real, group=self.tp_cp_group)
            self._real_tokens = real / self.tp_cp_group.size()
        try:
            chosen: tuple[torch.Tensor, torch.Tensor] = super().routing(logits, padding_mask)
        finally:
            self._real_tokens = None
        return chosen

    def attach_and_log_load_balancing_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attach the loss; with `--calculate-per-token-loss` it is weighed by the real tokens.

        Upstream takes them from counts that it has already added up over the ranks of the sequence, in place,
        and multiplies by the number of ranks once more: with padding under TP 2 the loss counts twice.
        """
        if self._real_tokens is not None:
            kwargs["valid_token_count"] = self._real_tokens
        attached: torch.Tensor = super().attach_and_log_load_balancing_loss(*args, **kwargs)
        return attached


class AlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """`--moe-token-dispatcher-type alltoall` for CPU tensors, too; CUDA tensors take upstream's path.

    Upstream copies the split sizes to the host on a side stream. On a CPU there is nothing to copy, so it
    leaves them tensors and the exchange raises TypeError (megatron-core 0.19 and main).
    """

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


class LatentMoELayer(MoELayer):
    """Megatron's MoE layer; `--moe-latent-size` and `--moe-shared-expert-overlap` work on plain torch.

    Parameters: `router.weight` [N, d], `router.expert_bias` [N] (FP32 buffer), with a latent width
    `fc1_latent_proj.weight` [l, d] and `fc2_latent_proj.weight` [d, l], then `experts.*`,
    `shared_experts.*`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        name: str | None = None,
    ) -> None:
        groups = pg_collection or get_default_pg_collection()
        # The parent gets a config without the two options it refuses. The modules it builds get the real one,
        # except the shared expert: its overlap variant belongs to upstream's mechanism.
        plain = copy(config)
        plain.moe_latent_size = None
        plain.moe_shared_expert_overlap = False

        def build_experts(num_local: int, _config: TransformerConfig, **kwargs: Any) -> Any:
            return submodules.experts(num_local, config, **kwargs)

        super().__init__(
            plain,
            MoESubmodules(
                experts=build_experts, shared_experts=submodules.shared_experts, router=submodules.router
            ),
            layer_number=layer_number,
            pg_collection=groups,
            is_mtp_layer=is_mtp_layer,
            name=name,
        )
        self.config = config
        self.submodules = submodules
        if config.moe_latent_size:
            self._build_latent_projections(name)
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = AlltoAllTokenDispatcher(
                self.num_local_experts, self.local_expert_indices, config=plain, pg_collection=groups
            )
        # Useful only where a side stream can compute while tokens are exchanged.
        self.overlaps_shared_expert = (
            config.moe_shared_expert_overlap
            and self.use_shared_expert
            and self.ep_group.size() > 1
            and torch.device(torch.cuda.current_device()).type == "cuda"
        )
        self._shared_stream = torch.cuda.Stream() if self.overlaps_shared_expert else None

    def _build_latent_projections(self, name: str | None) -> None:
        config = self.config
        tail = {key: self._modules.pop(key) for key in ("experts", "shared_experts") if key in self._modules}
        for key, sizes, init in (
            ("fc1_latent_proj", (config.hidden_size, config.moe_latent_size), config.init_method),
            (
                "fc2_latent_proj",
                (config.moe_latent_size, config.hidden_size),
                config.output_layer_init_method,
            ),
        ):
            projection = DuplicatedLinear(
                *sizes, config=config, init_method=init, name=f"{name}.{key}" if name is not None else None
            )
            self.add_module(key, projection)
        self._modules.update(tail)  # upstream registers the projections before the experts

    def shared_experts_compute(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[s, b, d] -> the shared expert's [s, b, d], on a side stream if it overlaps the dispatch."""
        if self._shared_stream is None:
            return super().shared_experts_compute(hidden_states)
        # Autograd replays each op on the stream it ran on, so backward overlaps as well.
        self._shared_stream.wait_stream(torch.cuda.current_stream())
        hidden_states.record_stream(self._shared_stream)
        with torch.cuda.stream(self._shared_stream):
            return super().shared_experts_compute(hidden_states)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> torch.Tensor:
        """Un-permute, project [s, b, l] back to [s, b, d] and add the shared expert."""
        output = self.token_dispatcher.combine_postprocess(output)
        if self.config.moe_latent_size:
            output, _ = self.fc2_latent_proj(output)
        if shared_expert_output is not None:
            if self._shared_stream is not None:
                torch.cuda.current_stream().wait_stream(self._shared_stream)
                shared_expert_output.record_stream(torch.cuda.current_stream())
            output = output + shared_expert_output
        return output
