"""FP32 masters found in checkpoints of real runs with each kind of optimizer state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_nemotron3.checkpoints.convert.keys import master_keys, non_weight_kind, plain_name
from megatron_nemotron3.checkpoints.metadata import CheckpointIndex, DistTensor, read_metadata
from megatron_nemotron3.launch import Launch, ParallelLayout, TrainingData, flags, to_argv
from megatron_nemotron3.train import processes
from tests.support import distributed
from tests.support.checkpoint_reading import read_rows
from tests.support.checkpoint_runs import CONFIG
from tests.support.short_run import short_schedule

BF16, FP32 = (DistTensor(kind, (4, 2), ()) for kind in ("bfloat16", "float32"))
RESHARD = ("--dist-ckpt-optim-fully-reshardable",)
#: Layout, whether the optimizer is distributed, further options -> what is before the master's key.
RUNS = {
    "plain": (ParallelLayout(), False, (), "optimizer.state.fp32_param."),
    "plain ep2": (ParallelLayout(dp=2, ep=2), False, (), "optimizer.state.fp32_param."),
    "reshardable": (ParallelLayout(), True, RESHARD, "optimizer.state.param."),
    "reshardable ep2": (ParallelLayout(dp=2, ep=2), True, RESHARD, "optimizer.state.param."),
}


def saved(folder: Path, layout: ParallelLayout, sharded: bool, *extra: str) -> CheckpointIndex:
    """The checkpoint of a BF16 run of two steps."""
    schedule = short_schedule(2, seq_length=32, global_batch_size=2, save_interval=2)
    data = TrainingData(mock_data=True, tokenizer_type="NullTokenizer", vocab_size=255, save=str(folder))
    chosen = flags(
        Launch.of(
            CONFIG,
            layout,
            precision="bf16",
            backend="torch",
            schedule=schedule,
            data=data,
            extra=extra,
            distributed_optimizer=sharded,
        )
    )
    argv = ["--device", "cpu", str(processes.ENTRY), *to_argv(chosen)]
    distributed.run_launcher(argv, layout.world_size, timeout=240)
    return read_metadata(folder / "iter_0000002")


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS)
def test_runs(run: str, tmp_path: Path) -> None:
    """Every weight except the expert bias has a master and equals the rounded master."""
    layout, sharded, extra, prefix = RUNS[run]
    index = saved(tmp_path, layout, sharded, *extra)
    found = master_keys(index.tensors)
    keys = [key for key in index.tensors if non_weight_kind(key) is None]
    assert set(found) == {plain_name(key) for key in keys if not key.endswith("expert_bias")}
    for weight, master in found.items():
        assert master == prefix + weight
        stored, exact = read_rows(index, weight), read_rows(index, master)
        assert exact.dtype == torch.float32 and torch.equal(exact.bfloat16(), stored)
    assert any(not torch.equal(read_rows(index, m), read_rows(index, w).float()) for w, m in found.items())


@pytest.mark.full
def test_buckets_have_no_names(tmp_path: Path) -> None:
    index = saved(tmp_path, ParallelLayout(), True)
    weights = [key for key in index.tensors if non_weight_kind(key) is None]
    parameters = [key for key in weights if not key.endswith("expert_bias")]
    with pytest.raises(
        ValueError, match="in 1 bucket.*save again with --dist-ckpt-optim-fully-resh"
    ) as error:
        master_keys(index.tensors)
    assert str(error.value).startswith(f"{len(parameters)} of {len(weights)} weights have no FP32 master")


def test_prefixes() -> None:
    weights = {"a.weight": BF16, "module.b.weight": BF16, "a.expert_bias": FP32}
    found = {
        "chained_0.optimizer.state.fp32_param.a.weight": FP32,
        "optimizer.state.param.module.b.weight": FP32,
        "optimizer.state.exp_avg.a.weight": FP32,
    }
    assert master_keys(weights | found) == {
        "a.weight": "chained_0.optimizer.state.fp32_param.a.weight",
        "b.weight": "optimizer.state.param.module.b.weight",
    }


def test_modules_of_a_mimo_model() -> None:
    """Each module has an optimizer of its own; a frozen one has none, and its weights are read."""
    language, frozen = "language_model.a.weight", "modality_submodules.vision.b.weight"
    tensors = {language: BF16, frozen: BF16}
    tensors |= {f"mimo.language.chained_0.optimizer.state.{k}.{language}": FP32 for k in ("param", "exp_avg")}
    expected = {language: f"mimo.language.chained_0.optimizer.state.param.{language}"}
    assert master_keys(tensors, optional="modality_submodules.") == expected
    with pytest.raises(ValueError, match=f"1 of 2 weights .*first '{frozen}'"):
        master_keys(tensors)
    wrapped = "modality_submodules.vision.module.module.b.weight"
    assert plain_name(wrapped) == frozen and non_weight_kind(f"mimo.vision.optimizer.state.step.{frozen}")


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({}, "1 of 2 weights .*first 'a.weight': .*no optimizer state with names"),
        ({"optimizer.state.exp_avg.a.weight": FP32}, "only some of the weights.*fully-reshardable"),
        (
            {"chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(x).bucket_idx_0.param": FP32},
            "in 1 bucket",
        ),
        ({"optimizer.state.param.a.weight": BF16}, "is bfloat16"),
        ({"optimizer.state.param.a.weight": DistTensor("float32", (8,), ())}, r"\[8\].*has shape \[4, 2\]"),
        ({f"optimizer.state.{kind}.a.weight": FP32 for kind in ("param", "fp32_param")}, "the same weight"),
        (
            {f"optimizer.state.param.{name}.weight": FP32 for name in "ac"},
            "1 of 2 FP32 masters belong to no weight.*c.weight",
        ),
    ],
)
def test_refusals(others: dict[str, DistTensor], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        master_keys({"a.weight": BF16, "a.expert_bias": FP32, **others})
