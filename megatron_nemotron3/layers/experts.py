"""Routed experts on plain torch: one grouped matrix product per projection, no loop over tokens.

Parameters are named as in TE, `linear_fc1.weight0 … weight{E-1}` [f, e] and `linear_fc2.weight0 …` [e, f], so
state dicts and checkpoints equal those of `TEGroupedMLP`. Tokens arrive sorted by expert, [routed tokens,
width].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_nemotron3.layers.functional import weighted_squared_relu
from megatron_nemotron3.layers.grouped import (
    grouped_linear,
    grouped_linear_cuda,
    grouped_mm_works,
    one_allocation,
    squared_relu_experts,
    squared_relu_experts_cuda,
    view_of,
)
from megatron_nemotron3.layers.linear import ReplaceableProducts
from megatron_nemotron3.layers.norm import EmptyExtraState, parameter_device
from megatron_nemotron3.precision.settings import library_kernels_enabled


class GroupedLinear(ReplaceableProducts, EmptyExtraState):
    """E independent linear layers without bias, applied to tokens sorted by expert.

    The token dispatcher communicates between tensor-parallel ranks, as for all of Megatron's expert linears.

    Args:
        num_gemms: local experts.
        input_size, output_size: global widths; that of `split_axis` is divided by the expert-TP size.
    """

    #: 0 splits the output (column parallel), 1 the input (row parallel).
    split_axis: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert pg_collection is not None
        if bias:
            raise ValueError("bias=True: experts of this family have no bias, pass --disable-bias-linear")
        self.config, self.num_gemms, self.name = config, num_gemms, name
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.expt_dp_group = pg_collection.expt_dp
        tp = self.tp_group.size()
        shape = [output_size, input_size]
        if shape[self.split_axis] % tp:
            raise ValueError(
                f"expert width {shape[self.split_axis]} is not divisible by expert TP={tp}: "
                "use an --expert-tensor-parallel-size that divides it"
            )
        local = list(shape)
        local[self.split_axis] //= tp
        self.in_features, self.out_features = local[1], local[0]

        # If experts have their own groups, their gradients are not reduced over the dense DP group.
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        device = parameter_device(config)
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(local, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(weight, True, self.split_axis, 1)
            weight.allreduce = not own_groups  # type: ignore[attr-defined]
            self.register_parameter(f"weight{i}", weight)
        if config.perform_initialization:
            self._initialize(shape, init_method)
        if torch.device(device).type == "cuda" and library_kernels_enabled():
            one_allocation(self.weights())  # so that the grouped product needs no copy

    def _initialize(self, shape: list[int], init_method: Callable[[Tensor], Any]) -> None:
        if not self.config.use_cpu_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for weight in self.weights():
                    init_method(weight)
            return
        # All ranks draw the matrices of all experts: weights do not depend on the layout.
        first, unused = self.ep_group.rank() * self.num_gemms, torch.empty_like(self.weights()[0])
        for expert in range(self.ep_group.size() * self.num_gemms):
            own = getattr(self, f"weight{expert - first}", unused) if expert >= first else unused
            _initialize_affine_weight_cpu(
                own,
                *shape,
                own.shape[self.split_axis],
                self.split_axis,
                init_method,
                params_dtype=self.config.params_dtype,
                rank=self.tp_group.rank(),
                world_size=self.tp_group.size(),
                skip_set_tensor_parallel_attributes=True,
            )

    def weights(self) -> list[torch.nn.Parameter]:
        """The local experts' matrices, each [output, input]."""
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]

    def forward(self, x: Tensor | None, tokens_per_expert: list[int] | Tensor) -> tuple[Any, None]:
        """[t, input] sorted by expert -> ([t, output], no bias); t = sum(tokens_per_expert).

        Counts are a tensor where `GroupedExperts.takes_device_counts`.

        With x None returns the matrices, for callers that fuse FC1 and FC2. They must call the module,
        because Megatron waits for gathered parameters (`--overlap-param-gather`) in its forward pre-hook.
        """
        if x is None:
            return self.weights(), None
        if (products := self.replaced()) is not None:
            output = products.grouped(self, x, self.weights(), tokens_per_expert)
        else:
            output = self.products_of(x, self.weights(), tokens_per_expert)
        return self.adapted(output, x, tokens_per_expert), None

    @staticmethod
    def products_of(x: Tensor, weights: list[Any], tokens_per_expert: list[int] | Tensor) -> Tensor:
        """[t, input] sorted by expert, times the matrix [output, input] of each expert."""
        if x.is_cuda:
            return grouped_linear_cuda(x, weights, tokens_per_expert)
        assert isinstance(tokens_per_expert, list)
        return grouped_linear(x, weights, tokens_per_expert)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed here."""

    def own_sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """One chunk per expert of a [E, output, input] tensor, as TE's grouped linear and `SequentialMLP`.

        With `singleton_local_shards` one key per expert.
        """
        assert metadata is not None
        singleton = metadata.get("singleton_local_shards", False)
        total = self.ep_group.size() * self.num_gemms
        first = self.ep_group.rank() * self.num_gemms
        result: dict[str, Any] = {}
        for i, weight in enumerate(self.weights()):
            expert = first + i
            offsets = sharded_offsets
            if not singleton:
                offsets = (*sharded_offsets, (len(sharded_offsets), expert, total))
            part = make_sharded_tensors_for_checkpoint(
                {f"{i}.weight": weight, f"{i}._extra_state": None},
                "",
                {f"{i}.weight": self.split_axis},
                offsets,
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(part, f"{i}.", f"{expert}.{prefix}" if singleton else prefix)
            for name, entry in part.items():
                entry.replica_id = (*entry.replica_id[:2], self.expt_dp_group.rank())
                kind = name.removeprefix(f"{i}.")
                number = "" if i == 0 and kind == "_extra_state" else i
                result[f"{prefix}{kind}{number}"] = entry
        return result

    def extra_repr(self) -> str:
        return f"{self.num_gemms} experts, in={self.in_features}, out={self.out_features}"


class ColumnParallelGroupedLinear(GroupedLinear):
    """FC1: output rows split over expert-TP ranks."""

    split_axis = 0


class RowParallelGroupedLinear(GroupedLinear):
    """FC2: input columns split over expert-TP ranks; the dispatcher sums the partial outputs."""

    split_axis = 1


class GroupedExperts(TEGroupedMLP):
    """FC1, weighted squared ReLU, FC2 for all local experts.

    Construction and checkpointing are those of upstream's `TEGroupedMLP`, which takes any linears.
    """

    #: Call the linears one after the other, so that hooks see what enters FC2
    #: (`post_training.compress.importance`).
    separate = False
    #: Rows and counts come from the last local expert to the first; set by `reverse`.
    reversed = False

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        activation = getattr(config.activation_func, "__name__", str(config.activation_func))
        if activation != "squared_relu" or config.gated_linear_unit:
            gate = "gated " if config.gated_linear_unit else ""
            raise ValueError(f"experts with {gate}{activation}: this family uses --squared-relu")
        super().__init__(num_local_experts, config, *args, **kwargs)

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Tokens [t, e] sorted by local expert, counts [E_local] that add up to t -> [t, e], no bias.

        Routing weights [t] are applied before FC2, which is linear, so that is equivalent.
        """
        on_device = self.takes_device_counts()
        counts = tokens_per_expert if on_device else tokens_per_expert.tolist()
        x, probs = permuted_local_hidden_states, permuted_probs
        recompute = self.activation_recompute and self.training
        if self._together():
            fc1, fc2 = self.linear_fc1(None, counts)[0], self.linear_fc2(None, counts)[0]
            if self.reversed:
                fc1, fc2 = fc1[::-1], fc2[::-1]
            form: Any = squared_relu_experts_cuda if on_device else squared_relu_experts
            return form(x, probs, fc1, fc2, counts, recompute=recompute), None
        assert not self.reversed
        if recompute:
            # Forward draws no random numbers, so the RNG state need not be restored.
            return checkpoint(
                self.one_by_one, x, probs, counts, use_reentrant=False, preserve_rng_state=False
            ), None
        return self.one_by_one(x, probs, counts), None

    def _together(self) -> bool:
        """Whether one function computes FC1, activation and FC2."""
        linears = (self.linear_fc1, self.linear_fc2)
        plain = all(one.replaced() is None and "adapter" not in one._modules for one in linears)
        return plain and not self.separate

    def reverse(self, possible: bool) -> bool:
        """Whether rows are to come from the last expert to the first now; never if it is not `possible`.

        Where addresses decrease, only so are the matrices one tensor without a copy. All ranks decide alike:
        only DDP's buffer, which has one layout on all of them, is an allocation in this order.
        """
        linears = (self.linear_fc1, self.linear_fc2)
        useful = possible and self.num_local_experts > 1 and self._together() and self.takes_device_counts()
        self.reversed = useful and all(view_of(one.weights()[::-1]) is not None for one in linears)
        return self.reversed

    def takes_device_counts(self) -> bool:
        """Whether `forward` takes the counts on the device."""
        linears: tuple[Any, ...] = (self.linear_fc1, self.linear_fc2)
        for linear in linears:
            if (products := linear.replaced()) is not None and not products.takes_device_counts(linear):
                return False
        return all(
            linear.weight0.is_cuda
            and grouped_mm_works(linear.weight0, [linear.weight0], self.num_local_experts)
            for linear in linears
        )

    def one_by_one(self, x: Tensor, probs: Tensor, counts: list[int] | Tensor) -> Tensor:
        hidden, _ = self.linear_fc1(x, counts)
        output: Tensor = self.linear_fc2(weighted_squared_relu(hidden, probs), counts)[0]
        return output
