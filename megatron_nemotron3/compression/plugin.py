"""Import of nvidia-modelopt's Megatron plugin, also where TransformerEngine (TE) is not installed.

modelopt 0.47's `nas/plugins/megatron.py` begins with `import transformer_engine`, and uses TE's classes as
keys of its registry and in isinstance checks. Without TE it swallows the import error, and pruning later
fails with KeyError 'mcore_minitron'. It offers no way to register the plugin without TE. So while the plugin
is imported, and only if TE is absent, `te_placeholders` provides empty classes under these names. A model of
the torch spec holds no TE layer, so nothing is ever an instance of them. This is the one patch of foreign
modules outside `cpu/`.
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
from unittest.mock import patch

from megatron_nemotron3.layers.backend import te_problem

#: Version this package was written against. Older ones lack HybridModel; newer ones may rename private
#: classes.
TESTED = "0.47.0"
CURE = f"pip install nvidia-modelopt=={TESTED}"

#: Names that modelopt imports from megatron.core.extensions.transformer_engine.
TE_LAYERS = (
    "TEColumnParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TEDotProductAttention",
    "TELayerNormColumnParallelLinear",
    "TELinear",
    "TERowParallelGroupedLinear",
    "TERowParallelLinear",
)
#: Megatron's modules that look for TE at their first import, which must come before the placeholders.
_LOOK_FOR_TE = (
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.moe_module_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.ssm.gated_delta_net",
    "megatron.core.transformer.multi_latent_attention",
)


def modelopt_problem() -> str | None:
    """Why modelopt cannot be used here, with the cure; None if it can."""
    if importlib.util.find_spec("modelopt") is None:
        return f"package nvidia-modelopt is not installed: {CURE}"
    return None


def load_plugin() -> None:
    """Import modelopt's pruning of Megatron models, which registers the mode "mcore_minitron".

    Raises:
        ImportError: modelopt is missing or does not have the plugin; the message has the pip line.
    """
    if (problem := modelopt_problem()) is not None:
        raise ImportError(problem)
    with warnings.catch_warnings():
        # At import modelopt warns about the version of transformers, which is not used here.
        warnings.filterwarnings("ignore", message=".*is not tested with current version of modelopt")
        importlib.import_module("modelopt.torch.prune")
    try:
        with te_placeholders():
            importlib.import_module("modelopt.torch.prune.plugins.mcore_minitron")
    except ImportError as error:
        found = importlib.metadata.version("nvidia-modelopt")
        raise ImportError(
            f"nvidia-modelopt {found} has no Megatron pruning plugin that loads ({error}): {CURE}"
        ) from error


@contextmanager
def te_placeholders() -> Iterator[None]:
    """Make `import transformer_engine` succeed inside the block. Does nothing if TE can be used.

    Patches `sys.modules` and `TE_LAYERS` of megatron.core.extensions.transformer_engine, and restores both.
    """
    if te_problem() is None:
        yield
        return
    import torch

    for name in _LOOK_FOR_TE:
        importlib.import_module(name)
    from megatron.core.extensions import transformer_engine as extension

    def empty(name: str) -> type:
        return type(
            name,
            (torch.nn.Module,),
            {"__doc__": "Placeholder for a class of TransformerEngine, which is not installed."},
        )

    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    vars(package)["pytorch"] = pytorch
    vars(pytorch).update({name: empty(name) for name in ("LayerNorm", "RMSNorm")})
    before = {name: sys.modules.get(name) for name in (package.__name__, pytorch.__name__)}
    sys.modules.update({package.__name__: package, pytorch.__name__: pytorch})
    try:
        with ExitStack() as stack:
            for name in TE_LAYERS:
                stack.enter_context(patch.object(extension, name, empty(name)))
            yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
