"""The proxy of a launch: the smallest model and layouts that keep its structure.

From the arguments of a command line follow a small model, the arguments that train it in each of a few small
layouts, and those that train it in one process. `ProxyLaunch.remarks` has what is not as in the launch.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_nemotron3.launch import ParallelLayout, parser, versions
from megatron_nemotron3.launch import boosting as settings
from megatron_nemotron3.launch.architecture import MODEL, MOE, MTP, emit
from megatron_nemotron3.launch.boosting import Boost
from megatron_nemotron3.launch.flag import Flag, is_known, parse, to_argv
from megatron_nemotron3.launch.flags import backend_arguments
from megatron_nemotron3.launch.stored_model import merged_options
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models import pattern as patterns
from megatron_nemotron3.models.lora import LoRASettings
from megatron_nemotron3.models.stack_specs import MODULE, spec_name
from megatron_nemotron3.proof.certify import layouts, small
from megatron_nemotron3.proof.certify import options as table
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.large import FullLaunch, LaunchRequest, full_launch
from megatron_nemotron3.proof.certify.layouts import Sizes, cover
from megatron_nemotron3.proof.certify.options import Treatment

#: Elements of a bucket of gradients, so that the proxy has several.
_BUCKET = 16384
#: Option -> the parallel dimension without which Megatron refuses it.
_NEEDS = {
    "--overlap-param-gather-with-optimizer-step": "vpp",
    "--overlap-p2p-communication-warmup-flush": "vpp",
    "--microbatch-group-size-per-virtual-pipeline-stage": "vpp",
    "--distribute-saved-activations": "tp",
}
#: `--recompute-modules` that need Transformer Engine or its grouped matrix products.
_MODULES = frozenset(("layernorm", "moe_act"))

_SCRIPT = "they are compared where the proxy is trained without the script, which trains all weights"


@dataclass(frozen=True)
class Remark:
    """What of a launch the proxy has in another form, or cannot have."""

    #: Options or property of the launch.
    what: str
    #: What the proxy has instead, or why it can have nothing.
    instead: str
    treatment: Treatment = Treatment.REPLACED
    #: The options, as they are in the launch.
    options: tuple[str, ...] = ()

    @property
    def untested(self) -> bool:
        """Whether nothing about it is proven."""
        return self.treatment is Treatment.UNTESTED


@dataclass(frozen=True, kw_only=True)
class ProxyLaunch:
    """A small model, and the arguments that train it in small layouts and in one process."""

    #: The model of the launch, and its small form.
    model: Nemotron3Config
    config: Nemotron3Config
    #: The layout of the launch, and the small ones.
    large: Sizes
    sizes: tuple[Sizes, ...]
    #: What is trained, without Megatron's command line.
    case: TrainingCase
    #: Words without layout, batch and schedule: what is computed, and by which mechanism.
    meaning: tuple[str, ...]
    mechanism: tuple[Flag, ...]
    #: Words of options that draw random numbers, for runs that are compared with themselves only.
    drawing: tuple[str, ...]
    #: What becomes of each option of the launch.
    treatments: Mapping[str, Treatment]
    remarks: tuple[Remark, ...]

    def arguments(self, sizes: Sizes | None) -> list[str]:
        """Return Megatron's command line in a layout or in one process (None), without batch and schedule."""
        layout = sizes.layout if sizes else ParallelLayout()
        pattern = stages_of(self.config, layout)
        head = [
            Flag("--spec", (MODULE, spec_name(self.config, "torch"))),
            Flag("--hybrid-layer-pattern", (pattern,)),
        ]
        rows = MODEL + (MOE if self.config.is_moe else ()) + (MTP if self.config.has_mtp else ())
        size_rows = [row for row in rows if table.group(row.flag) is table.MODEL_SIZES]
        head += [flag for row in size_rows for flag in emit(row.flag, row.value(self.config), "extra", "")]
        for name, value in (
            ("--tensor-model-parallel-size", layout.tp),
            ("--sequence-parallel", layout.sequence_parallel),
            ("--pipeline-model-parallel-size", layout.pp),
            ("--context-parallel-size", layout.cp),
            *(
                (("--expert-model-parallel-size", layout.ep), ("--expert-tensor-parallel-size", layout.etp))
                if self.config.is_moe
                else ()
            ),
            (
                "--num-distributed-optimizer-instances",
                sizes.instances if sizes and sizes.instances > 1 else None,
            ),
            ("--make-vocab-size-divisible-by", small.VOCABULARY_DIVISOR),
            ("--seq-length", self.case.seq_length),
            ("--max-position-embeddings", self.case.seq_length),
        ):
            head += emit(name, value, "extra", "")
        mechanism = self._mechanism(layout) if sizes else []
        # Megatron's default is 0.1.
        dropout = [word for name in table.DROPOUT if name not in self.meaning for word in (name, "0.0")]
        return [*to_argv(head), *self.meaning, *dropout, *mechanism, *backend_arguments("torch")]

    def _mechanism(self, layout: ParallelLayout) -> list[str]:
        """Return the arguments of the mechanisms that a layout can have."""
        kept = []
        for flag in self.mechanism:
            size = _NEEDS.get(flag.name)
            if size and getattr(layout, size) == 1 and getattr(self.large.layout, size) > 1:
                continue
            if flag.name == "--microbatch-group-size-per-virtual-pipeline-stage":
                group, pp = int(flag.values[0]), self.large.layout.pp
                flag = Flag(flag.name, (str(layout.pp + (group > pp) - (group < pp)),))
            kept.append(flag)
        names = {flag.name for flag in kept}
        if "--overlap-grad-reduce" in names and not names & {"--ddp-num-buckets", "--use-megatron-fsdp"}:
            kept.append(Flag("--ddp-bucket-size", (str(_BUCKET),)))
        return [*to_argv(kept), *(word for name in kept for word in table.FSDP.get(name.name, ()))]


