"""`nemotron3 precision`: the recipe of a model as a table and as Megatron's file; the report of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.common import output
from megatron_nemotron3.common.files import require_output
from megatron_nemotron3.common.options import add_command, json_flag, option
from megatron_nemotron3.common.output import result, say
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import ModelOptions, chosen_model, names_model
from megatron_nemotron3.precision import report as report_file
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.precision.formats import BF16, FORMATS, MXFP8, NVFP4, counted
from megatron_nemotron3.precision.model_formats import CensusError, ModelFormats
from megatron_nemotron3.precision.table import (
    LINEARS,
    NEVER,
    PRECISIONS,
    ModuleKind,
    Structure,
    bf16_layers,
    is_published,
)

_COLUMNS = ("module", "format", "why")


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Options of `nemotron3 precision`."""

    which: ModelOptions
    format: str = option(
        f"number format of the linear layers (default {NVFP4})",
        default=NVFP4,
        choices=PRECISIONS,
        spelling="--precision",
        hidden=["--format"],
    )
    output: Path | None = option("output file, for --te-precision-config-file", "FILE", hidden=["--yaml"])
    te_precision_config_file: Path | None = option(
        "Megatron precision file, to compare with the published formats", "FILE"
    )
    report: Path | None = option("run with --log-precision whose measurements to print", "DIR")
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add the command."""
    add_command(commands.add_parser("precision"), PrecisionOptions, precision_command)


def precision_command(options: PrecisionOptions) -> int:
    """Print the recipe's table, write or compare a precision file, or summarize a run. Exit status 0."""
    if options.report is not None and not names_model(options.which) and options.output is None:
        with result(options.json):
            rows = report_file.read(options.report)
            now = report_file.last(rows)
            facts = {"iteration": now[0].iteration, "rows": [row._asdict() for row in now]}
            say("\n".join(report_file.summary(rows)), folder=options.report, **facts)
        return 0
    if options.report is not None or not names_model(options.which):
        raise ValueError("give the NAME of a model, or --report DIR alone")
    if (path := options.te_precision_config_file) is not None:
        if options.output is not None or options.format != NVFP4:
            raise ValueError(f"{yaml_file.FLAG} compares a file for {NVFP4}: drop --output and --precision")
        with result(options.json):
            config = chosen_model(options.which)
            text = compare(config, path)
            say(text, model=config.name, file=path, findings=text.splitlines())
        return 0
    if options.output is not None:
        require_output(options.output, "--output", b"# NVFP4 recipe for ")
    with result(options.json):
        config = chosen_model(options.which)
        if options.output is None:
            text, facts = render(config, options.format), table(config, options.format)
        else:
            text, facts = write(config, options.format, options.output), {"file": options.output}
        say(text, model=config.name, precision=options.format, **facts)
    return 0


def table(config: Nemotron3Config, precision: str = NVFP4) -> dict[str, Any]:
    """What the table says, for a JSON document; `linears` counts them by format."""
    return {
        "modules": [dict(zip(("modules", "format", "why"), row)) for row in _rows(config, precision)],
        "linears": dict(ModelFormats.of(config, precision).count()),
        "notes": list(_recipe_notes(config, precision)),
    }


def render(config: Nemotron3Config, precision: str = NVFP4) -> str:
    """Text of the table that the command prints."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown format {precision!r}: use one of {', '.join(PRECISIONS)}")
    head = f"{config.title} in {precision}"
    body = output.table([_COLUMNS, *_rows(config, precision)])
    return "\n".join((head, "=" * len(head), "", *body, "", *_recipe_notes(config, precision)))


def write(config: Nemotron3Config, precision: str, path: str | Path) -> str:
    """Write the precision file of NVFP4, and say what it is for."""
    if precision != NVFP4:
        raise ValueError(
            f"--precision {precision} needs no file: every linear follows its layer; drop --output"
        )
    yaml_file.write_precision_file(config, path)
    return f"{path}: written; nemotron3 flags {config.name} --precision nvfp4 {yaml_file.FLAG} {path}"


def compare(config: Nemotron3Config, path: str | Path) -> str:
    """Say in which formats a precision file puts a model's linears, and what is not the published recipe."""
    formats = ModelFormats.of(config, NVFP4, file=yaml_file.read(path, config))
    try:
        formats.require_some()
    except CensusError as problem:
        raise ValueError(f"{yaml_file.FLAG} {path}: {problem}") from None
    return "\n".join(formats.in_force())


def _rows(config: Nemotron3Config, precision: str) -> Iterator[tuple[str, str, str]]:
    """Modules, format and why: the kinds that a model has, and its BF16 layers after the linears."""
    kept, quantized = bf16_layers(config, precision), precision == NVFP4
    present = Structure.of(config).kinds()
    for kind in LINEARS:
        if kind.name in present:
            yield _modules_text(kind), kind.format(precision), kind.why if quantized else ""
    body = range(kept.start, config.num_layers - kept.end)
    ends = [f"{a}-{b - 1}" for a, b in ((0, body.start), (body.stop, config.num_layers)) if a < b]
    if ends:
        why = "needed for stable training (arXiv 2509.25149, E)" if quantized else ""
        yield f"all linears of layers {', '.join(ends)} (from 0)", BF16, why
    for kind in NEVER:
        if kind.layer in ("", *config.pattern):
            yield _modules_text(kind), kind.recipe, kind.why


def _modules_text(kind: ModuleKind) -> str:
    """The modules of a kind: "mlp.experts.linear_fc1, linear_fc2"."""
    first, *rest = (glob.lstrip("*.") for glob in kind.modules)
    return ", ".join((first.rstrip(".*"), *(name.rpartition(".")[2] for name in rest)))


def _recipe_notes(config: Nemotron3Config, precision: str) -> Iterator[str]:
    yield f"linears: {counted(ModelFormats.of(config, precision).count())}"
    if precision == BF16:
        return
    kept, recipe = bf16_layers(config, precision), FORMATS[precision]
    yield f"BF16 layers: {kept.start or 'none'} at the start, {kept.end or 'none'} at the end ({kept.source})"
    yield f"GPUs: compute capability {recipe.needs}" + ("; emulated on any device" if recipe.emulated else "")
    yield "Megatron: " + " ".join(" ".join(map(str, (name, *values))) for name, values in recipe.options)
    if not is_published(config, precision):
        applied = ": this is Super's recipe applied to it" if precision in (NVFP4, MXFP8) else ""
        yield f"No source says that {config.title} was trained so{applied}."
    elif precision == MXFP8:
        yield "Super and Ultra were trained in nvfp4; NVIDIA's MXFP8 configurations keep the same tail."
