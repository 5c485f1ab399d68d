"""What ranks of a trainer and of an engine must hold, made from whole tensors without the code under test.

`trained` cuts with the converter's rules, which tests/checkpoints/convert compares with Megatron's own
checkpoints. `loaded` follows the loaders of vLLM's and SGLang's NemotronH models: narrow, by rank, of the
whole tensor. tests/inference/refit/test_engines.py compares it with what vLLM's own loaders made.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import transforms
from megatron_nemotron3.checkpoints.convert.inventory import hf_tensors, mappings
from megatron_nemotron3.checkpoints.convert.plan import apply
from megatron_nemotron3.launch.layout import cut_pattern
from megatron_nemotron3.launch.plan.state import padded_vocab_size
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as _pattern


def whole(config: Nemotron3Config, dtype: str = "bfloat16", seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype))
        for t in hf_tensors(config, dtype=dtype)
    }


def trained(config: Nemotron3Config, layout: Any, rank: int, hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Megatron's tensors of a training rank, by the Hugging Face names that they are the source of."""
    size = layout.tp * layout.cp * layout.dp
    pp, inside = divmod(rank, size)
    tp, etp, ep = inside % layout.tp, inside % layout.etp, inside // layout.etp % layout.ep
    padded = padded_vocab_size(config, layout)
    parsed = _pattern.parse(cut_pattern(config, layout))
    stages = [stage % layout.pp for stage, layers in enumerate(parsed.stages) for _ in layers]
    found = {}
    for mapping in mappings(config, dialect="parameter", padded_vocab_size=padded):
        name = mapping.prefix.megatron
        if name.startswith("decoder."):
            places = [stages[int(name.split(".")[2])]]
        elif mapping.hf[0].name.endswith("embeddings.weight"):
            places = [0, layout.pp - 1] if config.has_mtp else [0]
        else:
            places = [layout.pp - 1]
        if pp not in places:
            continue
        plan = mapping.to_hf().inverse()
        for number, (key, tensor) in enumerate(apply(plan, {t.name: hf[t.name] for t in mapping.hf}).items()):
            local = tensor
            if mapping.row.routed:
                each = (config.num_moe_experts or 0) // layout.ep
                if number // each != ep:
                    continue
            split = transforms.split_parameter(
                mapping.row, mapping.prefix.config, tp=layout.tp, etp=layout.etp, padded_vocab_size=padded
            )
            if split is not None:
                own = etp if mapping.row.routed else tp
                local = apply(split, {"full": tensor})[str(own)]
            sources = [mapping.hf[number].name] if mapping.row.routed else [t.name for t in mapping.hf]
            found.update(dict.fromkeys(sources, local))
            assert key
    return found


