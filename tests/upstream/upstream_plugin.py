"""A pytest plugin under which Megatron's own unit tests run on a CPU, with our stack or with the stock one.

`python -m tests.upstream` loads it into a pytest that runs in a checkout of Megatron-LM. It is a top-level
module because `tests` is Megatron's package there. The files of the tests are not changed:

* CUDA names mean the CPU (`megatron_nemotron3.cpu`);
* packages that test files import and that are not here are empty modules; Megatron itself does not see them;
* with UPSTREAM_SPEC=ours the names in `REPLACED` are ours in the test files that import them.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from megatron_nemotron3.cpu import cpu_mode, quiet_on_cpu

#: (module, name) of Megatron -> (module, name) of ours: what our spec replaces.
REPLACED = {
    (
        "megatron.core.models.hybrid.hybrid_layer_specs",
        "hybrid_stack_spec",
    ): "specs:nemotron3_torch_stack_spec",
    ("megatron.core.models.hybrid.hybrid_block", "HybridStack"): "layers.stack:Nemotron3Stack",
    ("megatron.core.ssm.mamba_mixer", "MambaMixer"): "layers.mamba:Mamba2Mixer",
    ("megatron.core.transformer.moe.moe_layer", "MoELayer"): "layers.latent_moe:LatentMoELayer",
    ("megatron.core.transformer.moe.router", "TopKRouter"): "layers.latent_moe:CountingRouter",
    (
        "megatron.core.transformer.multi_token_prediction",
        "MultiTokenPredictionLayer",
    ): "layers.mtp:MTPLayer",
    (
        "megatron.core.extensions.transformer_engine",
        "TEDotProductAttention",
    ): "layers.attention:TorchCoreAttention",
}
_ABSENT = ("transformer_engine", "flash_attn")


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    __version__ = "0.0.0"
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _AbsentPackages:
    """Finds packages of `_ABSENT` while a test file is being imported, and only then."""

    importing = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of an empty module, or None for other modules and at other times."""
        if not self.importing or name.split(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        """Create the empty module."""
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is empty."""


_packages = _AbsentPackages()
_mode = cpu_mode()  # for the rest of the process
_results: dict[str, tuple[str, str]] = {}


def pytest_configure() -> None:
    """Enter CPU mode and put our implementations in place."""
    quiet_on_cpu()
    _mode.__enter__()
    sys.meta_path.append(_packages)  # type: ignore[arg-type]


def pytest_make_collect_report() -> None:
    """Let test files import what is not here; each is imported when it is collected."""
    _packages.importing = True


def pytest_collection_finish(session: Any) -> None:
    """Put ours in place in the test files; a test that asks for an absent package from now on is told so."""
    _packages.importing = False
    for name in [name for name in sys.modules if name.split(".")[0] in _ABSENT]:
        del sys.modules[name]
    if os.environ["UPSTREAM_SPEC"] != "ours":
        return
    for (place, name), ours in REPLACED.items():
        theirs = getattr(importlib.import_module(place), name)
        part, _, attribute = ours.partition(":")
        replacement = getattr(importlib.import_module(f"megatron_nemotron3.{part}"), attribute)
        for module in {item.module for item in session.items}:
            if vars(module).get(name, session) is theirs:
                setattr(module, name, replacement)


def pytest_collectreport(report: Any) -> None:
    """Record a file that cannot be imported."""
    if report.failed:
        _results[report.nodeid] = ("error", _last_line(report))


def pytest_runtest_logreport(report: Any) -> None:
    """Record the outcome of a test; what fails first counts."""
    if report.when == "call" or not report.passed:
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        _results.setdefault(report.nodeid, (outcome, "" if report.passed else _last_line(report)))


def _last_line(report: Any) -> str:
    """The message of the exception, or the reason of a skip, in one line."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr).strip().splitlines()[-1].removeprefix("E ")
    return " ".join(text.split("\n", 1)[0].split())


def pytest_sessionfinish() -> None:
    """Write the outcomes."""
    Path(os.environ["UPSTREAM_RESULTS"]).write_text(json.dumps(_results))


def pytest_unconfigure() -> None:
    """Leave CPU mode while its modules are still there."""
    _mode.__exit__(None, None, None)
