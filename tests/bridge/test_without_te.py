"""Modules of Bridge that need TransformerEngine are imported without it, and nobody else sees one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="TransformerEngine is installed"
)
#: As in Bridge 0.6.2: the import, an annotation, an isinstance check.
LORA_LAYERS = """
import transformer_engine.pytorch as te
from megatron.bridge.peft import other

def branch(module) -> te.ops.Sequential:
    return isinstance(module, (te.Linear, te.LayerNormLinear))
"""
#: As megatron-core looks for TransformerEngine.
OTHER = """
try:
    import transformer_engine as te
    HAVE_TE = True
except ImportError:
    HAVE_TE = False
"""
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from megatron_nemotron3.cpu.bridge_imports import allow_missing_te
allow_missing_te(); allow_missing_te()
from megatron.bridge.peft import lora_layers, other
import importlib.util
found = importlib.util.find_spec("transformer_engine")
print(lora_layers.branch(3), other.HAVE_TE, found, sum("bridge_imports" in repr(f) for f in sys.meta_path))
"""


def test_import(tmp_path: Path) -> None:
    peft = tmp_path / "megatron" / "bridge" / "peft"
    peft.mkdir(parents=True)
    for folder in (peft, peft.parent):
        (folder / "__init__.py").touch()
    (peft / "lora_layers.py").write_text(LORA_LAYERS)
    (peft / "other.py").write_text(OTHER)
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["False", "False", "None", "1"], done.stderr
