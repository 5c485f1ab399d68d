"""Our torch stack has the parameters and checkpoint keys that stock Megatron has on TransformerEngine (TE).

So a torch_dist checkpoint moves between `hybrid_stack_spec` and ours in both directions, strictly: TE asks
for its `_extra_state` objects, so ours has them, empty.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.models import GOLDEN_LAYOUTS, describe_golden_model, golden_file

GOLDEN: dict[str, Any] = json.loads(golden_file().read_text())
#: Name in the golden file -> (model, layout, rank).
CASES = {
    "super_like": ("super_like", "", 0),
    "dense_hybrid": ("dense_hybrid", "", 0),
    "super_like_tp2_ep2_rank0": ("super_like", "_tp2_ep2", 0),
    "super_like_tp2_ep2_rank1": ("super_like", "_tp2_ep2", 1),
}


@functools.cache
def ours(model: str, layout: str) -> list[Any]:
    """Per rank, the described torch model."""
    world_size, sizes = GOLDEN_LAYOUTS[layout]
    spec = ("megatron_nemotron3.specs", "nemotron3_torch_stack_spec")
    return run_distributed(describe_golden_model, world_size, model, sizes, *spec)


def split_extra_state(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """(tensors, names of `_extra_state` objects)."""
    extra = {key for key in checkpoint if key.endswith("_extra_state")}
    return {key: value for key, value in checkpoint.items() if key not in extra}, extra


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """(ours, stock)."""
    model, layout, rank = CASES[request.param]
    return ours(model, layout)[rank], GOLDEN[request.param]


def test_every_golden_model_is_compared() -> None:
    assert set(CASES) == set(GOLDEN)


def test_parameter_names_shapes_and_order(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    mine, stock = pair
    assert list(mine["parameters"].items()) == list(stock["parameters"].items())


def test_checkpoint_keys_shapes_chunks_and_order(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    mine, stock = (split_extra_state(side["checkpoint"])[0] for side in pair)
    assert mine == stock
    assert list(mine) == list(stock)


def test_extra_state(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    mine, stock = (split_extra_state(side["checkpoint"])[1] for side in pair)
    assert mine == stock


def test_chunks_of_all_ranks_tile_each_tensor() -> None:
    """Every element of every tensor is in some rank's chunks: an offset bug cannot hide in both ranks."""
    ranks = [split_extra_state(rank["checkpoint"])[0] for rank in ours("super_like", "_tp2_ep2")]
    assert {key: v["global_shape"] for key, v in ranks[0].items()} == {
        key: v["global_shape"] for key, v in ranks[1].items()
    }
    for key, entry in ranks[0].items():
        shape = entry["global_shape"]
        chunks = {
            (tuple(chunk["offset"]), tuple(chunk["shape"])) for rank in ranks for chunk in rank[key]["chunks"]
        }
        assert sum(volume(size) for _, size in chunks) == volume(shape), key


def volume(shape: Any) -> int:
    """Number of elements."""
    return functools.reduce(lambda a, b: a * b, shape, 1)
