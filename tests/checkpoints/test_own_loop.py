"""A loop of one's own is saved and resumed: to the bit, in other layouts, by Megatron's optimizers, too."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_nemotron3.checkpoints import load_checkpoint, resume_checkpoint, save_checkpoint
from megatron_nemotron3.checkpoints.check import check
from megatron_nemotron3.checkpoints.folders import TRACKER, write_tracker
from megatron_nemotron3.checkpoints.state import read_arguments
from megatron_nemotron3.cpu.async_save import forked_results
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Pieces, gather, pieces, pieces_of
from megatron_nemotron3.train.build import build_model

CONFIG = get("super-tiny").but(pattern="ME*E", vocab_size=512, num_moe_experts=8)
MODEL: dict[str, Any] = {"precision": "fp32", "backend": "torch", "auxiliary_losses": False}
TOKENS = torch.arange(3, 36).reshape(1, -1)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Two groups, and MTP in none."""
    split: tuple[list[Any], list[Any]] = ([], [])
    for name, parameter in model.named_parameters():
        if not name.startswith("mtp."):
            split[parameter.dim() == 1].append(parameter)
    return torch.optim.AdamW([{"params": split[0]}, {"params": split[1], "weight_decay": 0.0}], lr=1e-3)


def losses(model: Any, optimizer: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        positions = torch.arange(32)[None]
        loss = model(TOKENS[:, :-1], positions, None, labels=TOKENS[:, 1:].contiguous()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.usefixtures("world")
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    model = build_model(CONFIG, **MODEL, seed=5)
    optimizer = adam(model)
    assert resume_checkpoint(tmp_path / "run", model, optimizer) == 0
    losses(model, optimizer, 2)
    optimizer.param_groups[1]["lr"] = 5e-4  # what a schedule has set
    place = save_checkpoint(tmp_path / "run", model, optimizer, 2)
    expected = losses(model, optimizer, 2)
    other = build_model(CONFIG, **MODEL, seed=6)
    resumed = adam(other)
    (tmp_path / "run" / "iter_0000003").mkdir()  # of a save that was killed
    assert resume_checkpoint(tmp_path / "run", other, resumed) == 2
    assert losses(other, resumed, 2) == expected and len(set(expected)) == 2
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    save_checkpoint(tmp_path / "run", other, resumed, 3)
    write_tracker(tmp_path / "run", 2)  # the next save was killed before it was named
    os.utime(tmp_path / "run" / TRACKER, (0, 0))
    assert resume_checkpoint(tmp_path / "run", other, resumed) == 3
    assert check(tmp_path / "run") == 0
    load_checkpoint(model, place)  # of any kind


@pytest.mark.usefixtures("world")
def test_what_cannot_be_saved_or_resumed_is_refused(tmp_path: Path) -> None:
    model = build_model(CONFIG, **MODEL)
    optimizer = adam(model)
    losses(model, optimizer, 1)
    with pytest.raises(ValueError, match=r"iter_0000000: steps are counted from 1"):
        save_checkpoint(tmp_path, model, optimizer, 0)
    with pytest.raises(ValueError, match="none of the model"):
        save_checkpoint(tmp_path, model, adam(build_model(CONFIG, **MODEL)), 1)
    with pytest.raises(ValueError, match="not of build_model"):
        save_checkpoint(tmp_path, torch.nn.Linear(2, 2), optimizer, 1)
    mixed = build_model(CONFIG, **{**MODEL, "precision": "bf16"})
    with pytest.raises(ValueError, match="parameters of one type: use a Float16Module"):
        save_checkpoint(tmp_path, mixed, SimpleNamespace(sharded_state_dict=None), 1)
    first = next(iter(optimizer.state.values()))
    kept, first["exp_avg"] = first["exp_avg"], torch.zeros(7)
    with pytest.raises(ValueError, match=r"exp_avg of embedding\.\S+ is \[7\], not \[512, 128\]"):
        save_checkpoint(tmp_path, model, optimizer, 1)
    first["exp_avg"] = kept
    expert = next(p for name, p in model.named_parameters() if name.endswith("linear_fc1.weight1"))
    optimizer.state[expert]["step"] += 1
    with pytest.raises(ValueError, match=r"step of \S*experts\S* differs among its parts: 1\.0, 2\.0"):
        save_checkpoint(tmp_path, model, optimizer, 1)
    assert not list(tmp_path.iterdir())
    optimizer.state[expert]["step"] -= 1
    save_checkpoint(tmp_path, model, optimizer, 1)
    with pytest.raises(ValueError, match="iter_0000001: it is saved already"):
        save_checkpoint(tmp_path, model, optimizer, 1)
    one_group = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="its optimizer has 2 groups of parameters, this one 1"):
        resume_checkpoint(tmp_path, model, one_group)
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    with pytest.raises(ValueError, match=r"its optimizer also has embedding\.\S+, and this one does not"):
        resume_checkpoint(tmp_path, model, optimizer)


def moved(folder: str, steps: int, sizes: dict[str, int]) -> tuple[Pieces, Pieces]:
    """Resume in a layout, make steps with gradients that need no other rank, save; weights and a moment."""
    model = build_model(CONFIG, **MODEL, **sizes)
    optimizer = adam(model)
    before = resume_checkpoint(folder, model, optimizer)
    for step in range(before, before + steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().cos() * (step + 1)
        optimizer.step()
    with forked_results():
        save_checkpoint(folder, model, optimizer, before + steps)
    moments = {p: kept["exp_avg"] for p, kept in optimizer.state.items()}
    return pieces([model]), pieces_of([model], list(moments), list(moments.values()))


def test_another_layout_resumes(tmp_path: Path) -> None:
    """One process, TP 2 with EP 2, PP 2 take turns: the values are those of one process."""
    run_distributed(moved, 1, str(tmp_path / "turns"), 1, {}, apart=True)
    straight = run_distributed(moved, 1, str(tmp_path / "straight"), 3, {}, apart=True)
    run_distributed(moved, 2, str(tmp_path / "turns"), 1, {"tp": 2, "ep": 2})
    ranks = run_distributed(moved, 2, str(tmp_path / "turns"), 1, {"pp": 2})
    arguments = read_arguments(tmp_path / "turns" / "iter_0000002")
    assert [arguments[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline", "expert")] == [
        2,
        1,
        2,
    ]
    for part in (0, 1):
        found, expected = (gather([rank[part] for rank in of]) for of in (ranks, straight))
        assert found.keys() == expected.keys()
        assert [key for key, value in found.items() if not value.equal(expected[key])] == []


def resumed_by_megatron(folder: str, distributed: bool) -> list[bool]:
    """Two runs of Megatron's optimizer on data-parallel ranks, one of them interrupted."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    def made() -> tuple[Any, Any]:
        options: Any = {"use_distributed_optimizer": distributed}
        model = build_model(CONFIG, **MODEL, dp=2, seed=5)
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(**options), model)
        return wrapped, get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-3, **options), [wrapped]
        )

    def step(model: Any, optimizer: Any) -> None:
        model.zero_grad_buffer()
        for parameter in model.parameters():
            parameter.main_grad.copy_(parameter.detach().cos())
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    with forked_results():
        save_checkpoint(folder, [model], optimizer, 1)
    step(model, optimizer)
    other, resumed = made()
    assert resume_checkpoint(folder, [other], resumed) == 1
    step(other, resumed)
    with pytest.raises(
        ValueError, match="no state of a torch optimizer's: load_checkpoint loads its weights"
    ):
        resume_checkpoint(folder, other, adam(other))
    return [a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True)]


@pytest.mark.parametrize("distributed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_megatrons_optimizers_resume(distributed: bool, tmp_path: Path) -> None:
    for equal in run_distributed(resumed_by_megatron, 2, str(tmp_path), distributed):
        assert all(equal) and equal
