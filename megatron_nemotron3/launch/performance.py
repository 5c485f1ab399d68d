"""The options and variables published for a model on a GPU: `tuned`.

    launch = Launch.of("super", tp=2, ep=64, dp=32, gpu="gb200", backend="te")
    launch.tuned.options          # {"--moe-token-dispatcher-type": ("flex",), ...}
    launch.tuned.environment      # {"USE_MNNVL": "1", ...}
    launch.options                # those options and the ones of launch.extra, which replace them
    published(launch.config, "gb200", "bf16")   # the published layout and batch, or None

`flags` emits `tuned.options` in place of its own options of the same name and drops `tuned.removed`; rules
and `plan` read `launch.options`. The settings themselves are in `performance.json`, by model, GPU and
precision, with their source: published layouts ("runs"), and rows of options and variables, of which each
adds to the rows above it and replaces their values.

The published sets use `--attention-backend fused`, with which Megatron refuses NVTE_FUSED_ATTN=0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_nemotron3.launch import parser
from megatron_nemotron3.launch.flag import parse
from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config


@dataclass(frozen=True)
class Hardware:
    """Properties of a GPU that the settings depend on."""

    #: Ranks that NVLink connects.
    nvlink_domain: int
    #: Compute capability; None: not published.
    capability: tuple[int, int] | None
    #: GPUs whose settings to take where there are none for this one, nearest first.
    nearest: tuple[str, ...]


#: Types of GPU that `--gpu` accepts.
HARDWARE: dict[str, Hardware] = {
    "h100": Hardware(8, (9, 0), ("b200", "gb200")),
    "h200": Hardware(8, (9, 0), ("h100", "b200", "gb200")),
    "b200": Hardware(8, (10, 0), ("gb200", "b300", "gb300", "h100")),
    "b300": Hardware(8, (10, 3), ("gb300", "b200", "gb200", "h100")),
    "gb200": Hardware(72, (10, 0), ("gb300", "b200", "h100")),
    "gb300": Hardware(72, (10, 3), ("gb200", "b300", "h100")),
    "vr200": Hardware(72, None, ("gb300", "gb200", "b300", "h100")),
}
#: Types of GPU, in lower case.
GPUS = tuple(HARDWARE)
#: Ranks that the published multi-node NVLink runs use of a domain: 16 trays of 4, of 72.
USED_OF_NVL72 = 64


@dataclass(frozen=True)
class PublishedLaunch:
    """A published run: what a user chooses."""

    gpus: int
    layout: ParallelLayout
    micro_batch_size: int
    global_batch_size: int
    seq_length: int = 8192
    #: Folder of the recipe in Megatron-Bridge.
    folder: str = "perf_recipes"


@dataclass(frozen=True)
class PerformanceRow:
    """Settings of the models, GPUs and precisions named; () names all."""

    model: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    #: Only with sequence parallelism over several tensor ranks.
    sequence_parallel: bool = False
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Options and variables that the run does not have, although rows above or `flags` do.
    without: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Fields of Megatron's configuration that the run sets and no option of any version can.
    fields: tuple[str, ...] = ()
    #: What the run gives up, in one sentence.
    caution: str = ""
    #: Why the row is as it is, for readers of the file.
    about: str = ""

    def applies(self, model: str, gpu: str, precision: str, layout: ParallelLayout) -> bool:
        named = ((self.model, model), (self.gpu, gpu), (self.precision, precision))
        sharded = layout.tp > 1 and layout.sequence_parallel
        fits = sharded or not self.sequence_parallel
        return fits and all(not words or word in words for words, word in named)


def _read() -> tuple[dict[tuple[str, str, str], PublishedLaunch], tuple[PerformanceRow, ...]]:
    """Return the published launches by (model, GPU, precision), and the rows."""
    content = json.loads(Path(__file__).with_name("performance.json").read_text(encoding="utf-8"))
    runs: dict[tuple[str, str, str], PublishedLaunch] = {}
    for run in content["runs"]:
        model, gpu, precisions = run.pop("model"), run.pop("gpu"), run.pop("precision").split()
        tp, pp, ep = (run.pop(name, 1) for name in ("tp", "pp", "ep"))
        layout = ParallelLayout(tp=tp, pp=pp, ep=ep, dp=run["gpus"] // (tp * pp))
        runs |= {(model, gpu, precision): PublishedLaunch(layout=layout, **run) for precision in precisions}
    return runs, tuple(map(_row, content["rows"]))


#: Key of a row -> what is made of its words, of another type than a tuple.
_MADE: dict[str, Callable[[list[str]], Any]] = {
    "options": lambda words: {flag.name: flag.values for flag in parse(words)},
    "environment": lambda words: dict(word.split("=", 1) for word in words),
    "caution": " ".join,
    "about": " ".join,
}


def _row(row: Mapping[str, Any]) -> PerformanceRow:
    """Return a row of the file, where a text may be a list of lines."""
    found = {}
    for name, value in row.items():
        text = " ".join(value) if isinstance(value, list) else value
        found[name] = _MADE.get(name, tuple)(text.split()) if isinstance(text, str) else text
    return PerformanceRow(**found)


RUNS, ROWS = _read()

#: Words of Bridge's names of recipes.
NAMES = {
    "nano": "nemotron_3_nano",
    "lightning": "nemotron_3_5_lightning",
    "super": "nemotron_3_super",
    "ultra": "nemotron_3_ultra",
    "nemotron-h-56b": "nemotronh_56b",
    "bf16": "bf16",
    "fp8-tensorwise": "fp8cs",
    "mxfp8": "fp8mx",
    "nvfp4": "nvfp4",
}

_HYBRID_EP = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
_INSTANCES = "--num-distributed-optimizer-instances"


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What was published for a model on a GPU in a precision, for one layout."""

    gpu: str
    #: The recipe of Megatron-Bridge that it comes from.
    recipe: str
    #: The recipe's layout and batch.
    run: PublishedLaunch
    #: Option -> values; () for a switch.
    options: Mapping[str, tuple[str, ...]]
    #: Options that the published run does not pass, although `flags` otherwise does.
    removed: frozenset[str]
    #: Variables that the training processes need.
    environment: Mapping[str, str]
    #: Options that the chosen version of megatron-core does not have: they are not in `options`.
    unknown: tuple[str, ...] = ()
    #: Fields of Megatron's configuration that the published run sets and no option can.
    fields: tuple[str, ...] = ()
    #: What the published run gives up for its speed or memory.
    cautions: tuple[str, ...] = ()
    #: What was taken in place of a set that was not published, and in which model, GPU and precision.
    instead: str = ""

    @property
    def notes(self) -> list[str]:
        """Remarks for the user, in sentences."""
        found = [f"--gpu {self.gpu}: {self.instead}"] if self.instead else []
        if self.unknown:
            found.append(f"--gpu {self.gpu}: published, but not passed: {', '.join(self.unknown)}")
        if self.fields:
            found.append(
                f"--gpu {self.gpu}: published, but no option of Megatron sets it: {', '.join(self.fields)}"
            )
        return found + [f"--gpu {self.gpu}: {caution}" for caution in self.cautions]

    @property
    def variables(self) -> str:
        """The variables and where they come from, in one line."""
        values = " ".join(f"{name}={value}" for name, value in self.environment.items())
        return f"variables of --gpu {self.gpu}, from {self.recipe}: {values}"


