"""Peak memory of whole conversions at the widths of Ultra, below the promised 1 GiB at any size.

Measured is anonymous memory: pages of mapped files belong to the system's cache, which takes them back. Pages
that forked processes share count once (PSS): two workers share some 0.3 GB of torch with their parent.
Files are sparse (tests/support/sparse_checkpoints.py): all lengths and reads are real, but nothing is written
to the disk.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.process_tree import Usage, watch
from megatron_nemotron3 import cli
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from megatron_nemotron3.models.omni import NANO_OMNI
from tests.support import sparse_checkpoints as sparse
from tests.support.counted_job import digest
from tests.support.megatron_tensors import megatron_tensors

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
#: One of each kind of layer, and an MTP block.
ULTRA = get("ultra").but(pattern="M*E", mtp_num_layers=1)
SMALL = ULTRA.but(pattern="*E", mtp_pattern=None, mtp_num_layers=0, num_moe_experts=22, vocab_size=2048)

#: Of one worker.
_MOST = 160 << 20


def measured(*words: object) -> Usage:
    """Run Python in a new process."""
    return watch(
        [sys.executable, *map(str, words)],
        environment={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        proportional=True,
        interval=0.05,
    )


def nemotron3(*words: object) -> Usage:
    """Run the command in new processes; it must succeed."""
    used = measured("-m", "tests.support.sparse_checkpoints", *words)
    assert used.returncode == 0, used.output[-2000:]
    return used


def idle() -> int:
    """Anonymous memory of an interpreter with torch, in bytes."""
    return measured("-c", "import time, torch; time.sleep(0.3)").proportional


def peaks(folder: Path, config: Nemotron3Config, workers: int) -> list[int]:
    """Return the peak memory of from-hf and to-hf, in bytes above an idle interpreter with torch."""
    hf, megatron, back = (folder / name for name in ("hf", "megatron", "back"))
    sparse.write_hf(hf, config)
    own, count = idle(), ("--workers", workers)
    used = [
        nemotron3("convert", "from-hf", hf, megatron, *count),
        nemotron3("convert", "to-hf", megatron, back, *count),
    ]
    return [one.proportional - own for one in used]


@pytest.mark.full
def test_small_model_of_ultras_widths(tmp_path: Path) -> None:
    """22 of 512 experts: 0.9 GB in two stacks, each of them larger than what is allowed."""
    assert SMALL.hidden_size == 8192 and SMALL.moe_ffn_hidden_size == 5120 and SMALL.moe_latent_size == 2048
    found = peaks(tmp_path, SMALL, workers=1)
    assert max(found) < _MOST, found


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_every_kind_of_layer_of_ultra(tmp_path: Path, workers: int) -> None:
    """All 131,072 rows of the embedding (2.1 GB) and all 512 experts (21.5 GB in two stacks, twice)."""
    assert ULTRA.num_moe_experts == 512 and ULTRA.vocab_size == 131072
    found = peaks(tmp_path, ULTRA, workers)
    same = nemotron3("convert", "verify", tmp_path / "hf", tmp_path / "back", "--workers", workers)
    assert "0 differ" in same.output
    found.append(same.proportional - idle())
    assert max(found) < GIB // 2, found


@pytest.mark.full
@pytest.mark.parametrize("layers", [1, 0])
def test_omni(tmp_path: Path, layers: int) -> None:
    """Encoders of one layer or all, and projectors, of the width of Nano Omni (0.9 and 3.3 GB)."""
    language = NANO_OMNI.language.but(pattern="*E", num_moe_experts=8, vocab_size=16384)
    config = NANO_OMNI.but(language=language)
    assert config.sound is not None
    if layers:
        vision, sound = (replace(one, num_layers=layers) for one in (config.vision, config.sound))
        config = config.but(vision=vision, sound=sound)
    sparse.write_omni(tmp_path / "hf", config)
    own, count = idle(), ("--workers", 1)
    used = [
        nemotron3("convert", "from-hf", tmp_path / "hf", tmp_path / "megatron", *count),
        nemotron3("convert", "to-hf", tmp_path / "megatron", tmp_path / "back", *count),
    ]
    assert f"behind encoders radio {layers or 32} x 1280, parakeet {layers or 24} x 1024" in used[0].output
    assert max(one.proportional - own for one in used) < _MOST


@pytest.mark.full
def test_plan_of_the_whole_nano_omni(tmp_path: Path) -> None:
    sparse.write_omni(tmp_path / "hf", NANO_OMNI)
    used = nemotron3("convert", "from-hf", tmp_path / "hf", tmp_path / "out", "--dry-run")
    assert "nano-omni, layers" in used.output and "nothing was written" in used.output
    assert not (tmp_path / "out").exists()


#: Counts of the inventories, as the released checkpoints have them.
COUNTS = {"nano": 6243, "lightning": 6513, "super": 42683, "ultra": 51023}


@pytest.mark.full
@pytest.mark.parametrize("name", COUNTS)
def test_plan_of_a_whole_model(tmp_path: Path, name: str) -> None:
    """`--dry-run` reads all headers of a model of released size and describes it, in both directions."""
    config = get(name)
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    sparse.write_hf(hf, config)
    sparse.write_megatron(megatron, hf)
    own = idle()
    for way, source, tensors in (
        ("from-hf", hf, len(megatron_tensors(config))),
        ("to-hf", megatron, COUNTS[name]),
    ):
        used = nemotron3("convert", way, source, tmp_path / "out", "--dry-run")
        assert f" {tensors:,} tensors; " in used.output and "nothing was written" in used.output
        assert used.proportional - own < GIB // 2
    assert not (tmp_path / "out").exists()


def test_sparse_folders_are_what_the_converter_writes(tmp_path: Path) -> None:
    """Sparse files equal written files byte for byte, so measurements with them are valid."""
    sparse.write_hf(tmp_path / "hf", tiny(get("super")), limit=200_000)
    words = ["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "converted"), "--workers", "1"]
    assert cli.main(words) == 0
    sparse.write_megatron(tmp_path / "megatron", tmp_path / "hf")
    found, expected = digest(tmp_path / "converted"), digest(tmp_path / "megatron")
    for name in ("nemotron3_manifest.json", "release/hugging_face/config.json"):
        found.pop(name)
    assert found == expected
