"""What the sides of the GPU measurements share: weights, sketches, model FLOPs, host waits."""

from __future__ import annotations

import warnings
from argparse import Namespace

import pytest
import torch

from benchmarks import gpu_model, gpu_weights
from benchmarks.gpu_world import host_waits, world
from megatron_nemotron3.cpu import cpu_mode
from megatron_nemotron3.models import Nemotron3Config
from tests.support.model_mapping import megatron_model, to_transformers, transformers_config


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


def test_experts_are_halved_until_they_fit() -> None:
    """On an H200 none are; on 80 GB half of Super's."""
    config = gpu_model.stack("super")
    assert gpu_model.fitting(config, 139 * 2**30) is config
    assert gpu_model.fitting(config, 80 * 10**9).num_moe_experts == 256
    with pytest.raises(ValueError, match="Super 120B-A12B with 64 experts needs .* use a larger device"):
        gpu_model.fitting(config, 44 * 2**30)


#: What Megatron's function asks of a layer kind that this family does not have.
LINEAR_ATTENTION = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim")


def test_flops_are_megatrons() -> None:
    """Megatron leaves out the router; for Super all else is the same."""
    tokens = 8192
    from megatron.training.training import num_floating_point_operations

    config = gpu_model.stack("super")
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
    ours = sum(gpu_model.flops_per_token(config, tokens).values())
    assert ours - router == pytest.approx(num_floating_point_operations(args, 1) / tokens, rel=1e-12)


def value(n: int | None) -> int:
    assert n is not None
    return n


@pytest.mark.parametrize(("name", "pinned"), [("nano", False), ("super", True)])
def test_sides_hold_the_same_weights(name: str, pinned: bool) -> None:
    """Filled by name, converted by the parity tests' own table."""
    transformers = pytest.importorskip("transformers")
    config: Nemotron3Config = gpu_model.stack(name, tiny=True)
    theirs = transformers.NemotronHForCausalLM(transformers_config(config))
    gpu_weights.fill(gpu_weights.transformers_pieces(theirs, config), pinned=pinned)
    expected = theirs.state_dict()
    with world("cpu"):
        ours = megatron_model(config)
    gpu_weights.fill(gpu_weights.megatron_pieces(ours, config), pinned=pinned)
    found = to_transformers({n: t for n, t in ours.state_dict().items() if t is not None}, config)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    assert all(t.std() > 0 for n, t in found.items() if pinned or not n.endswith("correction_bias"))
    # Sketches of the same tensors are the same, whatever the module that holds them.
    mine = gpu_weights.sketches(gpu_weights.megatron_pieces(ours, config))
    assert mine == gpu_weights.sketches(gpu_weights.transformers_pieces(theirs, config))


def relative(a: list[float], b: list[float]) -> float:
    x, y = torch.tensor(a), torch.tensor(b)
    return ((x - y).norm() / y.norm()).item()


@pytest.mark.parametrize("columns", [slice(None), slice(2, 3)], ids=["everywhere", "one column"])
def test_sketches_tell_how_far_tensors_are_apart(columns: slice) -> None:
    """On average over names; single estimates scatter most where the difference is one column."""
    generator = torch.Generator().manual_seed(1)
    a, noise = torch.randn(2, 7, 3, 5, generator=generator)
    change = torch.zeros_like(a)
    change[..., columns] = 0.05 * noise[..., columns]
    true = (change.norm() / a.norm()).item()
    found = []
    for number in range(40):
        sketch = [gpu_weights.sketch(f"t{number}", t).tolist() for t in (a + change, a)]
        found.append(relative(*sketch) ** 2)
    assert sum(found) / len(found) == pytest.approx(true**2, rel=0.35)
