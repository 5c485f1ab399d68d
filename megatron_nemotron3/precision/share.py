"""The share of each format in a model's parameters and forward FLOPs, in closed form. Standard library only.

FLOPs are those of one token's forward pass in training: routed experts count top-k times, MTP blocks once per
depth, and the output layer once more per depth. Backward takes twice as many for each product, so the shares
of a whole step are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_nemotron3.models import Nemotron3Config, count
from megatron_nemotron3.models.parameters import elements_outside_layers, layer_tensors, weightless_flops
from megatron_nemotron3.precision.formats import BF16, NVFP4
from megatron_nemotron3.precision.table import LINEARS, NEVER, ModuleKind, bf16_layers

TAIL = "tail"
OTHER = "other"
WEIGHTLESS = "weightless"

_QUANTIZABLE = {kind.name for kind in LINEARS}


@dataclass(frozen=True)
class FormatShare:
    """One line of the table: modules with the same treatment, and how much of the model they are."""

    #: Name of a `ModuleKind`, or "tail", "other", "weightless".
    name: str
    modules: str
    format: str
    #: Elements stored, and forward FLOPs of one token.
    parameters: int
    flops: float
    why: str


def shares(config: Nemotron3Config, precision: str, *, seq_length: int | None = None) -> list[FormatShare]:
    """Divide all parameters and FLOPs of a model into lines, in the order of the table.

    Args:
        seq_length: tokens; None: `config.seq_length`.
    """
    kept = bf16_layers(config, precision)
    body = range(kept.start, config.num_layers - kept.end)
    sums = _FormatSums()
    for number, symbol in enumerate(config.pattern):
        sums.layer(config.at(number), symbol, seq_length, 1, 1, None if number in body else TAIL)
    if config.has_mtp:
        for symbol in config.mtp_pattern or "":
            sums.layer(config, symbol, seq_length, config.mtp_num_blocks, config.mtp_num_layers, "mtp")
    outside = elements_outside_layers(config)
    embedding, output, mtp = (outside[linear] for linear in ("embedding", "output_layer", "mtp"))
    sums.add("mtp", mtp * config.mtp_num_blocks, 2.0 * mtp * config.mtp_num_layers)
    sums.add("embedding", embedding, 0.0)
    sums.add("output_layer", output, 2.0 * output * (1 + config.mtp_num_layers))
    # Norms outside the layers; they have no products.
    sums.parameters[OTHER] += count(config).stored - sum(sums.parameters.values())
    return [
        line
        for line in _share_lines(sums, precision, body, config.num_layers)
        if line.parameters or line.flops
    ]


class _FormatSums:
    """Elements and FLOPs of each line."""

    def __init__(self) -> None:
        self.parameters: Counter[str] = Counter()
        self.flops: dict[str, float] = {}

    def add(self, name: str, parameters: int, flops: float) -> None:
        self.parameters[name] += parameters
        self.flops[name] = self.flops.get(name, 0.0) + flops

    def layer(
        self,
        config: Nemotron3Config,
        symbol: str,
        seq_length: int | None,
        stored: int,
        applied: int,
        linears: str | None,
    ) -> None:
        """Add a layer that is stored and applied several times. `linears`: the line of its linears."""
        for tensor in layer_tensors(config, symbol):
            name = tensor.linear or OTHER
            if linears and name in _QUANTIZABLE:
                name = linears
            self.add(name, tensor.elements * stored, 2.0 * tensor.active_elements * applied)
        flops = weightless_flops(config, symbol, seq_length or config.seq_length)
        self.add(WEIGHTLESS, 0, flops * applied)


def _share_lines(sums: _FormatSums, precision: str, body: range, layers: int) -> Iterator[FormatShare]:
    def line(name: str, modules: str, fmt: str, why: str) -> FormatShare:
        return FormatShare(name, modules, fmt, sums.parameters[name], sums.flops.get(name, 0.0), why)

    for kind in LINEARS:
        yield line(
            kind.name, modules_of(kind), kind.format(precision), kind.why if precision == NVFP4 else ""
        )
    ends = [f"{a}-{b - 1}" for a, b in ((0, body.start), (body.stop, layers)) if a < b]
    why = "needed for stable training (arXiv 2509.25149, E)" if precision == NVFP4 else ""
    yield line(TAIL, f"all linears of layers {', '.join(ends)}", BF16, why)
    for kind in NEVER:
        yield line(kind.name, modules_of(kind), kind.recipe, kind.why)
    yield line(OTHER, "norms, A, D, dt, expert bias", BF16, "no linears")
    yield line(WEIGHTLESS, "attention scores, SSD scan", BF16, "no weights; softmax and scan sum in FP32")


def modules_of(kind: ModuleKind) -> str:
    """The modules of a kind as text: "mlp.experts.linear_fc1, linear_fc2"."""
    first, *rest = (glob.lstrip("*.") for glob in kind.modules)
    return ", ".join((first.rstrip(".*"), *(name.rpartition(".")[2] for name in rest)))


def totals(lines: list[FormatShare]) -> dict[str, tuple[float, float]]:
    """Format -> its shares of the parameters and of the FLOPs, from 0 to 1."""
    parameters, flops = sum(line.parameters for line in lines), sum(line.flops for line in lines)
    found: dict[str, tuple[float, float]] = {}
    for line in lines:
        before = found.get(line.format, (0.0, 0.0))
        found[line.format] = before[0] + line.parameters / parameters, before[1] + line.flops / flops
    return found
