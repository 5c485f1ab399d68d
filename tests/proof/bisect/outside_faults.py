"""Faults of the engine, written by someone who did not know the diagnosis: from public reports, or seeded.

A fault changes weights, modules or functions of `systems.Engine`, never the tokens. `main` prints how far
each moves log-probabilities of the healthy engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.proof.bisect.damage import BC, INNER, C, changed, each, experts, stale
from tests.proof.bisect.systems import Engine, Weights, checkpoint, healthy_engine, replaced, tokens


@dataclass(frozen=True)
class OutsideFault:
    """One fault; its source is "owner/repo#number" or "seeded"."""

    what: str
    kind: str
    #: The first layer that is wrong; None outside the layers.
    layer: int | None
    source: str
    weights: Callable[[Weights], Weights] | None = None
    engine: Callable[[Engine], None] | None = None
    decode: bool = False


#: Numbers of the decoder's layers.
M, ATTENTION = ([n for n, letter in enumerate(C.pattern) if letter == kind] for kind in "M*")
SCAN = "mamba2_chunk_scan"


def within(layers: list[int], name: str, wrap: Callable[[Any], Any]) -> Callable[[Engine], None]:
    """While the mixers of some layers run, a function of transformers' module is another one."""

    def patch(engine: Engine) -> None:
        for number in layers:
            mixer = engine.layers[number].mixer

            def forward(*args: Any, plain: Any = mixer.forward, **given: Any) -> Any:
                with replaced(engine.modeling, name, wrap(getattr(engine.modeling, name))):
                    return plain(*args, **given)

            mixer.forward = forward

    return patch


def hook(module: Any, change: Callable[..., Any]) -> None:
    """A module's output becomes another, from `(module, arguments, output)`."""
    module.register_forward_hook(change)


def routed(layer: int, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Engine], None]:
    """A layer's router gives other weights, from logits [s, e], weights and experts [s, topk]."""
    return lambda engine: hook(
        engine.layers[layer].mixer.gate, lambda module, args, out: (out[0], change(*out), out[2])
    )


