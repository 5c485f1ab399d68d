"""A matplotlib figure to a file, whole or not at all. Imports no matplotlib of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def save(figure: Any, path: Path) -> None:
    """Write a pyplot figure as PNG under a temporary name, rename it, and close the figure.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    import matplotlib.pyplot as plt

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    finally:
        plt.close(figure)
        temporary.unlink(missing_ok=True)
