"""X-Token beside NeMo-RL's: losses, gradients and the rules of the projection. `NEMO_RL_DIR`, opt-in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_nemotron3.proof.certify.ranks import run_distributed

pytestmark = [
    pytest.mark.rl,
    pytest.mark.skipif(
        not os.environ.get("NEMO_RL_DIR"), reason="NEMO_RL_DIR does not name a checkout: make test-rl"
    ),
]


@pytest.mark.parametrize("same", [False, True])
def test_losses(tmp_path: Path, same: bool) -> None:
    """To rounding, but for P-KL over the whole vocabulary, where they add 1e-10 to every probability."""
    from tests.rl import xtoken_compared

    (found,) = run_distributed(xtoken_compared.losses, 1, tmp_path, same, apart=True)
    for name, one in found.items():
        print(name, one)
        value, gradient = (1e-4, 2e-3) if name.startswith("P-KL") else (1e-6, 1e-6)
        assert one.ours == pytest.approx(one.theirs, rel=value), name
        assert one.gradient < gradient, name
    if same:  # plain KL, which theirs gives with the partition only
        assert found["P-KL"].ours == pytest.approx(found["H-KL"].theirs, rel=1e-6)


def test_rules(tmp_path: Path) -> None:
    """Every ordinary token has their weights; special tokens are paired by other rules."""
    from tests.rl import xtoken_compared

    ((size, different),) = run_distributed(xtoken_compared.different_rows, 1, tmp_path, apart=True)
    assert size > 300 and different == ["<|end|>"]
