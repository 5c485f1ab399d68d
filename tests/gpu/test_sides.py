"""The sides of a training step (benchmarks/sides.py): weights, model FLOPs, host waits."""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_nemotron3.cpu import cpu_mode
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models.parameters import count
from tests.support.gpu_world import host_waits, world
from tests.support.model_mapping import megatron_model, to_transformers, transformers_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # they import their neighbors
import models
import sides
import weights


def test_waits_on_cuda_are_warnings_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counting of what CUDA reports, with reports made here; everything is put back."""
    modes: list[str] = []

    def one_step() -> None:
        for _ in range(3):  # the same line three times: all count
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        torch.cuda.Event().synchronize()
        torch.cuda.synchronize()

    with cpu_mode():
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
        before = torch.cuda.Event.synchronize, torch.cuda.synchronize
        assert host_waits(one_step, "cuda") == 5
        assert modes == ["warn", "default"]
        assert (torch.cuda.Event.synchronize, torch.cuda.synchronize) == before


def test_stacks_keep_the_published_proportions() -> None:
    """Nano: 23 M, 23 E, 6 *; Super: 40, 40, 8."""
    assert models.stack("nano").pattern == "MEMEM*EME"
    assert models.stack("super").pattern == "MEMEMEM*EME"
    for name in ("nano", "super"):
        config, published = models.stack(name), get(name)
        assert config.but(pattern=published.pattern) == published.but(mtp_pattern=None, mtp_num_layers=0)


def test_experts_are_halved_until_they_fit() -> None:
    """On an H200 none are; on 80 GB half of Super's."""
    config = models.stack("super")
    assert models.fitting(config, 139 * 2**30) is config
    assert models.fitting(config, 80 * 10**9).num_moe_experts == 256
    with pytest.raises(ValueError, match="Super 120B-A12B with 64 experts needs .* use a larger device"):
        models.fitting(config, 44 * 2**30)


#: What Megatron's function asks of a layer kind that this family does not have.
LINEAR_ATTENTION = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim")


@pytest.mark.parametrize("tokens", [512, 8192])
def test_flops_are_megatrons(tokens: int) -> None:
    """Megatron leaves out the router; for Super all else is the same."""
    from megatron.training.training import num_floating_point_operations

    config = models.stack("super")
    args = Namespace(
        **{name: getattr(config, name) for name in dir(config) if not name.startswith("_")},
        group_query_attention=True,
        hybrid_layer_pattern=config.pattern,
        padded_vocab_size=config.vocab_size,
        swiglu=False,
        **dict.fromkeys(f"linear_{name}" for name in LINEAR_ATTENTION),
    )
    args.seq_length, args.mtp_num_layers = tokens, 0
    router = 6 * config.pattern.count("E") * value(config.num_moe_experts) * config.hidden_size
    ours = sum(models.flops_per_token(config, tokens).values())
    assert ours - router == pytest.approx(num_floating_point_operations(args, 1) / tokens, rel=1e-12)


def value(n: int | None) -> int:
    assert n is not None
    return n


def test_matmul_flops_are_six_a_parameter() -> None:
    """Without embedding, norms, convolution and the scan's vectors, less than 1 % of Super."""
    active = count(models.stack("super")).active["with_output_layer"]
    matmul = models.flops_per_token(models.stack("super"), 8192)["matmul"]
    assert 0.99 * active < matmul / 6 < active


@pytest.mark.parametrize("name", ["nano", "super"])
@pytest.mark.parametrize("pinned", [False, True])
def test_sides_hold_the_same_weights(name: str, pinned: bool) -> None:
    """Filled by name, converted by the parity tests' own table."""
    transformers = pytest.importorskip("transformers")
    config: Nemotron3Config = models.stack(name, tiny=True)
    theirs = transformers.NemotronHForCausalLM(transformers_config(config))
    weights.fill(weights.transformers_pieces(theirs), pinned=pinned)
    expected = theirs.state_dict()
    with world("cpu"):
        ours = megatron_model(config)
    weights.fill(weights.megatron_pieces(ours, config), pinned=pinned)
    found = to_transformers({n: t for n, t in ours.state_dict().items() if t is not None}, config)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    assert all(t.std() > 0 for n, t in found.items() if pinned or not n.endswith("correction_bias"))


@pytest.mark.full
def test_a_side_on_a_cpu() -> None:
    """What is measured of ours; the programs on a GPU call the same methods."""
    side = sides.SIDES["plain"]("cpu")
    assert side.build(models.stack("super", tiny=True)).startswith("backend torch")
    logits = side.logits(48)
    assert logits.shape == (48, side.config.vocab_size // sides.VOCABULARY_STRIDE)
    assert np.isfinite(logits).all() and np.array_equal(logits, side.logits(48))
    assert side.step(48) > 0 and min(side.peak(48)) >= 0 and side.waits(48) >= 0
    profile = side.profile(48, 20)
    assert len(profile) == 20 and all(row["calls"] > 0 for row in profile)
    side.close()
