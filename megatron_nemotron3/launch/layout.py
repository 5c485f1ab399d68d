"""How a model is spread over ranks: `ParallelLayout`, pipeline cuts. Published layouts: `phases.py`.

Attention, Mamba, shared experts and embeddings live on a grid of tp x cp x dp x pp ranks; routed experts on
the same ranks cut another way, etp x ep x edp x pp.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as _pattern
from megatron_nemotron3.models.parameters import layer_flops


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the parallel dimensions. `world_size` follows from them.

    Raises:
        ValueError: a size is not a positive integer. Whether a model fits a layout: `rules.check`.
    """

    #: Tensor parallel (`--tensor-model-parallel-size`).
    tp: int = 1
    #: Sequence parallel; None: if and only if tp > 1, because MoE requires it with TP.
    sp: bool | None = None
    #: Pipeline parallel, and virtual stages per pipeline rank (interleaved schedule).
    pp: int = 1
    vpp: int = 1
    #: Expert parallel, and tensor parallel inside an expert. Megatron's default for the latter is tp; every
    #: published Nemotron 3 launch sets 1.
    ep: int = 1
    etp: int = 1
    #: Context parallel.
    cp: int = 1
    #: Data parallel, of the dense layers.
    dp: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "sp":
                if not (value is None or isinstance(value, bool)):
                    raise ValueError(f"sp={value!r}: give True, False or None")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not a positive integer: give 1 or more")

    @property
    def sequence_parallel(self) -> bool:
        """Whether `--sequence-parallel` is on."""
        return self.tp > 1 if self.sp is None else self.sp

    @property
    def world_size(self) -> int:
        """Number of ranks: tp * cp * dp * pp."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold one copy of a layer's experts: etp * ep."""
        return self.etp * self.ep

    @property
    def edp(self) -> int:
        """Copies of the experts: tp * cp * dp / (etp * ep), rounded down (a rule checks divisibility)."""
        return self.tp * self.cp * self.dp // self.expert_ranks

    @property
    def stages(self) -> int:
        """Pipeline stages of the pattern: pp * vpp."""
        return self.pp * self.vpp

    def __str__(self) -> str:
        shown = [f"{name.upper()}{size}" for name, size in vars(self).items() if name != "sp" and size > 1]
        return " ".join((*shown, *(["SP"] if self.sequence_parallel else []))) or "1 rank"


def last_stage_cost(config: Nemotron3Config, seq_length: int) -> float:
    """Forward FLOPs per token that only the last pipeline stage computes: the output layer and MTP.

    Every MTP depth passes through the output layer, too. Megatron always puts a hybrid's MTP on the last
    stage.
    """
    output = 2.0 * config.vocab_size * config.hidden_size
    inner = sum(layer_flops(config, kind, seq_length) for kind in config.mtp_pattern or "")
    depth = inner + 2.0 * 2 * config.hidden_size**2 + output  # eh_proj is [d, 2d]
    return output + config.mtp_num_layers * depth


def cut_pattern(config: Nemotron3Config, layout: ParallelLayout, seq_length: int | None = None) -> str:
    """Return the value of `--hybrid-layer-pattern`: pp * vpp stages of about equal work, then the MTP depths.

    Raises:
        ValueError: fewer layers than stages.
    """
    mtp = (config.mtp_pattern or "",) * config.mtp_num_layers
    if layout.stages == 1:
        return _pattern.join_stages((config.pattern,), mtp)
    tokens = seq_length or config.seq_length
    cost = [layer_flops(config.at(layer), kind, tokens) for layer, kind in enumerate(config.pattern)]
    stages = _pattern.cut(
        config.pattern, layout.stages, cost, last_stage_extra=last_stage_cost(config, tokens)
    )
    return _pattern.join_stages(stages, mtp)
