"""NeMo-RL with our stack: import of a Hugging Face model, and the worker: `NEMO_RL_DIR`, opt-in."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import yaml

from megatron_nemotron3.checkpoints.metadata import read_metadata
from megatron_nemotron3.cli import main
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.rl.frameworks import marks
from tests.support.checkpoint_reading import read_rows
from tests.support.hf_folders import write_hf, write_tokenizer
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
    )
    iteration = tmp_path / "theirs" / "iter_0000000"
    model = yaml.safe_load((iteration / "run_config.yaml").read_text())["model"]
    assert "megatron_nemotron3.bridge.torch_stack_spec" in str(model["hybrid_stack_spec"])
    assert model["mtp_num_layers"] == config.mtp_num_layers
    index = read_metadata(iteration)
    theirs = {name: read_rows(index, name) for name in index.tensors}
    same(written(tmp_path / "ours"), theirs, config)


def test_the_worker_sends_the_weights(tmp_path: Path) -> None:
    """NeMo-RL's worker imports the model, builds it with an optimizer, and sends every tensor unchanged."""
    adapter = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    if not hasattr(adapter, "FullyShardedDataParallelV1"):
        pytest.skip("NeMo-RL's worker needs the mains of Megatron-LM and Bridge: make test-rl MAIN=1")
    from tests.rl import nemo_rl_worker

    config = get("super-tiny")
    values = write_hf(tmp_path / "hf", config)
    write_tokenizer(tmp_path / "hf")
    arguments = (nemo_rl_worker.refit, 1, tmp_path / "hf")
    (rank,) = run_distributed(*arguments, timeout=500, apart=True)
    assert rank["decoder"] == "Nemotron3Stack" and rank["mtp"] == config.mtp_num_layers == 2
    found = rank["weights"]
    assert found.keys() == values.keys()
    # The routers' correction may be sent in the policy's type; it is FP32 in the folder.
    assert {value.dtype for value in found.values()} <= {torch.bfloat16, torch.float32}
    assert [
        name for name, value in values.items() if not found[name].equal(value.to(found[name].dtype))
    ] == []
