"""verl's engine with `external_lib: megatron_nemotron3.bridge`, and its weight sync: `VERL_DIR`, opt-in.

verl compares its sharded delta sync with Bridge's full export on two GPUs, for a model of kinds M, * and -
(tests/special_distributed/test_mcore_probe_differential.py). Here it is compared on gloo, for models with
experts, LatentMoE and MTP, with tensor, pipeline and expert parallelism, and by what reaches rank 0, which
sends the weights: entries of a rank that verl does not merge are not counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.rl.frameworks import marks
from tests.support.convert_models import DISTINCT
from tests.support.hf_folders import write_hf

pytestmark = marks("VERL_DIR")

LAYOUTS = {
    "one rank": {},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "EP2": {"ep": 2},
    "TP2 EP2": {"tp": 2, "ep": 2},
    "TP2 PP2": {"tp": 2, "pp": 2},
}
MODELS = {
    "super": get("super-tiny"),
    # All kinds of layers in the decoder and inside MTP, an odd vocabulary, every size of its own.
    "distinct": DISTINCT.but(pattern="M-E*ME"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_change_of_a_weight_reaches_exactly_its_tensor(model: str, layout: str, tmp_path: Path) -> None:
    from tests.rl import verl_ranks

    config, sizes = MODELS[model], LAYOUTS[layout]
    values = write_hf(tmp_path / "hf", config)
    world = max(sizes.get("tp", 1) * sizes.get("pp", 1), sizes.get("ep", 1))
    ranks = run_distributed(
        verl_ranks.sync, world, tmp_path / "hf", sizes, pattern(config, sizes), timeout=300, apart=True
    )
    first = ranks[0]
    assert {rank["decoder"] for rank in ranks} == {"Nemotron3Stack"}
    assert {rank["mtp"] for rank in ranks} == {config.mtp_num_layers}

    assert first["before"].keys() == values.keys()
    assert [n for n, value in values.items() if not bits(first["before"][n]).equal(bits(value))] == []
    received = merged([rank["everything"] for rank in ranks])
    assert received.keys() == values.keys()
    for name, value in values.items():
        assert_received(name, received[name], bits(value), torch.ones(value.numel(), dtype=torch.bool))

    received = merged([rank["sparse"] for rank in ranks])
    for name, value in first["before"].items():
        after = bits(first["after"][name])
        assert not after.equal(bits(value)), f"{name} does not depend on any weight"
        assert_received(name, received[name], after, (after != bits(value)).view(-1))


def test_mtp_enable_alone_does_not_remove_mtp(tmp_path: Path) -> None:
    """With verl's default, `mtp.enable` false, the layer pattern still has MTP (docs/bridge.md)."""
    from tests.rl import verl_ranks

    write_hf(tmp_path / "hf", MODELS["super"])
    (sent,) = run_distributed(verl_ranks.without_mtp, 1, tmp_path / "hf", timeout=300, apart=True)
    assert any(name.startswith("mtp.") for name in sent)


def pattern(config: Nemotron3Config, sizes: dict[str, int]) -> str:
    """The model's layers, cut into equal stages."""
    main, *mtp = config.full_pattern.split("/")
    half = len(main) // sizes.get("pp", 1)
    return "/".join([main[:half] + "|" + main[half:] if half < len(main) else main, *mtp])


def bits(value: torch.Tensor) -> torch.Tensor:
    """A tensor as the delta sync sends it, BF16, to compare bit by bit."""
    return value.to(torch.bfloat16).view(torch.int16)


def merged(ranks: list[list[Any]]) -> dict[str, tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """Tensor -> (shape, positions, values) of what reaches rank 0."""
    found: dict[str, list[Any]] = {}
    for rows in zip(*ranks, strict=True):
        _, together = rows[0]
        for (slots, counts, index, value), _ in [rows[rank] for rank in together or [0]]:
            assert slots == rows[0][0][0]
            parts = zip(slots, index.split(counts), value.split(counts))
            for (name, shape), places, values in parts:
                found.setdefault(name, []).append((tuple(shape), places.long(), values))
    return {
        name: (pieces[0][0], torch.cat([p[1] for p in pieces]), torch.cat([p[2] for p in pieces]))
        for name, pieces in found.items()
    }


def assert_received(name: str, received: Any, wanted: torch.Tensor, where: torch.Tensor) -> None:
    """Exactly the elements of `where` arrive, each with its value."""
    shape, places, values = received
    assert shape == tuple(wanted.shape), name
    assert places.unique().equal(where.nonzero()[:, 0]), name
    assert wanted.reshape(-1)[places].equal(bits(values)), name
