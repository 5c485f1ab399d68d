"""Rules on performance options: graphs, dispatcher, offloading, optimizer types.

Combinations that Megatron refuses while it reads the arguments or builds the config have no rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megatron_nemotron3.launch import parser
from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.performance import HARDWARE, USED_OF_NVL72
from megatron_nemotron3.launch.rule import ARGUMENTS, CONFIG, Rule, divisors

_OPTIMIZER = "megatron/core/optimizer/optimizer_config.py"
_IMPL = "--cuda-graph-impl"
_INSTANCES = "--num-distributed-optimizer-instances"
_PRECISION_AWARE = "--use-precision-aware-optimizer"

#: Option -> the one without which Megatron ignores it, and the values that it needs; (): a switch.
_NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "--recompute-modules": ("--recompute-granularity", ("selective",)),
    "--cuda-graph-modules": (_IMPL, ("local", "transformer_engine")),
    "--offload-modules": ("--fine-grained-activation-offloading", ()),
    "--moe-flex-dispatcher-backend": ("--moe-token-dispatcher-type", ("flex",)),
}
#: Options under which a row holds several documents, whose borders go through the layers with the tokens.
_PACKING = ("--sft", "--dataloader-inter-document-masking", "--rl-use-sequence-packing")
#: Recomputed parts that hold weights.
_WITH_WEIGHTS = {"moe", "mlp", "shared_experts"}
_FSDP, _SHARDING = "--use-megatron-fsdp", "--data-parallel-sharding-strategy"
_OUTER = "--outer-dp-sharding-strategy"
_FSDP_SOURCE = "megatron/core/distributed/fsdp/src/megatron_fsdp/"
#: Options that store the optimizer's state in other types than FP32.
_TYPES = ("--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")


def _ignored(c: Launch) -> Iterator[tuple[str, str]]:
    """Yield options without effect, each with the one that it needs."""
    for name, (other, values) in _NEEDS.items():
        given = name in c.options and (other not in c.options if not values else True)
        if given and (not values or c.option(other, "") not in values):
            yield name, f"{other} {' or '.join(values)}".strip()


def _graphed_attention(c: Launch) -> bool:
    """Whether Transformer Engine's CUDA graphs hold attention; without a list they hold whole layers."""
    modules = c.options.get("--cuda-graph-modules") or ()
    return c.option(_IMPL, "none") == "transformer_engine" and (not modules or "attn" in modules)


def _nvlink_ranks(c: Launch) -> int:
    assert c.gpu is not None
    return min(HARDWARE[c.gpu].nvlink_domain, USED_OF_NVL72)


def _uneven(c: Launch) -> bool:
    """Whether expert groups of HybridEP begin and end within NVLink domains."""
    if c.gpu is None or c.option("--moe-flex-dispatcher-backend", "") != "hybridep":
        return False
    small, large = sorted((c.layout.expert_ranks, _nvlink_ranks(c)))
    return large % small != 0


def _divides_gradients(c: Launch) -> bool:
    """Whether Megatron-FSDP reduces gradients in every micro-batch, to divide them."""
    return _FSDP in c.options and c.option(_SHARDING, "no_shard") in ("optim_grads", "optim_grads_params")


def _recomputes_weights(c: Launch) -> bool:
    """Whether a recomputed part of a layer holds weights."""
    how = c.option("--recompute-granularity", "")
    parts = c.options.get("--recompute-modules") or ()
    return how == "full" or (how == "selective" and not _WITH_WEIGHTS.isdisjoint(parts))


def _types(c: Launch) -> list[str]:
    """Options that ask for another type than FP32."""
    return [f"{name} {c.option(name, '')}" for name in _TYPES if c.option(name, "fp32") != "fp32"]


def _instances(c: Launch) -> int:
    return int(c.option(_INSTANCES, "1"))


def _copies(c: Launch) -> dict[str, int]:
    """Return the ranks that hold the same weights, for weights outside and inside of experts."""
    experts = {"EDP": c.layout.edp} if c.config.is_moe else {}
    return {"DP*CP": c.layout.dp * c.layout.cp, **experts}