def stages_of(config: Nemotron3Config, layout: ParallelLayout) -> str:
    """Return `--hybrid-layer-pattern` of a proxy: its stages, joined to as many as the layout has."""
    stages = (config.source or config.pattern).split(patterns.PIPE)
    joined = layouts.joined(stages, layout.stages)
    return patterns.join_stages(joined, (config.mtp_pattern or "",) * config.mtp_num_layers)


def make(request: LaunchRequest, ranks: int, version: str | None = None) -> ProxyLaunch:
    """Return the proxy of a launch, in worlds of up to `ranks` ranks.

    Raises:
        ValueError: the options describe no model of the family, or an option is wrong.
    """
    lora, boost = request.lora, request.boost
    if lora is not None:
        LoRASettings.parse(lora)
    if boost is not None:
        Boost.parse(boost)
        settings.require_trainable(to_argv(request.flags))
    merged = merged_options(request.flags)
    launch = full_launch(merged, request.world_size, request.vocab_size)
    remarks = [Remark(what, instead) for what, instead in launch.assumed]
    sizes, missing = cover(launch.sizes, ranks, small.own_microbatches(launch))
    remarks += [
        Remark(" with ".join(dict.fromkeys(pair)), reason, Treatment.UNTESTED)
        for pair, reason in missing.items()
    ]
    known = versions.chosen(version)
    if lacking := parser.unknown((flag.name for flag in merged.flags), known):
        remarks.append(
            Remark(f"options that megatron-core {known} does not have", "", Treatment.KEPT, tuple(lacking))
        )
    if lora is not None:
        remarks.append(Remark(f"adapters in the script: NEMOTRON3_LORA={lora}", _SCRIPT, Treatment.UNTESTED))
    config, sized = _small(launch, sizes, remarks)
    meaning, mechanism, treatments = list(sized), list[Flag](), dict[str, Treatment]()
    drawing: list[Flag] = []
    grouped: dict[table.OptionGroup, list[str]] = {}
    given = {flag.name: flag.values for flag in merged.flags}
    for flag in merged.flags:
        flag = _on_a_cpu(flag, remarks)
        group = table.group(flag.name, flag.values, given)
        treatments[flag.name] = group.treatment
        if group.treatment is Treatment.KEPT and group.mechanism:
            mechanism.append(flag)
        elif group.treatment is Treatment.KEPT:
            meaning += to_argv([flag])
        elif group is table.RANDOM and is_known(flag.values):
            drawing.append(flag)
        if group.treatment in (Treatment.REPLACED, Treatment.UNTESTED) or group is table.UNKNOWN:
            grouped.setdefault(group, []).append(str(flag))
        if group.treatment is Treatment.UNTESTED and flag.name == "--moe-token-dispatcher-type":
            mechanism.append(Flag(flag.name, ("alltoall",)))
    for name in (name for name in table.DROPOUT if name not in treatments):
        drawing.append(Flag(name, ("0.1",)))
        grouped.setdefault(table.RANDOM, []).append(f"{name} 0.1, Megatron's default")
    remarks += [
        Remark(group.what, group.instead, group.treatment, tuple(names)) for group, names in grouped.items()
    ]
    return ProxyLaunch(
        model=launch.model,
        config=config,
        large=launch.sizes,
        sizes=tuple(sizes),
        case=replace(small.training(launch, config, sizes), lora=lora, boost=boost),
        meaning=tuple(meaning),
        mechanism=tuple(mechanism),
        drawing=tuple(to_argv(drawing)),
        treatments=treatments,
        remarks=tuple(dict.fromkeys(remarks)),
    )


def _on_a_cpu(flag: Flag, remarks: list[Remark]) -> Flag:
    """Return an option without values that a CPU cannot have, and say so."""
    if flag.name != "--recompute-modules" or not (lost := [m for m in flag.values if m in _MODULES]):
        return flag
    remarks.append(
        Remark(
            f"recomputation of {' and '.join(lost)}",
            "kept in memory: they need Transformer Engine",
            Treatment.UNTESTED,
            (str(flag),),
        )
    )
    kept = tuple(module for module in flag.values if module not in _MODULES)
    return Flag(flag.name, kept or ("core_attn",))


