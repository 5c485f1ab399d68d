"""Record what NVIDIA ModelOpt 0.47 prunes from two tiny models: writes modelopt_pruning.json beside itself.

    pip install nvidia-modelopt==0.47.0        # beside torch, megatron-core 0.19.2 and this package
    python tests/golden/make_modelopt_pruning.py [FILE]

Runs on a CPU. ModelOpt's plugin for Megatron knows the layers of TransformerEngine and mamba-ssm, which need
a GPU, so its registrations are given our layers in their place. Importance, ranking and slicing are its own.
Experts are Megatron's `SequentialMLP`, in which ModelOpt ranks the channels of each expert by itself.

Per case: `layers`, the decoder layers from the one that matters most, and `tensors`, for each weight that is
left its shape and the CRC-32 of its sorted elements: ModelOpt orders what stays by rank, we by position. Each
expert's two weights are a pair.
"""

from __future__ import annotations

import json
import re
import sys
import types
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

import megatron_nemotron3 as n3
from megatron_nemotron3.models import Nemotron3Config, get, tiny

_DENSE = tiny(get("nano-4b")).but(name="dense", pattern="M-*M-M*-")
#: Every token goes to every expert: ModelOpt's score of an expert that a call leaves out is not a number.
_MOE = tiny(get("super")).but(
    name="moe", pattern="MEM*EE", mtp_pattern=None, mtp_num_layers=0, num_moe_experts=6, moe_router_topk=6
)
#: Case -> model, and the sizes that are left. ModelOpt ranks Mamba heads by all channels even where fewer
#: stay, so `mamba_head_dim` is pruned by itself.
CASES: dict[str, tuple[Nemotron3Config, dict[str, int]]] = {
    "dense": (
        _DENSE,
        {
            "hidden_size": 96,
            "dense_ffn_hidden_size": 320,
            "num_attention_heads": 4,
            "mamba_num_heads": 8,
        },
    ),
    "channels of heads": (_DENSE, {"mamba_head_dim": 12}),
    "depth": (_DENSE, {"num_layers": 6}),
    "moe": (
        _MOE,
        {
            "hidden_size": 96,
            "mamba_num_heads": 8,
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 64,
            "moe_shared_expert_intermediate_size": 128,
            "moe_router_topk": 4,
        },
    ),
}
#: Tokens. Each is a sequence of its own: ModelOpt takes the mean of a sequence's absolute activations before
#: it squares, which is ours where a sequence has one token.
TOKENS = 48


def build(config: Nemotron3Config) -> Any:
    """A model whose weights do not depend on torch's random numbers."""
    model = n3.build_model(config, precision="fp32", backend="torch").eval()
    drawn = numpy.random.default_rng(7)
    with torch.no_grad():
        for _, tensor in sorted(model.named_parameters()):
            made = torch.from_numpy(drawn.standard_normal(tuple(tensor.shape), numpy.float32))
            if tensor.dim() == 1:  # gains, biases, A_log, D
                tensor.copy_(1 + 0.3 * made)
            else:
                # Rows and columns of very different size, so that ranks do not hang on rounding.
                rows = torch.from_numpy(drawn.lognormal(0, 0.5, (tensor.shape[0], 1)).astype("f4"))
                tensor.copy_(made * rows.view(-1, *[1] * (tensor.dim() - 1)) / tensor.shape[-1] ** 0.5)
    return model


def run(model: Any) -> None:
    """Give the model one token at a time."""
    tokens = numpy.random.default_rng(8).integers(0, 2048, TOKENS)
    for token in torch.from_numpy(tokens):
        model(token.view(1, 1), torch.zeros(1, 1, dtype=torch.long), None)


