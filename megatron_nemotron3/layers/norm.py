"""RMSNorm and LayerNorm on plain torch that support sequence parallelism, and checkpoints like TE's.

Parameters have the mark `sequence_parallel`, which makes Megatron reduce their gradients; torch's norms lack
it.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_nemotron3.layers.functional import Place, gated_group_rms_norm, layer_norm, rms_norm


class EmptyExtraState(torch.nn.Module):
    """A module with an empty `_extra_state` in its checkpoints; TE's counterpart keeps FP8 scaling there.

    TE asks for the entry when it loads, and a strict load fails without it. Megatron's own linears write
    None for the same reason.
    """

    def get_extra_state(self) -> None:
        """There is no state to keep."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the FP8 scaling state of a TE run."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Plain state dicts may lack the entry; TE's grouped linears write one for each further expert.
        name = f"{prefix}_extra_state"
        state_dict.setdefault(name, None)
        for key in [key for key in state_dict if key.startswith(name) and key != name]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)


def parameter_device(config: TransformerConfig) -> Any:
    """The device on which new parameters are created."""
    return "cpu" if config.use_cpu_initialization else torch.cuda.current_device()


def new_norm_parameter(config: TransformerConfig, size: int, *, bias: bool = False) -> torch.nn.Parameter:
    """A norm's gain or bias [size], replicated over TP ranks and marked for sequence parallelism."""
    start = 0.0 if bias or config.layernorm_zero_centered_gamma else 1.0
    parameter = torch.nn.Parameter(
        torch.full((size,), start, dtype=config.params_dtype, device=parameter_device(config))
    )
    parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return parameter


def sharded_parameters(
    module: Any, prefix: str, axes: dict[str, int], offsets: tuple, metadata: dict | None
) -> dict[str, Any]:
    """Checkpoint entries of a module: each parameter is split along its axis in `axes`, or else replicated.

    The module has a `tp_group`, over which parameters are split.
    """
    assert metadata is not None
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


def norm_gain(weight: Tensor, zero_centered: bool) -> Tensor:
    """The factor that a stored gain stands for: `--apply-layernorm-1p` stores gain - 1."""
    return weight + 1 if zero_centered else weight


class RMSNorm(EmptyExtraState):
    """y = x / rms(x) * gain over the last dimension, statistics in FP32, output in the input's dtype.

    Built as Megatron builds norms: `RMSNorm(config=…, hidden_size=…, eps=…)`. Input [s, b, d].
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma
        self.weight = new_norm_parameter(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return rms_norm(x, norm_gain(self.weight, self.zero_centered_gamma), self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class LayerNorm(RMSNorm):
    """y = (x - mean(x)) / std(x) * gain + bias over the last dimension; all else as `RMSNorm`.

    No published Nemotron 3 model has it. It is Megatron's default for `--normalization`.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = new_norm_parameter(config, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return layer_norm(x, norm_gain(self.weight, self.zero_centered_gamma), self.bias, self.eps)


def is_layer_norm(config: TransformerConfig) -> bool:
    """Whether `--normalization` asks for LayerNorm rather than RMSNorm."""
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(
            f"normalization={config.normalization!r}: the torch backend supports RMSNorm and LayerNorm; "
            "pass --normalization RMSNorm"
        )
    return bool(config.normalization == "LayerNorm")


class NormBuilder:
    """Builds the norm that `--normalization` asks for, as `RMSNorm` is built.

    A class and no function, because Megatron's `build_module` does not call functions.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> RMSNorm:  # type: ignore[misc]
        return (LayerNorm if is_layer_norm(config) else RMSNorm)(config, hidden_size, eps)


class GatedGroupRMSNorm(torch.nn.Module):
    """Output norm of Mamba-2: RMSNorm over each group of y * silu(z) (arXiv 2405.21060, section 7).

    `size` is the local width, inner size / tp: each tensor-parallel rank holds whole groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        size: int,
        *,
        group_size: int,
        tp_group: torch.distributed.ProcessGroup,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.group_size, self.eps, self.tp_group = group_size, eps, tp_group
        self.weight = torch.nn.Parameter(
            torch.ones(size, dtype=config.params_dtype, device=parameter_device(config))
        )
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.partition_dim = 0  # type: ignore[attr-defined]

    def forward(self, y: Tensor, z: Tensor, z_gradient: Place = None) -> Tensor:
        """y, z [..., size] -> [..., size]; `z_gradient` as in `gated_group_rms_norm`."""
        return gated_group_rms_norm(
            y, z, self.weight, group_size=self.group_size, eps=self.eps, z_gradient=z_gradient
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Split along axis 0 over tensor-parallel ranks, as upstream's `ExtendedRMSNorm`."""
        return sharded_parameters(self, prefix, {"weight": 0}, sharded_offsets, metadata)
