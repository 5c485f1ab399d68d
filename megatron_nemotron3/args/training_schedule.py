"""How long and how fast to train, in one frozen dataclass. Standard library only.

Fields have the names of Megatron's options. None means: no source states it; then no flag is emitted for it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

#: Fields that hold lengths, by unit.
SAMPLES = ("train_samples", "lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples")
ITERS = ("train_iters", "lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters")


@dataclass(frozen=True, kw_only=True)
class TrainingSchedule:
    """Batch, length, learning rate and intervals. Lengths are all in samples or all in iterations.

    Raises:
        ValueError: lengths in both units, or a size below 1.
    """

    #: Sequences per rank and step; Megatron requires it.
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    #: Tokens per sequence; None: the config's.
    seq_length: int | None = None

    train_samples: int | None = None
    train_iters: int | None = None

    lr: float | None = None
    min_lr: float | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_iters: int | None = None
    #: Where the decay ends, counted from the start.
    lr_decay_samples: int | None = None
    lr_decay_iters: int | None = None
    #: Length of the last phase, the decay of warmup-stable-decay.
    lr_wsd_decay_samples: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_decay_style: str | None = "WSD"
    lr_wsd_decay_style: str = "minus_sqrt"

    # The same in all three reports. Megatron's defaults differ: weight decay 0.01, beta2 0.999.
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0

    # In iterations; no report states them. The values of NVIDIA's release test of Super
    # (tests/functional_tests/test_cases/nemotron/nemotron3_super_release_gb200).
    eval_interval: int | None = 100
    eval_iters: int = 14
    save_interval: int = 200
    log_interval: int = 10

    def __post_init__(self) -> None:
        samples = [name for name in SAMPLES if getattr(self, name) is not None]
        iters = [name for name in ITERS if getattr(self, name) is not None]
        if samples and iters:
            raise ValueError(
                f"{samples[0]}={getattr(self, samples[0])} and {iters[0]}={getattr(self, iters[0])} use two "
                "units: Megatron wants all lengths in samples or all in iterations"
            )
        # A warm-up may be 0 long, and eval_iters=0 turns evaluation off.
        may_be_zero = {"eval_iters", "lr_warmup_samples", "lr_warmup_iters"}
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in may_be_zero else 1
            if isinstance(value, int) and value < least:
                raise ValueError(f"{field.name}={value}: give {least} or more")

    @property
    def unit(self) -> str:
        """What lengths are counted in: "iters" or "samples"."""
        return "iters" if any(getattr(self, name) is not None for name in ITERS) else "samples"

    def length(self, name: str) -> int | None:
        """A length by its name without the unit: `length("lr_warmup")`, in `unit`."""
        value: int | None = getattr(self, f"{name}_{self.unit}")
        return value

    @property
    def unknown(self) -> tuple[str, ...]:
        """What has to be given before training can start, but is in no source: `("lr", ...)`."""
        needed = {"train": self.length("train"), "lr": self.lr, "lr_decay_style": self.lr_decay_style}
        if self.lr_decay_style not in (None, "constant"):  # a constant rate has no minimum
            needed["min_lr"] = self.min_lr
        return tuple(name for name, value in needed.items() if value is None)
