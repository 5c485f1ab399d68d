"""Import of nvidia-modelopt's Megatron plugin, also where TransformerEngine (TE) is not installed.

modelopt 0.47's `nas/plugins/megatron.py` begins with `import transformer_engine` and names TE's classes where
it registers layers and asks for types. Without TE the import error is swallowed, and pruning later fails with
KeyError 'mcore_minitron'. A model of the torch spec holds no TE layer, so for the length of that import, and
only where TE is absent, empty classes stand for the names; nothing is ever an instance of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from megatron_nemotron3.layers.backend import te_problem

#: Version this part was written against; older ones have no HybridModel, newer ones may rename what is used.
TESTED = "0.47.0"
CURE = f"pip install nvidia-modelopt=={TESTED}"

#: What modelopt imports from megatron.core.extensions.transformer_engine.
_TE_LAYERS = (
    "TEColumnParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TEDotProductAttention",
    "TELayerNormColumnParallelLinear",
    "TELinear",
    "TERowParallelGroupedLinear",
    "TERowParallelLinear",
)
#: Megatron's modules that ask for TE when they are first imported: that must not be inside the stand-in.
_MEGATRON = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.moe_module_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.ssm.gated_delta_net",
    "megatron.core.transformer.multi_latent_attention",
)


def modelopt_problem() -> str | None:
    """Why modelopt cannot be used here, with the cure, or None."""
    if importlib.util.find_spec("modelopt") is None:
        return f"package nvidia-modelopt is not installed: {CURE}"
    return None


def load_plugin() -> None:
    """Import modelopt's pruning of Megatron models: `modelopt.torch.prune` then knows "mcore_minitron".

    Raises:
        ImportError: modelopt is missing or does not have the plugin; the message has the pip line.
    """
    if (problem := modelopt_problem()) is not None:
        raise ImportError(problem)
    with warnings.catch_warnings():
        # On import modelopt remarks on transformers' version, which nothing here uses.
        warnings.filterwarnings("ignore", message=".*is not tested with current version of modelopt")
        importlib.import_module("modelopt.torch.prune")
    try:
        with _te_names():
            importlib.import_module("modelopt.torch.prune.plugins.mcore_minitron")
    except ImportError as error:
        found = importlib.metadata.version("nvidia-modelopt")
        raise ImportError(
            f"nvidia-modelopt {found} has no Megatron pruning plugin that loads ({error}): {CURE}"
        ) from error


@contextmanager
def _te_names() -> Iterator[None]:
    """TE's names exist for the block; where TE can be built they are the real ones and nothing happens."""
    if te_problem() is None:
        yield
        return
    import torch

    for name in _MEGATRON:
        importlib.import_module(name)
    from megatron.core.extensions import transformer_engine as extension

    def empty(name: str) -> type:
        return type(name, (torch.nn.Module,), {"__doc__": "Stands for a class of TE, not installed."})

    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    vars(package)["pytorch"] = pytorch
    vars(pytorch).update({name: empty(name) for name in ("LayerNorm", "RMSNorm")})
    before = {name: sys.modules.get(name) for name in (package.__name__, pytorch.__name__)}
    sys.modules.update({package.__name__: package, pytorch.__name__: pytorch})
    try:
        with ExitStack() as stack:
            for name in _TE_LAYERS:
                stack.enter_context(patch.object(extension, name, empty(name)))
            yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@contextmanager
def gloo_gathers_scalars() -> Iterator[None]:
    """gloo gathers a tensor without dimensions, as nccl does; modelopt counts the layers left that way.

    Without it pruning depth ends with "ProcessGroupGloo::allgather: invalid tensor size at index 0".
    """
    import torch.distributed as dist

    gather = dist.all_gather_into_tensor

    def gather_vectors(output: Any, local: Any, *args: Any, **kwargs: Any) -> Any:
        return gather(output, local.reshape(-1) if local.dim() == 0 else local, *args, **kwargs)

    with patch.object(dist, "all_gather_into_tensor", gather_vectors):
        yield
