"""`nemotron3 precision`: the recipe of a model as a table and as Megatron's file; the report of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.common import output
from megatron_nemotron3.common.files import require_output, require_plot
from megatron_nemotron3.common.options import add_command, json_flag, option
from megatron_nemotron3.common.output import result, say
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import ModelOptions, chosen_model, names_model
from megatron_nemotron3.precision import report as report_file
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.precision.census import Ambient, CensusError, require_some
from megatron_nemotron3.precision.deviations import recipe_in_force
from megatron_nemotron3.precision.formats import BF16, FORMATS, MXFP8, NVFP4
from megatron_nemotron3.precision.share import FormatShare, shares, totals
from megatron_nemotron3.precision.table import PRECISIONS, Structure, bf16_layers, is_published, tail

_COLUMNS = ("module", "format", "parameters", "FLOPs", "why")


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
    output: Path | None = option("where to write: a --te-precision-config-file", "FILE", hidden=["--yaml"])
    te_precision_config_file: Path | None = option(
        "Megatron's file with the format of each module (compare it with the published)",
        "FILE",
    )
    report: Path | None = option("summary and plot of a measured run", "DIR")
    json: bool = json_flag()


def register(commands: Any) -> None:
    """Add `nemotron3 precision`."""
    add_command(commands.add_parser("precision"), PrecisionOptions, precision_command)


def precision_command(options: PrecisionOptions) -> int:
    """Print the recipe's table, write or compare a precision file, or summarize a run. Exit status 0."""
    if options.report is not None and not names_model(options.which) and options.output is None:
        if options.report.is_dir():  # a missing one has its own message
            require_plot(options.report / report_file.PICTURE, "--report")
        with result(options.json):
            rows = report_file.read(options.report)
            now = report_file.last(rows)
            say(
                report(rows, options.report),
                folder=options.report,
                plot=options.report / report_file.PICTURE,
                iteration=now[0].iteration,
                rows=[row._asdict() for row in now],
            )
        return 0
    if options.report is not None or not names_model(options.which):
        raise ValueError("give the NAME of a model, or --report DIR alone")
    if options.te_precision_config_file is not None:
        if options.output is not None or options.format != NVFP4:
            raise ValueError(f"{yaml_file.FLAG} compares a file for {NVFP4}: drop --output and --precision")
        with result(options.json):
            config = chosen_model(options.which)
            text = compare(config, options.te_precision_config_file)
            say(
                text,
                model=config.name,
                file=options.te_precision_config_file,
                findings=text.splitlines(),
            )
        return 0
    if options.output is not None:
        require_output(options.output, "--output")
    with result(options.json):
        config = chosen_model(options.which)
        text = run(config, options.format, options.output)
        facts = {"file": options.output} if options.output is not None else table(config, options.format)
        say(text, model=config.name, precision=options.format, **facts)
    return 0


def table(config: Nemotron3Config, precision: str = NVFP4) -> dict[str, Any]:
    """Return what the table says, for a JSON document; shares are from 0 to 1."""
    lines = shares(config, precision)
    parameters, flops = sum(line.parameters for line in lines), sum(line.flops for line in lines)
    return {
        "modules": [
            {
                "modules": line.modules,
                "format": line.format,
                "parameters": line.parameters / parameters,
                "flops": line.flops / flops,
                "why": line.why,
            }
            for line in lines
        ],
        "formats": {
            fmt: {"parameters": share, "flops": of_flops} for fmt, (share, of_flops) in totals(lines).items()
        },
        "notes": list(_recipe_notes(config, precision, lines)),
    }


def render(config: Nemotron3Config, precision: str = NVFP4) -> str:
    """Text of the table that the command prints.

    Raises:
        ValueError: an unknown format.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown format {precision!r}: use one of {', '.join(PRECISIONS)}")
    lines = shares(config, precision)
    cells = [_COLUMNS, *_share_cells(lines)]
    head = f"{config.title} in {precision}"
    body = output.table(cells, "llrrl")
    return "\n".join((head, "=" * len(head), "", *body, "", *_recipe_notes(config, precision, lines)))


def markdown(config: Nemotron3Config, precision: str = NVFP4) -> str:
    """The same table for docs/nvfp4.md."""
    rows = [_COLUMNS, ("-", "-", "-:", "-:", "-"), *_share_cells(shares(config, precision))]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def run(config: Nemotron3Config, precision: str = NVFP4, path: str | Path | None = None) -> str:
    """Write the precision file, if there is a path for it; return the text for stdout, the table without.

    Raises:
        ValueError: a file is asked for, and the format is not nvfp4. Other formats need no file.
        FileExistsError: a file with other text exists.
    """
    if path is None:
        return render(config, precision)
    if precision != NVFP4:
        raise ValueError(
            f"--precision {precision} needs no file: every linear follows its layer; drop --output"
        )
    yaml_file.write_precision_file(config, path)
    return f"{path}: written; nemotron3 flags {config.name} --precision nvfp4 {yaml_file.FLAG} {path}"


def compare(config: Nemotron3Config, path: str | Path) -> str:
    """Say in which formats a precision file puts a model's linears, and what is not the published recipe."""
    file, structure = yaml_file.read(path, config), Structure.of(config)
    ambient = Ambient(NVFP4, config.num_layers, at_end=tail(config).layers)
    try:
        require_some(structure, file, ambient)
    except CensusError as problem:
        raise ValueError(f"{yaml_file.FLAG} {path}: {problem}") from None
    return "\n".join(recipe_in_force(structure, file, ambient))


def report(rows: Sequence[report_file.ReportRow], folder: str | Path, title: str = "") -> str:
    """Draw `precision.png` next to the report in a run's folder; returns the summary for stdout."""
    picture = Path(folder) / report_file.PICTURE
    report_file.plot(rows, picture, title or str(folder))
    return "\n".join((*report_file.summary(rows), f"precision plot   {picture}"))


def _share_cells(lines: list[FormatShare]) -> list[tuple[str, ...]]:
    parameters, flops = sum(line.parameters for line in lines), sum(line.flops for line in lines)
    return [
        (
            line.modules,
            line.format,
            f"{line.parameters / parameters:.2%}",
            f"{line.flops / flops:.2%}",
            line.why,
        )
        for line in lines
    ]


def _recipe_notes(config: Nemotron3Config, precision: str, lines: list[FormatShare]) -> Iterator[str]:
    for fmt, (parameters, flops) in totals(lines).items():
        yield f"{fmt}: {parameters:.1%} of parameters, {flops:.1%} of FLOPs"
    yield f"FLOPs: one token forward, {config.seq_length} tokens a sequence"
    if precision == BF16:
        return
    kept, recipe = bf16_layers(config, precision), FORMATS[precision]
    yield f"BF16 layers: {kept.start or 'none'} at the start, {kept.end or 'none'} at the end ({kept.source})"
    yield f"GPUs: compute capability {recipe.needs}" + ("; emulated on any device" if recipe.emulated else "")
    yield "Megatron: " + " ".join(" ".join(map(str, (name, *values))) for name, values in recipe.options)
    if precision not in (NVFP4, MXFP8):
        yield f"No source says that {config.title} was trained so."
    elif not is_published(config):
        yield f"No source says that {config.title} was trained so: this is Super's recipe applied to it."
    elif precision != NVFP4:
        yield "Super and Ultra were trained in nvfp4; NVIDIA's MXFP8 configurations keep the same tail."
