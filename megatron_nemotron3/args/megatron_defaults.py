"""Defaults of Megatron's parser for the options that describe a model and its training.

They are those of megatron-core 0.19; a test compares them with the installed parser. Only `installed`, which
reads that parser, needs megatron-core. Standard library only.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Callable, Mapping

from megatron_nemotron3.precision.formats import DEFAULT_RECIPES

Options = Mapping[str, tuple[str, ...]]

#: Option -> its default as typed. Options that are missing here default to None or are switches that are off.
DEFAULTS: dict[str, str] = {
    "--num-query-groups": "1",
    "--mamba-head-dim": "64",
    "--mamba-state-dim": "128",
    "--mamba-num-groups": "8",
    "--normalization": "LayerNorm",
    "--norm-epsilon": "1e-05",
    "--position-embedding-type": "learned_absolute",
    "--init-method-std": "0.02",
    "--attention-dropout": "0.1",
    "--hidden-dropout": "0.1",
    "--moe-router-topk": "2",
    "--moe-router-score-function": "softmax",
    "--moe-router-bias-update-rate": "0.001",
    "--moe-router-load-balancing-type": "aux_loss",
    "--moe-aux-loss-coeff": "0.0",
    "--mtp-loss-scaling-factor": "0.1",
    "--tensor-model-parallel-size": "1",
    "--pipeline-model-parallel-size": "1",
    "--context-parallel-size": "1",
    "--expert-model-parallel-size": "1",
    "--moe-token-dispatcher-type": "allgather",
    "--lr-warmup-samples": "0",
    "--min-lr": "0.0",
    "--weight-decay": "0.01",
    "--adam-beta1": "0.9",
    "--adam-beta2": "0.999",
    "--clip-grad": "1.0",
    "--lr-decay-style": "linear",
    "--lr-wsd-decay-style": "exponential",
}

#: Defaults that apply only if another option is given.
_BELOW = {
    "--moe-flex-dispatcher-backend": (("--moe-token-dispatcher-type", "flex"), "deepep"),
    "--fp4-recipe": (("--fp4-format", "e2m1"), DEFAULT_RECIPES["fp4"]),
    "--fp8-recipe": (("--fp8-format",), DEFAULT_RECIPES["fp8"]),
    "--fp8-amax-history-len": (("--fp8-format",), "1"),
    "--fp8-amax-compute-algo": (("--fp8-format",), "most_recent"),
    "--num-layers-at-start-in-bf16": (("--first-last-layers-bf16",), "1"),
    "--num-layers-at-end-in-bf16": (("--first-last-layers-bf16",), "1"),
}


def _first_value(options: Options, name: str) -> str | None:
    return (options.get(name) or (None,))[0]


def _kv_channels(options: Options) -> str | None:
    hidden, heads = _first_value(options, "--hidden-size"), _first_value(options, "--num-attention-heads")
    if not (hidden and heads and hidden.isdecimal() and heads.isdecimal() and int(heads)):
        return None
    return str(int(hidden) // int(heads))


#: Option -> how Megatron derives it from others (validate_args of megatron/training/arguments.py).
_DERIVED: dict[str, Callable[[Options], str | None]] = {
    "--kv-channels": _kv_channels,
    "--moe-ffn-hidden-size": lambda options: _first_value(options, "--ffn-hidden-size"),
    "--expert-tensor-parallel-size": lambda options: (
        _first_value(options, "--tensor-model-parallel-size") or "1"
    ),
}


def default(name: str, options: Options) -> str | None:
    """Return the value of an option that a command line of `options` does not pass; None if it has none."""
    if name in _BELOW:
        (parent, *values), text = _BELOW[name]
        return text if parent in options and tuple(values) in ((), options[parent]) else None
    return _DERIVED[name](options) if name in _DERIVED else DEFAULTS.get(name)


def is_default(name: str, options: Options) -> bool:
    """Whether an option changes nothing: its value is the default, or the option it refines is missing."""
    if name in _BELOW and default(name, options) is None:
        return True
    return options[name] == (DEFAULTS.get(name),)


def installed() -> tuple[str, list[argparse.Action]]:
    """Return (version, options) of the installed Megatron's parser. It imports torch, which takes seconds.

    Raises:
        ValueError: megatron-core, or what it needs, is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not there
            version = importlib.import_module("megatron.core").__version__
            arguments = importlib.import_module("megatron.training.arguments")
    except ImportError as missing:
        raise ValueError(
            f"--all asks the installed Megatron for its defaults, but {missing}: "
            "pip install 'megatron-nemotron3[train]'"
        ) from None
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    return version, [action for action in parser._actions if action.dest != "help"]