def resumed(at: int, state: Callable[..., Tensor], late: bool = False) -> Callable[[Any], Any]:
    """The scan stops before token `at` and goes on with a state made of its true one.

    Args:
        at: the token.
        state: from the scan of a slice of tokens, `at`, the true state, A, dt and the other arguments.
        late: the state does not decay on its way to the outputs.
    """

    def wrap(old: Any) -> Any:
        def found(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C_: Tensor, **given: Any) -> Any:
            if x.shape[1] <= at:
                return old(x, dt, A, B, C_, **given)

            def part(where: slice, **other: Any) -> Any:
                return old(x[:, where], dt[:, where], A, B[:, where], C_[:, where], **(given | other))

            first, true = part(slice(at), return_final_states=True)
            start = state(part, at, true, A, dt, given)
            rest, final = part(slice(at, None), return_final_states=True, initial_states=start)
            if late:
                rest, _ = part(slice(at, None), return_final_states=True, initial_states=None)
                heads = C_[:, at:].repeat_interleave(x.shape[2] // C_.shape[2], 2).float()
                rest = rest + torch.einsum("blhn,bhpn->blhp", heads, start)
            y = torch.cat([first, rest.to(first.dtype)], 1)
            return (y, final) if given["return_final_states"] else y

        return found

    return wrap


def decay(A: Tensor, dt: Tensor, given: Any) -> Tensor:
    """What is left of a state after tokens [b, s, h] -> [b, h, 1, 1]."""
    return (A * F.softplus(dt + given["dt_bias"])).sum(1).exp()[..., None, None]


def state_of(cache: Any, number: int, name: str) -> Any:
    """A state of a Mamba layer."""
    return getattr(cache.layers[number], name)[0]


def rows(name: str, where: slice, change: Callable[[Tensor], Tensor], dim: int = 0) -> Callable[..., Weights]:
    """A part of the tensors that match becomes another."""

    def other(w: Tensor) -> Tensor:
        w = w.clone()
        part = w.movedim(dim, 0)
        part[where] = change(part[where].clone())
        return w

    return changed(name, other)


def redrawn(w: Tensor) -> Tensor:
    """dt_bias as transformers draws it."""
    low, high = math.log(0.001), math.log(0.1)
    dt = (torch.rand(w.shape, generator=torch.Generator().manual_seed(5)) * (high - low) + low).exp()
    return (dt + (-torch.expm1(-dt)).log()).to(w.dtype)


def attend(layer: int, change: Callable[..., Any]) -> Callable[[Engine], None]:
    """Attention of one layer, or of all for 0, is another function of the plain one and its arguments."""
    layers = [layer] if layer else ATTENTION
    return within(layers, "eager_attention_forward", lambda old: partial(change, old))


def k_scale_for_v(old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
    """Both are quantised with their own scales; both are read with the keys'."""
    ks, vs = k.abs().amax() / 448, v.abs().amax() / 448
    k, v = (ks * (t / scale).to(torch.float8_e4m3fn).to(t.dtype) for t, scale in ((k, ks), (v, vs)))
    return old(module, q, k, v, mask, **given)


def sharper(old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
    """Queries behind the "original" context have YaRN's factor, here of 8, squared."""
    position = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    factor = torch.where(position < 128, 1.0, (0.1 * math.log(8) + 1) ** 2).to(q.dtype)
    return old(module, q * factor, k, v, mask, **given)


def capped(
    old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
) -> Any:
    """Scores pass a tanh."""
    k, v = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (k, v))
    scores = 1.5 * torch.tanh(q @ k.transpose(2, 3) * scaling / 1.5)
    weights = (scores + (0 if mask is None else mask)).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), weights


def page_twice(old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
    """The page of tokens 48 to 63 is that of 32 to 47."""
    page = torch.arange(k.shape[2])
    page[48:64] -= 16
    return old(module, q, k[:, :, page], v[:, :, page], mask, **given)


def dropped(logits: Tensor, weights: Tensor, taken: Tensor) -> Tensor:
    """Experts serve no more tokens than three quarters of their even share; later ones are lost."""
    s, k = taken.shape
    hot = F.one_hot(taken.flatten(), logits.shape[1])
    place = (hot.cumsum(0) * hot).sum(-1).view(s, k)
    return weights * (place <= math.ceil(0.75 * s * k / logits.shape[1]))


def fp4_input(engine: Engine) -> None:
    """Down-projections to the latent width see activations of four bits, with a scale per 16 values."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def before(module: Any, args: Any) -> Any:
        x = args[0].unflatten(-1, (-1, 16))
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 6
        near = ((x / scale).abs()[..., None] - grid).abs().argmin(-1)
        return ((grid[near] * x.sign() * scale).flatten(-2).to(args[0].dtype),)

    for mixer in engine.of_kind("E"):
        mixer.fc1_latent_proj.register_forward_pre_hook(before)


def int8(w: Tensor) -> Tensor:
    """One scale for the matrix, four times too large."""
    scale = 4 * w.float().abs().max() / 127
    return ((w.float() / scale).round() * scale).to(w.dtype)


def mtp_before_norm(engine: Engine) -> None:
    """MTP gets the stream, not what the final norm makes of it."""
    seen: list[Tensor] = []
    engine.layers[-1].register_forward_hook(lambda m, a, out: seen.append(out[0]))
    plain = engine.mtp.forward

    def forward(embedded: Tensor, final: Tensor) -> Tensor:
        stream = torch.cat(seen)
        seen.clear()
        return plain(embedded, stream)

    engine.mtp.forward = forward


def stale_after_accepting(engine: Engine) -> None:
    """Every sixth token starts from the states of two tokens before."""
    kept: list[list[Tensor]] = []

    def states(cache: Any) -> list[Tensor]:
        names = ("conv_states", "recurrent_states")
        return [state_of(cache, number, name) for number in M for name in names]

    def start(cache: Any) -> None:
        kept[:] = [[t.clone() for t in states(cache)]]

    def after(cache: Any) -> None:
        if len(kept) % 6 == 5:
            for now, old in zip(states(cache), kept[-2], strict=True):
                now.copy_(old)
        kept.append([t.clone() for t in states(cache)])

    engine.between, engine.after = start, after


def rejected_in_window(engine: Engine) -> None:
    """After every fourth token, the convolutions' windows hold one token more, which was not taken."""
    count = [0]

    def after(cache: Any) -> None:
        count[0] += 1
        if count[0] % 4 == 0:
            for window in [state_of(cache, number, "conv_states") for number in M]:
                window.copy_(window.roll(-1, -1))

    engine.after = after


def first_kv_head(engine: Engine) -> None:
    """The prompt's keys and values arrive with the first head in place of the second."""

    def between(cache: Any) -> None:
        for layer in [cache.layers[number] for number in ATTENTION]:
            layer.keys[:, 1], layer.values[:, 1] = layer.keys[:, 0], layer.values[:, 0]

    engine.between = between


def neighbours_state(engine: Engine) -> None:
    """Layer 0 decodes from the state of the other sequence's prompt."""
    prompts = [ids[None, :length] for ids, length in tokens()]
    with torch.no_grad():
        caches = [engine.model(ids, use_cache=True).past_key_values for ids in prompts]
    kept = [state_of(cache, 0, "recurrent_states").clone() for cache in caches]

    def between(cache: Any) -> None:
        own = [ids.shape[1] for ids in prompts].index(cache.layers[ATTENTION[0]].get_seq_length())
        state_of(cache, 0, "recurrent_states").copy_(kept[1 - own])

    engine.between = between


#: Groups of heads, if a shard is taken to begin in the middle of a group.
RATIO = torch.tensor([0, 1, 1, 1, 2, 2, 3, 3])
#: The first row of group 1 of C in in_proj.
C1 = 2 * INNER + BC + C.mamba_state_dim
OUTSIDE: dict[str, OutsideFault] = {}


def _add(name: str, what: str, kind: str, layer: int | None, source: str = "seeded", **fault: Any) -> None:
    OUTSIDE[name] = OutsideFault(what, kind, layer, source, **fault)


# fmt: off
_add("one_norm_group", "The gated norm of Mamba layers normalises all channels as one group.", "M", 0,
     "state-spaces/mamba#910", engine=each("M", "norm.group_size", INNER))
_add("dt_bias_redrawn", "dt_bias of Mamba layers is drawn anew after loading.", "M", 0,
     "huggingface/transformers#45591", weights=changed(r"mixer\.dt_bias$", redrawn))
_add("dt_init_range", "dt is clamped to the range that only serves to initialise it.", "M", 0,
     "huggingface/transformers#35154", engine=each("M", "time_step_limit", (0.001, 0.1)))
_add("interchunk_axis", "States between the scan's chunks are summed over the wrong axis.", "M", 0,
     "huggingface/transformers#47246", engine=within(M, SCAN, resumed(
         128, lambda part, at, s, A, dt, given: s * (1 + decay(A, dt[:, at:], given)))))
_add("initial_state_undecayed", "A prefill chunk's initial state does not decay in its outputs.", "M", 0,
     "vllm-project/vllm#21783", engine=within(M, SCAN, resumed(64, lambda part, at, s, *_: s, late=True)))
_add("cached_state_early", "A prefix of 96 tokens goes on with layer 2's state after 80.", "M", 2,
     "sgl-project/sglang#37836", engine=within([2], SCAN, resumed(
         96, lambda part, at, *_: part(slice(at - 16), return_final_states=True)[1])))
_add("heads_by_ratio", "Heads at borders of groups take B and C of the next group.", "M", 0,
     "vllm-project/vllm#13660", engine=within(M, SCAN, lambda old: (
         lambda x, dt, A, B, C_, **given: old(x, dt, A, B[:, :, RATIO], C_[:, :, RATIO], **given))))
_add("conv_tiles", "Layer 0's convolution loses the tokens before each tile of 32.", "M", 0,
     engine=within([0], "causal_conv1d_fn", lambda old: (
         lambda x, *args, **given: torch.cat([old(t, *args, **given) for t in x.split(32, -1)], -1))))
_add("c_reversed", "Channels of C in group 1 of layer 5 are reversed.", "M", 5, weights=rows(
     r"^backbone\.layers\.5\.mixer\.in_proj", slice(C1, C1 + C.mamba_state_dim), lambda t: t.flip(0)))
_add("decayed_twice", "Layer 2's state decays twice at token 60.", "M", 2, engine=within([2], SCAN, resumed(
     60, lambda part, at, s, A, dt, given: s * decay(A, dt[:, at : at + 1], given))))
_add("conv_bias_twice", "The convolution's bias of layer 5 is added twice.", "M", 5,
     weights=changed(r"^backbone\.layers\.5\.mixer\.conv1d\.bias", lambda w: 2 * w))

_add("qkv_rank_0", "Each of two ranks loads the first shard of queries, keys and values.", "*", 3,
     "vllm-project/vllm-gguf-plugin#103",
     weights=changed(r"mixer\.[qkv]_proj", lambda w: w.chunk(2)[0].repeat(2, 1)))
_add("v_read_with_k_scale", "Layer 6's FP8 values are read with the scale of the keys.", "*", 6,
     "sgl-project/sglang#26852", engine=attend(6, k_scale_for_v))
_add("head_halved", "Head 2 of layer 3 counts half.", "*", 3, weights=rows(
     r"^backbone\.layers\.3\.mixer\.o_proj", slice(64, 96), lambda t: t / 2, dim=1))
_add("sharper_past_128", "From position 128 on, queries of layer 6 have YaRN's factor.", "*", 6,
     engine=attend(6, sharper))
_add("softcap", "Scores of layer 3 are capped as another model's are.", "*", 3,
     engine=attend(3, capped))
_add("page_twice", "One page of keys and values appears twice in the page table, another not at all.", "*", 3,
     engine=attend(0, page_twice))
_add("partial_sum_twice", "The second rank's share of layer 6's o_proj is summed twice.", "*", 6,
     weights=rows(r"^backbone\.layers\.6\.mixer\.o_proj", slice(64, None), lambda t: 2 * t, dim=1))

_add("scaled_twice", "The routed scaling factor is applied in the router and on the output.", "E", 1,
     "vllm-project/vllm#45037", engine=each("E", "gate.routed_scaling_factor", lambda old: old * old))
_add("shared_over_factor", "Shared experts are divided by the routed scaling factor.", "E", 1,
     "sgl-project/sglang#28237", weights=changed(r"shared_experts\.down_proj", lambda w: w / 5))
_add("shared_partial", "Shared experts' outputs are one rank's, not the sum of two.", "E", 1,
     "vllm-project/tpu-inference#3435",
     weights=rows(r"shared_experts\.down_proj", slice(32, None), torch.zeros_like, dim=1))
_add("round_robin", "The router places experts in turn, the loader placed them in blocks.", "E", 1,
     "vllm-project/vllm#23745", weights=experts(lambda e: e // 2 + 8 * (e % 2)))
_add("rebalanced", "Layer 4's experts 8 to 11 moved a slot on, the router's map did not.", "E", 4,
     "sgl-project/sglang#25882", weights=experts(lambda e: 8 + (e - 7) % 4 if 8 <= e < 12 else e, "4"))
_add("experts_not_refit", "Routed experts are those of before the last update.", "E", 1,
     "NVIDIA-NeMo/RL#3565", weights=stale(r"mixer\.experts\."))
_add("raw_logits", "Layer 7's experts are weighted by their logits.", "E", 7, "sgl-project/sglang#35160",
     engine=routed(7, lambda logits, weights, taken: 5 * logits.gather(1, taken)))
_add("latent_from_fp4", "Routed experts see the input that was quantised to FP4.", "E", 1,
     "NVIDIA/TensorRT-LLM#11601", engine=fp4_input)
_add("rank_doubled", "Outputs of layer 1's experts 4 to 7, a rank's, count twice.", "E", 1,
     engine=routed(1, lambda logits, weights, taken: weights * (1 + (taken // 4 == 1))))
_add("capacity", "Layer 7's experts drop tokens beyond three quarters of their even share.", "E", 7,
     engine=routed(7, dropped))
_add("weight_on_input", "Layer 4's router weights multiply experts' inputs, and relu² squares them.", "E", 4,
     engine=routed(4, lambda logits, weights, taken: weights**2))
_add("int8_one_scale", "Routed experts are in INT8 with one scale per matrix, four times too large.", "E", 1,
     weights=changed(r"mixer\.experts\.", int8))

_add("gain_plus_one", "The norm before layer 6 multiplies by one plus its gain.", "*", 6,
     weights=changed(r"^backbone\.layers\.6\.norm\.weight", lambda w: w + 1))
_add("residual_of_normed", "Layer 5 adds its output to its normed input.", "M", 5, engine=lambda e: hook(
    e.layers[5], lambda block, args, out: out - args[0] + block.norm(args[0])))
_add("embedding_border", "Ids 250 to 255 have no embedding: neither of two shards holds them.", "model", None,
     weights=rows(r"embeddings", slice(250, 256), torch.zeros_like))
_add("padded_head", "Rows that pad the vocabulary take part in the softmax with logit zero.", "model", None,
     "mirage-project/mirage#751", engine=lambda e: hook(
         e.model.lm_head, lambda module, args, out: F.pad(out, (0, 1024 - out.shape[-1]))))

_add("mtp_before_norm", "MTP reads the hidden states before the final norm.", "mtp", None,
     "ggml-org/llama.cpp#24025", engine=mtp_before_norm)
_add("mtp_head_norm", "MTP's final norm has the gain of the model's.", "mtp", None, weights=lambda given: (
    given | {"mtp.layers.1.final_layernorm.weight": given["backbone.norm_f.weight"]}))
_add("stale_after_accepting", "A step after accepted drafts starts from Mamba states without them.", "M", 0,
     "vllm-project/vllm#52942", engine=stale_after_accepting, decode=True)
_add("rejected_in_window", "Convolutions keep rejected drafts in their windows.", "M", 0,
     "vllm-project/vllm#50272", engine=rejected_in_window, decode=True)
_add("first_kv_head", "Transfer from prefill to decoding writes the first KV head over the second.", "*", 3,
     "sgl-project/sglang#19086", engine=first_kv_head, decode=True)
_add("neighbours_state", "Layer 0 decodes from another sequence's state.", "M", 0,
     engine=neighbours_state, decode=True)
# fmt: on

#: Faults that touch few tokens, besides those of MTP and decoding.
FEW = ("interchunk_axis", "cached_state_early", "decayed_twice", "sharper_past_128", "embedding_border")


def effect(fault: OutsideFault) -> tuple[float, float]:
    """Median and largest change of log-probabilities in FP32; of MTP's for its faults."""
    engine = Engine((fault.weights or dict)(checkpoint()), torch.float32, fault.decode)
    if fault.engine:
        fault.engine(engine)
    name = "mtp" if fault.kind == "mtp" else "logprobs"
    pairs = zip(tokens(), healthy_engine(torch.float32, fault.decode), strict=True)
    change = torch.cat([(getattr(engine.score(*s), name) - getattr(h, name)).abs() for s, h in pairs])
    return change.median().item(), change.max().item()


def main() -> None:
    """Print every fault's effect, and whether it suffices."""
    torch.set_num_threads(1)
    for name, fault in OUTSIDE.items():
        median, most = effect(fault)
        partly = fault.decode or fault.kind == "mtp" or name in FEW
        enough = most > 0.05 if partly else median > 0.01
        note = "ok" if enough else "TOO SMALL"
        print(f"{name:24}{fault.kind:6}{fault.layer!s:5}{median:9.4f}{most:9.4f}  {note}")


if __name__ == "__main__":
    main()
