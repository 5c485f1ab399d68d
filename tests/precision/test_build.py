"""NVFP4 of a model that is built in Python: the same as by environment and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_nemotron3 as n3
from megatron_nemotron3.launch import Launch
from megatron_nemotron3.models import tiny
from megatron_nemotron3.precision import install, yaml_file
from megatron_nemotron3.precision.settings import current, emulating, parse_emulation
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from megatron_nemotron3.train.build import model_config
from tests.support.emulation import seed
from tests.support.recipe_table import expected

TINY = tiny(n3.get("super"))


def built(
    file: str | None, environment: str | None, **arguments: Any
) -> tuple[dict[str, str], set[Any], torch.Tensor]:
    """Formats by name, recipes' switches for stochastic rounding, and the loss of a forward."""
    seed(7)
    outside = parse_emulation(environment or "")
    with emulating(outside):
        model = n3.build_model(
            "super", tiny=True, backend="torch", te_precision_config_file=file, **arguments
        )
        assert current() == outside
    words = torch.arange(64).unsqueeze(0)
    loss = model(words, words, None, labels=words).mean()
    found = dict(install.emulated(model))
    training = [products.training for products in found.values()]
    stochastic = {
        how.dgrad[0].stochastic for how in training if how and how.dgrad and how.dgrad[0].block == 16
    }
    return {name: products.formats[0] for name, products in found.items()}, stochastic, loss.detach()


def take(file: str) -> dict[str, Any]:
    initialize()
    return {
        "both": built(file, "nvfp4,sr=0", precision="nvfp4", emulate=True),
        "text": built(file, None, precision="nvfp4", emulate="nvfp4,sr=0"),
        "off": built(None, None, precision="bf16", emulate="0"),
    }


def test_a_model_built_in_python(tmp_path: Path) -> None:
    """The argument counts before the setting around it, which is afterwards what it was."""
    file = str(tmp_path / "precision.yaml")
    yaml_file.write_precision_file(TINY, file)
    found = run_distributed(take, 1, file)[0]
    wanted = {name: fmt for name, fmt in expected(TINY, "nvfp4").items() if fmt != "bf16"}
    assert found["both"][:2] == (wanted, {True}) and found["text"][:2] == (wanted, {False})
    assert torch.equal(found["both"][2], found["text"][2])  # no draws in forward
    assert found["off"][0] == {} and not torch.equal(found["off"][2], found["text"][2])


def test_bad_emulation_is_refused() -> None:
    with pytest.raises(ValueError, match="'st' is no switch"):
        model_config(Launch.of("super", tiny=True, backend="torch", precision="nvfp4", emulate="nvfp4,st=0"))
