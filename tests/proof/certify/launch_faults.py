"""Faults of a launch itself, which Megatron takes without a word.

Each gets the folder with the launch's precision file, damages the file or not, and returns further words of
the command line; of an option given twice the last counts.
"""

from __future__ import annotations

from pathlib import Path

from megatron_nemotron3.precision import yaml_file

#: Name of the precision file.
FILE = "precision.yaml"


def _edit(folder: Path, old: str, new: str) -> None:
    file = folder / FILE
    text = file.read_text()
    if old not in text:
        raise ValueError(f"{old!r} is not in {file}")
    file.write_text(text.replace(old, new))


def enabled_dropped(folder: Path) -> str:
    """A matcher of the precision file lacks `enabled: true`, so its layers take NVFP4."""
    _edit(folder, '"*mixer.out_proj"\n    enabled: true', '"*mixer.out_proj"')
    return ""


def glob_matches_nothing(folder: Path) -> str:
    """A matcher of the precision file names a module that the model does not have."""
    _edit(folder, "*mlp.fc[12]_latent_proj", "*mlp.latent_proj[12]")
    return ""


def matcher_dropped(folder: Path) -> str:
    """The precision file has no matcher for attention's output, which takes NVFP4."""
    matcher = '  attention_proj:\n    config: "bf16"\n    type: "glob"\n    pattern: "*.linear_proj"\n'
    _edit(folder, f"{matcher}    enabled: true\n", "")
    return ""


def file_dropped(folder: Path) -> str:
    """The precision file is another, with no matcher at all."""
    (folder / FILE).write_text("configs: {}\nmatchers: {}\n")
    return ""


def tail_counted_per_stage(folder: Path) -> str:
    """The BF16 layers at the end are counted in one of two stages instead of the whole model."""
    return "--num-layers-at-end-in-bf16 7"


def memory_exceeded(folder: Path) -> str:
    """A micro-batch of this size does not fit on the GPUs."""
    return "--micro-batch-size 8"


def buckets_shifted(folder: Path) -> str:
    """A reshardable checkpoint holds the optimizer's state shifted by the padding between buckets."""
    return "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


def write_file(folder: Path, model: str) -> None:
    """Write the published precision file."""
    from megatron_nemotron3.models import get

    yaml_file.write_precision_file(get(model), folder / FILE)