PERFORMANCE_RULES: tuple[Rule, ...] = (
    Rule(
        "option-without-effect",
        lambda c: any(_ignored(c)),
        lambda c: "; ".join(
            f"{name} has no effect: Megatron reads it only with {needed}" for name, needed in _ignored(c)
        ),
        f"{CONFIG}; megatron/core/transformer/moe/token_dispatcher.py",
        "warning",
    ),
    Rule(
        "cpu-offloading-num-layers",
        lambda c: int(c.option("--cpu-offloading-num-layers", "0")) > 0,
        lambda c: (
            f"--cpu-offloading-num-layers={c.option('--cpu-offloading-num-layers', '')} offloads nothing: "
            "only the block of GPT models has it. Use --fine-grained-activation-offloading with "
            "--offload-modules"
        ),
        "megatron/core/models/hybrid/hybrid_block.py",
        "warning",
    ),
    Rule(
        "packed-graphs",
        lambda c: c.first_of(*_PACKING) and "*" in c.kinds and _graphed_attention(c),
        lambda c: (
            f"{c.first_of(*_PACKING)} with CUDA graphs of attention: a graph takes tensors only, so the "
            "first replay refuses the borders of the documents, after the warm-up and the capture. Use "
            f"{_IMPL} none" + ("" if c.gpu is None else " (--without cuda-graph-modules, too)")
        ),
        "megatron/core/transformer/transformer_layer.py; Megatron-LM #3869",
    ),
    Rule(
        "hybridep-domain",
        _uneven,
        lambda c: (
            f"HybridEP with EP*ETP={c.layout.expert_ranks}: an expert group is as many ranks in a row, and "
            f"NVLink on {c.gpu} connects {_nvlink_ranks(c)}, so some groups would count ranks of two "
            "domains as one: one number must divide the other"
        ),
        "HybridEP's buffer (DeepEP, hybrid-ep); megatron/core/parallel_state.py; NeMo-RL #3436",
    ),
    Rule(
        "activation-offloading",
        lambda c: c.backend == "torch" and "--fine-grained-activation-offloading" in c.options,
        lambda c: (
            "--fine-grained-activation-offloading needs the modules of Transformer Engine, and the backend "
            "is torch: drop it and recompute (--recompute-granularity selective), or use backend te"
        ),
        ARGUMENTS,
    ),
    Rule(
        "optimizer-types",
        lambda c: _types(c) and _PRECISION_AWARE not in c.options,
        lambda c: (
            f"{', '.join(_types(c))}: other types than fp32 need {_PRECISION_AWARE}, which Megatron only "
            "notices when it makes the optimizer: add it"
        ),
        _OPTIMIZER,
    ),
    Rule(
        "precision-aware-optimizer",
        lambda c: (
            _PRECISION_AWARE in c.options
            and "--optimizer-cpu-offload" not in c.options
            and (c.backend == "torch" or not c.distributed_optimizer)
        ),
        lambda c: (
            f"{_PRECISION_AWARE} needs Transformer Engine's Adam and the distributed optimizer, which "
            f"Megatron only notices when it makes the optimizer; here the backend is {c.backend} and the "
            f"distributed optimizer is {'on' if c.distributed_optimizer else 'off'}: drop it"
        ),
        _OPTIMIZER,
    ),
    Rule(
        "moe-router-fusion",
        lambda c: c.backend == "torch" and c.config.is_moe and "--moe-router-fusion" in c.options,
        lambda c: (
            "--moe-router-fusion raises ValueError in the first step without Transformer Engine, and is "
            "turned off on a CPU: drop it, or use backend te"
        ),
        "megatron/core/transformer/moe/moe_utils.py",
    ),
    Rule(
        "fsdp-pipeline",
        lambda c: _FSDP in c.options and c.layout.pp > 1,
        lambda c: (
            f"{_FSDP} with PP={c.layout.pp}: its device mesh has no pipeline dimension, and Megatron ends "
            "with an error of einops when it wraps the model: use PP 1"
        ),
        "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py",
    ),
    Rule(
        "fsdp-expert-dp",
        lambda c: (
            _divides_gradients(c)
            and c.config.is_moe
            and not c.config.has_mtp  # emits --calculate-per-token-loss
            and "--calculate-per-token-loss" not in c.options
            and c.microbatches > 1
            and c.layout.edp == 1
        ),
        lambda c: (
            f"{_FSDP} {_SHARDING} {c.option(_SHARDING, '')} with experts on one data-parallel rank each "
            f"(EP*ETP={c.layout.expert_ranks}) and {c.microbatches} micro-batches: the gradients of experts "
            "are divided by the number of ranks again in every micro-batch: add --calculate-per-token-loss"
        ),
        f"{_FSDP_SOURCE}param_and_grad_buffer.py",
    ),
    Rule(
        "fsdp-mtp-recompute",
        lambda c: (
            _divides_gradients(c)
            and c.config.mtp_use_repeated_layer
            and c.config.mtp_num_layers > 1
            and _recomputes_weights(c)
        ),
        lambda c: (
            f"{_FSDP} {_SHARDING} {c.option(_SHARDING, '')} with recomputation and {c.config.mtp_num_layers} "
            "MTP depths that share weights: their gradients are reduced at each use, and come out wrong: "
            f"recompute no part with weights (core_attn, moe_act), or use {_SHARDING} optim"
        ),
        f"{_FSDP_SOURCE}megatron_fsdp.py",
    ),
    Rule(
        "hsdp-overlap",
        lambda c: (
            _FSDP in c.options
            and _instances(c) > 1
            and "--overlap-grad-reduce" not in c.options
            and not (c.backend != "torch" and c.distributed_optimizer)  # emits it
        ),
        lambda c: (
            f"{_FSDP} with {_INSTANCES} {_instances(c)}: without --overlap-grad-reduce the instances never "
            "sum their gradients, and train apart: add it"
        ),
        f"{_FSDP_SOURCE}megatron_fsdp.py",
    ),
    Rule(
        "hsdp-outer-norm",
        lambda c: (
            _FSDP in c.options
            and _instances(c) > 1
            and c.option(_OUTER, "no_shard") != "no_shard"
            and float(c.option("--clip-grad", parser.default("--clip-grad", c.options) or "0")) > 0
        ),
        lambda c: (
            f"{_FSDP} with {_INSTANCES} {_instances(c)} and {_OUTER} "
            f"{c.option(_OUTER, '')}: Megatron sums the gradient norm within an instance, which holds 1 part "
            f"of {_instances(c)} of the gradients. So the norm is too small, and --clip-grad scales each "
            f"part by its own: use {_OUTER} no_shard, or --clip-grad 0"
        ),
        "megatron/core/optimizer/__init__.py",
        "warning",  # NVIDIA's launches have it, and gradients that need no clipping are right
    ),
    Rule(
        "optimizer-instances",
        lambda c: any(copies % max(1, _instances(c)) for copies in _copies(c).values()),
        lambda c: (
            f"{_INSTANCES} {_instances(c)} divides not all of "
            f"{', '.join(f'{name}={copies}' for name, copies in _copies(c).items())}: use "
            f"{_INSTANCES} {divisors(gcd(*_copies(c).values()))}"
        ),
        "megatron/core/parallel_state.py",
    ),
)
