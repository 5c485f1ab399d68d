"""The schedule of a command of several steps, and the model that its files name."""

from __future__ import annotations

from megatron_nemotron3.models import Nemotron3Config


def require_positive(options: object, *names: str) -> None:
    """Raise ValueError for an option that is given and not above 0."""
    for name in names:
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give more than 0")


def require_schedule(options: object, config: Nemotron3Config) -> None:
    """Raise ValueError if --steps or --lr is missing and the model is no tiny one."""
    missing = [f"--{name}" for name in ("steps", "lr") if getattr(options, name) is None]
    if missing and "-tiny" not in config.name:
        raise ValueError(f"{config.title} has no default schedule: give {' and '.join(missing)}")


def own(config: Nemotron3Config) -> Nemotron3Config:
    """Return the model for a file, with a name of its own; that of a tiny one keeps its default schedule."""
    return config.but(name="own-tiny" if "-tiny" in config.name else "own")
