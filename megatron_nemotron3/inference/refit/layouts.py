"""The two layouts of a refit: which ranks hold a tensor.

Both sides number their ranks from 0. A trainer has Megatron's order of ranks: tp, cp, dp, pp, and for routed
experts etp, ep, edp, pp, fastest first. A vLLM replica has tp, pp, dp; an SGLang replica tp, pp, where dp
(attention) and ep divide tp. Replicas follow one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from megatron_nemotron3.checkpoints.convert.quantized import Weight
from megatron_nemotron3.inference.refit.shares import ENGINES, EngineNames, Role, packed
from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch import rules as _rules
from megatron_nemotron3.launch.layout import cut_pattern
from megatron_nemotron3.launch.plan.state import padded_vocab_size
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as _pattern
from megatron_nemotron3.models.tensors import Row

Ranks = tuple[int, ...]
#: Types of weights that are not quantized.
DTYPES = ("bfloat16", "float16", "float32")
#: On each side. The plan of the largest model takes seconds at this size.
MOST_RANKS = 2048


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model on Megatron's ranks.

    Args:
        pattern: `--hybrid-layer-pattern`, whose `|` cut the stages; None: as our flags cut it.
        padded_vocab_size: rows of the embedding over all tensor ranks; None: as our flags pad it.

    Raises:
        ValueError: the model cannot be trained in this layout (every violated rule), or the pattern is of
            another model or number of stages.
    """

    config: Nemotron3Config
    layout: ParallelLayout = ParallelLayout()
    pattern: str | None = None
    padded_vocab_size: int | None = None

    def __post_init__(self) -> None:
        _ranks_fit("training", self.layout.world_size)
        _rules.enforce(Launch(config=self.config, layout=self.layout))
        parsed = self._parsed
        if parsed.main != self.config.pattern or len(parsed.stages) != self.layout.stages:
            raise ValueError(
                f"pattern {self.pattern!r} is not that of {self.config.name}, {self.config.pattern!r}, in "
                f"{self.layout.stages} stages (PP={self.layout.pp}, VPP={self.layout.vpp})"
            )

    @cached_property
    def _parsed(self) -> Any:
        return _pattern.parse(self.pattern or cut_pattern(self.config, self.layout))

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The stage of every decoder layer, from 0 to pp * vpp - 1."""
        return tuple(stage for stage, layers in enumerate(self._parsed.stages) for _ in layers)

    @property
    def vocabulary(self) -> int:
        return self.padded_vocab_size or padded_vocab_size(self.config, self.layout)

    def stages_of(self, part: str, layer: int | None, name: str) -> tuple[int, ...]:
        last = self.layout.pp - 1
        if layer is not None:
            return (self.stages[layer] % self.layout.pp,)
        if part == "model" and name.endswith("embeddings.weight"):
            # MTP embeds the next tokens itself, so its stage holds the table, too.
            return tuple(dict.fromkeys((0, last) if self.config.has_mtp else (0,)))
        return (last,)

    def holders(self, row: Row, stages: tuple[int, ...], index: int, expert_rank: int = 0) -> Ranks:
        """Ranks that hold the share `index` of `training_shares`, of an expert rank's experts."""
        layout = self.layout
        size = layout.tp * layout.cp * layout.dp
        base = [stage * size for stage in stages]
        if row.routed:
            first = expert_rank * layout.etp + index
            return tuple(b + r for b in base for r in range(first, size, layout.expert_ranks))
        if row.tp == "replicated":
            return tuple(b + r for b in base for r in range(size))
        return tuple(b + r for b in base for r in range(index, size, layout.tp))

    def __str__(self) -> str:
        return f"{self.layout}"

    @classmethod
    def of(cls, config: Nemotron3Config, text: str) -> Training:
        """Read "tp=2,ep=8,pp=4"; `dp` is by default the smallest that holds the experts."""
        sizes: dict[str, Any] = _sizes(text, ("tp", "pp", "vpp", "ep", "etp", "cp", "dp"), "training")
        if "dp" not in sizes:
            experts = sizes.get("ep", 1) * sizes.get("etp", 1)
            sizes["dp"] = experts // math.gcd(experts, sizes.get("tp", 1) * sizes.get("cp", 1))
        return cls(config=config, layout=ParallelLayout(**sizes))


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """Replicas of a model on an inference engine's ranks.

    tp, pp: as the engine counts them. dp: attention groups of a replica; vLLM has dp * tp * pp ranks, SGLang
    has tp * pp, in which dp divides tp. ep: ranks over which experts are spread; vLLM's is 1 or dp * tp,
    SGLang's divides tp. mtp: whether the engine drafts with MTP; None: if the model has MTP. With engine "hf"
    each replica is one rank, which gets every tensor whole, as the engines' `load_weights` takes them.
    fp32_router: the routers are FP32, as vLLM has them on GPUs other than Hopper and data center Blackwell.
    quantize: with engine "hf", the recipe by which the senders pack the weights (`refit.quantized`).
    input_scales: scales of activations, as `quantized.quantization` takes them.
    """

    config: Nemotron3Config
    engine: str = "vllm"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    replicas: int = 1
    mtp: bool | None = None
    fp32_router: bool = False
    dtype: str = "bfloat16"
    quantize: str | None = None
    input_scales: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            cure = "use hf, whole tensors under Hugging Face's names, for the loader of another engine"
            raise ValueError(f"engine {self.engine!r} is none of {', '.join(ENGINES)}: {cure}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}: use one of {', '.join(DTYPES)}")
        if self.engine != "hf" and self.quantize:
            raise ValueError(
                f"quantize={self.quantize!r}: packed weights go to the engine's own loader: use engine hf"
            )
        if self.input_scales and not self.quantize:
            raise ValueError("input_scales are of quantized weights: give quantize, too")
        _ = self.packed  # refuses a recipe
        for name in ("tp", "pp", "dp", "ep", "replicas"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name}={size}: give 1 or more")
        _ranks_fit("serving", self.size)
        wide, experts = self.dp * self.tp, self.config.num_moe_experts or 1
        if self.engine == "hf" and self.replica_size * self.ep * self.dp > 1:
            raise ValueError("engine hf has whole tensors on each rank: give replicas= alone")
        if self.engine == "vllm" and self.ep not in (1, wide):
            raise ValueError(f"vLLM spreads experts over dp * tp = {wide} ranks or none: ep={self.ep}")
        if self.engine == "sglang" and (self.tp % self.ep or self.tp % self.dp):
            raise ValueError(f"SGLang's ep={self.ep} and dp={self.dp} must divide tp={self.tp}")
        if self.ep > 1 and not self.config.is_moe:
            raise ValueError(f"{self.config.name} has no experts to spread over ep={self.ep}: leave ep out")
        if self.mtp and not self.config.has_mtp:
            raise ValueError(f"{self.config.name} has no MTP: leave mtp out")
        if experts % self.ep:
            raise ValueError(f"{experts} experts cannot be divided by ep={self.ep}: choose one that divides")
        if self.pp > self.config.num_layers:
            raise ValueError(f"{self.config.num_layers} layers cannot be {self.pp} stages")
        if self.drafts and self.engine != "hf":
            if self.config.mtp_num_blocks != 1 or set(self.config.mtp_pattern or "") - set("*E"):
                raise ValueError(
                    f"both engines draft with one MTP block of * and E layers, {self.config.name} has "
                    f"{self.config.mtp_num_blocks} of {self.config.mtp_pattern!r}: give mtp=0 to leave it out"
                )
            if self.pp > 1:
                raise ValueError(
                    f"MTP of an engine at pp={self.pp} is not planned: give mtp=0 to leave it out"
                )

    @property
    def rules(self) -> EngineNames:
        return ENGINES[self.engine]

    @property
    def drafts(self) -> bool:
        return self.config.has_mtp if self.mtp is None else self.mtp and self.config.has_mtp

    @cached_property
    def packed(self) -> dict[str, Weight]:
        """Tensors that are stored otherwise than the model's, by Hugging Face's name; empty: none is."""
        if self.quantize is None:
            return {}
        return packed(self.config, self.quantize, dict(self.input_scales), self.dtype)

    @property
    def replica_size(self) -> int:
        return self.tp * self.pp * (self.dp if self.engine == "vllm" else 1)

    @property
    def size(self) -> int:
        return self.replica_size * self.replicas

    def group_size(self, role: Role) -> int:
        # vLLM cuts shared experts, but not where experts are spread over several attention groups.
        whole = self.engine == "vllm" and min(self.ep, self.tp, self.dp) > 1
        if role == "whole" or (role == "shared" and whole):
            return 1
        if role == "experts":
            return (self.dp * self.tp if self.engine == "vllm" else self.tp) // self.ep
        if role in ("attention", "embedding") and self.engine == "sglang":
            return self.tp // self.dp
        return self.tp

    def stages_of(self, part: str, layer: int | None, name: str) -> tuple[int, ...]:
        if layer is not None:
            sizes = self.rules.layers(self.config.num_layers, self.pp)
            return (next(stage for stage in range(self.pp) if sum(sizes[: stage + 1]) > layer),)
        if part != "model":
            return (self.pp - 1,)
        place = self.rules.outside[0 if name.endswith("embeddings.weight") else 1]
        return {"first": (0,), "last": (self.pp - 1,), "all": tuple(range(self.pp))}[place]

    def holders(self, role: Role, stages: tuple[int, ...], index: int, expert_rank: int = 0) -> Ranks:
        """Ranks of all replicas with the share `index` of `serving_shares`, of an expert rank's experts."""
        return _serving_holders(self, role, stages, index, expert_rank)

    def __str__(self) -> str:
        sizes = (("TP", self.tp), ("EP", self.ep), ("PP", self.pp), ("DP", self.dp))
        shown = " ".join(f"{name}{size}" for name, size in sizes if size > 1) or "1 rank"
        return (
            f"{self.engine} {shown}"
            + f", {self.replicas:,} replicas" * (self.replicas > 1)
            + (f", {self.quantize}" if self.quantize else "")
        )

    @classmethod
    def of(cls, config: Nemotron3Config, text: str, **settings: Any) -> EngineLayout:
        known = ("tp", "pp", "dp", "ep", "replicas", "mtp", "fp32_router")
        sizes: dict[str, Any] = _sizes(text, known, "serving")
        for name in known[-2:]:
            if sizes.get(name, 0) > 1:
                raise ValueError(f"serving layout: {name}={sizes[name]}: use {name}=0 or {name}=1")
        settings |= {name: bool(sizes.pop(name)) for name in known[-2:] if name in sizes}
        return cls(config=config, **sizes, **settings)


