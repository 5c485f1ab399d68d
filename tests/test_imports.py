"""Imports point one way, and the light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_nemotron3"

#: part -> parts it may import besides `common`. A part is a top-level module or folder of the package.
ALLOWED = {
    "common": {"checkpoint"},
    "models": {"checkpoint"},
    "args": {"boost", "checkpoint", "lora", "models", "precision"},
    "cpu": set(),
    "plots": {"checkpoint"},
    "bars": set(),
    "paired": set(),
    "monitor": {"checkpoint", "plots"},
    "checkpoint": {"bars"},
    "precision": {"checkpoint", "models", "monitor", "plots"},
    "convert": {"bars", "checkpoint", "layers", "lora", "models", "precision"},
    "boundary": {"checkpoint", "plots"},
    "plan": {"args", "checkpoint", "models", "plots", "precision"},
    "generate": {
        *("bars", "checkpoint", "convert", "cpu", "layers", "lifetime", "models", "omni", "paired", "plots"),
        *("run", "train"),
    },
    "certify": {
        *("args", "bars", "boost", "build", "checkpoint", "common", "convert", "cpu", "generate", "lora"),
        *("models", "monitor", "plan", "precision", "run", "specs", "train"),
    },
    "refit": {"args", "boundary", "checkpoint", "common", "convert", "models", "plan", "precision"},
    "bisect": {"checkpoint", "common", "convert", "distill", "generate", "layers", "models"},
    "distill": {
        *("args", "boundary", "build", "checkpoint", "convert", "cpu", "layers", "lora", "models", "monitor"),
        *("precision", "specs", "xtoken"),
    },
    "omni": {"args", "boundary", "build", "checkpoint", "common", "convert", "cpu", "models", "train"},
    "compression": {
        *("args", "bars", "build", "certify", "checkpoint", "convert", "cpu", "generate", "layers", "models"),
        *("monitor", "plan", "run", "train"),
    },
    "doctor": {"build", "common", "cpu", "layers", "models", "precision"},
    "layers": {"checkpoint", "cpu", "lora", "models", "monitor", "precision"},
    "lora": set(),
    "specs": {"layers", "models"},
    "build": {"args", "cpu", "layers", "models", "precision", "specs"},
    "bridge": {"convert", "cpu", "layers", "lora", "models", "specs"},
    "boost": {"checkpoint", "distill", "layers", "monitor"},
    "run": {
        *(
            "args",
            "boost",
            "checkpoint",
            "common",
            "cpu",
            "distill",
            "layers",
            "common",
            "models",
            "monitor",
            "precision",
        ),
        *("spawned", "specs"),
    },
    "train": {
        "args",
        "bars",
        "boost",
        "build",
        "checkpoint",
        "cpu",
        "distill",
        "layers",
        "common",
        "lora",
        "models",
        "monitor",
        "plan",
        "plots",
        "precision",
        "run",
    },
    "recipes": {"checkpoint", "omni"},
    "xtoken": {"checkpoint", "convert"},
    "finetune": {
        *("args", "bars", "boost", "checkpoint", "convert", "cpu", "generate", "lora", "models", "paired"),
        *("plots", "run", "train"),
    },
    "report": {
        *(
            "args",
            "bars",
            "checkpoint",
            "common",
            "generate",
            "models",
            "monitor",
            "plots",
            "precision",
            "train",
        ),
    },
    "report": {"args", "checkpoint", "common", "generate", "models", "monitor", "precision", "train"},
    "cli": {
        "args",
        "bisect",
        "certify",
        "boundary",
        "checkpoint",
        "compression",
        "convert",
        "doctor",
        "finetune",
        "generate",
        "models",
        "monitor",
        "plan",
        "precision",
        "refit",
        "report",
        "run",
        "train",
        "xtoken",
    },
    "__main__": {"cli", "common"},
}
#: parts whose import costs neither torch nor megatron, numpy, yaml, psutil, filelock
LIGHT = (
    "common.lock",
    "common.processes",
    "common.ranks",
    "common.spawned",
    "models",
    "post_training.compress.search_command",
    "post_training.compress.sizes",
    "post_training.compress.command",
    "args",
    "train.data",
    "cpu",
    "checkpoint",
    "convert",
    "checkpoints.convert.command",
    "inference.generate.command",
    "models.command",
    "train.monitor.watch",
    "precision.table",
    "post_training.boost.command",
    "post_training.finetune.command",
    "cli.report",
    "precision.census",
    "precision.command",
    "precision.settings",
    "train.teacher.check",
    "train.teacher.settings",
    "train.monitor.settings",
    "launch.boosting",
    "boundary.layout",
    "boundary.planner",
    "boundary.bounds",
    "boundary.explain",
    "boundary.command",
    "checkpoints.check",
    "checkpoints.convert.check",
    "cli.doctor.command",
    "launch.plan.flops",
    "launch.plan.state",
    "launch.plan.command",
    "launch.plan.memory",
    "cli.recipes",
    "inference.refit.command",
    "inference.refit.layouts",
    "inference.refit.shares",
    "post_training.xtoken.command",
    "proof.certify.options",
    "proof.certify.stages",
    "proof.certify.small",
    "proof.certify.large",
    "proof.certify.batch_shape",
    "proof.certify.twin_text",
    "proof.certify.layouts",
    "proof.certify.twin",
    "proof.certify.finding",
    "run",
    "cli",
    "train.command",
    "post_training.distill.logits_command",
)


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [node.module]
                if node.module != "megatron_nemotron3"
                else [f"{node.module}.{a.name}" for a in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("megatron_nemotron3.")}
    return found


def test_every_part_is_listed() -> None:
    parts = {
        p.stem
        for p in PACKAGE.iterdir()
        if (p.suffix == ".py" or p.is_dir()) and not p.name.startswith("__p")
    }
    assert parts - {"__init__", "py"} == set(ALLOWED)


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part: str) -> None:
    files = (
        [PACKAGE / f"{part}.py"]
        if (PACKAGE / f"{part}.py").exists()
        else list((PACKAGE / part).rglob("*.py"))
    )
    assert files
    used = set().union(*(_imports(file) for file in files)) - {part, "common"}
    assert used <= ALLOWED[part], f"{part} imports {sorted(used - ALLOWED[part])}"


@pytest.mark.parametrize("part", LIGHT)
def test_light_parts_import_nothing_heavy(part: str) -> None:
    code = (
        f"import sys, megatron_nemotron3, megatron_nemotron3.{part}; "
        "print([m for m in ('torch', 'megatron.core', 'numpy', 'yaml', 'transformers', 'psutil', 'filelock') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_facade_names_exist() -> None:
    import megatron_nemotron3 as n3

    for name in n3.__all__:
        assert getattr(n3, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        n3.nothing  # noqa: B018


def test_no_file_is_long() -> None:
    long = {str(f): n for f in PACKAGE.rglob("*.py") if (n := len(f.read_text().splitlines())) > 400}
    assert long == {}
