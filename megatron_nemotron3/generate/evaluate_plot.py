"""Losses by depth and acceptance by number of drafts, as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_nemotron3.checkpoint.files import save_figure
from megatron_nemotron3.generate.evaluate import Acceptance, Losses


def plot(losses: Losses, accepted: Sequence[Acceptance], stated: int, path: Path, title: str) -> None:
    """Write a PNG.

    Args:
        stated: MTP depths that the checkpoint states; deeper ones are hatched.

    Raises:
        OSError: it cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), dpi=120, layout="constrained")
    values = [losses.next_token, *losses.depths]
    bars = left.bar(range(len(values)), values, color=["C0", *["C1"] * len(losses.depths)])
    for depth, bar in enumerate(bars):
        if depth > stated:
            bar.set_hatch("//")
    left.bar_label(bars, fmt="%.3f", fontsize=8)
    left.set_xticks(
        range(len(values)), ["next token", *(f"MTP {k}" for k in range(1, len(values)))], fontsize=8
    )
    hatched = f", hatched: beyond mtp_num_layers={stated}" if len(losses.depths) > stated else ""
    left.set(ylabel="loss (nats per token)", title=f"held-out loss{hatched}")
    if accepted:
        drafts = [a.speculation.draft for a in accepted]
        right.plot(drafts, [a.speculation.acceptance_length for a in accepted], "o-", label="measured")
        right.plot(drafts, [k + 1 for k in drafts], color="gray", ls="--", lw=1, label="every draft accepted")
        right.set(xlabel="drafted tokens", ylabel="tokens a verification", title="acceptance length, greedy")
        right.set_xticks(drafts)
        right.legend()
        right.grid(alpha=0.3)
    else:
        right.set_axis_off()
    figure.suptitle(title)
    save_figure(figure, path)
