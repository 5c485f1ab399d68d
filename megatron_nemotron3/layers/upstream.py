"""What megatron-core calls differently from version to version: the one place that asks which one is here.

The differences are rows of `versions.CHANGES` and `versions.NAMES`; this module only applies them, so that
layers and specs are written for the newest names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import __version__ as _version
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_nemotron3 import versions
from megatron_nemotron3.monitor import settings

#: Minor version of the megatron-core that is imported, which need not be the installed one.
VERSION = versions.minor(_version)


def has(change: str) -> bool:
    """Whether the imported megatron-core has the property `versions.CHANGES` describes."""
    return versions.has(change, VERSION)


def find(today: str) -> Any:
    """The object that is called `today` ("module:name") in the newest version."""
    return getattr(*versions.locate(today, VERSION))


if TYPE_CHECKING:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
else:
    HybridStack = find("megatron.core.models.hybrid.hybrid_block:HybridStack")
    HybridStackSubmodules = find("megatron.core.models.hybrid.hybrid_block:HybridStackSubmodules")
    HybridModel = find("megatron.core.models.hybrid.hybrid_model:HybridModel")


def _cannot_watch(part: Any) -> None:
    """In place of a monitor's hooks where Megatron's metrics cannot be replaced.

    Raises:
        RuntimeError: NEMOTRON3_MONITOR asks for monitors.
    """
    if settings.asked_for() and settings.interval() > 0:
        raise RuntimeError(
            f"{settings.VARIABLE}={settings.interval()}: megatron-core {VERSION} has no metrics tracker for "
            f"monitors to report through ({versions.CHANGES['metrics-tracker'].since} has): unset it"
        )


def _watchers() -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    if not has("metrics-tracker"):
        return _cannot_watch, _cannot_watch
    from megatron_nemotron3.monitor import attach

    return attach.watch_stack, attach.watch_mtp


#: Monitor a stack, and an MTP layer, when they are built.
watch_stack, watch_mtp = _watchers()


def forget_moe_metrics() -> None:
    """Drop what MoE layers have logged: it has the size of the first model of the process."""
    if has("metrics-tracker"):
        find("megatron.core.transformer.moe.moe_logging:destroy_moe_metrics_tracker")()
    else:
        find("megatron.core.transformer.moe.moe_utils:get_moe_layer_wise_logging_tracker")().clear()


def told_name(name: str | None) -> dict[str, str | None]:
    """`name=` for a constructor of upstream's that takes one in this version."""
    return {"name": name} if has("module-name") else {}


def dense_mlp(submodules: MLPSubmodules) -> Any:
    """What builds the MLP of a `-` layer."""
    if has("mlp-builder"):
        return partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def moe_mlp(layer: Any, submodules: MoESubmodules) -> Any:
    """What builds an `E` layer's MoE. Where a layer is told no groups it takes Megatron's global ones."""
    if has("spec-kwargs"):
        return partial(layer, submodules=submodules)
    return ModuleSpec(module=layer, submodules=submodules)


def conv1d_arguments(weight: torch.Tensor, bias: torch.Tensor, padding: int) -> dict[str, Any]:
    """`MambaContextParallel`'s arguments for the convolution: [channels, 1, kernel], [channels], tokens."""
    if has("conv1d-parameters"):
        return {"conv1d_weight_cp1": weight, "conv1d_bias_cp1": bias, "conv1d_padding": padding}
    return {"conv1d_cp1": SimpleNamespace(weight=weight, bias=bias)}


class _MambaMixerWithConv1d(mamba_mixer.MambaMixer):
    """Upstream's mixer where it stores the convolution as a module `conv1d`; ours holds two parameters.

    So they stay the mixer's own, whose call DDP waits for, and have one name in every version.
    """

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Upstream's entries under our names; keys in the checkpoint are the same in every version."""
        with self._conv1d_as_module():
            found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        convolution = {
            f"{prefix}conv1d_{name}": found.pop(f"{prefix}conv1d.{name}") for name in ("weight", "bias")
        }
        return {**convolution, **found}

    @contextmanager
    def _conv1d_as_module(self) -> Iterator[None]:
        own, module = dict(self._parameters), torch.nn.Module()
        for name in ("weight", "bias"):
            module.register_parameter(name, self._parameters.pop(f"conv1d_{name}"))
        self._modules["conv1d"] = module
        try:
            yield
        finally:
            del self._modules["conv1d"]
            self._parameters.update(own)  # appended: put them back in their order
            for name in own:
                self._parameters[name] = self._parameters.pop(name)


MambaMixer: Any = mamba_mixer.MambaMixer if has("conv1d-parameters") else _MambaMixerWithConv1d
