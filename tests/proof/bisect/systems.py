"""Two systems that score the same tokens: transformers' NemotronH, and Megatron with our stack, on the CPU.

Neither shares code with `megatron_nemotron3.proof.bisect`. A fault changes their modules, weights or options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import inventory, plan
from megatron_nemotron3.models import Nemotron3Config, get
from tests.support import model_mapping

#: Tensors by Hugging Face's names.
Weights = dict[str, Tensor]

#: Every kind, each more than once, and one MTP block. The vocabulary fills no whole number of shards.
MODEL: Nemotron3Config = get("super-tiny").but(
    name="bisect-tiny",
    pattern="MEM*EM*E",
    vocab_size=500,
    hidden_size=64,
    mamba_num_heads=8,
    num_attention_heads=4,
    kv_channels=32,
    num_moe_experts=16,
    moe_router_topk=4,
    moe_latent_size=32,
    moe_ffn_hidden_size=64,
    moe_shared_expert_intermediate_size=64,
    mamba_num_groups=4,
    mtp_num_layers=1,
    mtp_use_repeated_layer=False,
)
#: Standard deviations of matrices times the root of their inputs. Every layer adds about as much to
#: the stream, and BF16 changes log-probabilities by 0.01 (median), as reported of trained models.
_FACTORS = {
    "lm_head.weight": 1.5,
    "mixer.out_proj.weight": 0.5,
    "o_proj.weight": 2.0,
    "gate.weight": 2.0,
    "fc2_latent_proj.weight": 0.08,
    "shared_experts.down_proj.weight": 0.3,
}
#: Mean and standard deviation of tensors of a mixer that are no such matrices, and of the embedding.
_MOMENTS = {
    "A_log": (0.5, 0.7),
    "dt_bias": (-2.5, 1.2),
    "conv1d.weight": (0.0, 0.4),
    "conv1d.bias": (0.0, 0.4),
    "gate.e_score_correction_bias": (0.0, 0.1),
    "backbone.embeddings.weight": (0.0, 1.0),
}
#: Length and prompt of each sequence. Both are longer than a chunk of the scan.
LENGTHS = ((200, 140), (160, 40))


def moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a random tensor, by its Hugging Face name.

    Decays of the state reach from a few tokens to the whole sequence.
    """
    part = name.rpartition("mixer.")[2]
    if part in _MOMENTS:
        return _MOMENTS[part]
    if len(shape) == 1:
        return 1.0, 0.3
    factor = next((f for end, f in _FACTORS.items() if name.endswith(end)), 1.0)
    return 0.0, factor * shape[1] ** -0.5


def checkpoint(seed: int = 1, config: Nemotron3Config = MODEL) -> Weights:
    """Random weights as a checkpoint holds them, BF16 but for the expert bias."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for t in inventory.hf_tensors(config):
        mean, std = moments(t.name, t.shape)
        value = mean + std * torch.randn(t.shape, generator=generator)
        found[t.name] = value.to(getattr(torch, t.dtype))
    return found


def later(weights: Weights, seed: int = 2, step: float = 0.1) -> Weights:
    """The same after some steps of training: every tensor moved by a tenth of its size."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.float() + step * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
        for name, t in weights.items()
    }


def tokens(config: Nemotron3Config = MODEL) -> list[tuple[Tensor, int]]:
    """Ids [s] and the length of the prompt of each sequence."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(config.vocab_size, (s,), generator=generator), p) for s, p in LENGTHS]


@dataclass
class Scored:
    """What a system computed for one sequence; as `recording.Sequence`, for all tokens."""

    ids: Tensor
    prompt: int
    #: Log-probability of token t given those before it, from token 1 on [s - 1].
    logprobs: Tensor
    #: Of token t + 1 by the MTP block at the hidden state before token t, from token 2 on [s - 2].
    mtp: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    routing: dict[int, Tensor] = field(default_factory=dict)


def chosen(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probability of each id: logits [n, v], ids [n] -> [n]."""
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


# --- transformers ----------------------------------------------------------------------------------------


