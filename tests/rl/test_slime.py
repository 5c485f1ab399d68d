"""slime with `--custom-model-provider-path` builds, evaluates and trains our model: `SLIME_DIR`, opt-in."""

from __future__ import annotations

import pytest

from megatron_nemotron3.launch import Launch, flags, to_argv
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.rl.frameworks import marks

pytestmark = marks("SLIME_DIR")

MODEL = get("super-tiny").but(vocab_size=256)


def command(**sizes: int) -> list[str]:
    """The command line of slime's train.py that concerns Megatron."""
    launch = Launch.of(MODEL, precision="fp32", backend="torch", **sizes)
    return [
        *to_argv(flags(launch)),
        *("--custom-model-provider-path", "megatron_nemotron3.train.build.model_provider"),
        *("--train-backend", "megatron", "--load", "unused", "--loss-type", "sft_loss"),
        *("--rollout-batch-size", "3", "--num-rollout", "1"),
        *("--vocab-size", str(MODEL.vocab_size), "--weight-decay", "0", "--lr", "1e-3"),
        *("--micro-batch-size", "1", "--data-pad-size-multiplier", "8"),
    ]


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("mtp", [False, True])
def test_a_step(sizes: dict[str, int], mtp: bool) -> None:
    """Packed log-probabilities are those of each sample alone; MTP trains exactly if slime asks for it."""
    from tests.rl import slime_ranks

    argv = command(**sizes) + (["--enable-mtp-training"] if mtp else [])
    world = sizes.get("tp", 1) * sizes.get("pp", 1)
    ranks = run_distributed(slime_ranks.step, world, argv, sizes, timeout=300, apart=True)
    last = ranks[-1]
    assert {rank["decoder"] for rank in ranks} == {"Nemotron3Stack"}
    assert [len(logs) for logs in last["log_probs"]] == [response for _, response in slime_ranks.SAMPLES]
    for packed, alone in zip(last["log_probs"], last["plain"] or []):
        assert (packed - alone).abs().max() < 1e-4
    assert last["loss"] > 0 and last["norm"] > 0
    of_mtp = [name for name in last["parameters"] if name.startswith("mtp.")]
    changed = set().union(*(rank["changed"] for rank in ranks))
    assert of_mtp
    assert not mtp or any(name in changed for name in of_mtp)
    assert mtp or not any(name in changed for name in of_mtp)
    assert any(name.startswith("decoder.") for name in changed)