def gpu_named(name: str) -> str:
    """Return the name of a type of GPU as `GPUS` has it, from any letter case."""
    if (found := name.strip().lower()) not in HARDWARE:
        raise ValueError(f"unknown GPU {name!r}: use one of {', '.join(GPUS)}")
    return found


def relative(config: Nemotron3Config) -> str:
    """Return the model with published settings that a model is nearest to; its own name if it is one."""
    if config.name in {model for model, _, _ in RUNS}:
        return config.name
    if not config.is_moe:
        return "nemotron-h-56b"
    if config.moe_latent_size:
        return "ultra" if config.hidden_size >= 8192 else "super"
    return "lightning" if config.has_mtp else "nano"


def _nearest(model: str, gpu: str, precision: str) -> tuple[str, str, str]:
    """Return the published set nearest to a wanted one: the same model, then GPU, then precision."""
    for candidate in (gpu, *HARDWARE[gpu].nearest):
        found = [key for key in RUNS if key[:2] == (model, candidate)]
        if found:
            same = (model, candidate, precision)
            return same if same in found else found[0]
    raise AssertionError(f"{model} has no published set at all")  # every model of RUNS has one


def published(config: Nemotron3Config, gpu: str, precision: str) -> PublishedLaunch | None:
    """Return the published layout and batch of exactly this model, GPU and precision, or None."""
    return RUNS.get((config.name, gpu_named(gpu), precision))


def recipe_name(key: tuple[str, str, str]) -> str:
    """Return the name of Bridge's recipe function of a published set."""
    model, gpu, precision = key
    return f"{NAMES[model]}_pretrain_{RUNS[key].gpus}gpu_{gpu}_{NAMES[precision]}_config"