class Engine:
    """transformers' model, and an MTP block of transformers' own blocks.

    Args:
        weights: by Hugging Face's names.
        dtype: of weights and activations.
        decode: run the prompt at once and then token by token, with the states of the cache.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype = torch.float32, decode: bool = False) -> None:
        from transformers.models.nemotron_h import modeling_nemotron_h as modeling

        self.config, self.dtype, self.decode = MODEL, dtype, decode
        self.modeling = modeling
        settings = {"_attn_implementation": "eager", "_experts_implementation": "eager"}
        self.model = model_mapping.transformers_model(self.config, **settings).eval()
        main = {n: t for n, t in weights.items() if not n.startswith("mtp.")}
        self.model.load_state_dict(model_mapping.stack_experts(main), strict=True)
        self.layers = list(self.model.model.layers)
        self.mtp = _MTP(self.model.config, modeling, weights).eval()
        self.eos: Tensor | None = None
        for part in (self.model, self.mtp):
            biases = {n: b.clone() for n, b in part.named_buffers() if n.endswith("correction_bias")}
            part.to(dtype)
            for name, bias in biases.items():
                part.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias
            model_mapping.unclamped(part)
        #: Called between the prompt and the first decoded token with the cache.
        self.between: Callable[[Any], None] = lambda cache: None
        #: Called after each forward of the model with the cache.
        self.after: Callable[[Any], None] = lambda cache: None
        #: Contexts in which every forward runs: patched functions of transformers.
        self.contexts: list[Callable[[], Any]] = []

    def of_kind(self, kind: str) -> list[Any]:
        """The mixers of a kind, MTP's last."""
        pattern = self.config.pattern + (self.config.mtp_pattern or "")
        blocks = [*self.layers, *self.mtp.blocks]
        return [block.mixer for block, letter in zip(blocks, pattern, strict=True) if letter == kind]

    @torch.no_grad()
    def score(self, ids: Tensor, prompt: int) -> Scored:
        """Score a sequence [s]."""
        hidden: dict[int, list[Tensor]] = {}
        routing: dict[int, list[Tensor]] = {}
        final: list[Tensor] = []
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context())

            def on(module: Any, note: Callable[[Any], None]) -> None:
                handle = module.register_forward_hook(lambda _, args, out: note(out))
                stack.callback(handle.remove)

            for number, block in enumerate(self.layers):
                on(block, lambda out, n=number: hidden.setdefault(n, []).append(out[0].float()))
                if hasattr(block.mixer, "gate"):
                    on(
                        block.mixer.gate,
                        lambda out, n=number: routing.setdefault(n, []).append(out[2].int()),
                    )
            on(self.model.model.norm_f, lambda out: final.append(out[0]))
            logits = self._decoded(ids, prompt) if self.decode else self.model(ids[None]).logits[0]
            mtp = self.mtp(self.model.model.embeddings(ids), torch.cat(final))
            mtp = self.model.lm_head(mtp)
        return Scored(
            ids,
            prompt,
            chosen(logits[:-1], ids[1:]),
            chosen(mtp[:-1], ids[2:]),
            {n: torch.cat(rows) for n, rows in hidden.items()},
            {n: torch.cat(rows) for n, rows in routing.items()},
        )

    def _decoded(self, ids: Tensor, prompt: int) -> Tensor:
        found = self.model(ids[None, :prompt], use_cache=True)
        states, logits = found.past_key_values, [found.logits[0]]
        self.between(states)
        for t in range(prompt, len(ids)):
            logits.append(self.model(ids[None, t : t + 1], past_key_values=states, use_cache=True).logits[0])
            self.after(states)
        return torch.cat(logits)


class _MTP(torch.nn.Module):
    """The block of depth 1 by transformers' modules, which has no class for it."""

    def __init__(self, config: Any, modeling: Any, weights: Weights) -> None:
        super().__init__()
        import copy

        config = copy.copy(config)
        kinds = MODEL.mtp_pattern or ""
        config.layers_block_type = [model_mapping.BLOCK_TYPES[kind] for kind in kinds]

        def norm(name: str) -> Any:
            made = modeling.NemotronHRMSNorm(MODEL.hidden_size, eps=MODEL.layernorm_epsilon)
            made.load_state_dict({"weight": weights[name].float()})
            return made

        self.enorm, self.hnorm = norm("mtp.layers.0.enorm.weight"), norm("mtp.layers.0.hnorm.weight")
        self.final = norm(f"mtp.layers.{len(kinds) - 1}.final_layernorm.weight")
        joined = weights["mtp.layers.0.eh_proj.weight"].float()
        self.eh_proj = torch.nn.Linear(2 * MODEL.hidden_size, MODEL.hidden_size, bias=False)
        self.eh_proj.load_state_dict({"weight": joined})
        self.blocks = torch.nn.ModuleList()
        for number in range(len(kinds)):
            block = modeling.NemotronHBlock(config, number)
            prefix = f"mtp.layers.{number}."
            own = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
            own = model_mapping.stack_experts(own)
            own = {n: own[n] for n in block.state_dict()}
            block.load_state_dict(own, strict=True)
            self.blocks.append(block)

    def forward(self, embedded: Tensor, final: Tensor) -> Tensor:
        """Embeddings and final hidden states [s, d] -> normed states [s - 1, d] for the token after next."""
        s = len(final) - 1
        x = self.eh_proj(torch.cat([self.enorm(embedded[1:]), self.hnorm(final[:-1])], -1))[None]
        mask = torch.full((s, s), -torch.inf, dtype=x.dtype).triu_(1)[None, None]
        for block in self.blocks:
            x = block(x, attention_mask=mask if block.block_type.endswith("attention") else None)
        return self.final(x[0])


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module of transformers for a while; for patches of functions."""
    old = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, old)


# --- Megatron --------------------------------------------------------------------------------------------


class Trainer:
    """Megatron's HybridModel with our torch stack; inside `world_of_one`.

    Args:
        weights: by Hugging Face's names.
        dtype: of weights and activations.
        changes: of Megatron's `TransformerConfig`.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        self.model = model_mapping.megatron_model(MODEL, **changes).eval()
        state = self.model.state_dict()
        found: Weights = {}
        for mapping in inventory.mappings(MODEL, dialect="parameter"):
            found |= plan.apply(mapping.to_hf().inverse(), {t.name: weights[t.name] for t in mapping.hf})
        with torch.no_grad():
            for name, tensor in found.items():
                if name in state or not name.endswith("expert_bias"):  # a router without one is a fault
                    state[name].copy_(tensor)
        self.dtype = dtype
        #: Whether a sequence runs behind the one scored before it, without a border between them.
        self.packed = False
        self._before = torch.empty(0, dtype=torch.long)

    @torch.no_grad()
    def score(self, ids: Tensor, prompt: int) -> Scored:
        """Score a sequence [s]; without MTP, hidden states and routing."""
        row = torch.cat([self._before, ids]) if self.packed else ids
        logits = self.model(row[None], torch.arange(len(row))[None], None)[0][-len(ids) :]
        self._before = ids
        return Scored(ids, prompt, chosen(logits[:-1], ids[1:]), torch.empty(0))


@cache
def healthy_engine(dtype: torch.dtype = torch.float32, decode: bool = False) -> tuple[Scored, ...]:
    """What transformers computes for every sequence without a fault."""
    engine = Engine(checkpoint(), dtype, decode)
    return tuple(engine.score(*sequence) for sequence in tokens())
