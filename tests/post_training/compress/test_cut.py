"""What is left of a model is a model of its config, and computes what it computed before."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.plan import Slices, extent, whole
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource, row_major
from megatron_nemotron3.checkpoints.convert.streams import BAND
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from megatron_nemotron3.post_training import compress
from megatron_nemotron3.post_training.compress.cut import CutTensors
from megatron_nemotron3.post_training.compress.scores import Scores
from megatron_nemotron3.post_training.compress.sizes import Sizes, candidate_config
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.post_training.compress.silence import all_logits, build, random_scores, scale_norms, silence

#: With MTP; LatentMoE, experts without a latent width, experts that differ by layer, dense layers.
CONFIGS = {name: tiny(get(name)) for name in ("super", "nano", "puzzle", "nano-4b")}
#: An MTP block for each depth.
CONFIGS["two blocks"] = CONFIGS["super"].but(mtp_use_repeated_layer=False)
EVERYTHING: dict[str, dict[str, Any]] = {
    "super": {
        "hidden_size": 96,
        "num_layers": 10,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "num_moe_experts": 24,
        "moe_ffn_hidden_size": 64,
        "moe_shared_expert_intermediate_size": 128,
        "moe_latent_size": 24,
    },
    "two blocks": {"hidden_size": 96, "num_layers": 8, "num_query_groups": 1, "num_moe_experts": 24},
    "nano": {"hidden_size": 96, "num_moe_experts": 12, "moe_ffn_hidden_size": 64},
    "puzzle": {"num_layers": 10, "num_moe_experts": 24, "moe_latent_size": 24},
    "nano-4b": {
        "hidden_size": 96,
        "num_layers": 10,
        "mamba_num_heads": 8,
        "num_attention_heads": 4,
        "dense_ffn_hidden_size": 320,
    },
}


def cut(name: str, sizes: Sizes, control: bool = False) -> tuple[Nemotron3Config, list[float], float]:
    """Cut a model with silent parts: its config, errors of all logits, and what cutting others changes."""
    config = CONFIGS[name]
    scores = random_scores(config)
    layers = scores.layers(sizes.get("num_layers", config.num_layers))  # type: ignore[arg-type]
    pruned = candidate_config(config, sizes, layers)
    model = build(config)
    silence(model, scores, pruned, layers)
    before = all_logits(model)

    def after(scores: Scores) -> list[torch.Tensor]:
        found, weights = compress.prune(model, scores, sizes)
        student = build(found)
        scale_norms(weights, config, found)
        compress.load(student, weights)
        return all_logits(student)

    errors = [float((a - b).abs().max()) for a, b in zip(before, after(scores), strict=True)]
    wrong = float("inf")
    if control:
        wrong = float((before[-1] - after(random_scores(config, seed=1))[-1]).abs().max())
    return pruned, errors, wrong


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full if n in ("nano", "two blocks") else ()) for n in EVERYTHING],
)
def test_all_sizes(name: str) -> None:
    """Decoder and MTP compute what they computed; other parts of the first model would not."""
    ((pruned, errors, wrong),) = run_distributed(cut, 1, name, EVERYTHING[name], name == "super")
    assert {size: getattr(pruned, size) for size in EVERYTHING[name]} == EVERYTHING[name]
    assert len(errors) == 1 + pruned.mtp_num_layers
    assert max(errors) < 1e-4 < 0.01 < wrong


def test_experts_of_each_layer_have_a_width_of_their_own() -> None:
    ((pruned, errors, _),) = run_distributed(cut, 1, "super", {"moe_ffn_hidden_size": (96, 64, 32, 48, 96)})
    assert pruned.moe_layers == ((96, 6), (64, 6), (32, 6), (48, 6), (96, 6))
    assert max(errors) < 1e-4


def same_sizes(name: str) -> bool:
    """Prune to the sizes a model has."""
    config = CONFIGS[name]
    model = build(config)
    _, weights = compress.prune(model, random_scores(config), {"hidden_size": config.hidden_size})
    return all(torch.equal(t, model.state_dict()[key]) for key, t in weights.items()) and len(weights) > 50


def test_the_sizes_that_a_model_has_change_nothing() -> None:
    assert run_distributed(same_sizes, 1, "super") == [True]


class Numbered(TensorSource):
    """Tensors whose elements are their numbers; notes the largest slice that was read."""

    def __init__(self, tensors: dict[str, SourceTensor]) -> None:
        self.folder, self.files, self.tensors, self.largest = Path(), {}, tensors, 0

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        slices = whole(self.tensors[name].shape) if slices is None else slices
        self.largest = max(self.largest, prod(extent(slices)) * 4)
        index = numpy.ix_(*(numpy.arange(*one) for one in slices))
        numbers = sum(i * n for i, n in zip(index, row_major(self.tensors[name].shape)))
        return torch.from_numpy(numbers.astype(numpy.int32))


def test_slices_are_read_in_bands() -> None:
    """Any slice of any tensor is that of the indices that stay, and no read is larger than a band."""
    config = CONFIGS["super"].but(vocab_size=32768, hidden_size=1024, moe_latent_size=256)
    source = Numbered({t.name: SourceTensor("int32", t.shape) for t in inventory.hf_tensors(config)})
    pruned = candidate_config(config, EVERYTHING["super"] | {"num_layers": 12, "hidden_size": 96})
    scores = random_scores(config)
    view = CutTensors(source, scores, pruned, range(12))
    assert {t.name: t.shape for t in inventory.hf_tensors(pruned)} == {
        n: t.shape for n, t in view.tensors.items()
    }
    made = numpy.random.default_rng(0)
    for name, tensor in view.tensors.items():
        there, axes = view._parts[name]
        kept = [numpy.arange(n) if i is None else i for i, n in zip(axes, tensor.shape)]
        slices = tuple(tuple(sorted(made.choice(n + 1, 2, replace=False).tolist())) for n in tensor.shape)
        strides = row_major(source.tensors[there].shape)
        index = numpy.ix_(*(i[a:b].astype(numpy.int64) for i, (a, b) in zip(kept, slices)))
        wanted = sum(i * n for i, n in zip(index, strides))
        numpy.testing.assert_array_equal(view.read(name, slices), wanted)
    name = "backbone.embeddings.weight"
    assert view.read(name).shape == (32768, 96)
    assert BAND // 2 < source.largest <= BAND < source.tensors[name].nbytes
