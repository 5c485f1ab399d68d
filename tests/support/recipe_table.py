"""The formats of a model's linears from the table of kinds alone, the reference of `ModelFormats.of`."""

from __future__ import annotations

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.formats import BF16
from megatron_nemotron3.precision.table import Structure, bf16_layers


def expected(config: Nemotron3Config, precision: str) -> dict[str, str]:
    """Module name -> format."""
    kept = bf16_layers(config, precision)
    return {
        linear.name: BF16
        if linear.layer is not None and not kept.start <= linear.layer < config.num_layers - kept.end
        else linear.kind.format(precision)
        for linear in Structure.of(config).linears()
    }
