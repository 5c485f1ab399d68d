"""What pyproject.toml cannot say: a README with links for a package index, and where the recipes lie."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
RECIPES = "megatron_nemotron3.recipes"


def long_description() -> str:
    """README.md with each link to a file of this repository as a link to "Source", or as the file's name.

    Where pyproject.toml has no such address, the reader finds the file in the source distribution.
    """
    source = re.search(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    target = rf"[\1]({source[1]}/blob/main/\2)" if source else r"\1 (`\2`)"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)", target, text)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    # The folder of scripts at the top is a package without modules in the wheel.
    packages=[*find_packages(include=["megatron_nemotron3", "megatron_nemotron3.*"]), RECIPES],
    package_dir={RECIPES: "recipes"},
)
