"""Damage to an engine (transformers) and to a trainer (Megatron): their weights, modules and functions.

Nothing here uses bisect's hypotheses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.proof.bisect.systems import MODEL, Engine, Trainer, Weights, checkpoint, later, replaced

C = MODEL
INNER, BC, HEADS = C.mamba_inner_size, C.mamba_num_groups * C.mamba_state_dim, C.mamba_num_heads
SPLIT = [INNER, INNER, BC, BC, HEADS]


# --- what weights become ---------------------------------------------------------------------------------


def changed(pattern: str, change: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    """Tensors whose names match become others."""

    def weights(given: Weights) -> Weights:
        names = [name for name in given if re.search(pattern, name)]
        assert names, pattern
        return given | {name: change(given[name]).contiguous() for name in names}

    return weights


def renamed(pattern: str, source: Callable[[re.Match[str]], str]) -> Callable[[Weights], Weights]:
    """Tensors whose names match are those of other names."""

    def weights(given: Weights) -> Weights:
        found = {name: match for name in given if (match := re.search(pattern, name))}
        assert found, pattern
        return given | {name: given[source(match)] for name, match in found.items()}

    return weights


def by_rank(w: Tensor, parts: list[int], ranks: int = 2) -> Tensor:
    """Each rank holds its share of every part; the shards are joined rank by rank."""
    pieces = [part.chunk(ranks) for part in w.split(parts)]
    return torch.cat([piece[rank] for rank in range(ranks) for piece in pieces])


def swap(w: Tensor, dim: int) -> Tensor:
    """The halves of two ranks in the wrong order."""
    a, b = w.chunk(2, dim)
    return torch.cat([b, a], dim)


def tap_by_tap(w: Tensor) -> Tensor:
    """[c, 1, k], written through a view of [k, c]."""
    return w.reshape(w.shape[-1], -1).t().reshape(w.shape)


def reordered(w: Tensor) -> Tensor:
    """z and x in the order x, z."""
    z, x, *rest = w.split(SPLIT)
    return torch.cat([x, z, *rest])


def b_and_c(w: Tensor) -> Tensor:
    """B and C in the order C, B."""
    z, x, b, c, dt = w.split(SPLIT)
    return torch.cat([z, x, c, b, dt])


def experts(order: Callable[[int], int], layers: str = r"\d+") -> Callable[[Weights], Weights]:
    """Expert e of the decoder has the weights of another."""
    pattern = rf"^(backbone\.layers\.{layers}\.mixer\.experts\.)(\d+)(\..*)"
    return renamed(pattern, lambda m: f"{m[1]}{order(int(m[2]))}{m[3]}")


def shifted_rows(w: Tensor) -> Tensor:
    """The second of two shards begins at half of the vocabulary, not at half of the padded one."""
    padded = -(-len(w) // 128) * 128
    rows = torch.arange(len(w))
    return w[torch.where(rows < padded // 2, rows, rows - (padded - len(w)) // 2)]


def qkv_by_kind(given: Weights) -> Weights:
    """linear_qkv has each group's queries, key and value; an engine takes its rows for q, then k, then v."""
    result, c = dict(given), C.kv_channels
    heads = C.num_attention_heads // C.num_query_groups
    for layer, kind in enumerate(C.pattern):
        if kind == "*":
            q, k, v = names = [f"backbone.layers.{layer}.mixer.{x}_proj.weight" for x in "qkv"]
            groups = [given[n].split(c * (heads if n == q else 1)) for n in names]
            rows = torch.cat([piece for group in zip(*groups, strict=True) for piece in group])
            sizes = [len(given[n]) for n in (q, k, v)]
            result |= {n: part.contiguous() for n, part in zip(names, rows.split(sizes), strict=True)}
    return result


def stale(pattern: str) -> Callable[[Weights], Weights]:
    """Tensors that match are those of before the last update: the checkpoint is a step later."""
    old = earlier()
    return lambda given: given | {n: old[n] for n in given if re.search(pattern, n)}


def earlier() -> Weights:
    """The checkpoint before this one."""
    return later(checkpoint())


# --- what modules become ---------------------------------------------------------------------------------


