"""Thirty faults of an engine, by somebody who did not know the diagnosis.

Here those of mamba and attention; `outside_faults_3b` has the rest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.proof.bisect.outside_faults import OutsideFault
from tests.proof.bisect.systems import MODEL, Engine, Weights, replaced

# --- Helpers ---------------------------------------------------------------------------------------------


def edited(pattern: str, change: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    """Weights in which the tensors whose names match are changed."""
    return lambda weights: {n: change(t) if re.search(pattern, n) else t for n, t in weights.items()}


def _patched(engine: Engine, name: str, change: Callable[..., Any], layers: Iterable[int] = range(8)) -> None:
    """`change(old, layer, *args)` in place of a function of the modeling file, in some layers."""
    old, current = getattr(engine.modeling, name), [-1]
    chosen = set(layers)

    def enter(number: int) -> Callable[..., None]:
        return lambda *_: current.__setitem__(0, number)

    for number, block in enumerate([*engine.layers, *engine.mtp.blocks]):
        inside = number if number < len(engine.layers) and number in chosen else -1
        block.register_forward_pre_hook(enter(inside))

    def new(*args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs) if current[0] < 0 else change(old, current[0], *args, **kwargs)

    engine.contexts.append(lambda: replaced(engine.modeling, name, new))


def _mixers(engine: Engine, kind: str) -> list[Any]:
    """The mixers of a kind in the model, without MTP's."""
    return [b.mixer for b, letter in zip(engine.layers, MODEL.pattern, strict=True) if letter == kind]


# --- Mamba -----------------------------------------------------------------------------------------------


def _half_groups(engine: Engine) -> None:
    """Halve the groups of the gated norm."""
    for mixer in _mixers(engine, "M"):
        mixer.norm.group_size //= 2


def _clamped_steps(engine: Engine) -> None:
    """Clamp time steps to 0.1."""
    for mixer in _mixers(engine, "M"):
        mixer.time_step_limit = (0.0, 0.1)


def _wrong_axis(
    old: Any, _: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **kwargs: Any
) -> Any:
    """Start every chunk at the state of the one before it alone, times the sum of all later decays."""
    final = kwargs.pop("return_final_states")
    parts = [slice(i, i + chunk_size) for i in range(0, x.shape[1], chunk_size)]
    log_decays = [(A * F.softplus(dt[:, p] + kwargs["dt_bias"])).sum(1) for p in parts]
    kwargs |= {"chunk_size": chunk_size, "return_final_states": True}
    start, outs = None, []
    for number, part in enumerate(parts):
        inputs = (x[:, part], dt[:, part], A, B[:, part], C[:, part])
        outs.append(old(*inputs, **(kwargs | {"initial_states": start}))[0])
        own = old(*inputs, **(kwargs | {"initial_states": None}))[1]
        reached = [torch.zeros_like(log_decays[0])]
        for later in log_decays[number + 1 :]:
            reached.append(reached[-1] + later)
        start = own * torch.stack(reached).exp().sum(0)[..., None, None]
    out = torch.cat(outs, 1)
    return (out, own) if final else out


def _contiguous_shards(t: Tensor) -> Tensor:
    """Channels [x, B, C] cut into two halves as they stand, each half read as a rank's [x, B, C]."""
    first, second = (half.split([64, 32, 32]) for half in t.split(128))
    return torch.cat([part for pair in zip(first, second, strict=True) for part in pair])


