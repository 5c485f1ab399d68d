"""Twenty more faults of the engine, by someone else who did not know the diagnosis; form of `outside_faults`.

`main` prints how far each moves log-probabilities of the healthy engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.proof.bisect.damage import BC, INNER, C, changed, each, swap
from tests.proof.bisect.outside_faults import SCAN, M, OutsideFault, attend, effect, hook, routed, within
from tests.proof.bisect.systems import Engine, Weights

#: Where the second part of a prompt begins: behind a prefix in the cache, or a chunk of the prefill.
SECOND = 96
#: What FP4 holds besides signs.
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def before(module: Any, change: Callable[..., Any]) -> None:
    """A module's arguments become others."""
    module.register_forward_pre_hook(lambda module, args: change(*args))


def reads(find: Callable[[Engine], Any], block: int) -> Callable[[Engine], None]:
    """A module reads the stream as a block gets it."""

    def patch(engine: Engine) -> None:
        kept: list[Tensor] = []
        engine.layers[block].register_forward_pre_hook(
            lambda m, args: kept.__setitem__(slice(None), args[:1])
        )
        before(find(engine), lambda x: (kept[0],))

    return patch


def d_by_channel(old: Any) -> Any:
    """Channel c of all has D of head c modulo the heads, not of its own."""

    def found(x: Tensor, *args: Any, **given: Any) -> Any:
        heads, width = x.shape[2:]
        d = given["D"].repeat(width).view(heads, width)
        return old(x, *args, **(given | {"D": None})) + x * d

    return found