def each(kind: str, attribute: str, value: Any) -> Callable[[Engine], None]:
    """An attribute of a mixer, or of one of its modules (with dots), is another one."""

    def patch(engine: Engine) -> None:
        for mixer in engine.of_kind(kind):
            *path, last = attribute.split(".")
            for name in path:
                mixer = getattr(mixer, name)
            old = getattr(mixer, last)
            new = value(old) if callable(value) else value
            if isinstance(old, Tensor):
                old.data.copy_(new)
            else:
                setattr(mixer, last, new)

    return patch


def function(name: str, wrap: Callable[[Any, Any], Any]) -> Callable[[Engine], None]:
    """A function of transformers' module is wrapped while the engine runs."""

    def patch(engine: Engine) -> None:
        old = getattr(engine.modeling, name)
        engine.contexts.append(lambda: replaced(engine.modeling, name, wrap(old, engine)))

    return patch


def between(change: Callable[[Any], None]) -> Callable[[Engine], None]:
    """What happens to the states of Mamba layers between prompt and decoding."""

    def patch(engine: Engine) -> None:
        def states(cache: Any) -> None:
            for number, kind in enumerate(C.pattern):
                if kind == "M":
                    change(cache.layers[number])

        engine.between = states

    return patch


def roll_conv(layer: Any) -> None:
    """The convolution's state ends one token before the prompt does."""
    state = _states(layer, "conv_states")
    state.copy_(state.roll(1, -1))


def zero_conv(layer: Any) -> None:
    """The convolution's state is empty."""
    _states(layer, "conv_states").zero_()


def zero_ssm(layer: Any) -> None:
    """The state of the recurrence is empty."""
    _states(layer, "recurrent_states").zero_()


def round_ssm(layer: Any) -> None:
    """The state of the recurrence is stored in BF16."""
    state = _states(layer, "recurrent_states")
    state.copy_(state.bfloat16().to(state.dtype))


def _states(layer: Any, name: str) -> Tensor:
    state: Tensor = getattr(layer, name)[0]
    return state


def always(change: Callable[[Any], None]) -> Callable[[Engine], None]:
    """After the prompt and after every token."""

    def patch(engine: Engine) -> None:
        between(change)(engine)
        engine.after = engine.between

    return patch


def scan(**other: Any) -> Callable[[Engine], None]:
    """Arguments of the chunked scan."""

    def wrap(old: Any, engine: Engine) -> Any:
        def found(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C_: Tensor, **given: Any) -> Any:
            return old(x, dt, A, B, C_, **(given | other))

        return found

    return function("mamba2_chunk_scan", wrap)


def scan_by_chunk(old: Any, engine: Engine) -> Any:
    """Every chunk begins with an empty state."""

    def found(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C_: Tensor, **given: Any) -> Any:
        size = given["chunk_size"]
        parts = zip(x.split(size, 1), dt.split(size, 1), B.split(size, 1), C_.split(size, 1), strict=True)
        return torch.cat([old(xs, dts, A, b, c, **given) for xs, dts, b, c in parts], 1)

    return found


def scan_other_groups(old: Any, engine: Engine) -> Any:
    """Heads take B and C of the groups in turn."""

    def found(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C_: Tensor, **given: Any) -> Any:
        per = x.shape[2] // B.shape[2]
        return old(x, dt, A, B.repeat(1, 1, per, 1), C_.repeat(1, 1, per, 1), **given)

    return found


def without_silu(old: Any, engine: Engine) -> Any:
    """The convolution has no activation."""
    return lambda *args, **given: old(*args, **(given | {"activation": None}))


def norm_then_gate(engine: Engine) -> None:
    """The gate is applied after the norm."""
    for mixer in engine.of_kind("M"):
        plain = mixer.norm.forward

        def forward(x: Tensor, gate: Tensor, plain: Any = plain) -> Tensor:
            return plain(x) * F.silu(gate.float()).to(x.dtype)

        mixer.norm.forward = forward


def attention(change: Callable[..., Any]) -> Callable[[Engine], None]:
    """The function that attends is another one, given its arguments and the plain one."""
    return function("eager_attention_forward", lambda old, engine: partial(change, old))