def _conv_without_context(old: Any, _: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Start the convolution anew every 64 tokens."""
    return torch.cat([old(part, *args, **kwargs) for part in x.split(64, dim=-1)], -1)


def _state_at_block(old: Any, _: int, x: Tensor, dt: Tensor, A: Tensor, *bc: Tensor, **kwargs: Any) -> Any:
    """Keep the state after the last whole block of 16 tokens instead of the state after the prompt."""
    found = old(x, dt, A, *bc, **kwargs)
    if not kwargs["return_final_states"]:
        return found
    whole = x.shape[1] // 16 * 16
    return found[0], old(x[:, :whole], dt[:, :whole], A, *(t[:, :whole] for t in bc), **kwargs)[1]


def _stale_states(engine: Engine) -> None:
    """Start every sequence at the states that another sequence left in the slot."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(MODEL.vocab_size, (1, 90), generator=generator)
    with torch.no_grad():
        left = engine.model(ids, use_cache=True).past_key_values
    states = {n: left.layers[n].recurrent_states[0] for n, k in enumerate(MODEL.pattern) if k == "M"}

    def change(old: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        return old(*args, **(kwargs | {"initial_states": states[layer]}))

    _patched(engine, "mamba2_chunk_scan", change)


def _tiled_groups(
    old: Any, _: int, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs: Any
) -> Any:
    """Give head h the B and C of group h mod 4 instead of group h // 2."""
    times = x.shape[2] // B.shape[2]
    return old(x, dt, A, B.repeat(1, 1, times, 1), C.repeat(1, 1, times, 1), **kwargs)


def _bias_twice(
    old: Any, _: int, state: Tensor, x: Tensor, dt: Tensor, *args: Any, dt_bias: Tensor, **kwargs: Any
) -> Any:
    """Add dt_bias before the step adds it."""
    return old(state, x, dt + dt_bias, *args, dt_bias=dt_bias, **kwargs)


# --- Attention -------------------------------------------------------------------------------------------


def _rotated(x: Tensor) -> Tensor:
    """Rotary embedding of [b, h, s, c] at base 10000, halves as real and imaginary parts."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    pairs = torch.complex(x[..., :half].float(), x[..., half:].float())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def _with_rope(old: Any, _: int, module: Any, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rotate queries and keys."""
    return old(module, _rotated(q), _rotated(k), *args, **kwargs)


def _scale_of_hidden(engine: Engine) -> None:
    """Scale by hidden size over heads."""
    for mixer in engine.of_kind("*"):
        mixer.scaling = (MODEL.hidden_size // MODEL.num_attention_heads) ** -0.5


def _tiled_heads(engine: Engine) -> None:
    """Repeat KV heads as a whole, not each one."""
    new = lambda x, times: x.repeat(1, times, 1, 1)  # noqa: E731
    engine.contexts.append(lambda: replaced(engine.modeling, "repeat_kv", new))


def _base_2(old: Any, _: int, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Merge a chunk of 64 tokens with those before it by log-sum-exps of base 2 taken as natural ones."""
    k, v = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (k, v))
    row, column = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    before = column < row // 64 * 64
    logits = (q @ k.mT) * module.scaling
    found, sizes = [], []
    for part in (before, ~before & (column <= row)):
        masked = logits.masked_fill(~part, -torch.inf)
        found.append(masked.softmax(-1).nan_to_num(0.0) @ v)
        sizes.append(masked.logsumexp(-1, keepdim=True) / math.log(2.0))
    shares = torch.stack(sizes).softmax(0)
    return (shares * torch.stack(found)).sum(0).transpose(1, 2).contiguous(), None


def _values_by_key_scale(
    old: Any, _: int, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Read keys and values of an FP8 cache, both times the scale of the keys."""
    if q.shape[2] == 1:
        k, v = ((t / s).clamp(-448, 448).to(torch.float8_e4m3fn) for t, s in ((k, 0.012), (v, 0.009)))
        k, v = k.to(q.dtype) * 0.012, v.to(q.dtype) * 0.012
    return old(module, q, k, v, *args, **kwargs)


def _hole(states: Any) -> None:
    """Leave one slot behind the prompt unwritten, which decode reads."""
    for layer, kind in zip(states.layers, MODEL.pattern, strict=False):
        if kind == "*":
            layer.keys, layer.values = (F.pad(t, (0, 0, 0, 1)) for t in (layer.keys, layer.values))


OUTSIDE_3: dict[str, OutsideFault] = {
    "norm_half_groups": OutsideFault(
        (
            "The gated norm of every mamba mixer takes its mean square over 16 channels instead of a group "
            "of 32."
        ),
        "M",
        0,
        "state-spaces/mamba#908",
        engine=_half_groups,
    ),
    "dt_upper_clamp": OutsideFault(
        "Every mamba mixer clamps the time step to at most 0.1 after softplus.",
        "M",
        0,
        "ml-explore/mlx-lm#988",
        engine=_clamped_steps,
    ),
    "interchunk_wrong_axis": OutsideFault(
        (
            "Between chunks of the scan every mamba mixer passes on the state of the last chunk alone, "
            "scaled by a sum of later decays, instead of the decayed sum of all chunks."
        ),
        "M",
        0,
        "huggingface/transformers#47246",
        engine=lambda e: _patched(e, "mamba2_chunk_scan", _wrong_axis),
        decode=True,
    ),
    "conv_contiguous_shards": OutsideFault(
        (
            "The convolution of every mamba mixer has its channels in the order of two contiguous shards, "
            "each read as x, B, C, instead of x, B, C of the whole."
        ),
        "M",
        0,
        "tenstorrent/tt-forge-models#798",
        weights=edited(r"^backbone.*conv1d\.", _contiguous_shards),
    ),
    "d_lost_on_reload": OutsideFault(
        "D of every mamba mixer is zero, so that the skip from x to the output of the scan is missing.",
        "M",
        0,
        "PrimeIntellect-ai/prime-rl#2714",
        weights=edited(r"mixer\.D$", torch.zeros_like),
    ),
    "conv_no_context_at_chunk": OutsideFault(
        (
            "The convolution of every mamba mixer sees zeros before every 64th token instead of the last "
            "tokens of the chunk of the prompt before."
        ),
        "M",
        0,
        "vllm-project/vllm#56196",
        engine=lambda e: _patched(e, "causal_conv1d_fn", _conv_without_context),
    ),
    "state_of_older_block": OutsideFault(
        (
            "Decode of the mamba mixers 2 and 5 starts at the SSM state after the last whole block of 16 "
            "tokens of the prompt, not after its last token."
        ),
        "M",
        2,
        "vllm-project/vllm#34874",
        engine=lambda e: _patched(e, "mamba2_chunk_scan", _state_at_block, (2, 5)),
        decode=True,
    ),
    "state_of_other_sequence": OutsideFault(
        (
            "The SSM state of every mamba mixer starts at what another sequence left in its slot instead of "
            "zero."
        ),
        "M",
        0,
        "vllm-project/vllm#56524",
        engine=_stale_states,
    ),
    "groups_tiled": OutsideFault(
        "Head h of every mamba mixer uses B and C of group h mod 4 instead of group h // 2.",
        "M",
        0,
        "seeded",
        engine=lambda e: _patched(e, "mamba2_chunk_scan", _tiled_groups),
    ),
    "dt_bias_twice_in_decode": OutsideFault(
        "The decode step of every mamba mixer adds dt_bias twice before softplus; the prompt is right.",
        "M",
        0,
        "ml-explore/mlx-lm#1153",
        engine=lambda e: _patched(e, "mamba2_selective_state_update", _bias_twice),
        decode=True,
    ),
    "rope_on_nope": OutsideFault(
        (
            "Every attention layer of the model rotates queries and keys by rotary embeddings, which the "
            "model has not."
        ),
        "*",
        3,
        "vllm-project/vllm#30413",
        engine=lambda e: _patched(e, "eager_attention_forward", _with_rope),
    ),
    "scale_of_hidden_per_head": OutsideFault(
        (
            "Every attention layer scales logits by the root of hidden size over heads, 16, instead of that "
            "of the head size 32."
        ),
        "*",
        3,
        "vllm-project/vllm#2622",
        engine=_scale_of_hidden,
    ),
    "kv_heads_tiled": OutsideFault(
        "Query head i of every attention layer reads KV head i mod 2 instead of i // 2.",
        "*",
        3,
        "vllm-project/vllm#2379",
        engine=_tiled_heads,
    ),
    "lse_base_2_in_merge": OutsideFault(
        (
            "Every attention layer merges a chunk of 64 tokens with the tokens before it by log-sum-exps "
            "that are too large by 1 / ln 2, so that the two parts get wrong weights."
        ),
        "*",
        3,
        "sgl-project/sglang#40903",
        engine=lambda e: _patched(e, "eager_attention_forward", _base_2),
    ),
    "fp8_cache_value_scale": OutsideFault(
        (
            "Attention layer 6 reads an FP8 cache in decode with the scale of the keys for the values, "
            "which makes values 4/3 too large."
        ),
        "*",
        6,
        "sgl-project/sglang#26852",
        engine=lambda e: _patched(e, "eager_attention_forward", _values_by_key_scale, (6,)),
        decode=True,
    ),
    "cache_hole_after_prompt": OutsideFault(
        (
            "In decode every attention layer also attends to one slot of zeros between the prompt and the "
            "decoded tokens."
        ),
        "*",
        3,
        "microsoft/onnxruntime-genai#2354",
        engine=lambda e: setattr(e, "between", _hole),
        decode=True,
    ),
}
