"""The launch to certify: a script, the arguments of a command, or a model's name."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from megatron_nemotron3.launch import command_line, versions
from megatron_nemotron3.launch.command import chosen_launch
from megatron_nemotron3.launch.flags import flags
from megatron_nemotron3.launch.script_options import given_options, text_of, variables
from megatron_nemotron3.models import names
from megatron_nemotron3.proof.certify.large import LaunchRequest

#: Names a Megatron-LM checkout whose script the launch runs.
CHECKOUT = "MEGATRON_LM_DIR"
#: Options that go with a script or arguments; the others describe a launch by the NAME of a model.
BESIDE = (
    *("name", "command", "run", "extra", "json", "set", "ranks", "gpu", "gpus", "output", "check"),
    *("command_line", "main"),
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
    text = shlex.join(arguments) if target is None else text_of(target, target)
    given = variables(options.set)
    found = command_line.read_launch(text, given)
    return LaunchRequest(
        title="command" if target is None else "standard input" if target == "-" else target,
        flags=tuple(found.flags),
        notes=tuple(found.notes),
        emulate=command_line.emulation(text),
        lora=command_line.adapters(text),
        boost=command_line.heads(text),
        world_size=options.gpus or found.world_size,
    )


def _named(options: argparse.Namespace) -> LaunchRequest:
    if options.set:
        raise ValueError(f"--set {options.set[0]} sets a variable of a script, and none is given")
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
    folder = Path(named)
    for part in ("pretrain_hybrid.py", "megatron/core/package_info.py"):
        if not (folder / part).is_file():
            raise ValueError(f"{CHECKOUT}={named} is no checkout of Megatron-LM 0.19 or newer: no {part}")
    versions.require_imported(folder.resolve())
    return folder.resolve()
