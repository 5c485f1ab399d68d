"""The models of the family, one constant each. `source` names where the numbers come from.

`get("super")` returns one by name. Numbers that no source states are None, or a comment says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

from megatron_nemotron3.common.parser import hint
from megatron_nemotron3.models.config import Nemotron3Config, unbuilt_fields
from megatron_nemotron3.models.tiny import TINY_SUFFIX, tiny

NANO = Nemotron3Config(
    name="nano",
    title="Nemotron 3 Nano 30B-A3B",
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    hidden_size=2688,
    num_attention_heads=32,
    num_query_groups=2,
    mamba_num_heads=64,
    num_moe_experts=128,
    moe_router_topk=6,
    moe_ffn_hidden_size=1856,
    moe_shared_expert_intermediate_size=3712,
    moe_router_topk_scaling_factor=2.5,
    init_method_std=0.0173,
    published_total="31.6B",
    published_active="3.2B (3.6B with embeddings)",
    source=(
        "arXiv 2512.20848; "
        "Megatron-LM examples/post_training/modelopt/conf/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.sh"
    ),
)

# Nano's sizes with MTP. No source states its initialization; the value is Nano's.
LIGHTNING = NANO.but(
    name="lightning",
    title="Nemotron 3.5 Lightning 30B-A3B",
    mtp_pattern="*E",
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.3,
    published_total=None,
    published_active=None,
    source="Megatron-Bridge recipes; the released checkpoint's 6,513 tensors of 32,913,266,240 elements",
)

SUPER = Nemotron3Config(
    name="super",
    title="Nemotron 3 Super 120B-A12B",
    pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=2,
    mamba_num_heads=128,
    num_moe_experts=512,
    moe_router_topk=22,
    moe_ffn_hidden_size=2688,
    moe_shared_expert_intermediate_size=5376,
    moe_latent_size=1024,
    moe_router_topk_scaling_factor=5.0,
    mtp_pattern="*E",
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.3,
    init_method_std=0.014,
    published_total="120.6B",
    published_active="12.7B",
    source=(
        "arXiv 2604.12374; "
        "Megatron-LM examples/post_training/modelopt/conf/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16.sh"
    ),
)

# fmt: off
_PUZZLE_EXPERTS = (
    (1280, 4), (1280, 8), (1280, 10), (1280, 8), (1280, 8), (1280, 8), (1280, 12), (1280, 8),
    (1280, 10), (1280, 8), (2688, 12), (1536, 14), (2688, 12), (1536, 12), (1536, 12), (2688, 12),
    (2688, 12), (2688, 12), (1536, 10), (2688, 12), (2688, 12), (1792, 12), (1792, 14), (1280, 10),
    (1280, 10), (1280, 12), (1280, 8), (1280, 12), (1280, 10), (1280, 8), (1280, 8), (1280, 10),
    (1280, 10), (1280, 10), (1280, 12), (1280, 12), (1280, 14), (1280, 16), (1792, 18), (2048, 18),
)
# fmt: on

# Pruned from Super, whose initialization and MTP block it keeps: 512 experts of another width, and another
# number of them per token, in each E layer, and a smaller Mamba state.
PUZZLE = SUPER.but(
    name="puzzle",
    title="Nemotron Labs 3 Puzzle 75B-A9B",
    mamba_state_dim=96,
    moe_layers=_PUZZLE_EXPERTS,
    published_total="75.3B",
    published_active="9.3B",
    source=(
        "block_configs in the config.json of nvidia/NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B, revision "
        "7cd7fa01; the rest as Super"
    ),
)

ULTRA = Nemotron3Config(
    name="ultra",
    title="Nemotron 3 Ultra 550B-A55B",
    pattern=(
        "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*"
        "EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    hidden_size=8192,
    num_attention_heads=64,
    num_query_groups=2,
    mamba_num_heads=256,
    num_moe_experts=512,
    moe_router_topk=22,
    moe_ffn_hidden_size=5120,
    moe_shared_expert_intermediate_size=10240,
    moe_latent_size=2048,
    moe_router_topk_scaling_factor=5.0,
    mtp_pattern="*E",
    mtp_num_layers=2,
    mtp_loss_scaling_factor=0.1,
    init_method_std=0.0099,
    published_total="550B",
    published_active="55B",
    source=(
        "arXiv 2606.15007; "
        "Megatron-LM examples/post_training/modelopt/conf/nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.sh"
    ),
)

NEMOTRON_H_8B = Nemotron3Config(
    name="nemotron-h-8b",
    title="Nemotron-H 8B",
    pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    hidden_size=4096,
    max_position_embeddings=8192,
    num_attention_heads=32,
    num_query_groups=8,
    mamba_num_heads=128,
    dense_ffn_hidden_size=21504,
    init_method_std=0.014,
    published_total="8B",
    source=(
        "arXiv 2504.03624; Megatron-LM examples/post_training/modelopt/conf/nvidia/Nemotron-H-8B-Base-8K.sh; "
        "initialization and the absence of positions: examples/rl/model_configs/nemotron5_8b.sh"
    ),
)

# Pruned from the 8B. No source states an initialization: the standard deviation is the family's rule below.
NEMOTRON_H_4B = NEMOTRON_H_8B.but(
    name="nemotron-h-4b",
    title="Nemotron-H 4B",
    hidden_size=3072,
    mamba_num_heads=112,
    dense_ffn_hidden_size=12288,
    init_method_std=0.0161,
    published_total="4B",
    source=(
        "arXiv 2504.11409; "
        "Megatron-LM examples/post_training/modelopt/conf/nvidia/Nemotron-H-4B-Instruct.sh, without its "
        "positions, as the 8B; file sizes of nvidia/Nemotron-H-4B-Base-8K: 4.99 and 3.98 GB"
    ),
)

NEMOTRON_H_56B = Nemotron3Config(
    name="nemotron-h-56b",
    title="Nemotron-H 56B",
    pattern=(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*"
        "-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    ),
    hidden_size=8192,
    max_position_embeddings=8192,
    num_attention_heads=64,
    num_query_groups=8,
    mamba_num_heads=256,
    mamba_state_dim=256,
    dense_ffn_hidden_size=32768,
    init_method_std=0.0099,
    published_total="56B",
    source=(
        "arXiv 2504.03624; "
        "Megatron-LM examples/post_training/modelopt/conf/nvidia/Nemotron-H-56B-Base-8K.sh, "
        "examples/rl/model_configs/nemotron5_56b.sh (256 Mamba heads are Megatron's default at this width)"
    ),
)

# Pruned from the 56B, so never initialized at random: the standard deviation is the parent's.
NEMOTRON_H_47B = NEMOTRON_H_56B.but(
    name="nemotron-h-47b",
    title="Nemotron-H 47B",
    pattern=(
        "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-"
    ),
    dense_ffn_hidden_size=30720,
    published_total="47B",
    source=(
        "arXiv 2504.03624; "
        "Megatron-LM examples/post_training/modelopt/conf/nvidia/Nemotron-H-47B-Reasoning-128K.sh"
    ),
)

NANO_12B_V2 = Nemotron3Config(
    name="nano-12b-v2",
    title="Nemotron Nano 12B v2",
    pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
    hidden_size=5120,
    max_position_embeddings=131072,
    num_attention_heads=40,
    num_query_groups=8,
    mamba_num_heads=128,
    mamba_head_dim=80,
    dense_ffn_hidden_size=20480,
    init_method_std=0.0125,
    published_total="12B",
    source=(
        "arXiv 2508.14444 (layers, width, heads); "
        "Megatron-LM examples/rl/model_configs/nemotron5p5_12b_H.sh; "
        "Megatron-Bridge's provider of the model (128 Mamba heads, as Megatron's default)"
    ),
)

# Pruned from Nemotron Nano 12B v2, so never initialized at random: the standard deviation is the family's
# rule sqrt(0.8 / hidden_size), which gives the 12B base its published 0.0125. Sequence length: the base's.
NANO_9B_V2 = Nemotron3Config(
    name="nano-9b-v2",
    title="Nemotron Nano 9B v2",
    pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    hidden_size=4480,
    max_position_embeddings=131072,
    num_attention_heads=40,
    num_query_groups=8,
    mamba_num_heads=128,
    mamba_head_dim=80,
    dense_ffn_hidden_size=15680,
    init_method_std=0.0134,
    published_total="8,888,227,328",
    source=(
        "arXiv 2508.14444; "
        "Megatron-LM examples/post_training/modelopt/conf/nvidia/NVIDIA-Nemotron-Nano-9B-v2.sh; "
        "total: safetensors metadata of nvidia/NVIDIA-Nemotron-Nano-9B-v2"
    ),
)

# Pruned from Nemotron Nano 9B v2: standard deviation by the same rule; 8192 tokens is the sequence length of
# the first distillation stage.
NANO_4B = Nemotron3Config(
    name="nano-4b",
    title="Nemotron 3 Nano 4B",
    pattern="M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
    hidden_size=3136,
    num_attention_heads=40,
    num_query_groups=8,
    mamba_num_heads=96,
    mamba_head_dim=80,
    dense_ffn_hidden_size=12544,
    init_method_std=0.016,
    published_total="3,973,556,832",
    source=(
        "config.json of nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16 as quoted by public inference engines; "
        "total: the parameter count those engines report for it"
    ),
)

_ALL = (
    *(NANO, SUPER, ULTRA, LIGHTNING, PUZZLE, NANO_4B, NANO_9B_V2, NANO_12B_V2),
    *(NEMOTRON_H_4B, NEMOTRON_H_8B, NEMOTRON_H_47B, NEMOTRON_H_56B),
)
_MODELS = {model.name: model for model in _ALL}

# What Hugging Face repository names carry besides the title.
_DECORATION = re.compile(r"^(nvidia/)?(nvidia-)?|(-base)?(-8k)?(-bf16)?$")
# "-30b-a3b": a title without its sizes is still unique for the mixture-of-experts models.
_SIZES = re.compile(r"-\d+b-a\d+b$")


def _slug(text: str) -> str:
    return _DECORATION.sub("", re.sub(r"[\s_]+", "-", text.strip().lower()))


def _aliases() -> dict[str, str]:
    table = {}
    for name, model in _MODELS.items():
        slug = _slug(model.title)
        for alias in (slug, _SIZES.sub("", slug), name):
            table[alias] = name
    return table


_ALIASES = _aliases()


def names() -> tuple[str, ...]:
    """The catalog names: the three sizes of Nemotron 3, then their relatives."""
    return tuple(_MODELS)


def get(name: str) -> Nemotron3Config:
    """The model of that name.

    Accepts the catalog name in any case ("super", "Super"), the title with or without sizes
    ("nemotron-3-super", "Nemotron 3 Super 120B-A12B"), the Hugging Face repository
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"), and "-tiny" after any of these for `tiny(get(...))`.

    Raises:
        ValueError: an unknown name; the message lists the known ones and the nearest.
    """
    slug = _slug(name)
    base = slug.removesuffix(TINY_SUFFIX)
    if base in _ALIASES:
        model = _MODELS[_ALIASES[base]]
        return tiny(model) if slug != base else model
    known = f"known are {', '.join(names())}{hint(base, _ALIASES)}"
    raise ValueError(f"unknown model {name!r}: {known}")


#: Name of a model that is not in the catalog, where nothing else names it.
CUSTOM = "custom"
#: Fields that a run, a tokenizer or a file format chooses, without making it another model.
_OF_A_RUN = frozenset(
    (
        *("name", "title", "vocab_size", "seq_length", "max_position_embeddings", "mamba_chunk_size"),
        *("moe_aux_loss_coeff", "moe_router_bias_update_rate", "init_method_std"),
        *("mtp_num_layers", "mtp_use_repeated_layer", "mtp_loss_scaling_factor"),
        *("published_total", "published_active", "source"),
    )
)
_MTP = frozenset(("mtp_pattern",))


def identify(config: Nemotron3Config) -> tuple[Nemotron3Config, ...]:
    """The catalog models and tiny forms with the layers and sizes of `config`. Some tiny forms are alike.

    A model that was trained without MTP is also found. How often MTP is applied is not compared, because
    released checkpoints do not state it.
    """
    known = [form for model in _ALL for form in (model, tiny(model))]
    for ignored in (_OF_A_RUN, _OF_A_RUN | _MTP) if config.mtp_pattern is None else (_OF_A_RUN,):
        ignored |= unbuilt_fields(config)
        compared = [field.name for field in fields(config) if field.name not in ignored]
        found = [model for model in known if all(getattr(model, f) == getattr(config, f) for f in compared)]
        if found:
            return tuple(found)
    return ()


def named(config: Nemotron3Config, found: Sequence[Nemotron3Config]) -> Nemotron3Config:
    """`config` with the name and title of what `identify` found, or of "custom"."""
    if not found:
        return config.but(name=CUSTOM, title="a model that is not in the catalog")
    name, title = (" or ".join(getattr(model, field) for model in found) for field in ("name", "title"))
    return config.but(name=name, title=title)