def summary(weights: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Shape and checksum of each tensor's elements, in any order; of the experts of a layer in any order."""
    found: dict[str, list[Any]] = {}
    experts: dict[str, dict[str, list[Any]]] = {}
    for name, tensor in sorted(weights.items()):
        flat = numpy.sort(tensor.detach().float().numpy().ravel())
        entry = [list(tensor.shape), zlib.crc32(flat.astype("<f4").tobytes())]
        if one := re.fullmatch(r"(.*experts)\.linear_fc\d\.weight(\d+)", name):
            experts.setdefault(one[1], {}).setdefault(one[2], []).append(entry)
        else:
            found[name] = entry
    return found | {name: sorted(of.values()) for name, of in experts.items()}


def _prepared(config: Nemotron3Config) -> Any:
    """The model as ModelOpt's dynamic modules read it."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_nemotron3.layers import attention, linear, norm
    from megatron_nemotron3.layers.experts import GroupedExperts

    model = build(config)
    for moe in [m for m in model.modules() if isinstance(getattr(m, "experts", None), GroupedExperts)]:
        grouped = moe.experts
        moe.experts = SequentialMLP(
            moe.num_local_experts,
            moe.config,
            MLPSubmodules(linear_fc1=linear.ColumnParallelLinear, linear_fc2=linear.RowParallelLinear),
            ProcessGroupCollection.use_mpu_process_groups(),
        ).eval()
        for number, expert in enumerate(moe.experts.local_experts):
            for one in ("linear_fc1", "linear_fc2"):
                getattr(expert, one).weight = getattr(getattr(grouped, one), f"weight{number}")
    for module in model.modules():
        if isinstance(module, linear.ReplaceableProducts):
            module.out_features, module.in_features = module.weight.shape
            module.bias = None
        if isinstance(module, linear.LayerNormColumnParallelLinear):
            module.te_return_bias = True
        if isinstance(module, attention.TorchCoreAttention):
            module.num_attention_heads = config.num_attention_heads
        if isinstance(module, norm.GatedGroupRMSNorm):
            module.bias = None
    return model


@cache
def _plugin() -> Any:
    """ModelOpt's plugin, with our layers registered in the places of TransformerEngine's and mamba-ssm's."""
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    from megatron_nemotron3.layers import attention, experts, latent_moe, linear, mamba, norm

    te = types.ModuleType("transformer_engine")
    te.pytorch = types.SimpleNamespace(RMSNorm=norm.RMSNorm, LayerNorm=norm.LayerNorm)  # type: ignore[attr-defined]
    stand_ins = {"transformer_engine": te, "mamba_ssm": types.ModuleType("mamba_ssm")}
    for name, ours in {
        "TEColumnParallelLinear": linear.ColumnParallelLinear,
        "TERowParallelLinear": linear.RowParallelLinear,
        "TELayerNormColumnParallelLinear": linear.LayerNormColumnParallelLinear,
        "TELinear": linear.DuplicatedLinear,
        "TEDotProductAttention": attention.TorchCoreAttention,
        "TEColumnParallelGroupedLinear": experts.ColumnParallelGroupedLinear,
        "TERowParallelGroupedLinear": experts.RowParallelGroupedLinear,
    }.items():
        setattr(extension, name, ours)
    mamba_mixer.MambaMixer, mamba_mixer.ExtendedRMSNorm = mamba.Mamba2Mixer, norm.GatedGroupRMSNorm
    sys.modules |= stand_ins
    from modelopt.torch.nas.plugins import megatron
    from modelopt.torch.nas.registry import DMRegistry
    from modelopt.torch.prune.plugins import mcore_minitron

    for one in stand_ins:
        del sys.modules[one]
    # It looks classes up by their forward, which these override.
    DMRegistry.register({latent_moe.LatentMoELayer: "LatentMoELayer"})(megatron._DynamicMoELayer)
    DMRegistry.register({MoETransformerLayer: "MoETransformerLayer"})(megatron._DynamicTransformerLayer)
    return mcore_minitron


def _forward(model: Any) -> None:
    """Run with the normalized inputs as a further output, as ModelOpt has TransformerEngine return them."""
    normed = [m for m in model.modules() if hasattr(m, "returns_normed")]
    for one in normed:
        one.returns_normed = True
    run(model)
    for one in normed:
        one.returns_normed = False


def record(name: str) -> dict[str, Any]:
    """Prune a model with ModelOpt."""
    import modelopt.torch.prune as mtp

    config, sizes = CASES[name]
    model = _prepared(config)
    mode = _plugin().get_mcore_minitron_config(
        hidden_size_divisor=1,
        ffn_hidden_size_divisor=1,
        mamba_head_dim_divisor=1,
        num_moe_experts_divisor=1,
        num_layers_divisor=1,
    )
    # ModelOpt leaves the number of experts per token to the caller.
    known = {n.replace("dense_ffn", "ffn"): size for n, size in sizes.items() if n != "moe_router_topk"}
    _, state = mtp.prune(
        model,
        mode=[("mcore_minitron", mode)],
        constraints={"export_config": known},
        dummy_input=None,
        config={"forward_loop": _forward},
    )
    return {"layers": [n - 1 for n in state["sorted_layers"]], "tensors": summary(dict(_weights(model)))}


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and not name.endswith("_extra_state"):
            yield re.sub(r"local_experts\.(\d+)\.(.*)$", r"\2\1", name), tensor


def main() -> None:
    """Write the file."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("modelopt_pruning.json")
    with n3.cpu_mode():
        found = {name: record(name) for name in CASES}
    lines = [f'"{name}": {json.dumps(case)}' for name, case in found.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
