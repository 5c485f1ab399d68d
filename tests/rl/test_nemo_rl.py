"""NeMo-RL imports a Hugging Face model with `mamba_stack_spec=`: `NEMO_RL_DIR`, opt-in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_nemotron3.checkpoint.metadata import read_metadata
from megatron_nemotron3.cli import main
from megatron_nemotron3.models import get
from tests.rl.frameworks import marks
from tests.support.checkpoint_reading import read_rows
from tests.support.distributed import run_distributed
from tests.support.hf_folders import write_hf
from tests.support.loaded_weights import same, written

pytestmark = marks("NEMO_RL_DIR")


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"ep": 2}], ids=str)
def test_import(sizes: dict[str, int], tmp_path: Path) -> None:
    """The checkpoint is that of `nemotron3 convert`, and names our spec."""
    from tests.rl import nemo_rl_ranks

    config = get("super-tiny")
    write_hf(tmp_path / "hf", config)
    assert main(["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "ours"), "--workers", "1"]) == 0
    run_distributed(
        nemo_rl_ranks.import_model,
        2 if sizes else 1,
        tmp_path / "hf",
        tmp_path / "theirs",
        "torch_stack_spec",
        sizes,
        timeout=300,
        apart=True,
        children=True,
    )
    iteration = tmp_path / "theirs" / "iter_0000000"
    model = yaml.safe_load((iteration / "run_config.yaml").read_text())["model"]
    assert "megatron_nemotron3.bridge.torch_stack_spec" in str(model["hybrid_stack_spec"])
    assert model["mtp_num_layers"] == config.mtp_num_layers
    index = read_metadata(iteration)
    theirs = {name: read_rows(index, name) for name in index.tensors}
    same(written(tmp_path / "ours"), theirs, config)
