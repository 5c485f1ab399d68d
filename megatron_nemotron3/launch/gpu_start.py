"""What ends a run before its first step although its options are right: environment and packages.

Megatron finds it when it builds the model or reads the checkpoint, on every rank, with a traceback.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, MutableMapping, Sequence

from megatron_nemotron3.common.parser import first_missing, option_value
from megatron_nemotron3.launch import continued, versions

#: What Megatron requires of these variables, where they are set, by --attention-backend.
ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
ATTENTION_VALUES = {"auto": "111", "flash": "100", "fused": "010", "unfused": "001", "local": "000"}


def require_attention_variables(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise ValueError if a variable contradicts `--attention-backend`."""
    backend = option_value(words, "--attention-backend") or "auto"
    given = {name: environment[name] for name in ATTENTION_VARIABLES if name in environment}

    def contradicting(values: str) -> list[str]:
        expected = dict(zip(ATTENTION_VARIABLES, values, strict=True))
        return [f"{name}={value}" for name, value in given.items() if value != expected[name]]

    # Megatron's parser refuses another name.
    if wrong := contradicting(ATTENTION_VALUES[backend]) if backend in ATTENTION_VALUES else []:
        fitting = [name for name, values in ATTENTION_VALUES.items() if not contradicting(values)]
        other = f", or give --attention-backend {' or '.join(fitting)}" if fitting else ""
        raise ValueError(
            f"{' '.join(wrong)} contradicts --attention-backend {backend}, which Megatron refuses: "
            f"unset {'it' if len(wrong) == 1 else 'them'}{other}"
        )


def require_gpu_packages(words: Sequence[str], environment: MutableMapping[str, str], rank: int) -> list[str]:
    """Check what a run on GPUs needs; return notes.

    Args:
        environment: of the run; Megatron's call of make is turned off in it where there is nothing to make.
        rank: rank 0 makes the helper, and reads what the checkpoint to load states.

    Raises:
        ValueError: Megatron would end before the first step.
    """
    if option_value(words, "--micro-batch-size") is None:  # without it Megatron's parser ends a training
        return []
    if rank == 0:
        _skip_make(environment)
    fusion = "fused_weight_gradient_mlp_cuda"
    if "--no-gradient-accumulation-fusion" not in words and first_missing(fusion):
        raise ValueError(
            f"Megatron's gradient accumulation fusion needs {fusion} of Apex, which is not installed: give "
            "--no-gradient-accumulation-fusion, or install Apex with its CUDA extensions"
        )
    if not first_missing("transformer_engine") or not first_missing("apex"):
        return []
    if "--use-distributed-optimizer" not in words:
        return []
    why = "without TransformerEngine and Apex Megatron cannot load the state of a distributed optimizer"
    anew = any(option in words for option in ("--finetune", "--no-load-optim"))
    if rank == 0 and not anew and (found := continued.loaded_state(words)) is not None:
        raise ValueError(
            f"{why}, and the checkpoint of step {found[0]} has one: install transformer-engine, or give "
            "--no-load-optim to start the optimizer anew"
        )
    return [f"{why}: a run that resumes this one starts the optimizer anew. pip install transformer-engine"]


def _skip_make(environment: MutableMapping[str, str]) -> None:
    """Megatron calls make for its dataset helper. PyPI's wheel has the helper compiled, and no Makefile."""
    if (core := versions.importable()) is None:
        return
    folder = core / "datasets"
    if shutil.which("make") is None:
        raise ValueError("Megatron calls make at its start, and there is none: install it (apt install make)")
    if (folder / "Makefile").exists():
        return
    if not any(folder.glob("helpers_cpp.*.so")):
        raise ValueError(
            f"{folder} has no Makefile for Megatron's dataset helper, and no compiled one: install "
            "megatron-core from PyPI, or put a checkout of Megatron-LM on PYTHONPATH"
        )
    environment["MAKEFLAGS"] = f"{environment.get('MAKEFLAGS', '')} --eval=all:;".strip()
