"""Check the precision file that a launch names, before anything starts. Reading it imports PyYAML."""

from __future__ import annotations

from pathlib import Path

from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.precision.census import require_usable
from megatron_nemotron3.precision.formats import NVFP4
from megatron_nemotron3.precision.model_formats import CensusError, ModelFormats


def formats_of(launch: Launch, file: yaml_file.PrecisionFile) -> ModelFormats:
    """The formats of a launch with this content of its precision file."""
    return ModelFormats.of(launch.config, launch.precision, (launch.bf16_at_start, launch.bf16_at_end), file)


def check(launch: Launch) -> list[str]:
    """Read the precision file of a launch, and return a line for each difference from the published recipe.

    A missing file is no error, because it may exist on the machine that trains.

    Raises:
        PrecisionFileError: the file is wrong.
        ValueError: an NVFP4 launch would have no NVFP4 linear.
    """
    path, config = launch.precision_file, launch.config
    file = yaml_file.NO_FILE
    if path is not None:
        if not Path(path).exists():
            return [
                f"{yaml_file.FLAG} {path} is not on this machine, so it was not checked: "
                f"nemotron3 precision {config.name} --output {path} writes the published one"
            ]
        file = yaml_file.read(path, config)
    emulate = launch.emulate
    if emulate is not None and emulate.packed and path is not None:
        raise ValueError(f"{yaml_file.FLAG} with packed weights of {emulate.packed}: drop the file")
    if launch.precision != NVFP4 or (emulate is not None and (emulate.every_layer or emulate.packed)):
        return []
    formats = formats_of(launch, file)
    try:
        formats.require_some()
    except CensusError as problem:
        raise ValueError(str(problem)) from None
    return [found.line() for found in formats.deviations()]


def require_usable_here(launch: Launch, *, measured: bool) -> None:
    """Check the precision file and formats of a launch that is about to train on this machine."""
    path = launch.precision_file
    if path is not None and not Path(path).exists():
        raise ValueError(
            f"{yaml_file.FLAG} {path} does not exist: nemotron3 precision {launch.config.name} --output "
            f"{path} writes the published one"
        )
    check(launch)
    try:
        require_usable(
            launch.extra,
            torch_spec=launch.backend == "torch",
            emulate=bool(launch.emulate),
            measured=measured,
        )
    except CensusError as problem:
        raise ValueError(str(problem)) from None
