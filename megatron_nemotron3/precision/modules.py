"""Names of a model's linears in closed form, and the format the table gives each. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.table import BF16, ModuleKind, kind_of, tail

_IN_LAYER: dict[str, tuple[str, ...]] = {
    "M": ("mixer.in_proj", "mixer.out_proj"),
    "*": ("self_attention.linear_proj", "self_attention.linear_qkv"),
    "E": (
        "mlp.experts.linear_fc1",
        "mlp.experts.linear_fc2",
        "mlp.shared_experts.linear_fc1",
        "mlp.shared_experts.linear_fc2",
    ),
    "-": ("mlp.linear_fc1", "mlp.linear_fc2"),
}
_LATENT = ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")


@dataclass(frozen=True)
class Linear:
    """A linear that could be quantized."""

    #: As `named_modules()` of a `HybridModel` on one pipeline stage has it.
    name: str
    kind: ModuleKind
    #: Decoder layer from 0, or None in MTP.
    layer: int | None


@dataclass(frozen=True)
class Structure:
    """What names depend on: patterns, and whether experts are latent."""

    pattern: str
    #: One pattern for each physical MTP block.
    mtp: tuple[str, ...] = ()
    latent: bool = False

    @classmethod
    def of(cls, config: Nemotron3Config) -> Structure:
        """The structure of a config."""
        blocks = (config.mtp_pattern or "",) * config.mtp_num_blocks
        return cls(config.pattern, blocks, bool(config.moe_latent_size))

    def linears(self) -> Iterator[Linear]:
        """All linears the table has a choice about, decoder first. Experts count as one per layer and FC."""
        for number, symbol in enumerate(self.pattern):
            for module in self._modules(symbol):
                yield _linear(f"decoder.layers.{number}.{module}", number)
        for block, inner in enumerate(self.mtp):
            yield _linear(f"mtp.layers.{block}.eh_proj", None)
            for number, symbol in enumerate(inner):
                for module in self._modules(symbol):
                    yield _linear(f"mtp.layers.{block}.mtp_model_layer.layers.{number}.{module}", None)

    def _modules(self, symbol: str) -> tuple[str, ...]:
        return (*(_LATENT if symbol == "E" and self.latent else ()), *_IN_LAYER[symbol])


def _linear(name: str, layer: int | None) -> Linear:
    kind = kind_of(name)
    assert kind is not None and kind.quantizable, name
    return Linear(name, kind, layer)


def expected(config: Nemotron3Config, precision: str, at_end: int | None = None) -> dict[str, str]:
    """Module name -> format, from the table alone.

    Args:
        config: the model.
        precision: "nvfp4", "mxfp8" or "bf16".
        at_end: BF16 layers at the end; None: the table's.
    """
    kept = tail(config).layers if at_end is None else at_end
    first_kept = config.num_layers - kept
    return {
        linear.name: BF16
        if linear.layer is not None and linear.layer >= first_kept
        else linear.kind.format(precision)
        for linear in Structure.of(config).linears()
    }


def kinds_of(structure: Structure) -> set[str]:
    """Names of the rows a model has."""
    return {linear.kind.name for linear in structure.linears()}
