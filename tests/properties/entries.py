"""How evidence is written down: its three kinds, and the small runs it is about (`evidence.py` has it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_nemotron3.launch import ParallelLayout, TrainingSchedule
from megatron_nemotron3.models import Nemotron3Config
from tests.properties import measure
from tests.properties.step import Case

#: Where a run may end.
STAGES = {
    "arguments": "reading the arguments",
    "groups": "making process groups",
    "model": "building the model",
    "step": "in the first step",
}


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Megatron ends the run itself."""

    case: Case
    #: How far it gets: one of `STAGES`.
    stage: str
    #: A part of the exception's class and message.
    message: str
    #: What is pretended to be installed, so that a check of Megatron's behind it is reached.
    pretend: Callable[[], Any] = measure.nothing
    #: Rules that cannot but be violated along with this one.
    along: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return f"refuses ({STAGES[self.stage]})"


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Megatron takes it. `measured` finds what it makes of it, and must find exactly `shown`."""

    case: Case
    measured: Callable[[Case], str]
    shown: str
    along: tuple[str, ...] = ()
    kind = "takes it"


@dataclass(frozen=True, kw_only=True)
class NotShown:
    """Nothing without a GPU and Transformer Engine can show it."""

    case: Case
    why: str
    along: tuple[str, ...] = ()
    kind = "not shown"


Evidence = Refused | Wrong | NotShown


def model(pattern: str = "M*E-", **changes: Any) -> Nemotron3Config:
    """A model of a few hundred weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "vocab_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 4,
        "mamba_state_dim": 4,
        "mamba_num_groups": 2,
        "dense_ffn_hidden_size": 8,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 4,
        "moe_shared_expert_intermediate_size": 4,
        "moe_router_topk_scaling_factor": 1.0,
        "init_method_std": 0.1,
    }
    return Nemotron3Config(name="made-up", title="made up", pattern=pattern, **{**sizes, **changes})


MTP: dict[str, Any] = {"mtp_pattern": "*E", "mtp_num_layers": 2}


def schedule(**changes: Any) -> TrainingSchedule:
    """Two sequences of eight tokens a step."""
    values: dict[str, Any] = {
        "seq_length": 8,
        "global_batch_size": 4,
        "train_iters": 2,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "lr_decay_iters": 2,
        "lr_wsd_decay_iters": 1,
    }
    return TrainingSchedule(**{**values, **changes})


def case(config: Nemotron3Config | None = None, *extra: str, **changes: Any) -> Case:
    """A run. Sizes of the layout and fields of `Case` by name."""
    sizes = {k: changes.pop(k) for k in ("tp", "sp", "pp", "vpp", "ep", "etp", "cp", "dp") if k in changes}
    return Case(
        **{
            "config": config or model(),
            "layout": ParallelLayout(**sizes),
            "schedule": schedule(),
            "extra": extra,
            **changes,
        }
    )


#: Sizes that fill the blocks of every number format.
ALIGNED: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "kv_channels": 8,
    "mamba_num_heads": 32,
    "mamba_state_dim": 16,
    "dense_ffn_hidden_size": 32,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}


def quantized(precision: str, *extra: str, config: Nemotron3Config | None = None, **changes: Any) -> Case:
    """A run below BF16, where Transformer Engine would be used if it were there."""
    values = {"precision": precision, "backend": "auto", "schedule": schedule(seq_length=32), **changes}
    if precision == "nvfp4":
        values.setdefault("te_precision_config_file", "precision.yaml")
    return case(config or model(**ALIGNED), *extra, **values)


FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