def with_rope(old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
    """transformers' own rotary positions, of base 10,000."""
    from transformers.models.nemotron_h.modeling_nemotron_h import apply_rotary_pos_emb

    c = q.shape[-1]
    angle = torch.outer(torch.arange(k.shape[-2]).float(), 10000.0 ** (-torch.arange(0, c, 2).float() / c))
    both = torch.cat([angle, angle], -1)[None]
    return old(
        module, *apply_rotary_pos_emb(q, k, both.cos().to(q.dtype), both.sin().to(q.dtype)), v, mask, **given
    )


def heads_in_turn(old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **given: Any) -> Any:
    """Keys are repeated as [0, 1, 0, 1], not as [0, 0, 1, 1]."""
    y, weights = old(module, q[:, _turned(q, k)], k, v, mask, **given)
    return y[:, :, torch.argsort(_turned(q, k))], weights


def _turned(q: Tensor, k: Tensor) -> Tensor:
    groups = k.shape[1]
    return torch.arange(q.shape[1]).view(-1, groups).t().flatten()


def window(old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **given: Any) -> Any:
    """Only the last 64 tokens are seen."""
    s = q.shape[-2]
    far = torch.full((s, s), -torch.inf, dtype=q.dtype).tril_(-64)
    return old(module, q, k, v, far.triu(-s) + mask, **given)


def blind(old: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **given: Any) -> Any:
    """A token sees those before it, not itself."""
    s = q.shape[-2]
    own = torch.full((s,), torch.finfo(q.dtype).min, dtype=q.dtype).diag()
    own[0, 0] = 0.0
    return old(module, q, k, v, mask + own, **given)


def router(change: Callable[[Any, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Engine], None]:
    """Routers compute weights and experts [s, topk] in another way, from the module and the logits."""

    def patch(engine: Engine) -> None:
        for mixer in engine.of_kind("E"):
            gate = mixer.gate

            def forward(x: Tensor, gate: Any = gate) -> Any:
                logits = F.linear(x.view(-1, x.shape[-1]).float(), gate.weight.float())
                return logits, *change(gate, logits)

            gate.forward = forward

    return patch


def softmaxed(gate: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax instead of sigmoid."""
    scores = logits.softmax(-1)
    taken = (scores + gate.e_score_correction_bias).topk(gate.top_k).indices
    weights = scores.gather(1, taken)
    return weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, taken


def biased(gate: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the experts contain the bias."""
    scores, taken = (logits.sigmoid() + gate.e_score_correction_bias).topk(gate.top_k)
    return scores / scores.sum(-1, keepdim=True) * gate.routed_scaling_factor, taken


def activated(act: torch.nn.Module) -> Callable[[Engine], None]:
    """Experts and shared experts have another activation."""

    def patch(engine: Engine) -> None:
        for mixer in engine.of_kind("E"):
            mixer.experts.act_fn = mixer.shared_experts.act_fn = act

    return patch


def unshared(engine: Engine) -> None:
    """Shared experts are left out."""
    for mixer in engine.of_kind("E"):
        mixer.shared_experts.forward = lambda x: torch.zeros_like(x)


def bf16_stream(engine: Engine) -> None:
    """The residual stream is kept in BF16."""
    for block in engine.layers:
        block.register_forward_hook(lambda module, args, out: out.bfloat16().to(out.dtype))


def eps_1e_6(engine: Engine) -> None:
    """The norms before layers have the epsilon of other models."""
    for block in engine.layers:
        block.norm.variance_epsilon = 1e-6


def no_final_norm(engine: Engine) -> None:
    """The head gets the stream as it is."""
    engine.model.model.norm_f.forward = lambda x: x


def head(change: Callable[[Tensor], Tensor]) -> Callable[[Engine], None]:
    """What becomes of the logits."""
    return lambda engine: engine.model.lm_head.register_forward_hook(lambda m, a, out: change(out)) and None


# --- the trainer -----------------------------------------------------------------------------------------


def parameters(pattern: str, change: Callable[[Tensor], Tensor]) -> Callable[[Trainer], None]:
    """Parameters of Megatron's model become others."""

    def patch(trainer: Trainer) -> None:
        state = trainer.model.state_dict()
        names = [name for name in state if re.search(pattern, name)]
        assert names, pattern
        for name in names:
            state[name].copy_(change(state[name].clone()))

    return patch


def leaking(trainer: Trainer) -> None:
    """Sequences are packed, and nothing resets states and attention between them."""
    trainer.packed = True
