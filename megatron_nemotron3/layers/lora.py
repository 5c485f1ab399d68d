"""LoRA adapters on the linears of the torch backend (arXiv 2106.09685): y = W x + alpha / dim * B (A x).

    decoder.layers.0.mixer.in_proj.adapter.linear_in.weight      A [dim, input]
    decoder.layers.0.mixer.in_proj.adapter.linear_out.weight     B [output, dim]
    decoder.layers.1.mlp.experts.linear_fc1.adapter.…            A [E, dim, input], B [E, output, dim]

Only tensors of width dim cross ranks: A is applied to a rank's own tokens (column) or features (row), and
its output is gathered or reduced. Names, shapes and torch_dist keys are those of Megatron-Bridge's LoRA with
`share_expert_adapters=False`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.ssm.mamba_mixer import _split_tensor_factory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_nemotron3.layers.experts import GroupedLinear
from megatron_nemotron3.layers.linear import ColumnParallelLinear, DuplicatedLinear, RowParallelLinear
from megatron_nemotron3.layers.norm import sharded_parameters
from megatron_nemotron3.layers.registration import keep_argument, when_complete
from megatron_nemotron3.models.lora import ARGUMENT, LINEARS, LoRASettings, current

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class Matrix(torch.nn.Module):
    """A parameter that is read by calling the module: Megatron gathers parameters in forward pre-hooks."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self) -> Tensor:
        return self.weight


class Adapter(torch.nn.Module):
    """A and B of a frozen linear; forward takes what it multiplies and returns what is added to its output.

    `name` is the linear's in the whole model; with the seed it decides A's first values.
    """

    #: Axes of A and B that are split over tensor-parallel ranks; None: each rank has the whole matrix.
    axes: tuple[int | None, int | None] = (None, None)

    def __init__(self, linear: Any, lora: LoRASettings, name: str) -> None:
        super().__init__()
        self.scale, self.config = lora.scale, linear.config
        self.tp_group, self.sequence_parallel = linear.tp_group, linear.config.sequence_parallel
        base = next(p for key, p in linear.named_parameters() if key.startswith("weight"))
        #: Rows of each part of a rank's share of B, if the base is [z|x|B|C|dt] of Mamba.
        self.parts: list[int] | None = getattr(base, "partition_sizes", None)
        a, b = self.build(linear, lora, name)
        self.linear_in = Matrix(a.to(base.dtype).to(base.device))
        self.linear_out = Matrix(b.to(base.dtype).to(base.device))
        for matrix, axis in zip((self.linear_in, self.linear_out), self.axes):
            self.mark(matrix.weight, base, axis)

    def build(self, linear: Any, lora: LoRASettings, name: str) -> tuple[Tensor, Tensor]:
        """This rank's A, drawn, and B, zero."""
        rows, columns = linear.weight.shape  # of this rank
        full = columns * (self.tp_group.size() if self.axes[0] == 1 else 1)
        a = _first_values(lora, name, full)
        if self.axes[0] == 1:
            a = a[:, self.tp_group.rank() * columns :][:, :columns].clone()
        return a, torch.zeros(rows, lora.dim)

    def mark(self, weight: Any, base: Tensor, axis: int | None) -> None:
        """Tell Megatron how the parameter is split, and over which ranks its gradient is summed."""
        weight.allreduce = getattr(base, "allreduce", True)
        if axis is not None:
            set_tensor_model_parallel_attributes(weight, True, axis, 1)
        else:
            weight.tensor_model_parallel = False
            # Each rank has tokens of its own, so its gradient is a part of the sum.
            weight.sequence_parallel = self.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, input] as the linear takes it -> [s, b, output] as the linear returns it."""
        return F.linear(self.exchange(F.linear(x, self.linear_in())), self.linear_out()) * self.scale

    def exchange(self, hidden: Tensor) -> Tensor:
        """What is done with A x [s, b, dim] before B."""
        return hidden

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """A and B in global shapes; B of in_proj in its parts, as its weight."""
        names = ("linear_in.weight", "linear_out.weight")
        axes = {name: axis for name, axis in zip(names, self.axes) if axis is not None}
        result = sharded_parameters(self, prefix, axes, sharded_offsets, metadata)
        if self.parts is not None:
            key = f"{prefix}linear_out.weight"
            result[key] = _split_tensor_factory(result[key], self.parts, ("z", "x", "B", "C", "dt"), 0)
        return result

    def extra_repr(self) -> str:
        return f"A {[*self.linear_in.weight.shape]}, B {[*self.linear_out.weight.shape]}, scale {self.scale}"


class ColumnAdapter(Adapter):
    """Whole A, rows of B split as the linear's. A x [s / tp, b, dim] is gathered, instead of x."""

    axes = (None, 0)

    def exchange(self, hidden: Tensor) -> Tensor:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)


