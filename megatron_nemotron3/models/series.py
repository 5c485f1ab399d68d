"""Names of the monitored series, and the numbers in the log line.

`Values` is kind -> row -> value: a row is a layer ("layer_007") or one depth of an MTP layer
("mtp_2_layer_1"); TensorBoard and wandb get each as `kind/row`.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Values = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Kind:
    """One monitored quantity."""

    title: str
    unit: str
    log_scale: bool = False


KINDS: dict[str, Kind] = {
    "max_vio": Kind("MaxVio of the global batch", "largest / mean load"),
    "max_vio_interval": Kind("MaxVio of all steps of the interval", "largest / mean load"),
    "max_vio_micro_mean": Kind("MaxVio of a micro-batch, mean", "largest / mean load"),
    "max_vio_micro_worst": Kind("MaxVio of a micro-batch, worst", "largest / mean load"),
    "dead_experts": Kind("Experts without a token, global batch", "experts"),
    "dead_experts_interval": Kind("Experts without a token, all steps of the interval", "experts"),
    "expert_bias_spread": Kind("Expert bias, largest \N{MINUS SIGN} smallest", "score"),
    "expert_bias_mean": Kind("Expert bias, mean", "score"),
    "latent_rms": Kind("Latent that the experts read", "RMS", log_scale=True),
    "residual_rms": Kind("Residual stream after the layer", "RMS", log_scale=True),
    "zero_gradients": Kind("Gradients that are exactly zero", "share of the layer's weights"),
    "unchanged_weights": Kind("Weights without a change since the last measurement", "share of their rows"),
}
#: Section of the aggregates in TensorBoard and wandb.
AGGREGATES = "monitor"
#: Behind the name of a loss in the log line: the value of the line's own step, where the other is a mean.
OF_STEP = " of this step"

_DECODER = r"layer_(\d+)"
#: Pattern of a row -> its name in the log line.
_DISPLAY_NAMES = {
    _DECODER: "layer {}",
    r"mtp_(\d+)_layer_(\d+)": "MTP depth {} layer {}",
    r"mtp_(\d+)": "MTP depth {}",
    r"mtp_layer_(\d+)": "MTP layer {}",
}


def decoder_layers(stack: Any) -> Iterator[Any]:
    """Yield the layers of a decoder stack, also those of groups (`M[*E]`, which are stacks in the stack)."""
    for layer in stack.layers:
        yield from decoder_layers(layer) if hasattr(layer, "layers") else (layer,)


def decoder_row(number: int) -> str:
    """Row of decoder layer `number` (1-based, over all pipeline stages)."""
    return f"layer_{number:03d}"


def mtp_row(depth: int | None, number: int) -> str:
    """Row of layer `number` of MTP depth `depth`, both 1-based; None for weights that all depths share."""
    return f"mtp_layer_{number}" if depth is None else f"mtp_{depth}_layer_{number}"


def is_decoder(row: str) -> bool:
    """Whether the row is a decoder layer."""
    return re.fullmatch(_DECODER, row) is not None


def display_name(row: str) -> str:
    """The name of a row in the log line: "layer 7", "MTP depth 2 layer 1"; of MTP losses, "MTP depth 2"."""
    for pattern, name in _DISPLAY_NAMES.items():
        if found := re.fullmatch(pattern, row):
            return name.format(*map(int, found.groups()))
    return row


def aggregates(values: Values) -> dict[str, float]:
    """Numbers over all layers: those of the log line, and the median MaxVio."""
    found: dict[str, float] = {}
    if load := values.get("max_vio"):
        found["worst_max_vio"] = max(load.values())
        found["median_max_vio"] = statistics.median(load.values())
    if micro := values.get("max_vio_micro_worst"):
        found["worst_micro_batch_max_vio"] = max(micro.values())
    for kind in ("dead_experts", "dead_experts_interval"):
        if dead := values.get(kind):
            found[kind] = sum(dead.values())
    decoder = [row for row in sorted(values.get("residual_rms", {})) if is_decoder(row)]
    if decoder and (first := values["residual_rms"][decoder[0]]) > 0:
        found["residual_rms_last_over_first"] = values["residual_rms"][decoder[-1]] / first
    return found


def log_line(values: Values, numbers: dict[str, float]) -> str:
    """The text added to Megatron's log line, in Megatron's own form: ` name: number … |` for each number."""
    parts: list[str] = []
    for name, kind, text in (
        ("worst_max_vio", "max_vio", "worst MaxVio"),
        ("worst_micro_batch_max_vio", "max_vio_micro_worst", "in a micro-batch"),
    ):
        if name in numbers:
            where = max(values[kind], key=values[kind].__getitem__)
            parts.append(f"{text}: {numbers[name]:.2f} ({display_name(where)})")
    if "dead_experts" in numbers:
        parts.append(f"dead experts: {numbers['dead_experts']:.0f}")
    if "residual_rms_last_over_first" in numbers:
        parts.append(f"residual RMS last/first: {numbers['residual_rms_last_over_first']:.3G}")
    if "zero_gradients" in numbers:
        parts.append(f"zero gradients: {100 * numbers['zero_gradients']:.3f} %")
    return "".join(f" {part} |" for part in parts)


def scalars(values: Values, numbers: dict[str, float]) -> dict[str, float]:
    """All scalars for TensorBoard and wandb: tag -> value."""
    found = {f"{kind}/{row}": value for kind, rows in values.items() for row, value in rows.items()}
    return found | {f"{AGGREGATES}/{name}": value for name, value in numbers.items()}
