"""Bridge's own unit tests of its NemotronH converter and hybrid provider, with ours in place.

Needs a checkout of Megatron-Bridge beside the installed package: MEGATRON_BRIDGE_DIR.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("MEGATRON_BRIDGE_DIR", "")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.bridge") is None or not CHECKOUT,
        reason="needs Megatron-Bridge (make test-bridge), and its checkout in MEGATRON_BRIDGE_DIR",
    ),
]


def test_bridges_own_tests_pass_with_our_converter() -> None:
    """All of them, unchanged. The plugin also lets them run without TransformerEngine."""
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.bridge.upstream", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", CHECKOUT, "--noconftest", "--import-mode=importlib"),
            *("-W", "ignore"),
            f"{CHECKOUT}/tests/unit_tests/models/nemotronh/test_nemotron_h_bridge.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    assert re.fullmatch(r"\d+ passed in .*", found.stdout.splitlines()[-1])