class RowAdapter(Adapter):
    """Columns of A split as the linear's, whole B. A x is summed over ranks before B."""

    axes = (1, None)

    def exchange(self, hidden: Tensor) -> Tensor:
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(hidden, group=self.tp_group)


class GroupedAdapter(Adapter):
    """One A and B for each local expert. Expert-TP ranks also split the rank dim.

    All ranks of an expert-TP group have the same tokens, and the dispatcher adds their outputs. So FC1
    gathers A x along dim, FC2 scatters the sum of A x along dim, and no product is counted twice.
    """

    def __init__(self, linear: GroupedLinear, lora: LoRASettings, name: str) -> None:
        self.axes = (1, 1) if linear.split_axis == 0 else (2, 2)
        lora.require_expert_tp(linear.tp_group.size())
        super().__init__(linear, lora, name)
        self.ep_group, self.expt_dp_group = linear.ep_group, linear.expt_dp_group

    def build(self, linear: Any, lora: LoRASettings, name: str) -> tuple[Tensor, Tensor]:
        tp, rank = self.tp_group.size(), self.tp_group.rank()
        experts, first = linear.num_gemms, linear.ep_group.rank() * linear.num_gemms
        column = linear.split_axis == 0
        columns = linear.in_features * (1 if column else tp)
        a = torch.stack([_first_values(lora, f"{name}.{first + e}", columns) for e in range(experts)])
        a = a.chunk(tp, self.axes[0])[rank].clone()  # type: ignore[arg-type]
        return a, torch.zeros(experts, linear.out_features, lora.dim if column else lora.dim // tp)

    def mark(self, weight: Any, base: Tensor, axis: int | None) -> None:
        weight.allreduce = base.allreduce  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(weight, True, axis, 1)

    def forward(self, x: Tensor, counts: list[int] | Tensor | None = None) -> Tensor:
        """[t, input] sorted by expert, and rows of each expert -> [t, output]."""
        assert counts is not None
        hidden = GroupedLinear.products_of(x, [*self.linear_in().unbind(0)], counts)
        if self.axes[0] == 1:
            hidden = all_gather_last_dim_from_tensor_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = reduce_scatter_last_dim_to_tensor_parallel_region(hidden, group=self.tp_group)
        return GroupedLinear.products_of(hidden, [*self.linear_out().unbind(0)], counts) * self.scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """[experts, …] in global shapes, split over expert-parallel and expert-TP ranks."""
        before, result = len(sharded_offsets), {}
        for name, axis in zip(("linear_in", "linear_out"), self.axes):
            assert axis is not None
            key = f"{prefix}{name}.weight"
            result[key] = ShardedTensor.from_rank_offsets(
                key,
                getattr(self, name).weight,
                *sharded_offsets,
                (before, self.ep_group.rank(), self.ep_group.size()),
                (before + axis, self.tp_group.rank(), self.tp_group.size()),
                replica_id=(0, 0, self.expt_dp_group.rank()),
                prepend_axis_num=before,
            )
        return result


def _first_values(lora: LoRASettings, name: str, columns: int) -> Tensor:
    """Draw A [dim, columns] as peft does (Kaiming uniform), the same on every rank of every layout."""
    generator = torch.Generator().manual_seed(lora.seed + (zlib.crc32(name.encode()) << 20))
    bound = columns**-0.5
    return torch.empty(lora.dim, columns, dtype=torch.float32, device="cpu").uniform_(
        -bound, bound, generator=generator
    )


def adapter_class(linear: torch.nn.Module) -> type[Adapter] | None:
    """The adapter of a linear of the torch backend; None for other modules."""
    kinds: tuple[tuple[type, type[Adapter]], ...] = (
        (ColumnParallelLinear, ColumnAdapter),
        (RowParallelLinear, RowAdapter),
        (DuplicatedLinear, Adapter),
        (GroupedLinear, GroupedAdapter),
    )
    return next((adapter for kind, adapter in kinds if isinstance(linear, kind)), None)


def add_adapters(model: Any, lora: LoRASettings) -> list[str]:
    """Freeze a model and add adapters to the linears that `lora` names. Call it before DDP wraps the model.

    The correction of the routers (`expert_bias`) is frozen, too: it belongs to the base. Returns the names of
    the linears with an adapter, with layers counted over all pipeline stages. A stage may have none.
    """
    found = []
    for name, module in model.named_modules():
        name = _global_name(model, name)
        if not lora.matches(name):
            continue
        kind = adapter_class(module)
        if kind is None or getattr(module, "explicit_expert_comm", False):
            raise ValueError(
                f"LoRA on {name}: {type(module).__name__} is not a linear of the torch backend: use "
                "--spec megatron_nemotron3.specs nemotron3_torch_stack_spec, or Megatron-Bridge's LoRA"
            )
        if "adapter" in module._modules:
            raise ValueError(f"LoRA on {name}: it has an adapter already")
        found.append((name, module, kind))
    if not found and model.config.pipeline_model_parallel_size == 1:
        raise ValueError(f"LoRA with targets {', '.join(lora.targets)}: no linear of the model matches")
    for parameter in model.parameters():
        parameter.requires_grad = False
    for name, module, kind in found:
        module.adapter = kind(module, lora, name)
    for part in model.modules():
        if hasattr(part, "config"):  # layers may have configs of their own
            part.config.moe_router_bias_update_rate = 0.0
    if (embedding := getattr(model, "embedding", None)) is not None:
        embedding.register_forward_hook(_require_gradient)
    return [name for name, _, _ in found]


def _require_gradient(module: Any, arguments: Any, output: Tensor) -> None:
    """Let gradients be computed from the embedding on: recomputed layers ignore inputs without one."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)


def _global_name(model: Any, name: str) -> str:
    """A module's name with the layer's number in the whole model, from 0."""
    if (match := _LAYER.match(name)) is None:
        return name
    number = model.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{number}.{name[match.end() :]}"


def add_when_built(stack: Any, load_base: Callable[[Any, Path], None]) -> None:
    """Add the adapters that `lora.current` asks for to the model of a stack, at the end of its construction.

    Megatron calls `finish_init` of a model's modules when it is complete; the module that the stack is put
    into is the model. So any script that builds the model trains with LoRA.
    """
    lora = current()
    if lora is None:
        return

    def complete(model: Any) -> None:
        if lora.base is not None:
            load_base(model, Path(lora.base))
        _announce(model, lora, add_adapters(model, lora))

    when_complete(stack, complete)


def _announce(model: Any, lora: LoRASettings, names: list[str]) -> None:
    """Print what is trained, and keep the settings in the arguments that a checkpoint stores."""
    keep_argument(ARGUMENT, lora.text())
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        kinds = sorted({name.rpartition(".")[2] for name in names}, key=LINEARS.index)
        print(
            f"megatron_nemotron3: LoRA on {len(names)} linears of this rank ({', '.join(kinds)}), dim "
            f"{lora.dim}, alpha {lora.alpha:g}: {trained:,} of {sum(p.numel() for p in model.parameters()):,}"
            " parameters are trained",
            flush=True,
        )
