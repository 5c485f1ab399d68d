"""Rules of the warnings: which sign, for how long, what it means, what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_nemotron3.train.monitor import signs
from megatron_nemotron3.train.monitor.signs import Series, Signs


@dataclass(frozen=True)
class MonitorRule:
    """A rule, and the text of its warning after the numbers."""

    find: Callable[[Series], Signs]
    #: Measurements in a row that must show it.
    persist: int
    #: What it means, and what to do.
    advice: str
    #: Whether young runs show it while they are healthy.
    early: bool = False
    #: Rules of one subject often see the same fault; one of them reports it.
    subject: str = ""
    #: Whether this one explains the others for as long as it lasts, not only what begins with it.
    explains: bool = False

    @property
    def name(self) -> str:
        return self.find.__name__


_BALANCE = (
    "check --moe-router-bias-update-rate, the auxiliary loss, and that the router's weight is what it was; "
    "go back to a checkpoint from before it"
)
RULES: tuple[MonitorRule, ...] = (
    MonitorRule(
        signs.bias_drift,
        1,
        "The routing no longer follows the scores: compare the expert biases of the checkpoints before and "
        "after, and --moe-router-bias-update-rate; go back to the last one in which they agree with it.",
        subject="router",
    ),
    MonitorRule(
        signs.router_collapse,
        2,
        f"The router sends nearly all tokens to the same experts; the others stop learning: {_BALANCE}.",
        early=True,
        subject="router",
        explains=True,
    ),
    MonitorRule(
        signs.router_outlier,
        1,
        "Ultra's first MoE layer went from 4.8 to 12 against 1.2 before the run diverged; the cause is "
        "unknown, BF16 throughout did not help, an earlier decay of the learning rate did. Keep checkpoints, "
        "watch expert_bias_spread and residual_rms of that layer, consider decaying the learning rate now.",
        subject="router",
    ),
    MonitorRule(
        signs.dead_experts,
        2,
        f"Experts that no token reaches do not learn and do not come back by themselves: {_BALANCE}.",
        early=True,
        subject="router",
    ),
    MonitorRule(
        signs.no_gradient,
        2,
        "The layer does not learn: its output or its gradient is cut off or underflows; check that it is not "
        "frozen or bypassed, its flush to zero (--log-precision), and the loss mask.",
    ),
    MonitorRule(
        signs.residual_jump,
        2,
        "A layer writes far more into the stream than before, which drowns what the others write: look at "
        "its output projection and the gradient norm, and go back to a checkpoint from before it.",
    ),
    MonitorRule(
        signs.mtp_loss_jump,
        2,
        "The main loss did not follow, so it is not the data: MTP's own layers, its labels or its mask. Go "
        "back to a checkpoint from before it.",
        subject="mtp",
    ),
    MonitorRule(
        signs.mtp_loss_rise,
        1,
        "In Ultra this came first when the output layer's gradient was accumulated in BF16, where the small "
        "share of the MTP depths is lost; FP32 gradient reduction cured it. Check --grad-reduce-in-bf16 and "
        "--main-grads-dtype, and go back to a checkpoint from before the rise.",
        subject="mtp",
    ),
)
