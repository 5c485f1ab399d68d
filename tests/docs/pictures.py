"""The pictures of docs/architecture.md, drawn from the catalog and from a layout.

`python -m tests.docs.pages` writes them; a test compares the files with what the package says now.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_nemotron3.launch.layout import ParallelLayout, cut_pattern
from megatron_nemotron3.launch.phases import phase
from megatron_nemotron3.models import NANO, SUPER, ULTRA, Nemotron3Config
from megatron_nemotron3.models.pattern import parse
from megatron_nemotron3.models.tensors import symbol_sizes
from tests.docs.svg import WIDTH, Canvas

MODELS = (NANO, SUPER, ULTRA)
#: Layer kind -> class of its colour, name.
KINDS = {"M": ("M", "Mamba-2"), "*": ("A", "attention"), "E": ("E", "experts"), "-": ("D", "dense MLP")}
#: Layers in a row of a strip.
ROW = 22
_CELL, _LEFT, _HIGH = 16.8, 26.0, 18.0
_MIDDLE = WIDTH / 2


def _each(value: Callable[[Nemotron3Config], int | None]) -> str:
    """A number of Nano, Super and Ultra; one number if all have the same."""
    found = [value(config) for config in MODELS]
    shown = [f"{one:,}" if one else "none" for one in found]
    return shown[0] if len(set(shown)) == 1 else " / ".join(shown)


def _size(symbol: str) -> str:
    """A shape symbol of the table of tensors, of the three models."""
    return _each(lambda config: symbol_sizes(config)[symbol])


def _strip(canvas: Canvas, y: float, layers: str, first: int = 0) -> float:
    """Draw layers in rows, each with the number of its first layer; returns the y below."""
    for begin in range(0, len(layers), ROW):
        canvas.text(_LEFT - 5, y + 13, str(first + begin), size=10, anchor="end")
        for place, kind in enumerate(layers[begin : begin + ROW]):
            canvas.box(_LEFT + place * _CELL, y, _CELL - 1.5, _HIGH, KINDS[kind][0], kind, size=11)
        y += _HIGH + 3
    return y


def _legend(canvas: Canvas, y: float, kinds: str) -> float:
    x = _LEFT
    for kind in kinds:
        canvas.box(x, y, _CELL - 1.5, _HIGH, KINDS[kind][0], kind, size=11)
        canvas.text(x + _CELL + 3, y + 13, KINDS[kind][1], size=11)
        x += _CELL + 18 + len(KINDS[kind][1]) * 7
    return y + _HIGH + 14


def patterns() -> str:
    """Every layer of Nano, Super and Ultra, in order."""
    canvas = Canvas(
        "The layers of Nemotron 3 Nano, Super and Ultra in order: "
        + "; ".join(f"{config.title}: {config.full_pattern}" for config in MODELS)
    )
    y = _legend(canvas, 2, "M*E")
    for config in MODELS:
        numbers = ", ".join(f"{config.pattern.count(kind)} {kind}" for kind in "ME*")
        canvas.text(_LEFT, y + 10, config.title, size=13, bold=True)
        canvas.text(_LEFT, y + 26, f"{config.num_layers} layers: {numbers}", size=11)
        y = _strip(canvas, y + 34, config.pattern)
        if config.mtp_pattern:
            canvas.text(_LEFT, y + 13, "MTP", size=11)
            for place, kind in enumerate(config.mtp_pattern, start=2):
                canvas.box(_LEFT + place * _CELL, y, _CELL - 1.5, _HIGH, KINDS[kind][0], kind, size=11)
            stored = "one block" if config.mtp_num_blocks == 1 else f"{config.mtp_num_blocks} blocks"
            x = _LEFT + (2 + len(config.mtp_pattern)) * _CELL + 6
            canvas.text(x, y + 13, f"{stored}, applied at {config.mtp_num_layers} depths", size=11)
            y += _HIGH + 3
        y += 16
    return str(canvas)


def _residual(canvas: Canvas, top: float, bottom: float) -> None:
    """The path around a layer."""
    canvas.text(_MIDDLE, top - 6, f"x [s, b, d],  d = {_size('d')}", size=11, anchor="middle")
    canvas.line((_MIDDLE, top), (_MIDDLE, top + 12), (392, top + 12), (392, bottom), (_MIDDLE + 12, bottom))
    canvas.line((_MIDDLE, bottom - 18), (_MIDDLE, bottom - 9))
    canvas.box(_MIDDLE - 9, bottom - 9, 18, 18, "plain", "+")


def mamba() -> str:
    """What a Mamba-2 layer computes."""
    canvas = Canvas("A Mamba-2 layer: in_proj, convolution, selective scan, gated norm, out_proj")
    canvas.line((_MIDDLE, 18), (_MIDDLE, 38))
    canvas.box(40, 38, 320, 38, "M", "RMSNorm, in_proj", f"d → {_size('in_proj')} = z, x, B, C, dt")
    for x, low in ((70, 206), (200, 96), (338, 96)):
        canvas.line((x, 76), (x, low))
    canvas.text(78, 92, "z", size=11)
    canvas.text(208, 92, "x, B, C", size=11)
    canvas.text(346, 92, "dt", size=11)
    canvas.box(
        110, 96, 180, 38, "M", "convolution, SiLU", f"the last {_each(lambda c: c.mamba_conv_kernel)} tokens"
    )
    canvas.box(298, 96, 82, 38, "M", "softplus", "+ dt bias")
    canvas.line((200, 134), (200, 148))
    canvas.line((338, 134), (338, 148))
    canvas.box(
        *(94, 148, 286, 50, "M", "scan: h ← exp(dt A) h + dt B x;  y = C h + D x"),
        f"{_each(lambda c: c.mamba_num_heads)} heads, state of a head "
        f"{_each(lambda c: c.mamba_head_dim)} × {_each(lambda c: c.mamba_state_dim)}",
        "memory does not grow with the sequence",
        size=11.5,
    )
    canvas.line((200, 198), (200, 206))
    groups = _each(lambda c: c.mamba_num_groups)
    canvas.box(
        40, 206, 320, 38, "M", "RMSNorm of y · SiLU(z)", f"in {groups} groups; B and C have {groups}, too"
    )
    canvas.line((200, 244), (200, 254))
    canvas.box(40, 254, 320, 38, "M", "out_proj", f"{_size('inner')} → d")
    _residual(canvas, 18, 310)
    return str(canvas)


def attention() -> str:
    """What an attention layer computes."""
    canvas = Canvas("An attention layer: linear_qkv, causal attention, linear_proj")
    canvas.line((_MIDDLE, 18), (_MIDDLE, 38))
    canvas.box(40, 38, 320, 38, "A", "RMSNorm, linear_qkv", f"d → {_size('qkv')} = q, k, v")
    canvas.line((200, 76), (200, 86))
    canvas.box(
        *(40, 86, 320, 54, "A", "causal attention over all earlier tokens"),
        f"{_each(lambda c: c.num_attention_heads)} query heads, "
        f"{_each(lambda c: c.num_query_groups)} KV heads of {_each(lambda c: c.kv_channels)}",
        "no position embedding: the Mamba-2 layers know the order",
        size=11.5,
    )
    canvas.line((200, 140), (200, 150))
    canvas.box(40, 150, 320, 38, "A", "linear_proj", f"{_size('q')} → d")
    _residual(canvas, 18, 206)
    return str(canvas)


def experts() -> str:
    """What a mixture-of-experts layer computes, with the latent width or without."""
    latent = " / ".join(f"{c.moe_latent_size:,}" if c.moe_latent_size else "none" for c in MODELS)
    canvas = Canvas("A mixture-of-experts layer: router, latent projections, routed experts, shared expert")
    canvas.line((_MIDDLE, 18), (_MIDDLE, 38))
    canvas.box(40, 38, 320, 22, "E", "RMSNorm")
    for x, low in ((58, 78), (200, 78), (322, 128)):
        canvas.line((x, 60), (x, low))
    chosen = [f"{c.moe_router_topk} of {c.num_moe_experts}" for c in MODELS]
    canvas.box(4, 78, 108, 88, "E", "router", "for each token", *chosen, size=11.5)
    canvas.line((112, 147), (122, 147))
    canvas.box(122, 78, 132, 38, "P", "fc1_latent_proj", f"d → {latent}", size=11.5)
    canvas.line((200, 116), (200, 128))
    canvas.box(
        *(122, 128, 132, 66, "E", "routed experts"),
        _each(lambda c: c.moe_ffn_hidden_size),
        "wide, squared ReLU",
        "(all-to-all around)",
        size=11.5,
    )
    shared = _each(lambda c: c.moe_shared_expert_intermediate_size)
    canvas.box(
        262, 128, 122, 66, "E", "shared expert", shared, "wide, squared ReLU", "every token", size=11.5
    )
    canvas.line((200, 194), (200, 206))
    canvas.box(122, 206, 132, 38, "P", "fc2_latent_proj", f"{latent} → d", size=11.5)
    canvas.line((200, 244), (200, 258))
    canvas.line((322, 194), (322, 267), (209, 267))
    canvas.box(191, 258, 18, 18, "plain", "+")
    _residual(canvas, 18, 294)
    return str(canvas)


def mtp() -> str:
    """What multi-token prediction computes."""
    pattern = SUPER.mtp_pattern or ""
    canvas = Canvas("A multi-token-prediction block: two norms, eh_proj, an attention and an experts layer")
    canvas.box(4, 4, 190, 38, "D", "last hidden state", "at token t, from the decoder")
    canvas.box(206, 4, 190, 38, "D", "embedding", "of token t + 1")
    for x in (99, 301):
        canvas.line((x, 42), (x, 54))
        canvas.box(x - 60, 54, 120, 22, "P", "RMSNorm")
        canvas.line((x, 76), (x, 88))
    canvas.box(40, 88, 320, 38, "P", "eh_proj", "both side by side: 2d → d")
    y = 126.0
    for kind in pattern:
        canvas.line((200, y), (200, y + 12))
        canvas.box(40, y + 12, 320, 24, KINDS[kind][0], f"{kind}  {KINDS[kind][1]}, as in the decoder")
        y += 36
    canvas.line((200, y), (200, y + 12))
    canvas.box(40, y + 12, 320, 24, "P", "RMSNorm")
    canvas.line((200, y + 36), (200, y + 48))
    canvas.box(40, y + 48, 320, 38, "D", "output layer of the model", "predicts token t + 2")
    canvas.text(200, y + 104, "depth 2: the same weights again, one token further", size=11, anchor="middle")
    return str(canvas)


def place(layout: ParallelLayout, rank: int) -> dict[str, int]:
    """Map each dimension to the rank's index in it, in Megatron's default order tp-cp-ep-dp-pp.

    ep, etp and edp cut the ranks of a stage another way, for the routed experts.
    """
    found, rest = {}, rank
    for name in ("tp", "cp", "dp", "pp"):
        found[name], rest = rest % getattr(layout, name), rest // getattr(layout, name)
    rest = rank
    for name in ("etp", "ep", "edp"):
        found[name], rest = rest % getattr(layout, name), rest // getattr(layout, name)
    return found


def _experts_of(config: Nemotron3Config, layout: ParallelLayout, rank: int) -> tuple[str, str]:
    """The first and the last routed expert of a rank."""
    each = (config.num_moe_experts or 0) // layout.ep
    first = place(layout, rank)["ep"] * each
    return str(first), str(first + each - 1)


def _chunks(layout: ParallelLayout, cp: int) -> str:
    """Which of the 2 CP chunks of a sequence a context-parallel rank has: one of each end."""
    return f"{cp + 1} and {2 * layout.cp - cp}" if layout.cp > 1 else "all"


def layout_of(config: Nemotron3Config, layout: ParallelLayout) -> str:
    """Which rank of a launch holds what: the stages with their layers, and the ranks of the first one."""
    canvas = Canvas(f"{config.title} on {layout}: {layout.world_size} ranks")
    canvas.text(4, 14, f"{config.title}, {layout.world_size} GPUs", size=13, bold=True)
    canvas.text(4, 30, str(layout), size=11)
    y, first = 40.0, 0
    stages, each = parse(cut_pattern(config, layout)).stages, layout.world_size // layout.pp
    for stage, layers in enumerate(stages):
        begin = stage * each
        canvas.text(4, y + 12, f"stage {stage}: ranks {begin}–{begin + each - 1}", size=12, bold=True)
        canvas.text(396, y + 12, _besides(config, layout, stage), size=11, anchor="end")
        y = _strip(canvas, y + 20, layers, first)
        first += len(layers)
        if stage == 0:
            y = _grid(canvas, config, layout, y + 4)
        y += 8
    return str(canvas)


def _besides(config: Nemotron3Config, layout: ParallelLayout, stage: int) -> str:
    parts = ["embedding"] * (stage == 0) + ["output layer"] * (stage == layout.pp - 1)
    return (
        "and " + " and ".join(parts + ["MTP"] * (config.has_mtp and stage == layout.pp - 1)) if parts else ""
    )


def _grid(canvas: Canvas, config: Nemotron3Config, layout: ParallelLayout, y: float) -> float:
    """The ranks of the first stage: a row per part of the batch and of the sequence, a column per TP rank."""
    left = 96.0
    wide = (WIDTH - 4 - left) / layout.tp
    by_column = layout.tp % layout.expert_ranks == 0
    for tp in range(layout.tp):
        x = left + (tp + 0.5) * wide
        canvas.text(x, y + 12, f"TP {tp}", size=11, anchor="middle", room=wide)
        if by_column:
            canvas.text(x, y + 26, _experts_of(config, layout, tp)[0], size=11, anchor="middle", room=wide)
    if by_column:
        canvas.text(left - 4, y + 26, "experts from", size=11, anchor="end")
    y += 31 if by_column else 18
    colours = ("R0", "R1", "R2", "R3")
    for dp in range(layout.dp):
        for cp in range(layout.cp):
            canvas.text(4, y + 12, f"DP {dp}, CP {cp}" if layout.dp > 1 else f"CP {cp}", size=11)
            canvas.text(4, y + 24, f"parts {_chunks(layout, cp)}", size=10, room=left - 6)
            for tp in range(layout.tp):
                rank = tp + layout.tp * (cp + layout.cp * dp)
                lines = [f"rank {rank}" if wide > 60 else str(rank)]
                if not by_column:
                    lines.append("experts " + "–".join(_experts_of(config, layout, rank)))
                kind = "D" if by_column else colours[place(layout, rank)["ep"] % len(colours)]
                canvas.box(left + tp * wide, y, wide - 2, 28, kind, *lines, size=11)
            y += 31
    return y


#: A layout with two of everything, and the published one of Nano's extension to long sequences.
SMALL = ParallelLayout(tp=2, cp=2, pp=2, dp=2, ep=4)
PUBLISHED = phase(NANO, "long-context").layout or ParallelLayout()

#: Name of a file below docs/pictures/ -> what draws it.
PICTURES: dict[str, Callable[[], str]] = {
    "patterns": patterns,
    "mamba": mamba,
    "attention": attention,
    "experts": experts,
    "mtp": mtp,
    "layout_small": lambda: layout_of(SUPER, SMALL),
    "layout_published": lambda: layout_of(NANO, PUBLISHED),
}