def loaded(
    config: Nemotron3Config, engine: str, sizes: dict[str, int], rank: int, hf: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Parameters of an engine's rank after it has loaded these tensors."""
    if engine == "hf":
        return dict(hf)
    tp, pp, dp, ep = (sizes.get(name, 1) for name in ("tp", "pp", "dp", "ep"))
    experts_of = config.num_moe_experts or 1
    if engine == "vllm":
        rank %= tp * pp * dp
        t, stage, d = rank % tp, rank // tp % pp, rank // (tp * pp)
        dense = embedding = head = mlp = shared = (t, tp)
        block, cut = (d * tp + t, (0, 1)) if ep > 1 else (0, (d * tp + t, dp * tp))
        if ep > 1 and tp > 1 and dp > 1:
            shared = (0, 1)
        edges = _vllm_layers(len(config.pattern), pp)
    else:
        rank %= tp * pp
        t, stage = rank % tp, rank // tp
        dense = embedding = (t % (tp // dp), tp // dp)
        head = mlp = shared = (t, tp)
        block, cut = t // (tp // ep), (t % (tp // ep), tp // ep)
        edges = _sglang_layers(len(config.pattern), pp)
    inner, bc, heads = (
        config.mamba_inner_size,
        config.mamba_num_groups * config.mamba_state_dim,
        config.mamba_num_heads,
    )
    made: dict[str, Any] = {}
    for given, tensor in hf.items():
        name = re.sub(r"^model\.", "backbone.", given)
        match = re.match(r"(backbone|mtp)\.layers\.(\d+)\.(.*)", name)
        if match and match[1] == "backbone" and not edges[stage] <= int(match[2]) < edges[stage + 1]:
            continue
        rest = match[3] if match else name
        prefix = "" if not match else f"{'draft.' * (match[1] == 'mtp')}model.layers.{match[2]}."
        if not match:
            first = rest == "backbone.embeddings.weight"
            if engine == "sglang" and stage != (0 if first else pp - 1):
                continue
            target = {
                "backbone.embeddings.weight": "model.embed_tokens.weight",
                "backbone.norm_f.weight": "model.norm_f.weight",
            }.get(rest, rest)
            if rest == "backbone.norm_f.weight":
                made[target] = tensor
                continue
            number, size = embedding if first else head
            rows = -(-len(tensor) // 64) * 64 // size
            padded = torch.cat((tensor, tensor.new_zeros(rows * size - len(tensor), tensor.shape[1])))
            made[target] = padded[number * rows : (number + 1) * rows]
        elif ".experts." in rest:
            expert, matrix = int(rest.split(".")[2]), rest.split(".")[3]
            each = experts_of // ep
            if expert // each != block:
                continue
            module = "mixer.experts." + ("routed_experts." if engine == "vllm" else "")
            target = prefix + module + ("w13_weight" if matrix == "up_proj" else "w2_weight")
            axis = 0 if matrix == "up_proj" else 1
            part = tensor.chunk(cut[1], axis)[cut[0]]
            made.setdefault(target, [None] * each)[expert % each] = part
        elif rest.startswith(("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")):
            number, size = dense
            kv = config.num_query_groups
            if rest[6] == "q" or kv >= size:
                part = tensor.chunk(size)[number]
            else:
                part = tensor.chunk(kv)[number // (size // kv)]
            made.setdefault(prefix + "mixer.qkv_proj.weight", {})[rest[6]] = part
        elif rest in ("mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.conv1d.bias"):
            number, size = dense
            parts = [inner, inner, bc, bc, heads] if "in_proj" in rest else [inner, bc, bc]
            shards = [
                part if config.mamba_num_groups == 1 and n == bc else part.chunk(size)[number]
                for n, part in zip(parts, tensor.split(parts), strict=True)
            ]
            made[prefix + rest] = torch.cat(shards)
        elif rest == "mixer.A_log":
            made[prefix + "mixer.A"] = -torch.exp(tensor.chunk(dense[1])[dense[0]].float())
        elif rest in ("mixer.D", "mixer.dt_bias", "mixer.norm.weight", "eh_proj.weight"):
            made[prefix + rest] = tensor.chunk(dense[1])[dense[0]]
        elif rest in ("mixer.out_proj.weight", "mixer.o_proj.weight"):
            made[prefix + rest] = tensor.chunk(dense[1], 1)[dense[0]]
        elif rest.endswith(("up_proj.weight", "down_proj.weight")):
            number, size = shared if "shared" in rest else mlp
            made[prefix + rest] = tensor.chunk(size, 1 if "down" in rest else 0)[number]
        else:
            made[prefix + rest] = tensor
    for name, value in made.items():
        if isinstance(value, list):
            made[name] = torch.stack(value)
        elif isinstance(value, dict):
            made[name] = torch.cat([value[part] for part in "qkv"])
    return made


def _vllm_layers(layers: int, stages: int) -> list[int]:
    sizes = [layers // stages] * stages
    for i in range(layers % stages):
        sizes[-(i + 2)] += 1
    return [sum(sizes[:i]) for i in range(stages + 1)]


def _sglang_layers(layers: int, stages: int) -> list[int]:
    sizes = [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
    return [sum(sizes[:i]) for i in range(stages + 1)]
