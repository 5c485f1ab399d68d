"""The launch that the options of an existing command describe, and the rules that it violates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron_nemotron3.launch import command_line
from megatron_nemotron3.launch.flag import Flag, is_known
from megatron_nemotron3.launch.flags import flags
from megatron_nemotron3.launch.launch import Launch, TrainingData
from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.launch.reference import reference, version_of
from megatron_nemotron3.launch.rule import Violation
from megatron_nemotron3.launch.rules import check
from megatron_nemotron3.launch.schedule import TrainingSchedule
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.stack_specs import MODULE, spec_name
from megatron_nemotron3.precision.formats import BF16, FORMATS, requested
from megatron_nemotron3.precision.settings import OPTION as EMULATE_OPTION
from megatron_nemotron3.precision.settings import Emulation


def violated(launch: Launch) -> list[Violation]:
    """Return the rules that a launch violates which `launch_of` made."""
    return [violation for violation in check(launch) if violation.rule != "reserved-option"]


def launch_of(
    config: Nemotron3Config,
    pasted: Sequence[Flag],
    emulate: Emulation | None,
    schedule: TrainingSchedule | None = None,
    layout: ParallelLayout | None = None,
    whole: bool = False,
) -> Launch | None:
    """Return the launch that a command line describes; None if a size of its layout is no number."""
    options = {flag.name: flag.values for flag in pasted}
    layout = layout or command_line.layout_of(options)
    if layout is None:
        return None
    ours = {*sections(config), EMULATE_OPTION} | (set() if whole else reference(config).keys())
    ours -= {"--moe-token-dispatcher-type"}  # it decides which other options have an effect
    # Old launches give it next to --hybrid-override-pattern, and YAML always does.
    ours |= {"--num-layers"}
    others = [flag for flag in pasted if flag.name not in ours and is_known(flag.values)]
    backend = "torch" if options.get("--spec") == (MODULE, spec_name(config, "torch")) else "te"
    precision = emulate.format if emulate else _precision_of(options)
    words = [word for flag in others for word in (flag.name, *flag.values)]
    return Launch(
        config=config,
        layout=layout,
        precision=precision,
        backend=backend,
        schedule=schedule,
        extra=words,
        te_precision_config_file=(options.get("--te-precision-config-file") or (None,))[0],
        emulate=emulate,
        megatron_core=version_of(config),
    )


def _precision_of(options: Mapping[str, tuple[str, ...]]) -> str:
    """Return the precision that a command line asks for; BF16 for recipes of the user's own ("custom")."""
    found = requested(lambda name: (options[name] or ("",))[0] if name in options else None)
    return found[-1] if found and found[-1] in FORMATS else BF16


def sections(config: Nemotron3Config) -> dict[str, str]:
    """Return option -> section for every option that `flags` can emit."""
    everything: dict[str, Any] = dict.fromkeys((field.name for field in fields(TrainingData)), "x")
    launch = Launch(
        config=config, backend="te", data=TrainingData(**everything), megatron_core=version_of(config)
    )
    return {flag.name: flag.section for flag in flags(launch)}
