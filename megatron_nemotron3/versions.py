"""What the versions of megatron-core differ in, as far as this package meets it. Standard library only.

Flags and rules look here by the version they are made for (`chosen`), code by the version that is imported
(`layers/upstream.py`). `CHANGES` is what behaves differently, `NAMES` what was called differently, `OPTIONS`
which options of the command line are new. Read off the wheels 0.17.1, 0.18.2 and 0.19.2 and off main of
2026-08-22 (0.20.0, in development); docs/environment.md says what was run on each.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

#: Minor versions this package works with, oldest first; the last one is upstream's main.
KNOWN = ("0.17", "0.18", "0.19", "0.20")
#: What flags are made for where no megatron-core is installed.
DEFAULT = "0.19"


@dataclass(frozen=True)
class Change:
    """A property megatron-core has from version `since` on."""

    since: str
    what: str
    source: str


CHANGES: dict[str, Change] = {
    "full-recompute": Change(
        "0.18",
        "--recompute-granularity full reaches a hybrid's layers; before it is silently ignored",
        "megatron/core/models/hybrid/hybrid_block.py; mamba_block.py of 0.17 has no code for it",
    ),
    "mtp-full-recompute": Change(
        "0.19",
        "--recompute-granularity full reaches MTP; in 0.18 it raises TypeError there (padding_mask)",
        "megatron/core/transformer/multi_token_prediction.py",
    ),
    "module-name": Change(
        "0.18",
        "layers are told their name (`name=`) when they are built",
        "megatron/core/models/hybrid/hybrid_block.py",
    ),
    "spec-kwargs": Change(
        "0.18",
        "a TransformerLayer tells any MoE layer its groups; before only a ModuleSpec of MoELayer itself",
        "megatron/core/transformer/transformer_layer.py",
    ),
    "mlp-builder": Change(
        "0.18",
        "MLP.as_mlp_submodule builds a dense layer's MLP; before a ModuleSpec does",
        "megatron/core/transformer/mlp.py",
    ),
    "metrics-tracker": Change(
        "0.18",
        "MoE metrics go through an object that can be replaced, which is how monitors report",
        "megatron/core/transformer/moe/moe_logging.py",
    ),
    "config-container": Change(
        "0.18",
        "pretrain() takes a container of configs; before it parses the command line itself",
        "megatron/training/training.py",
    ),
    "batch-by-rank": Change(
        "0.18",
        "get_batch_on_this_tp_rank takes a batch and the layout; before the iterator and the arguments",
        "megatron/core/utils.py; megatron/training/utils.py of 0.17",
    ),
    "aux-loss-scale": Change(
        "0.19",
        "under --calculate-per-token-loss load balancing counts once; before 1 / (micro batch * TP * CP)",
        "megatron/core/transformer/moe/router.py",
    ),
    "conv1d-parameters": Change(
        "0.19",
        "the Mamba mixer holds the convolution as two parameters; before as a module `conv1d`",
        "megatron/core/ssm/mamba_mixer.py",
    ),
    "model-builder": Change(
        "0.19",
        "HybridModelBuilder builds any stage; that of 0.18 asserts that VPP is 1, and 0.17 has none",
        "megatron/training/models/hybrid.py",
    ),
    "mtp-batch": Change(
        "0.18",
        "the stock script gives MTP's stage tokens on every TP rank; before on the first alone",
        "pretrain_mamba.py of 0.17: get_batch_on_this_tp_rank without mtp_on_this_rank",
    ),
    "inference-linear": Change(
        "0.20",
        "MTP asks whether its projection is an inference linear, which raises without TransformerEngine",
        "megatron/core/tensor_parallel/inference_layers.py",
    ),
}

_HYBRID = "megatron.core.models.hybrid"
_MAMBA = "megatron.core.models.mamba"
#: module:name of today -> (first version that has it, module:name before).
NAMES: dict[str, tuple[str, str]] = {
    f"{_HYBRID}.hybrid_block:HybridStack": ("0.18", "megatron.core.ssm.mamba_block:MambaStack"),
    f"{_HYBRID}.hybrid_block:HybridStackSubmodules": (
        "0.18",
        "megatron.core.ssm.mamba_block:MambaStackSubmodules",
    ),
    f"{_HYBRID}.hybrid_layer_allocation:parse_hybrid_pattern": (
        "0.18",
        "megatron.core.ssm.mamba_hybrid_layer_allocation:parse_hybrid_pattern",
    ),
    f"{_HYBRID}.hybrid_layer_specs:hybrid_stack_spec": (
        "0.18",
        f"{_MAMBA}.mamba_layer_specs:mamba_stack_spec",
    ),
    f"{_HYBRID}.hybrid_model:HybridModel": ("0.18", f"{_MAMBA}.mamba_model:MambaModel"),
    "megatron.training.argument_utils:core_transformer_config_from_args": (
        "0.18",
        "megatron.training.arguments:core_transformer_config_from_args",
    ),
    "megatron.core.utils:get_batch_on_this_tp_rank": (
        "0.18",
        "megatron.training.utils:get_batch_on_this_tp_rank",
    ),
    "megatron.training.arguments:parse_and_validate_args": ("0.18", "megatron.training.arguments:parse_args"),
    "megatron.training.utils.common_utils:multi_tensor_applier": (
        "0.18",
        "megatron.training.utils:multi_tensor_applier",
    ),
    "megatron.training.utils.common_utils:multi_tensor_l2norm": (
        "0.18",
        "megatron.training.utils:multi_tensor_l2norm",
    ),
}

#: Version -> options its parser has and the version before has not. Ours and any a caller may append.
OPTIONS: dict[str, str] = {
    "0.18": """
        async-ckpt-use-cpu-shm chat-template cuda-graph-modules
        disable-ckpt-load-validate-sharding-integrity disable-pad-vocab-size
        disable-tokenizer-sentencepiece-ignore-extra-whitespaces enable-msc eval-global-batch-size
        eval-micro-batch-size fault-injector-delay-start-iteration fault-injector-fault-delay
        fault-injector-fault-probabilities fault-injector-fault-types fault-injector-mtti-seconds
        fault-injector-num-ranks fault-injector-offset-seconds fault-injector-ranks
        fault-injector-seed fine-grained-offloading-max-inflight-offloads fp8-output-proj
        gpu-sniff-test-interval high-priority-a2a-comm-stream inference-cuda-graph-all-prefills
        inference-cuda-graph-scope inference-disable-ep-consensus
        inference-dynamic-batching-sampling-backend inference-moe-token-dispatcher-type
        megatron-fsdp-enable-fine-grained-param-gather mlp-chunks-for-training
        moe-expert-rank-capacity-factor moe-hybridep-num-sms-preprocessing moe-mlp-glu-interleave-size
        moe-paged-stash moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda
        moe-paged-stash-page-size moe-single-grouped-bias moe-single-grouped-weight muon-nesterov
        no-ckpt-load-validate-sharding-integrity no-inference-disable-ep-consensus no-pad-vocab-size
        no-tokenizer-sentencepiece-ignore-extra-whitespaces no-use-layer-wise-param-layout
        null-tokenizer-eod-id null-tokenizer-pad-id nvtx-ranges
        overlap-dispatch-backward-with-experts-wgrad record-shapes save-activations-interval
        save-params-interval save-tokens-per-expert-interval start-eval-at-iter
        step-batch-size-schedule use-grouped-gemm-for-dense-mlp use-transformer-engine-op-fuser
        validation-set-names
        """,
    "0.19": """
        activation-offload-fraction dataloader-inter-document-masking delay-offload-until-cuda-graph
        delta-offload-bytes-across-pp-ranks disable-dsa-indexer-rotate-activation
        disable-dsa-indexer-scoring-relu disable-stream-ckpt-dequant dsa-indexer-k-norm-epsilon
        dsa-indexer-k-norm-fp32 dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset
        dsa-indexer-topk-freq dsa-kernel-backend expert-tensor-parallel-num-weight-shards
        flash-attention-version freeze-all-layers fsdp-db-use-persist-buf-on-alloc-fail
        inference-cuda-graph-max-tokens inference-dynamic-batching-async-sched-mode
        inference-dynamic-batching-cuda-graph-sizing-distribution
        inference-dynamic-batching-logprobs-mode inference-shards logits-load-decode-threads
        logits-load-dir logits-load-ignore-errors logits-load-kd-loss-alpha
        logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype
        logits-save-top-k logits-save-top-p logits-save-top-p-min-k mamba-training-ssm-states-dtype
        megatron-fsdp-max-pool-double-buffer moe-flex-dispatcher-num-sms
        moe-hybridep-pad-uneven-dispatch-inputs moe-ncclep-static-shape moe-ncclep-zero-copy
        moe-router-quantile-balancing-ema moe-routing-trace-capture-hidden-states
        moe-routing-trace-capture-logits moe-routing-trace-dump-weights
        moe-routing-trace-max-training-iters moe-routing-trace-path
        moe-shared-expert-glu-interleave-size mtp-detach-heads no-dsa-indexer-rotate-activation
        no-dsa-indexer-scoring-relu no-stream-ckpt-dequant no-yarn-correction-range-round-to-int
        override-ckpt-iteration rl-consumption-granularity rl-generation-lag rl-profile rl-profile-dir
        rl-submission-granularity tensor-parallel-num-weight-shards use-grouped-gemm-for-shared-expert
        use-same-sampling-seed-across-dp-ranks yarn-beta-fast yarn-beta-slow
        yarn-correction-range-round-to-int yarn-original-max-position-embeddings
        """,
    "0.20": """
        batch-invariant-backend ckpt-drop-redundant-extra-state
        ckpt-fully-parallel-load-per-rank-objects ckpt-pg-tensors-cache-create
        ckpt-pg-tensors-cache-path disable-save-tokenizer-assets enable-mhc-connections
        gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder
        gtp-expert-remat-nccl-ub gtp-remat-nccl-ub gtp-remat-opt-in-modules
        gtp-remat-reduce-scatter-with-fp32-accumulation megatron-fsdp-version mhc-init-gating-factor
        mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations moe-combine-bwd-dtype
        moe-dispatch-fwd-dtype moe-use-grouped-tensor mtp-hsm muon-use-syrk no-save-tokenizer-assets
        otel-enabled otel-service-name otel-span-groups output-logit-dtype rl-durable-rollout-bank
        rl-max-inflight-requests rl-rollout-bank-dir rl-rollout-bank-max-bytes use-gigatoken
        """,
}

#: Version -> options its parser has no more.
REMOVED: dict[str, str] = {
    "0.18": """
        inference-dynamic-batching-cuda-graph-max-tokens muon-use-nesterov
        no-scatter-gather-tensors-in-pipeline tiktoken-special-tokens
        tokenizer-hf-include-special-tokens tokenizer-hf-use-fast use-legacy-models
        """,
    "0.19": """
        rl-generation-batch-size rl-num-parallel-generation-batches rl-num-parallel-generations
        rl-parallel-generation-tasks
        """,
    "0.20": """
        disable-stream-ckpt-dequant moe-ncclep-static-shape no-stream-ckpt-dequant
        """,
}


def minor(version: str) -> str:
    """ "0.19.2" -> "0.19"; "main" is the last of `KNOWN`.

    Raises:
        ValueError: not a version, or one outside `KNOWN`.
    """
    if version == "main":
        return KNOWN[-1]
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"megatron-core version {version!r}: give one of {', '.join(KNOWN)} or main")
    number = ".".join(match.groups())
    if number not in KNOWN:
        older = _key(number) < _key(KNOWN[0])
        why = (
            "it has no MTP for hybrid models and no '|' or '/' in layer patterns"
            if older
            else "it is not known"
        )
        raise ValueError(
            f"megatron-core {version} is outside {KNOWN[0]} to {KNOWN[-1]}: {why}; use {DEFAULT} "
            "(pip install 'megatron-core[training]==0.19.2')"
        )
    return number


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def installed() -> str | None:
    """Version of the installed megatron-core, found without importing it; None where there is none."""
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None


def chosen(version: str | None = None) -> str:
    """The minor version flags are made for: the one given, else the installed one, else `DEFAULT`.

    Raises:
        ValueError: it is outside `KNOWN`.
    """
    return minor(version or installed() or DEFAULT)


def at_least(version: str, since: str) -> bool:
    """Whether minor version `version` is `since` or later."""
    return _key(version) >= _key(since)


def has(change: str, version: str) -> bool:
    """Whether megatron-core of minor version `version` has the property `CHANGES` describes."""
    return at_least(version, CHANGES[change].since)


def name_in(today: str, version: str) -> str:
    """What `today` ("module:name") is called in minor version `version`."""
    since, before = NAMES.get(today, (KNOWN[0], today))
    return today if at_least(version, since) else before


def locate(today: str, version: str) -> tuple[ModuleType, str]:
    """(module, name in it) of what is called `today` in minor version `version`; imports the module."""
    module, _, name = name_in(today, version).partition(":")
    return importlib.import_module(module), name


def unknown_options(options: Mapping[str, object], version: str) -> dict[str, str]:
    """Which of these options the parser of minor version `version` does not know -> why."""
    why: dict[str, str] = {}
    for since, names in OPTIONS.items():
        if not at_least(version, since):
            why |= {f"--{name}": f"new in {since}" for name in names.split()}
    for since, names in REMOVED.items():
        if at_least(version, since):
            why |= {f"--{name}": f"removed in {since}" for name in names.split()}
    return {name: why[name] for name in options if name in why}
