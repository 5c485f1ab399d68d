"""Mixture-of-experts layer with an optional latent width (LatentMoE, arXiv 2601.18089), without TE.

    x [s, b, d] --router--------------------------------> which k of N experts, with what weight
      |
      +--fc1_latent_proj--> [s, b, l] --dispatch--> experts --combine--> [s, b, l] --fc2_latent_proj--+
      |                                                                                               |
      +--shared expert (width d, no dispatch)---------------------------------------------------------+--> y

The tokens travel between expert-parallel ranks at width l, 1/4 of d in the published models.

Upstream's `MoELayer` does all of it but asserts TE for the two projections and refuses to overlap the
shared expert with the dispatch when there is a latent width. This subclass replaces those two things;
router, dispatch, recompute and checkpoint names are upstream's.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_nemotron3.layers.dispatch import AlltoAllTokenDispatcher
from megatron_nemotron3.layers.linear import DuplicatedLinear
from megatron_nemotron3.layers.upstream import told_name


class CountingRouter(TopKRouter):
    """Upstream's router, with exact load counts in BF16 training.

    Megatron's Float16Module narrows every buffer; upstream widens `expert_bias` again but not
    `local_tokens_per_expert`, so counts above 256 stall and the bias update sees wrong loads.
    """

    def _maintain_float32_expert_bias(self) -> None:
        super()._maintain_float32_expert_bias()
        counts = self.local_tokens_per_expert
        if counts is not None and counts.dtype != torch.float32:
            counts.data = counts.data.float()


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
        # The parent sees a config without what it refuses; everything it builds sees the real one
        # except the shared expert, whose overlap variant belongs to the upstream mechanism.
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
            **told_name(name),
        )
        self.config = config
        self.submodules = submodules
        if config.moe_latent_size:
            self._build_latent_projections(name)
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = AlltoAllTokenDispatcher(
                self.num_local_experts, self.local_expert_indices, config=plain, pg_collection=groups
            )
        # Worth it only where a side stream can run while tokens are on the wire.
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