def flat_halves(engine: Engine) -> None:
    """Two ranks that decode take halves of the window of all channels as their own x, B and C."""
    halves = torch.arange(INNER + 2 * BC).chunk(2)
    parts = zip(*(half.split([INNER // 2, BC // 2, BC // 2]) for half in halves), strict=True)
    order = torch.cat([piece for part in parts for piece in part])

    def between(cache: Any) -> None:
        for window in [cache.layers[number].conv_states[0] for number in M]:
            window.copy_(window[:, order])

    engine.between = between


def softmaxes(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Attention whose weights come from masked scores [b, h, s, s] in another way."""

    def found(
        old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> Any:
        k, v = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) * scaling + (0 if mask is None else mask)
        weights = change(scores.float()).to(q.dtype)
        return (weights @ v).transpose(1, 2).contiguous(), weights

    return found


def merged_in_base_2(scores: Tensor) -> Tensor:
    """Prefix and rest are merged by exp of a logarithm to base 2 of their sums."""
    weights, key = scores.softmax(-1), torch.arange(scores.shape[-1])
    true = weights[..., :SECOND].sum(-1, keepdim=True).clamp(1e-6, 1 - 1e-6)
    wrong = (true.logit() / math.log(2)).sigmoid()
    factor = torch.where(key < SECOND, wrong / true, (1 - wrong) / (1 - true))
    return weights * torch.where(key[:, None] < SECOND, 1.0, factor)


def top_left(scores: Tensor) -> Tensor:
    """Token i of the second chunk sees the keys up to i of the sequence."""
    key = torch.arange(scores.shape[-1])
    hidden = (key[:, None] >= SECOND) & (key > key[:, None] - SECOND)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def shared_keys(engine: Engine) -> None:
    """Layer 6 finds layer 3's keys in its cache."""
    kept: list[Tensor] = []

    def found(old: Any, module: Any, q: Tensor, k: Tensor, *args: Any, **given: Any) -> Any:
        if module.layer_idx == 3:
            kept[:] = [k]
        return old(module, q, kept[0], *args, **given)

    attend(0, found)(engine)


def displaced(engine: Engine) -> None:
    """One expert too many is chosen; the shared one takes the place of the last, in no order of scores."""

    def change(gate: Any, args: Any, out: Any) -> Any:
        scores = out[0].sigmoid()
        choice = (scores + gate.e_score_correction_bias).topk(gate.top_k + 1).indices
        taken = choice.sort(-1).values[:, :-1]
        weights = scores.gather(1, taken)
        return out[0], weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, taken

    for mixer in engine.of_kind("E"):
        hook(mixer.gate, change)


def by_size(logits: Tensor, weights: Tensor, taken: Tensor) -> Tensor:
    """Weights are sorted by size, experts by number."""
    return torch.empty_like(weights).scatter(1, taken.argsort(1), weights.sort(1, descending=True).values)


def first_chunk_routes(engine: Engine) -> None:
    """Experts run over chunks of 128 tokens, each time with the first chunk's routing."""

    def change(x: Tensor, taken: Tensor, weights: Tensor) -> Any:
        row = torch.arange(len(x)) % 128
        return x, taken[row], weights[row]

    for mixer in engine.of_kind("E"):
        before(mixer.experts, change)


def penalty(engine: Engine) -> None:
    """Logits of tokens seen are smaller by a factor of 1.1."""
    seen: list[Tensor] = []

    def embedded(module: Any, args: Any, out: Tensor) -> None:
        if args[0].dim() == 2:
            seen[:] = [F.one_hot(args[0], C.vocab_size).cumsum(1) > 0]

    def change(module: Any, args: Any, out: Tensor) -> Tensor:
        if out.dim() == 2:  # MTP's
            return out
        return torch.where(seen[0], torch.where(out > 0, out / 1.1, out * 1.1), out)

    hook(engine.model.model.embeddings, embedded)
    hook(engine.model.lm_head, change)


def scales_unpadded(given: Weights) -> Weights:
    """FP4 blocks' scales of each expert begin at a multiple of 40 rows; the kernel counts 32 per expert."""
    names = [f"backbone.layers.4.mixer.experts.{e}.down_proj.weight" for e in range(C.num_moe_experts)]
    blocks = [given[name].float().unflatten(1, (-1, 16)) for name in names]
    scales = [b.abs().amax(-1, keepdim=True) / 6 for b in blocks]
    stored, result = torch.cat([F.pad(s, (0, 0, 0, 0, 0, 8)) for s in scales]), dict(given)
    for e, (name, b, scale) in enumerate(zip(names, blocks, scales, strict=True)):
        payload = FP4[((b / scale).abs()[..., None] - FP4).abs().argmin(-1)] * b.sign()
        read = stored[e * len(b) : (e + 1) * len(b)]
        result[name] = (payload * read).flatten(1).to(given[name].dtype)
    return result


def zero_point(w: Tensor) -> Tensor:
    """INT4 in groups of 32, with a zero point of 9 in place of 8."""
    groups = w.float().unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return (((groups / scale).round() - 1) * scale).flatten(1).to(w.dtype)


OUTSIDE_2: dict[str, OutsideFault] = {}


def _add(name: str, what: str, kind: str, layer: int | None, source: str = "seeded", **fault: Any) -> None:
    OUTSIDE_2[name] = OutsideFault(what, kind, layer, source, **fault)


# fmt: off
_add("norm_groups_halved", "The gated norm of one of two ranks has as many groups as both.", "M", 0,
     "state-spaces/mamba#916", engine=each("M", "norm.group_size", lambda old: old // 2))
_add("first_dt", "Tokens verified together, four at once, have the first one's dt.", "M", 0,
     "huggingface/transformers#46741", engine=within(M, SCAN, lambda old: lambda x, dt, *args, **given: old(
         x, dt[:, torch.arange(dt.shape[1]) // 4 * 4], *args, **given)))
_add("flat_halves", "Convolutions' windows are cut in halves for two ranks, not x, B and C each.", "M", 0,
     "vllm-project/vllm#37638", engine=flat_halves, decode=True)
_add("decay_base_2", "The scan takes exp2 of what was never multiplied by log2(e).", "M", 0, engine=within(
    M, SCAN, lambda old: lambda x, dt, A, *args, **given: old(x, dt, A * math.log(2), *args, **given)))
_add("d_by_channel", "Layer 5 repeats D over channels in turn, not head by head.", "M", 5,
     engine=within([5], SCAN, d_by_channel))
_add("late_gate", "The gate of layer 2 is that of the token before.", "M", 2, engine=lambda e: before(
    e.layers[2].mixer.norm, lambda x, gate: (x, torch.cat([gate[:, :1], gate[:, :-1]], 1))))

_add("merged_in_base_2", "Attention to a prefix of 96 tokens and to the rest merge by base-2 sums.", "*", 3,
     "sgl-project/sglang#40903", engine=attend(0, softmaxes(merged_in_base_2)))
_add("top_left", "The causal mask of the second prefill chunk is aligned to the top left.", "*", 3,
     "gittensor-ai-lab/sparkinfer#3", engine=attend(0, softmaxes(top_left)))
_add("zero_sink", "Layer 3 attends to a sink whose logit stayed zero.", "*", 3, engine=attend(
    3, softmaxes(lambda scores: F.pad(scores, (0, 1)).softmax(-1)[..., :-1])))
_add("shared_keys", "Layer 6 reads keys of layer 3, values of its own.", "*", 6, engine=shared_keys)

_add("displaced", "A fused shared expert displaces one of the best experts, not the surplus one.", "E", 1,
     "sgl-project/sglang#8125", engine=displaced)
_add("weights_by_size", "Layer 4's router weights are sorted by size, its experts by number.", "E", 4,
     "vllm-project/vllm#48895", engine=routed(4, by_size))
_add("halves_swapped", "Halves of up-projections are swapped, as gate and up of gated experts are.", "E", 1,
     weights=changed(r"mixer\.experts\.\d+\.up_proj", lambda w: swap(w, 0)))
_add("limited", "What relu² of layer 7's routed experts gets is clamped, as another model's is.", "E", 7,
     engine=lambda e: before(e.layers[7].mixer.experts.act_fn, lambda x: (x.clamp(max=1.0),)))
_add("gate_sees_stream", "Layer 4's router reads the stream, not the normed one.", "E", 4,
     engine=reads(lambda e: e.layers[4].mixer.gate, 4))
_add("first_chunk_routes", "Experts take tokens from 128 on by the routing of tokens from 0 on.", "E", 1,
     engine=first_chunk_routes)

_add("norm_before_sum", "The norm before layer 6 misses layer 5's output; the residual has it.", "*", 6,
     engine=reads(lambda e: e.layers[6].norm, 5))
_add("penalty", "Log-probabilities have generation_config.json's repetition penalty of 1.1.", "model", None,
     "NVIDIA-NeMo/RL#3497", engine=penalty)

_add("scales_unpadded", "Layer 4's FP4 down-projections get scales at offsets without padding.", "E", 4,
     "vllm-project/vllm#35497", weights=scales_unpadded)
_add("zero_point", "Output projections of attention are in INT4 with zero points one too high.", "*", 3,
     "vllm-project/vllm#38966", weights=changed(r"mixer\.o_proj", zero_point))
# fmt: on

#: Faults that touch few tokens, besides those of decoding.
FEW_2 = ("merged_in_base_2", "top_left", "first_chunk_routes")


def main() -> None:
    """Print every fault's effect, and whether it suffices."""
    torch.set_num_threads(1)
    for name, fault in OUTSIDE_2.items():
        median, most = effect(fault)
        enough = most > 0.05 if fault.decode or name in FEW_2 else median > 0.005
        note = "ok" if enough else "TOO SMALL"
        print(f"{name:20}{fault.kind:6}{fault.layer!s:5}{median:9.4f}{most:9.4f}  {note}")


if __name__ == "__main__":
    main()
