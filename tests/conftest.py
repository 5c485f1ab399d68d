"""Settings of every test run: no deadlines, a clean Megatron for each test, long files first, `--quick`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from megatron_nemotron3.common.ranks import RANK_VARIABLES
from tests.support import durations

# No test may depend on how busy the machine is.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# A shell starts background jobs with SIGINT ignored, nohup with SIGHUP; processes of tests would inherit it.
for signum, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(signum) is signal.SIG_IGN:
        signal.signal(signum, handler)

SECONDS = durations.read()
_NVTE = {name for name in os.environ if name.startswith("NVTE_")}
_RANK = {name: os.environ.get(name) for name in RANK_VARIABLES}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remove what Megatron leaves behind in the process, so that it does not reach the next model.

    Megatron writes its attention backend to NVTE_* variables, sizes its metrics of MoE and MTP for the first
    model, and keeps the scale of its auxiliary loss in the shape of the first loss. A launcher that was tried
    here waits for the first forward of any model.
    """
    if (modules := sys.modules.get("torch.nn.modules.module")) is not None:
        hooks = modules._global_forward_pre_hooks
        for key, hook in list(hooks.items()):
            if getattr(hook, "__qualname__", "").startswith("at_first_forward."):
                del hooks[key]
    if (moe_logging := sys.modules.get("megatron.core.transformer.moe.moe_logging")) is not None:
        moe_logging.destroy_moe_metrics_tracker()
    if (moe_utils := sys.modules.get("megatron.core.transformer.moe.moe_utils")) is not None:
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if (mtp := sys.modules.get("megatron.core.transformer.multi_token_prediction")) is not None:
        mtp.MTPLossLoggingHelper.tracker.clear()
    for name in [name for name in os.environ if name.startswith("NVTE_") and name not in _NVTE]:
        del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """After the last test of a file, undo what a launcher in this process set to describe its one rank.

    A program that a later test starts would be that rank, and listen on the port of its store.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        for name, value in _RANK.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick`, which `make quick` uses."""
    parser.addoption("--quick", action="store_true", help="leave out the long files of tests/durations.txt")


def _seconds(path: Path) -> float:
    """How long a test file took when it was last measured."""
    below = path.is_relative_to(durations.TESTS)
    return SECONDS.get(path.relative_to(durations.TESTS).as_posix(), 0.0) if below else 0.0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out long files with `--quick`, without importing them."""
    return True if config.getoption("--quick") and _seconds(collection_path) > durations.LIGHT else None


def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest-xdist from starting the files with most tests first, whatever they take."""
    config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no process is left alone with one at the end."""
    items.sort(key=lambda item: -_seconds(item.path))


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """`tests.support.world.world_of_one` for a test module."""
    from tests.support.world import world_of_one

    with world_of_one():
        yield
