"""What `nemotron3 --version` prints. It imports no command."""

from __future__ import annotations

import platform

import megatron_nemotron3

#: Distributions that decide what this package can do, beside its own version.
PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton", "transformers")


def versions() -> str:
    """Return the versions of this package, of Python and of the packages that it builds on, as installed."""
    from importlib import metadata  # a quarter of the time of `nemotron3 --help`

    found = {"nemotron3": megatron_nemotron3.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    width = max(map(len, found)) + 2
    return "".join(f"{name:<{width}}{version}\n" for name, version in found.items())
