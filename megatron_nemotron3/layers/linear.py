"""Linear layers on plain torch with parameter names, attributes and checkpoints of TransformerEngine (TE).

To Megatron-Core's own linears they add replaceable matrix products (emulation), a fused norm in front with
TE's names, and a linear whose whole weight is on every tensor-parallel rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_size, get_tensor_model_parallel_group_if_none
from torch import Tensor

from megatron_nemotron3.cpu.products import linear
from megatron_nemotron3.layers.functional import layer_norm, rms_norm
from megatron_nemotron3.layers.norm import (
    EmptyExtraState,
    is_layer_norm,
    new_norm_parameter,
    norm_gain,
    parameter_device,
    sharded_parameters,
)


class ReplaceableProducts(torch.nn.Module):
    """A linear layer whose matrix products can be replaced, and that may have a LoRA `adapter`."""

    #: A `precision.linear.Emulated` or `precision.packed.PackedProducts`; None for Megatron's own products.
    products: Any = None

    def replaced(self) -> Any:
        """`products` if they apply in the current mode (training or evaluation), else None."""
        active = self.products is not None and self.products.recipe(self) is not None
        return self.products if active else None

    def adapted(self, output: Tensor, *inputs: Any) -> Tensor:
        """The output, with what the adapter (`layers.lora`) makes of the inputs added."""
        adapter: Any = self._modules.get("adapter")
        return output if adapter is None else output + adapter(*inputs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The layer's own tensors, and those of the adapter, which are split in another way."""
        adapter: Any = self._modules.pop("adapter", None)
        try:
            result: dict[str, Any] = self.own_sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            if adapter is not None:
                self._modules["adapter"] = adapter
        if adapter is not None:
            result.update(adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata))
        return result

    def own_sharded_state_dict(self, *arguments: Any) -> Any:
        return super().sharded_state_dict(*arguments)  # type: ignore[misc]

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Override Megatron's gather and multiplication (with their backward) by `products`."""
        if (products := self.replaced()) is not None:
            return products.linear(self, input, weight, *args, **kwargs)
        return self.plain_product(input, weight, *args, **kwargs)

    def plain_product(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron's gather and multiplication, for `products` that replace the weight alone."""
        return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]


class _WithAdapter(ReplaceableProducts):
    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, bias = super().forward(input_, *args, **kwargs)
        return self.adapted(output, input_), bias


class ColumnParallelLinear(_WithAdapter, tensor_parallel.ColumnParallelLinear):
    """Megatron's layer with `products` and `adapter`."""


class RowParallelLinear(_WithAdapter, tensor_parallel.RowParallelLinear):
    """Megatron's layer with `products` and `adapter`."""


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """Y = norm(X) W^T, with the rows of W split over tensor-parallel ranks.

    Input [s, b, d] (or [s / tp, b, d] with sequence parallelism), output [s, b, out / tp]. Parameters:
    `layer_norm_weight` [d], replicated, `weight` [out / tp, d]; with LayerNorm also `layer_norm_bias` [d].
    """

    #: Return (output, bias, normalized input), as the adapter wrappers of Megatron-Bridge read it.
    returns_normed = False

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
    ) -> None:
        has_bias = is_layer_norm(config)
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.tp_size = get_pg_size(self.tp_group)  # TE's name, which Bridge's wrappers read
        # TE registers the norm first. The order matters to optimizers that number their parameters.
        weight = self._parameters.pop("weight")
        self.layer_norm_weight = new_norm_parameter(config, input_size)
        self.layer_norm_bias = new_norm_parameter(config, input_size, bias=True) if has_bias else None
        self.register_parameter("weight", weight)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Normalize [s, b, d] with FP32 statistics, then multiply. Returns (output, bias or None)."""
        normed = self.normed(input_)
        output = super().forward(normed, weight, runtime_gather_output)
        return (*output, normed) if self.returns_normed else output  # type: ignore[return-value]

    def normed(self, x: Tensor) -> Tensor:
        gain = norm_gain(self.layer_norm_weight, self.zero_centered_gamma)
        if self.layer_norm_bias is None:
            return rms_norm(x, gain, self.eps)
        return layer_norm(x, gain, self.layer_norm_bias, self.eps)

    def map(self, transform: Callable[..., torch.nn.Module], **where: Any) -> torch.nn.Module:
        """Let Megatron-Bridge's PEFT transform the layer; its walk calls this where a module has it.

        An adapter of this layer takes the normalized input, so a wrapper gets it as a third output.
        """
        taken = inspect.signature(transform).parameters
        result = transform(self, **{name: value for name, value in where.items() if name in taken})
        self.returns_normed = self.returns_normed or result is not self
        return result


class DuplicatedLinear(ReplaceableProducts, EmptyExtraState):
    """Y = X W^T with the whole W [output_size, input_size] on each tensor-parallel rank.

    As TE's `TELinear(parallel_mode="duplicated")`, for the latent projections. Under sequence parallelism
    each rank has its own tokens, so the parameter is marked `sequence_parallel`: Megatron reduces its
    gradient.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        tp_group: torch.distributed.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.name = config, name
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype, device=parameter_device(config))
        )
        if config.perform_initialization:
            if config.use_cpu_initialization:
                init_method(self.weight)
            else:
                # The tracker's data-parallel RNG stream is the same on all tensor-parallel ranks.
                with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                    init_method(self.weight)
        self.weight.allreduce = True  # type: ignore[attr-defined]
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight.tensor_model_parallel = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., input_size] -> ([..., output_size], no bias)."""
        if (products := self.replaced()) is not None:
            return self.adapted(products.linear(self, x, self.weight), x), None
        return self.adapted(linear(x, self.weight), x), None

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed here. Megatron's MoE layer calls it."""

    def own_sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Replicated over tensor- and data-parallel ranks."""
        return sharded_parameters(self, prefix, {}, sharded_offsets, metadata)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}, duplicated"
