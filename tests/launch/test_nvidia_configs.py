"""Every option of NVIDIA's public configurations is ours with the same value, or a table says why not.

Reads the Megatron-LM checkout (tag core_v0.19.0) that the environment variable MEGATRON_LM_DIR names; skipped
without.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import Launch, ParallelLayout, flags, published, published_layout

ROOT = os.environ.get("MEGATRON_LM_DIR")
pytestmark = pytest.mark.skipif(not ROOT, reason="MEGATRON_LM_DIR names no Megatron-LM checkout")

MODELOPT = "examples/post_training/modelopt/conf/nvidia"
RELEASE = "tests/functional_tests/test_cases/nemotron/nemotron3_super_release_gb200/model_config.yaml"

#: What the option does is not ours to say: data, tokenizer, checkpoints, logging, network and host tuning.
NOT_THE_MODEL = re.compile(
    r"--(data-|tiktoken|tokenizer|trust-remote|no-mmap|num-workers|save|load|ckpt|dist-ckpt|log|timing|tensorboard"
    r"|wandb|export|ddp|high-priority|distributed-timeout|disable-gloo|manual-gc|exit-|override-opt|check-weight"
    r"|cuda-graph|te-rng|moe-hybridep|moe-flex)"
)
#: Options we do not emit, or with another value, and why.
DIFFERENT = {
    "--num-layers": "Megatron counts the pattern",
    "--is-hybrid-model": "Megatron sets it when there is a pattern",
    "--use-mcore-models": "deprecated, ignored",
    "--spec": "ours",
    "--attention-backend": "the files disagree (fused, flash); auto takes what is there",
    "--moe-token-dispatcher-type": "the release test uses HybridEP, which needs its library: through extra",
    "--micro-batch-size": "from the schedule: Ultra's run had 2, its modelopt file 1",
    "--global-batch-size": "the release test trains with 512, the published run with 3072",
    "--train-samples": "the release test is short",
    "--enable-experimental": "experimental permutation kernels, the user's choice: through extra",
    "--grad-reduce-in-bf16": "Ultra lost MTP's gradient with it: rule grad-reduce-in-bf16",
    "--fp8-param-gather": "memory, not arithmetic: through extra",
    "--reuse-grad-buf-for-mxfp8-param-ag": "goes with --fp8-param-gather",
    "--use-rotary-position-embeddings": "only in Nemotron-H's modelopt file; its RL file says none",
    "--no-position-embedding": "deprecated, goes with the former",
    "--rotary-percent": "there are no rotary positions",
    "--rotary-base": "there are no rotary positions",
    "--no-rope-fusion": "there are no rotary positions",
    "--no-masked-softmax-fusion": "that fusion is not on Transformer Engine's path",
    "--make-vocab-size-divisible-by": "Megatron's 128 leaves a vocabulary of 131072 as it is up to TP 1024",
    "--padded-vocab-size": "the same vocabulary follows from the tokenizer",
}
#: The same, for single files.
DIFFERENT_IN = {
    ("nano-9b-v2", "--max-position-embeddings"): "without positions only a bound on the sequence",
    ("nano-9b-v2", "--seq-length"): "a choice for post-training",
    ("nemotron-h-8b", "--seq-length"): "a choice for post-training",
    ("nemotron-h-8b", "--max-position-embeddings"): "without positions only a bound on the sequence",
    ("nemotron-h-4b", "--seq-length"): "a choice for post-training",
    ("nemotron-h-4b", "--max-position-embeddings"): "without positions only a bound on the sequence",
    ("nemotron-h-56b", "--tensor-model-parallel-size"): "a choice for post-training",
    ("nemotron-h-56b", "--pipeline-model-parallel-size"): "a choice for post-training",
}

FILES = {
    "nano": (f"{MODELOPT}/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.sh", "bf16"),
    "super": (f"{MODELOPT}/NVIDIA-Nemotron-3-Super-120B-A12B-BF16.sh", "bf16"),
    "super-release": (RELEASE, "mxfp8"),
    "ultra": (f"{MODELOPT}/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.sh", "bf16"),
    "nemotron-h-4b": (f"{MODELOPT}/Nemotron-H-4B-Instruct.sh", "bf16"),
    "nemotron-h-8b": (f"{MODELOPT}/Nemotron-H-8B-Base-8K.sh", "bf16"),
    "nemotron-h-47b": (f"{MODELOPT}/Nemotron-H-47B-Reasoning-128K.sh", "bf16"),
    "nemotron-h-56b": (f"{MODELOPT}/Nemotron-H-56B-Base-8K.sh", "bf16"),
    "nano-9b-v2": (f"{MODELOPT}/NVIDIA-Nemotron-Nano-9B-v2.sh", "bf16"),
}


def theirs(file: Path) -> dict[str, list[str]]:
    """Option -> values, of a shell file's MODEL_ARGS or a YAML file's MODEL_ARGS."""
    text = file.read_text()
    if file.suffix == ".yaml":
        body = text.partition("MODEL_ARGS:")[2].partition("METRICS:")[0]
        found = re.findall(r"^  (--[^:]+): *(.*)$", body, re.M)
        return {name: [] if value == "true" else shlex.split(value) for name, value in found}
    body = re.search(r'MODEL_ARGS="(.*?)"', text, re.S)
    assert body, file
    options: dict[str, list[str]] = {}
    for word in body[1].replace("\\\n", " ").split():
        if word.startswith("--"):
            options[(last := word)] = []
        else:
            options[last].append(word)
    return options


@pytest.mark.parametrize("key", FILES)
def test_same_or_explained(key: str) -> None:
    path, precision = FILES[key]
    config = models.get(key.removesuffix("-release"))
    layout = published_layout(config) or ParallelLayout()
    schedule = published(config)
    ours = {
        flag.name: list(flag.values)
        for flag in flags(Launch.of(config, layout, precision=precision, backend="te", schedule=schedule))
    }
    options = theirs(Path(ROOT or "") / path)
    assert len(options) > 20, "the file was not read"
    options = {
        {"--hybrid-override-pattern": "--hybrid-layer-pattern"}.get(name, name): values
        for name, values in options.items()
    }
    options = {name: values for name, values in options.items() if (key, name) not in DIFFERENT_IN}
    missing = [name for name in options if name not in ours and not explained(name)]
    assert not missing
    different = {
        name: (ours[name], values)
        for name, values in options.items()
        if name in ours and not explained(name) and not same(name, ours[name], values)
    }
    assert not different


def explained(name: str) -> bool:
    return name in DIFFERENT or NOT_THE_MODEL.match(name) is not None


def same(name: str, ours: list[str], values: list[str]) -> bool:
    if name == "--hybrid-layer-pattern":  # the modelopt files leave MTP out
        return ours == values or ours[0].partition("/")[0] == values[0]
    try:
        return [float(v) for v in ours] == [float(v) for v in values]
    except ValueError:
        return ours == values
