"""`nemotron3 report`: one HTML file about a run, which needs no other file and no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def render(**values: Any) -> str:
    """Fill in the template `page.html`; `values` are the names in it, `facts` among them.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template("page.html").render(**values)