@lru_cache(maxsize=65536)
def _serving_holders(
    serving: EngineLayout, role: Role, stages: tuple[int, ...], index: int, expert_rank: int
) -> Ranks:
    size, found = serving.group_size(role), []
    for rank in range(serving.replica_size):
        tensor, rest = rank % serving.tp, rank // serving.tp
        stage, data = rest % serving.pp, rest // serving.pp
        place = tensor
        if role == "experts":
            place = data * serving.tp + tensor
            if place // size != expert_rank:
                continue
        if stage in stages and place % size == index:
            found.append(rank)
    return tuple(
        replica * serving.replica_size + rank for replica in range(serving.replicas) for rank in found
    )


def _ranks_fit(side: str, ranks: int) -> None:
    if ranks > MOST_RANKS:
        raise ValueError(f"{ranks:,} {side} ranks: a plan has {MOST_RANKS:,} at most on each side")


def _sizes(text: str, known: tuple[str, ...], side: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in text.split(",") if text else []:
        name, _, number = (part.strip() for part in word.partition("="))
        if name not in known or not (number.isascii() and number.isdecimal() and len(number) < 7):
            raise ValueError(
                f"{side} layout: {word!r} is no size (below 1,000,000) of {', '.join(f'{k}=' for k in known)}"
            )
        if name in sizes:
            raise ValueError(f"{side} layout: {name}= is given twice")
        sizes[name] = int(number)
    return sizes