def _small(
    launch: FullLaunch, sizes: Sequence[Sizes], remarks: list[Remark]
) -> tuple[Nemotron3Config, tuple[str, ...]]:
    """Return the small model, and arguments for what its configuration does not say."""
    layout, model = launch.sizes.layout, launch.model
    count = max(s.layout.stages for s in sizes)
    chosen = layouts.chosen(launch.stages, count)
    stages, apart = layouts.shortened(chosen, launch.stages)
    lost = (
        [pair for pair in layouts.borders(launch.stages) if pair not in layouts.borders(stages)]
        if count > 1
        else []
    )
    for pairs, what in ((lost, "cuts between stages"), (apart, "neighbors in a stage")):
        if pairs:
            shown = ", ".join(f"{one or 'nothing'} and {other or 'nothing'}" for one, other in pairs)
            remarks.append(Remark(f"{what}: {shown}", "the small pipeline has fewer", Treatment.UNTESTED))
    mtp, _ = layouts.shortened([model.mtp_pattern or ""], [model.mtp_pattern or ""])
    config = small.small_model(model, layout, sizes, stages=stages, mtp=mtp[0])
    config = config.but(vocab_size=small.PADDED_VOCABULARY - (8 if launch.padded else 0))
    ep = max(s.layout.ep for s in sizes)
    config, groups = small.router_groups(config, launch.given, layout.ep, ep)
    return config, tuple(word for name, value in groups.items() for word in (name, str(value)))


_WIDTH = 110
_SIZES = {
    "layers": "num_layers",
    "hidden size": "hidden_size",
    "vocabulary": "vocab_size",
    "attention heads": "num_attention_heads",
    "query groups": "num_query_groups",
    "Mamba heads": "mamba_num_heads",
    "Mamba groups": "mamba_num_groups",
    "experts": "num_moe_experts",
    "experts per token": "moe_router_topk",
    "latent size": "moe_latent_size",
    "shared expert": "moe_shared_expert_intermediate_size",
    "MTP depths": "mtp_num_layers",
}


def proxy_lines(proxy: ProxyLaunch) -> list[str]:
    """Return what was kept, made small, replaced, left out and is not tested, in this order."""
    result = [f"{Treatment.SIZED.value}:"]
    result += [f"  {line}" for line in _sized(proxy)]
    for title, flags in (
        ("what is computed", parse(proxy.meaning)),
        ("how it is computed", [flag for flag in proxy.mechanism if flag.name in proxy.treatments]),
    ):
        if flags:
            result += [f"{Treatment.KEPT.value}, {title}:", *_wrapped(", ".join(map(str, flags)))]
    for treatment in (Treatment.KEPT, Treatment.REPLACED, Treatment.UNTESTED):
        found = [remark for remark in proxy.remarks if remark.treatment is treatment]
        if found:
            result.append(f"{treatment.value}:")
        for remark in found:
            names = f" ({', '.join(remark.options)})" if remark.options else ""
            instead = f": {remark.instead}" if remark.instead else ""
            result += _wrapped(f"{remark.what}{instead}{names}")
    dropped = Counter(
        (group if group.treatment is Treatment.DROPPED else table.OFF).what
        for name, treatment in proxy.treatments.items()
        if treatment is Treatment.DROPPED and (group := table.group(name))
    )
    if dropped:
        shown = ", ".join(f"{what} ({count} options)" for what, count in dropped.items())
        result += [f"{Treatment.DROPPED.value}:", *_wrapped(shown)]
    return result


def _sized(proxy: ProxyLaunch) -> Iterator[str]:
    large, config, batch = proxy.model, proxy.config, proxy.case
    yield f"layout {proxy.large} as {' and '.join(map(str, proxy.sizes))}"
    yield f"layers {_pattern(large)} as {config.source or config.pattern}{_depths(config)}"
    changed = [
        f"{name} {getattr(large, field)} as {getattr(config, field)}"
        for name, field in _SIZES.items()
        if field != "num_layers" and getattr(large, field)
    ]
    yield from textwrap.wrap(", ".join(changed), _WIDTH - 2)
    packed = f", documents of {', '.join(map(str, batch.documents))} tokens" if batch.documents else ""
    yield (
        f"{batch.sequences} sequences of {batch.seq_length} tokens in a step, "
        f"{batch.micro_batch_size} in a micro-batch{packed}"
    )


def _pattern(config: Nemotron3Config) -> str:
    text = config.pattern if len(config.pattern) <= 40 else f"{config.pattern[:28]}… ({config.num_layers})"
    return text + _depths(config)


def _depths(config: Nemotron3Config) -> str:
    return f"/{config.mtp_pattern}" * config.mtp_num_layers


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
