"""The long description: README.md, whose links a package index can follow. The rest is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description() -> str:
    """README.md with each link to a file of this repository as a link to "Source", or as the file's name.

    Where pyproject.toml has no such address, the reader finds the file in the source distribution.
    """
    source = re.search(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    target = rf"[\1]({source[1]}/blob/main/\2)" if source else r"\1 (`\2`)"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)", target, text)


setup(long_description=long_description(), long_description_content_type="text/markdown")