def tuned(
    config: Nemotron3Config,
    gpu: str,
    precision: str,
    layout: ParallelLayout,
    version: str,
    without: Sequence[str] = (),
) -> Tuned:
    """Return the settings published for a model on a GPU, or else those of the nearest set."""
    # Of pp, dp and the rest only the number of ranks matters: a search for layouts has few different ones.
    sizes = (layout.tp, layout.sp, layout.cp, layout.ep, layout.world_size)
    return _tuned(config, gpu, precision, sizes, version, tuple(without))


@lru_cache(maxsize=8192)
def _tuned(
    config: Nemotron3Config,
    gpu: str,
    precision: str,
    sizes: tuple[int, bool | None, int, int, int],
    version: str,
    without: tuple[str, ...],
) -> Tuned:
    gpu, model = gpu_named(gpu), relative(config)
    tp, sp, cp, ep, ranks = sizes
    layout = ParallelLayout(tp=tp, sp=sp, cp=cp, ep=ep, dp=ranks // (tp * cp))
    key = _nearest(model, gpu, precision)
    chosen = _Chosen()
    for row in ROWS:
        if row.applies(model, key[1], precision, layout):
            chosen.add(row)
    options, removed = chosen.options, chosen.removed
    if "--moe-flex-dispatcher-backend" in options:
        chosen.environment.update(_hybrid_ep(gpu, layout))
    if "--use-megatron-fsdp" in options:
        options.update(_hybrid_sharding(gpu, layout))
    hopper = HARDWARE[gpu].capability == (9, 0)
    if hopper and max(layout.tp, layout.cp) > 1 and "--use-megatron-fsdp" not in options:
        # Megatron refuses any other value (arguments.py): collectives then start in the order of the kernels.
        chosen.environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    for name in (f"--{word.removeprefix('--')}" for word in without):
        if name not in options:
            raise ValueError(f"{name} is not an option of --gpu {gpu}: it has {', '.join(sorted(options))}")
        del options[name]
    missing = parser.unknown(options, version)
    for name in [sentence.split()[0] for sentence in missing]:
        del options[name]
    return Tuned(
        gpu=gpu,
        recipe=recipe_name(key),
        run=RUNS[key],
        options=options,
        removed=frozenset(removed),
        environment=chosen.environment,
        unknown=tuple(missing),
        fields=tuple(chosen.fields),
        cautions=tuple(chosen.cautions),
        instead=_instead(config.name, gpu, precision, key),
    )


@dataclass
class _Chosen:
    """What the rows add up to."""

    options: dict[str, tuple[str, ...]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    environment: dict[str, str] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)

    def add(self, row: PerformanceRow) -> None:
        self.options |= row.options
        self.removed -= row.options.keys()
        for name in row.without:
            if name.startswith("--"):
                self.options.pop(name, None)
                self.removed.add(name)
            else:
                self.environment.pop(name, None)
        self.environment |= row.environment
        self.fields += row.fields
        self.cautions += [row.caution] if row.caution else []


def _hybrid_ep(gpu: str, layout: ParallelLayout) -> dict[str, str]:
    """Variables from which HybridEP takes the ranks that NVLink connects."""
    domain = HARDWARE[gpu].nvlink_domain
    multi_node = domain > 8
    # Its ranks are those of one expert-parallel group, and must divide it.
    most = min(layout.ep, USED_OF_NVL72 if multi_node else domain)
    ranks = max(size for size in range(1, most + 1) if layout.ep % size == 0)
    return {_HYBRID_EP: str(ranks), "NVLINK_DOMAIN_SIZE": str(domain), "USE_MNNVL": str(int(multi_node))}


def _hybrid_sharding(gpu: str, layout: ParallelLayout) -> dict[str, tuple[str, ...]]:
    """Options of hybrid sharding: shard within an NVLink domain, replicate the parameters across domains."""
    domain = HARDWARE[gpu].nvlink_domain
    instances = max(1, layout.world_size // (USED_OF_NVL72 if domain > 8 else domain))
    if instances == 1:
        return {}
    return {_INSTANCES: (str(instances),), "--outer-dp-sharding-strategy": ("optim",)}


def _instead(model: str, gpu: str, precision: str, key: tuple[str, str, str]) -> str:
    """Say what was taken where nothing was published for a model, GPU and precision; "" otherwise."""
    if key == (model, gpu, precision):
        return ""
    other = f", without what depends on {key[2]}" if key[2] != precision else ""
    return (
        f"nothing is published for {model} on {gpu} in {precision}; "
        f"taken from {key[0]} on {key[1]} in {key[2]} ({recipe_name(key)}){other}"
    )
