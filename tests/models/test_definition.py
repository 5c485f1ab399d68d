"""The definition against transformers, and what transformers does not compute by hand."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.models import Nemotron3Config, get, names
from megatron_nemotron3.models.definition import Definition, Routing
from tests.support.engines import tensors
from tests.support.model_mapping import stack_experts
from tests.support.parity import loss_and_gradients, oracle, relative_differences, text, without_mtp

#: One layer of each kind, two MTP depths.
SMALL = get("super-tiny").but(
    name="small",
    pattern="M*-E",
    vocab_size=97,
    hidden_size=48,
    num_attention_heads=6,
    kv_channels=8,
    mamba_num_heads=4,
    mamba_head_dim=16,
    mamba_num_groups=2,
    dense_ffn_hidden_size=64,
    num_moe_experts=8,
    moe_router_topk=3,
    moe_latent_size=24,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=40,
)


@cache
def weights() -> dict[str, Tensor]:
    return tensors(SMALL, seed=1)


def small(**options: Any) -> Definition:
    return Definition(SMALL, weights().__getitem__, **options)


def ids(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(1, SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


#: As transformers builds them, with a smaller vocabulary.
CATALOG = [without_mtp(get(f"{name}-tiny")).but(vocab_size=500) for name in names()]


# --- transformers -----------------------------------------------------------------------------------------


def drawn(seed: int) -> Nemotron3Config:
    """A random configuration with a layer of each kind."""
    pick = random.Random(seed)
    pattern = list("M*E-" + "".join(pick.choices("MM*E-", k=2)))
    pick.shuffle(pattern)
    groups, heads = pick.choice([(1, 3), (2, 4), (4, 4)]), pick.choice([(1, 4), (2, 6), (4, 4)])
    experts = pick.choice([4, 7, 16])
    return without_mtp(SMALL).but(
        name=f"drawn {seed}",
        pattern="".join(pattern),
        vocab_size=pick.randint(30, 300),
        hidden_size=pick.choice([24, 40, 64]),
        num_query_groups=heads[0],
        num_attention_heads=heads[1],
        kv_channels=pick.choice([4, 8, 16]),
        mamba_num_groups=groups[0],
        mamba_num_heads=groups[1],
        mamba_head_dim=pick.choice([8, 12]),
        mamba_state_dim=pick.choice([4, 16]),
        mamba_conv_kernel=pick.choice([2, 4]),
        num_moe_experts=experts,
        moe_router_topk=pick.randint(2, experts - 1),
        moe_router_topk_scaling_factor=pick.choice([1.0, 2.5]),
        moe_latent_size=pick.choice([None, 12]),
        dense_ffn_hidden_size=pick.choice([20, 56]),
        moe_ffn_hidden_size=pick.choice([16, 36]),
        moe_shared_expert_intermediate_size=pick.choice([16, 52]),
    )


@pytest.mark.parametrize("config", [*CATALOG, *map(drawn, range(6))], ids=lambda config: config.name)
def test_logits_and_gradients_are_those_of_transformers(config: Nemotron3Config) -> None:
    pytest.importorskip("transformers")
    given = {name: t.requires_grad_() for name, t in tensors(config, 2).items()}
    theirs = oracle(config, {name: t.detach().clone() for name, t in stack_experts(given).items()})
    tokens = text(config, batch=2, tokens=40)
    expected, _, gradients = loss_and_gradients(theirs, tokens)
    (logits,) = Definition(config, given.__getitem__)(tokens[:, :-1]).logits
    close(logits, expected)
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    found = stack_experts({n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in given.items()})
    assert max(relative_differences(found, gradients).values()) < 2e-4


# --- what transformers does not compute -------------------------------------------------------------------


def test_documents_are_runs_of_their_own() -> None:
    lengths, tokens = (7, 0, 12, 5), ids(2, 24)
    whole = small()(tokens, lengths)
    assert len(whole.logits) == 3
    apart = [small()(part) for part in tokens.split([n for n in lengths if n], 1)]
    for depth, logits in enumerate(whole.logits):
        close(logits, torch.cat([run.logits[depth] for run in apart], 1), atol=5e-6)
    assert (whole.logits[0] - small()(tokens).logits[0])[:, 7:].abs().amax() > 0.1


def test_mtp_by_hand() -> None:
    """Each depth has the embedding of the token that far ahead in the same document, else of token 0."""
    lengths, tokens, w = (9, 4), ids(1, 13), weights()
    run = small()(tokens, lengths)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], SMALL.layernorm_epsilon)

    logits = []
    for start, stop in ((0, 9), (9, 13)):
        document, rows = tokens[0, start:stop].tolist(), []
        # The same weights without MTP, and an output layer that gives the hidden states.
        hidden = small().but(logits=lambda plain, h: h)(tokens[:, start:stop], mtp=False).logits[0]
        for depth in (1, 2):
            ahead = [*document[depth:], *[0] * min(depth, len(document))]
            both = [norm(w["backbone.embeddings.weight"][ahead], "mtp.layers.0.enorm.weight")[None]]
            both.append(norm(hidden, "mtp.layers.0.hnorm.weight"))
            x = torch.cat(both, -1) @ w["mtp.layers.0.eh_proj.weight"].T
            for mix in ("attention", "experts"):
                u = norm(x, f"mtp.layers.{int(mix == 'experts')}.norm.weight")
                x = x + (attention(u) if mix == "attention" else experts(u))
            hidden = norm(x, "mtp.layers.1.final_layernorm.weight")
            rows.append(hidden @ w["lm_head.weight"].T)
        logits.append(rows)
    for depth in (1, 2):
        close(run.logits[depth], torch.cat([rows[depth - 1] for rows in logits], 1))


def attention(u: Tensor) -> Tensor:
    """The attention layer of SMALL's MTP block, by torch's."""
    w, c = weights(), SMALL
    q, k, v = (
        (u @ w[f"mtp.layers.0.mixer.{part}_proj.weight"].T).unflatten(-1, (-1, c.kv_channels)).transpose(1, 2)
        for part in "qkv"
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2) @ w["mtp.layers.0.mixer.o_proj.weight"].T


def experts(u: Tensor) -> Tensor:
    """The experts of SMALL's MTP block, token by token."""
    w, below, c = weights(), "mtp.layers.1.mixer.", SMALL

    def mlp(name: str, x: Tensor) -> Tensor:
        up, down = (w[f"{below}{name}{part}_proj.weight"] for part in ("up", "down"))
        return down @ (up @ x).clamp(min=0) ** 2

    def token(x: Tensor) -> Tensor:
        scores = 1 / (1 + (-w[below + "gate.weight"] @ x).exp())
        order = (scores + w[below + "gate.e_score_correction_bias"]).argsort(descending=True)
        chosen = order[: c.moe_router_topk].tolist()
        z = w[below + "fc1_latent_proj.weight"] @ x
        total = sum(scores[e] for e in chosen)
        y = sum(scores[e] / total * mlp(f"experts.{e}.", z) for e in chosen)
        routed = w[below + "fc2_latent_proj.weight"] @ (y * c.moe_router_topk_scaling_factor)
        return routed + mlp("shared_experts.", x)

    return torch.stack([torch.stack([token(x) for x in row]) for row in u])


