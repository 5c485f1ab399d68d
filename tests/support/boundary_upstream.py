"""Upstream's unit tests of a Megatron-LM checkout, with our classes in place of upstream's, on gloo.

The test files are not changed. In every rank, inside `cpu_mode`:

    our class stands where upstream's module has its own, before the test module is imported;
    `new_group` with backend nccl makes a gloo group, also where torch calls it itself;
    ranks meet after every `new_group`: on gloo a group that one rank destroys before another has connected
    is a refused connection.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest

#: node id -> "passed", "failed: …" or "skipped: …"
Outcomes = dict[str, str]


class _Recorder:
    """A pytest plugin that keeps outcomes, and leaves out tests by words in their names."""

    def __init__(self, without: tuple[str, ...]) -> None:
        self.without = without
        self.outcomes: Outcomes = {}
        self.left_out: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.left_out = [item.name for item in items if any(word in item.nodeid for word in self.without)]
        items[:] = [item for item in items if item.name not in self.left_out]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.outcomes[name] = f"failed: {report.longreprtext[-1500:]}"
        elif report.skipped:
            self.outcomes[name] = f"skipped: {report.longrepr}"
        elif report.when == "call":
            self.outcomes.setdefault(name, "passed")


def run_file(
    checkout: str, file: str, classes: dict[str, str], without: tuple[str, ...]
) -> tuple[Outcomes, list[str]]:
    """Run a test file on this rank; for `run_distributed`.

    Args:
        checkout: of Megatron-LM.
        file: relative to it.
        classes: "module:name" of upstream -> "module:name" of ours; empty: upstream's own.
        without: words in the names of tests that are not run.

    Returns: outcomes, and the names that were not run.
    """
    _replace(classes)
    gloo_groups()
    for name in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
        del sys.modules[name]  # upstream's package has this name, too
    sys.path.insert(0, checkout)
    recorder = _Recorder(without)
    options = ["-q", "--no-header", "--noconftest", "-p", "no:cacheprovider", "-p", "no:randomly"]
    os.chdir(checkout)
    pytest.main([*options, "-c", os.devnull, "--rootdir", checkout, file], plugins=[recorder])
    return recorder.outcomes, recorder.left_out


def _replace(classes: dict[str, str]) -> None:
    for theirs, ours in classes.items():
        module, _, name = theirs.partition(":")
        our_module, _, our_name = ours.partition(":")
        setattr(importlib.import_module(module), name, getattr(importlib.import_module(our_module), our_name))


def gloo_groups() -> None:
    """Replace nccl by gloo in `distributed_c10d`, as `cpu_mode` does in torch.distributed."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    original = distributed_c10d.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        group = original(*args, **kwargs)
        dist.barrier()
        return group

    distributed_c10d.new_group = dist.new_group = new_group
