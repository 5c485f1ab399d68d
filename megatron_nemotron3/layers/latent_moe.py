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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_nemotron3.layers.linear import DuplicatedLinear
from megatron_nemotron3.layers.norm import NormBuilder


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

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.reshape(-1, 1)
        super()._apply_expert_bias(routing_map)

    #: Tokens of the micro-batch that are not padding, per rank of the sequence; set while `routing` runs.
    _real_tokens: Tensor | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Upstream's choice and losses for logits [s, b, N]; `padding_mask` [s, b] is True for padding."""
        if padding_mask is not None and self.calculate_per_token_loss and self.is_aux_loss_enabled():
            real = (~padding_mask).sum().float()
            torch.distributed.all_reduce(real, group=self.tp_cp_group)
            self._real_tokens = real / self.tp_cp_group.size()
        try:
            chosen: tuple[Tensor, Tensor] = super().routing(logits, padding_mask)
        finally:
            self._real_tokens = None
        return chosen

    def attach_and_log_load_balancing_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attach the loss; weigh it by the real tokens with `--calculate-per-token-loss`.

        Upstream adds up their counts over the ranks of the sequence, in place, and multiplies by the number
        of ranks once more: with padding under TP 2 the loss counts twice.
        """
        if self._real_tokens is not None:
            kwargs["valid_token_count"] = self._real_tokens
        attached: Tensor = super().attach_and_log_load_balancing_loss(*args, **kwargs)
        return attached


class AlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """`--moe-token-dispatcher-type alltoall` with fewer waits of the host, and for CPU tensors, too.

    Upstream waits for all counts on the host and cuts the tokens into a piece for each source rank and
    expert. Here one index of the device reorders them, and counts stay on the device if the experts take them
    there: the host waits only for the split sizes of an exchange. Upstream's way remains for tokens that are
    dropped or padded, for TE's fused permutation and for CUDA graphs of a part of the layer.

    On a CPU upstream leaves the split sizes tensors, and the exchange raises TypeError (0.19 and main).
    """

    num_local_experts: int
    num_global_tokens_per_local_expert: Tensor | None
    #: Whether the experts take counts on the device now; the layer sets it.
    experts_take_device_counts: Callable[[], bool] = staticmethod(lambda: False)
    #: Whether the experts take rows from the last to the first now, if it is possible; the layer sets it.
    reverse_experts: Callable[[bool], bool] = staticmethod(lambda possible: False)
    #: Rows of each (source rank, local expert), on the device of the tokens; None without local choice.
    _pieces: Tensor | None = None
    #: What sorts the received tokens by expert, and what restores their order; None if they are sorted.
    _order: tuple[Tensor, Tensor] | None = None
    _counts_stay = False

    @property
    def _reorders(self) -> bool:
        config = self.config
        return not (
            self.drop_and_pad
            or config.moe_expert_capacity_factor is not None
            or config.moe_router_padding_for_quantization
            or config.moe_permute_fusion
            or config.cuda_graph_impl != "none"
        )

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor, **more: Any
    ) -> Any:
        """Upstream's, for choices and weights [t, N]. Its first expert of a rank may be our last."""
        if self.reverse_experts(self._reorders and routing_map.is_cuda):
            ranks = (-1, self.num_local_experts)
            routing_map, probs = (t.unflatten(1, ranks).flip(2).flatten(1) for t in (routing_map, probs))
        return super().dispatch_preprocess(hidden_states, routing_map, probs, **more)

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count tokens: [t, N] -> [E_local]."""
        counts: Tensor = super().preprocess(routing_map)
        self._counts_stay = self._reorders and routing_map.is_cuda and self.experts_take_device_counts()
        self._pieces = None
        if self._reorders and self.num_local_experts > 1:
            # Not copied to the host: upstream's sort is not used.
            self._pieces = self.num_global_tokens_per_local_expert
            self.num_global_tokens_per_local_expert = None
        return counts

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        if self._counts_stay:
            if self.ep_size * self.tp_size > 1:
                super()._maybe_dtoh_and_synchronize(point)
            return tokens_per_expert
        if tokens_per_expert is None or tokens_per_expert.is_cuda or self.routing_map.is_cuda:
            return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        if point == self.cuda_dtoh_point and not self.drop_and_pad:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if isinstance(splits, Tensor):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert

    def dispatch_postprocess(
        self, global_input_tokens: Tensor, global_probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gather over expert-TP ranks and sort by expert: (tokens [t, l], counts [E_local], probs [t])."""
        if self._pieces is None:
            return super().dispatch_postprocess(global_input_tokens, global_probs)
        with self._without_upstreams_sort():
            tokens, counts, probs = super().dispatch_postprocess(global_input_tokens, global_probs)
        self._order = None
        if self.ep_size * self.tp_size > 1:
            self._order = order_by_expert(self._pieces, len(tokens))
            tokens, probs = (Reordered.apply(t, *self._order) for t in (tokens, probs))
        return tokens, counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Restore the order of the ranks and sum over expert-TP ranks: [t, l] -> [t', l]."""
        if self._pieces is None:
            return super().combine_preprocess(hidden_states)
        if self._order is not None:
            order, inverse = self._order
            hidden_states = Reordered.apply(hidden_states, inverse, order)
        with self._without_upstreams_sort():
            return super().combine_preprocess(hidden_states)

    @contextmanager
    def _without_upstreams_sort(self) -> Iterator[None]:
        """Upstream sorts if there are several local experts."""
        number, self.num_local_experts = self.num_local_experts, 1
        try:
            yield
        finally:
            self.num_local_experts = number


def order_by_expert(pieces: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The index that sorts rows by expert, and its inverse, each [total]. The host does not wait.

    `pieces`, [sources, experts], are numbers of rows, which lie in this order.
    """
    sizes = pieces.t().reshape(-1)  # in the order of the result
    starts = (pieces.reshape(-1).cumsum(0) - pieces.reshape(-1)).view_as(pieces).t().reshape(-1)
    ends = sizes.cumsum(0)
    row = torch.arange(total, device=pieces.device)
    piece = torch.searchsorted(ends, row, right=True)
    order = row + (starts - (ends - sizes))[piece]
    return order, torch.empty_like(order).scatter_(0, order, row)


class Reordered(torch.autograd.Function):
    """x [t, ...], order [t], its inverse -> x[order]; backward is a gather, too, which needs no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class LatentMoELayer(MoELayer):
    """Megatron's MoE layer; `--moe-latent-size` and `--moe-shared-expert-overlap` work on plain torch.

    Parameters: `router.weight` [N, d], `router.expert_bias` [N] (FP32 buffer), with a latent width
    `fc1_latent_proj.weight` [l, d] and `fc2_latent_proj.weight` [d, l], with `--moe-use-norm-before-up-proj`
    between them `fc2_norm.weight` [l], then `experts.*`, `shared_experts.*`.
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
        plain.moe_use_norm_before_up_proj = False
        plain.moe_shared_expert_overlap = False

        def build_experts(num_local: int, _config: TransformerConfig, **kwargs: Any) -> Any:
            return submodules.experts(num_local, config, **kwargs)

        super().__init__(
            plain,
            replace(submodules, experts=build_experts),
            layer_number=layer_number,
            pg_collection=groups,
            is_mtp_layer=is_mtp_layer,
            name=name,
        )
        self.config = config
        self.submodules = submodules
        # Megatron-core 0.19 has no such option.
        self.norms_latent = getattr(config, "moe_use_norm_before_up_proj", False)
        if config.moe_latent_size:
            self._build_latent_projections(name)
        if config.moe_token_dispatcher_type == "alltoall":
            self.token_dispatcher = AlltoAllTokenDispatcher(
                self.num_local_experts, self.local_expert_indices, config=plain, pg_collection=groups
            )
            if (takes := getattr(self.experts, "takes_device_counts", None)) is not None:
                self.token_dispatcher.experts_take_device_counts = takes
                self.token_dispatcher.reverse_experts = self.experts.reverse
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
        widths, outward = (config.hidden_size, config.moe_latent_size), config.output_layer_init_method
        for key, sizes, init in (
            ("fc1_latent_proj", widths, config.init_method),
            ("fc2_latent_proj", widths[::-1], outward),
        ):
            full_name = f"{name}.{key}" if name is not None else None
            if key == "fc2_latent_proj" and self.norms_latent:
                self.fc2_norm = NormBuilder(config, config.moe_latent_size, config.layernorm_epsilon)
            self.add_module(key, DuplicatedLinear(*sizes, config=config, init_method=init, name=full_name))
        self._modules.update(tail)  # upstream registers the projections before the experts

    def shared_experts_compute(self, hidden_states: Tensor) -> Tensor | None:
        """[s, b, d] -> the shared expert's [s, b, d], on a side stream if it overlaps the dispatch."""
        if self._shared_stream is None:
            return super().shared_experts_compute(hidden_states)
        # Autograd replays each op on the stream it ran on, so backward overlaps as well.
        self._shared_stream.wait_stream(torch.cuda.current_stream())
        hidden_states.record_stream(self._shared_stream)
        with torch.cuda.stream(self._shared_stream):
            return super().shared_experts_compute(hidden_states)

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Un-permute, project [s, b, l] back to [s, b, d] and add the shared expert."""
        output = self.token_dispatcher.combine_postprocess(output)
        if self.config.moe_latent_size:
            output = self.fc2_norm(output) if self.norms_latent else output
            output, _ = self.fc2_latent_proj(output)
        if shared_expert_output is not None:
            if self._shared_stream is not None:
                torch.cuda.current_stream().wait_stream(self._shared_stream)
                shared_expert_output.record_stream(torch.cuda.current_stream())
            output = output + shared_expert_output
        return output
