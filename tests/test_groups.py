"""Groups in the pattern, `M[*E]`: the stack of such a model is walked, built and saved as its layers are.

Only a megatron-core that has groups (Megatron-LM #4798) builds one; the checkpoint that one wrote is read in
`tests/checkpoints/convert/test_dialects.py` on every version.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.hybrid import hybrid_layer_allocation

from megatron_nemotron3.checkpoints.convert.keys import numbered_by_layer
from megatron_nemotron3.models.pattern import parse
from megatron_nemotron3.models.series import decoder_layers
from megatron_nemotron3.precision.census import structure_of
from megatron_nemotron3.precision.model_formats import CensusError
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from megatron_nemotron3.specs import nemotron3_torch_stack_spec
from tests.support.models import build_hybrid, describe

GROUPED, PLAIN = "M[ME][*-]E", "MME*-E"
needs_groups = pytest.mark.skipif(
    not hasattr(hybrid_layer_allocation, "is_layer_group"), reason="this megatron-core has no groups"
)


def test_layers_of_groups_are_walked_one_by_one() -> None:
    layers = [SimpleNamespace(layer_number=number) for number in (1, 2, 3)]
    stack = SimpleNamespace(layers=[layers[0], SimpleNamespace(layers=layers[1:])])
    assert list(decoder_layers(stack)) == layers


@pytest.mark.parametrize("pattern", [f"{GROUPED}/*E", None])
def test_number_formats_need_a_pattern_without_groups(pattern: str | None) -> None:
    """A recipe names the linears of layers one by one; None: a model made from a list of layer configs."""
    with pytest.raises(CensusError, match="given by a pattern without groups"):
        structure_of(SimpleNamespace(hybrid_layer_pattern=pattern))


def step(pattern: str, monitored: str, weights: list[torch.Tensor] | None) -> dict[str, Any]:
    """One step of a model with these weights, in order; what it computes and how it is saved."""
    import os

    os.environ["NEMOTRON3_MONITOR"] = monitored
    initialize()
    model = build_hybrid(pattern, nemotron3_torch_stack_spec)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter, weight in zip(parameters.values(), weights or (), strict=bool(weights)):
            parameter.copy_(weight)
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(32).expand(2, -1)
    loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    numbers = [layer.layer_number for layer in decoder_layers(model.decoder)]
    return {
        "loss": loss.item(),
        "numbers": numbers,
        "weights": [p.detach().clone() for p in parameters.values()],
        "gradients": [p.grad.clone() for p in parameters.values()],
        "keys": list(describe(model)["checkpoint"]),
    }


@needs_groups
def test_a_grouped_model_is_the_same_model() -> None:
    (plain,) = run_distributed(step, 1, PLAIN, "1", None)
    (grouped,) = run_distributed(step, 1, GROUPED, "1", plain["weights"])
    assert grouped["numbers"] == plain["numbers"] == [1, 2, 3, 4, 5, 6]
    assert grouped["loss"] == plain["loss"]
    for mine, theirs in zip(grouped["gradients"], plain["gradients"], strict=True):
        torch.testing.assert_close(mine, theirs)
    mapped = numbered_by_layer(grouped["keys"], parse(GROUPED)).values()
    renamed = {key.replace("decoder.final_layernorm", "decoder.final_norm") for key in mapped}
    assert renamed == set(plain["keys"]) - {"output_layer._extra_state"}
