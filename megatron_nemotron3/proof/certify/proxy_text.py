"""What a proxy keeps of its launch, as lines for a reader."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

from megatron_nemotron3.launch.flag import parse
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.certify import options as table
from megatron_nemotron3.proof.certify.options import Treatment
from megatron_nemotron3.proof.certify.proxy import ProxyLaunch

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


def lines(proxy: ProxyLaunch) -> list[str]:
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
    large, config, batch = proxy.model, proxy.config, proxy.batch
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