@pytest.mark.parametrize("cuts", [(1,) * 12, (5, 1, 6), (2, 10)])
def test_a_state_continues_a_sequence(cuts: tuple[int, ...]) -> None:
    tokens, state = ids(2, 12), dict[str, Any]()
    parts = [small()(part, state=state).logits for part in tokens.split(cuts, 1)]
    assert {len(part) for part in parts} == {1}  # no MTP
    close(torch.cat([logits for (logits,) in parts], 1), small()(tokens).logits[0], atol=5e-6)


def test_given_choices_are_taken() -> None:
    """Experts 1, 4 and 6 everywhere are those of a router whose bias prefers them; their scores weigh."""
    tokens, chosen, bias = ids(1, 10), torch.tensor([1, 4, 6]), torch.zeros(8)
    bias[chosen] = 9.0
    seen: list[Routing] = []

    def choose(routing: Routing) -> Tensor:
        seen.append(routing)
        return chosen.expand_as(routing.chosen)

    run = small()(tokens, choose=choose)
    assert [routing.layer for routing in run.routings] == [
        "decoder.layers.3.",
        *["mtp.layers.0.mtp_model_layer.layers.1."] * 2,
    ]
    assert seen == run.routings and all((r.chosen == chosen).all() for r in run.routings)
    other = {n: bias if n.endswith("correction_bias") else t for n, t in weights().items()}
    biased = Definition(SMALL, other.__getitem__)(tokens)
    for found, expected, own in zip(run.logits, biased.logits, small()(tokens).logits, strict=True):
        close(found, expected)
        assert (found - own).abs().max() > 0.1


def test_experts_that_nobody_chose_are_not_read() -> None:
    read: list[str] = []
    Definition(SMALL, lambda name: read.append(name) or weights()[name])(ids(1, 1), mtp=False)  # type: ignore[func-returns-value]
    assert len({name.split(".")[-3] for name in read if ".experts." in name}) == SMALL.moe_router_topk


def test_a_step_is_replaced_wherever_it_is_called() -> None:
    tokens = ids(1, 10)
    plain = small()(tokens).logits[0]
    without = small().but(shared=lambda original, name, u: torch.zeros_like(u))
    removed = {n: torch.zeros_like(t) if "shared" in n else t for n, t in weights().items()}
    close(without(tokens).logits[0], Definition(SMALL, removed.__getitem__)(tokens).logits[0])

    # A replaced step that calls another one sees its replacement, in either order.
    doubled = {"mlp": lambda original, name, u: 2 * original(name, u)}
    noted: list[str] = []

    def shared(original: Any, name: str, u: Tensor) -> Any:
        noted.append(name)
        return original(name, u)

    for model in (small().but(**doubled).but(shared=shared), small().but(shared=shared).but(**doubled)):
        close(model(tokens).logits[0], small().but(**doubled)(tokens).logits[0], atol=0)
    assert noted and (small().but(**doubled)(tokens).logits[0] - plain).abs().max() > 0.1
    assert torch.equal(small()(tokens).logits[0], plain)
    with pytest.raises(ValueError, match="Definition has no step 'rope'"):
        small().but(rope=lambda original: None)
    with pytest.raises(ValueError, match="no step 'config'"):
        small().but(config=lambda original: None)
