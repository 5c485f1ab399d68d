"""The launch to certify (a script, the arguments of a command, or a model's name), and what its options say:
its model, stages and layout."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.convert.megatron_args import config_of
from megatron_nemotron3.launch import ParallelLayout, command_line, parser, versions
from megatron_nemotron3.launch.command import chosen_launch, given_options, source_of
from megatron_nemotron3.launch.flag import Flag, is_known
from megatron_nemotron3.launch.flags import flags
from megatron_nemotron3.launch.script import LaunchSource
from megatron_nemotron3.launch.stored_model import MergedOptions
from megatron_nemotron3.models import Nemotron3Config, names
from megatron_nemotron3.models import pattern as patterns
from megatron_nemotron3.models.stack_specs import MODULE
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.proof.certify import layouts
from megatron_nemotron3.proof.certify import options as table
from megatron_nemotron3.proof.certify.layouts import Sizes
from megatron_nemotron3.proof.certify.options import Treatment

_PATTERN = "--hybrid-layer-pattern"
#: The family's vocabulary.
_VOCABULARY = 131072
#: Arguments that are off, or on, where a command line does not give their switch.
_SWITCHES: dict[str, bool] = {
    "squared_relu": False,
    "swiglu": False,
    "group_query_attention": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "moe_router_enable_expert_bias": False,
}
#: Options that Megatron's parser gives a value where a command line does not.
_GIVEN_BY_MEGATRON = (
    *("--normalization", "--position-embedding-type", "--moe-router-score-function", "--moe-router-topk"),
    *("--mamba-head-dim", "--mamba-state-dim", "--mamba-num-groups"),
)
#: Switch -> the argument that it turns off.
_OFF = {"--disable-bias-linear": "add_bias_linear", "--no-position-embedding": "add_position_embedding"}
#: Options of the router that `config_of` knows no model with.
_GROUPS = ("--moe-router-num-groups", "--moe-router-group-topk")
#: Stacks that compute the family's layers: Megatron's, and those of this package.
_STACKS = (
    MODULE,
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.models.mamba.mamba_layer_specs",
)


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """A launch to certify."""

    title: str = ""
    #: Each once.
    flags: tuple[Flag, ...]
    notes: tuple[str, ...] = ()
    emulate: Emulation | None = None
    #: Adapters that it trains, as `LoRASettings.parse` reads them; None: it trains the weights.
    lora: str | None = None
    #: What MTP heads alone are trained for, as `Boost.parse` reads it; None: it trains the weights.
    boost: str | None = None
    #: GPUs of the launch; None: not known.
    world_size: int | None = None
    #: Tokens of the tokenizer, where no option says.
    vocab_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class FullLaunch:
    """A launch as it is."""

    #: Options that decide something about model, layout or batch, with their values.
    given: Mapping[str, tuple[str, ...]]
    model: Nemotron3Config
    #: Layers of each pipeline stage.
    stages: tuple[str, ...]
    sizes: Sizes
    #: Whether `sizes` has the launch's data parallel size.
    world_known: bool
    #: Whether the embedding has rows that no token has.
    padded: bool
    #: What the options do not say, and what is assumed.
    assumed: tuple[tuple[str, str], ...]


def full_launch(merged: MergedOptions, world_size: int | None, vocab_size: int | None) -> FullLaunch:
    """Return what a launch says."""
    given = {flag.name: flag.values for flag in merged.flags if _counts(flag.name)}
    assumed = []
    if not merged.read:
        if _PATTERN not in given or "--hidden-size" not in given:
            raise ValueError(
                merged.note.replace("so options of the model are not compared", "so there is no model")
            )
        assumed.append(
            ("the model", "that of the command line: the checkpoint of --load cannot be read here")
        )
    if _PATTERN not in given:
        raise ValueError(
            f"the command has no {_PATTERN}: it trains no hybrid model of the Nemotron family, which is all "
            "that certify knows. pretrain_gpt.py and Llama commands describe transformers; of a recipe of "
            "Megatron-Bridge give the run_config.yaml that Bridge writes beside its checkpoints"
        )
    for name, words in given.items():
        if table.group(name) is not table.SCHEDULE and not is_known(words):
            raise ValueError(
                f"{' '.join((name, *words))}: the script does not say what it is: give --set NAME=VALUE"
            )
    model, notes = _model(given, vocab_size)
    sizes, more = _sizes(given, model, world_size)
    first, last = (
        int(given[name][0]) if name in given else None
        for name in ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    )
    return FullLaunch(
        given=given,
        model=model,
        stages=tuple(layouts.of_launch(given[_PATTERN][0], sizes.layout.pp, first, last)),
        sizes=sizes,
        world_known=world_size is not None,
        padded=_padded_size(given, model, sizes.layout.tp) > model.vocab_size,
        assumed=(*assumed, *notes, *more),
    )


def _counts(name: str) -> bool:
    group = table.group(name)
    return group.treatment in (Treatment.KEPT, Treatment.SIZED) or group is table.SCHEDULE


def _type(name: str) -> str:
    found = (parser.argument(name, version) for version in reversed(versions.KNOWN))
    return next((known.type for known in found if known), "text")


def _number(name: str, words: tuple[str, ...], read: type[int] | type[float]) -> Any:
    try:
        value = [read(word) for word in words]
    except ValueError:
        raise ValueError(f"{name} {' '.join(words)} is no number") from None
    return value[0] if len(value) == 1 else value


def _model(
    given: Mapping[str, tuple[str, ...]], vocab_size: int | None
) -> tuple[Nemotron3Config, list[tuple[str, str]]]:
    values, assumed = dict[str, Any](_SWITCHES), list[tuple[str, str]]()
    defaults = {name: (text,) for name in _GIVEN_BY_MEGATRON if (text := parser.default(name, given))}
    for name, words in (defaults | dict(given)).items():
        if name in _OFF:
            values[_OFF[name]] = False
        if name in _OFF or name in _GROUPS or table.group(name) is table.SCHEDULE:
            continue
        kind = _type(name)
        if kind in ("int", "float"):
            value = _number(name, words, int if kind == "int" else float)
        else:
            value = words[0] if len(words) == 1 else list(words) or True
        values[name.removeprefix("--").replace("-", "_")] = value
    if "--position-embedding-type" not in given and "--use-rotary-position-embeddings" in given:
        values["position_embedding_type"] = "rope"
    if (spec := given.get("--spec")) and spec[0] not in _STACKS:
        assumed.append((f"layers of --spec {' '.join(spec)}", "those of this package"))
        del values["spec"]
    known = vocab_size or values.get("vocab_size") or values.get("padded_vocab_size")
    if not known:
        assumed.append(("size of the vocabulary", f"not in the command; {_VOCABULARY} is assumed"))
    try:
        return config_of(Namespace(**values), name="the launch", vocab_size=known or _VOCABULARY), assumed
    except ValueError as problem:
        raise ValueError(str(problem).replace("the stored arguments have", "the command has")) from None


def _padded_size(given: Mapping[str, tuple[str, ...]], model: Nemotron3Config, tp: int) -> int:
    if words := given.get("--padded-vocab-size"):
        return int(words[0])
    multiple = _size(given, "--make-vocab-size-divisible-by", 128) * tp
    return math.ceil(model.vocab_size / multiple) * multiple


def _size(given: Mapping[str, tuple[str, ...]], name: str, default: int = 1) -> int:
    value = int(_number(name, given.get(name) or (str(default),), int))
    if value < 1:
        raise ValueError(f"{name} {value}: give 1 or more")
    return value


def _sizes(
    given: Mapping[str, tuple[str, ...]], model: Nemotron3Config, world_size: int | None
) -> tuple[Sizes, list[tuple[str, str]]]:
    """Return the layout of the launch, and what is assumed of it."""
    tp, pp = (_size(given, f"--{kind}-model-parallel-size") for kind in ("tensor", "pipeline"))
    cp = _size(given, "--context-parallel-size")
    ep = _size(given, "--expert-model-parallel-size") if model.is_moe else 1
    etp = _size(given, "--expert-tensor-parallel-size", tp) if model.is_moe else 1
    instances = _size(given, "--num-distributed-optimizer-instances")
    experts, ranks = ep * etp, tp * cp
    assumed = []
    if world_size is None:
        # Two copies of everything that can have copies: of the experts, too.
        copies = 2 * instances
        dp = max(copies, math.lcm(copies * experts, ranks) // ranks)
        assumed.append(("number of ranks", f"not in the command; {dp * ranks * pp} (DP {dp}) are assumed"))
    else:
        dp, rest = divmod(world_size, ranks * pp)
        if rest or not dp or ranks * dp % experts:
            raise ValueError(
                f"{world_size} ranks are no multiple of TP{tp} x CP{cp} x PP{pp}"
                + (f" and of EP{ep} x ETP{etp} x PP{pp}" if experts > 1 else "")
            )
    cuts_given = given[_PATTERN][0].count(patterns.PIPE) + 1
    layout = ParallelLayout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        vpp=max(1, cuts_given // pp),
        ep=ep,
        etp=etp,
        sp=tp > 1 and "--sequence-parallel" in given,
    )
    return Sizes(layout=layout, instances=instances), assumed


#: Names a Megatron-LM checkout whose script the launch runs.
CHECKOUT = "MEGATRON_LM_DIR"
#: Options that go with a script or arguments; the others describe a launch by the NAME of a model.
BESIDE = (
    *("name", "command", "run", "extra", "json", "set", "trust_script", "ranks", "gpu", "gpus", "output"),
    *("check", "against", "command_line", "main"),
)
_OWN = (".json", ".py")


def read(options: argparse.Namespace, command: argparse.ArgumentParser) -> LaunchRequest:
    """Return the launch that the command line names; raise ValueError for none, two or an unreadable one."""
    target, arguments = options.name, tuple(options.extra)
    if options.model is not None or target in names() or Path(target or "").suffix in _OWN:
        return _named(options)
    if described := given_options(options, command, BESIDE):
        raise ValueError(f"an existing launch is certified as it is: drop {' '.join(described)}")
    if target is None and not arguments:
        raise ValueError("give a script, the NAME of a model, or -- and the words of the command")
    if target is not None and arguments:
        raise ValueError(f"{target} is certified as it is: drop -- {shlex.join(arguments)}")
    given = target is not None
    source = source_of(options, target, target) if given else LaunchSource(shlex.join(arguments))
    found = command_line.read_launch(source)
    return LaunchRequest(
        title="command" if target is None else "standard input" if target == "-" else target,
        flags=tuple(found.flags),
        notes=tuple(found.notes),
        emulate=found.emulate,
        lora=found.adapters,
        boost=found.heads,
        world_size=options.gpus or found.world_size,
    )


def _named(options: argparse.Namespace) -> LaunchRequest:
    if options.set or options.trust_script:
        what = f"--set {options.set[0]}" if options.set else "--trust-script"
        raise ValueError(f"{what} is about a script, and none is given")
    launch = chosen_launch(options)
    world = launch.layout.world_size
    if options.gpus not in (None, world):
        raise ValueError(f"--gpus {options.gpus}: the layout has {world} ranks: give --dp instead")
    return LaunchRequest(
        title=launch.config.name,
        flags=tuple(flags(launch)),
        emulate=launch.emulate,
        world_size=world,
        vocab_size=launch.config.vocab_size,
    )


def checkout(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the checkout of Megatron-LM whose script is run; None: this package's own is."""
    named = environment.get(CHECKOUT)
    if not named:
        return None
    folder = checkout_in(Path(named), f"{CHECKOUT}={named}", "pretrain_hybrid.py")
    versions.require_imported(folder)
    return folder


def checkout_in(folder: Path, given: str, *files: str) -> Path:
    """Return the whole path of a checkout of Megatron-LM; raise ValueError for a folder that is none."""
    for part in (*files, "megatron/core/package_info.py"):
        if not (folder / part).is_file():
            raise ValueError(f"{given} is no checkout of Megatron-LM 0.19 or newer: no {part}")
    return folder.resolve()
