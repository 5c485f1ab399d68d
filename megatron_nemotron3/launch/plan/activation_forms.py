"""What one layer keeps for backward, by module: one closed form for each layer kind.

The forms count the bytes of the storages that autograd holds, each storage once and whole (a view keeps its
base). A tensor that several modules hold is listed under the first of them. Masks, states and indices count;
scalars do not.

The forms of backend "torch" are compared with what autograd saves on a CPU
(tests/launch/plan/test_activations.py). "auto" is the torch spec with its GPU kernels, "te" is Transformer
Engine. Both are derived from what the functions are written to save, and are not measured. They differ from
"torch" as follows:

| kind | module | auto | te |
|-|-|-|-|
| M | scan | no states | output before the gate instead of convolution's output, dt and states |
| * | core_attn with CP | | a rank's own keys and values twice, instead of all ranks' and a mask |
| E | activation | | FC2's input |
| E | dispatch | | INT32 row maps instead of INT64 indices |

What packing and offloading take away is in `activations`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_nemotron3.launch import Launch
from megatron_nemotron3.launch.plan.options import IN_PLACE, CostOptions
from megatron_nemotron3.launch.plan.state import padded_vocab_size
from megatron_nemotron3.models import LoRASettings, Nemotron3Config

#: Bytes of an FP32 number, of an index, and of an entry of a row map.
FLOAT, INDEX, ROW = 4, 8, 4
#: The torch scan on a CPU keeps a state every so many chunks of so many tokens (`layers/chunked_scan.py`).
_CHUNK, _LEAST_CHUNKS, _BLOCK_ELEMENTS = 64, 4, 2**18

#: Module -> bytes.
Form = dict[str, int]


@dataclass(frozen=True)
class RankShare:
    """The part of a microbatch that one rank computes, and how it computes it.

    seq_length: tokens of a sequence before context parallelism cuts it. element: bytes of an activation.
    imbalance: routed tokens of this rank over their mean. padded_vocab: rows of the embedding table over all
    tensor ranks. sorts_received: whether tokens come from other ranks and go to several experts of this one.
    """

    seq_length: int
    micro_batch_size: int
    tp: int
    cp: int
    etp: int
    sequence_parallel: bool
    element: int
    backend: str
    imbalance: float
    precision: str
    padded_vocab: int
    sorts_received: bool = False
    options: CostOptions = CostOptions()

    @classmethod
    def of(cls, launch: Launch, imbalance: float = 1.0, lora: LoRASettings | None = None) -> RankShare:
        if imbalance < 1:
            raise ValueError(f"imbalance={imbalance}: the busiest rank has at least the mean, use 1 or more")
        layout, options = launch.layout, replace(CostOptions.of(launch), lora=lora)
        return cls(
            seq_length=launch.seq_length,
            micro_batch_size=launch.micro_batch_size,
            tp=layout.tp,
            cp=layout.cp,
            etp=layout.etp,
            sequence_parallel=layout.sequence_parallel,
            element=4 if launch.precision == "fp32" else 2,
            backend=launch.backend,
            imbalance=options.capacity or imbalance,
            precision=launch.precision,
            padded_vocab=padded_vocab_size(launch.config, layout),
            sorts_received=layout.ep * layout.etp > 1 and (launch.config.num_moe_experts or 0) > layout.ep,
            options=options,
        )

    @property
    def te(self) -> bool:
        return self.backend == "te"

    @property
    def tokens(self) -> int:
        """Tokens between the linears of a tensor-parallel layer."""
        return self.seq_length * self.micro_batch_size // self.cp

    @property
    def shard(self) -> int:
        """Tokens of the residual stream, which sequence parallelism divides over the tensor ranks."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    def routed_rows(self, config: Nemotron3Config) -> int:
        return round(self.shard * (config.moe_router_topk or 0) * self.etp * self.imbalance)

    def stream(self, width: int) -> int:
        """Bytes of [s / cp / tp, b, width]."""
        return self.shard * width * self.element

    def inner(self, width: int) -> int:
        """Bytes of [s / cp, b, width]."""
        return self.tokens * width * self.element


def norm(c: Nemotron3Config, share: RankShare, width: int | None = None) -> int:
    """The input of an RMSNorm, of the hidden size or of `width`, and its FP32 reciprocal for each token."""
    return share.stream(width or c.hidden_size) + share.shard * FLOAT


def mamba(c: Nemotron3Config, share: RankShare) -> Form:
    """The form of an M layer."""
    # After the exchange of context parallelism a rank has all tokens of some heads.
    split = share.tp * share.cp
    heads, inner = c.mamba_num_heads // split, c.mamba_inner_size // split
    groups = max(1, c.mamba_num_groups // split)
    conv = inner + 2 * groups * c.mamba_state_dim
    tokens = share.seq_length * share.micro_batch_size
    rank_inner = share.inner(c.mamba_inner_size // share.tp)
    form = {
        "norm": norm(c, share),
        "in_proj": share.stream(c.hidden_size),
        "conv1d": tokens * (inner + conv + heads) * share.element,  # the output of in_proj: z, x, B, C, dt
        "scan": 0,
        # The input, and an FP32 reciprocal for each group.
        "gated norm": rank_inner + share.tokens * (c.mamba_num_groups // share.tp) * FLOAT,
        "out_proj": rank_inner,
    }
    if share.te:
        form["scan"] = tokens * inner * share.element
        return form
    form["scan"] = tokens * (conv * share.element + 2 * heads * FLOAT)
    if share.backend == "torch":
        states = heads * c.mamba_head_dim * c.mamba_state_dim * FLOAT
        form["scan"] += share.micro_batch_size * _scan_states(share.seq_length, heads) * states
    if share.cp > 1:
        form["gated norm"] += rank_inner  # after the exchange, z is no longer a view of in_proj's output
        form["conv1d"] += conv * (c.mamba_conv_kernel + 1) * share.element
    return form


def _scan_states(seq_length: int, heads: int) -> int:
    length = min(seq_length, _CHUNK)
    whole, rest = divmod(seq_length, length)
    chunks = min(whole, max(_LEAST_CHUNKS, _BLOCK_ELEMENTS // (heads * length * length)))
    return -(-whole // chunks) + (rest > 0)


def attention(c: Nemotron3Config, share: RankShare) -> Form:
    """The form of a * layer."""
    q, kv = c.num_attention_heads * c.kv_channels, c.num_query_groups * c.kv_channels
    groups = c.num_query_groups / share.tp
    # Queries, keys and values are views of the output of linear_qkv. With fewer groups than ranks that output
    # is gathered, and all of it is kept; with several groups on a rank the queries are copied.
    mixed = share.inner((q + 2 * kv) // share.tp if groups >= 1 else q + 2 * kv)
    queries = share.inner(q // share.tp) if groups > 1 else 0
    core = mixed + queries
    if share.cp > 1 and "core_attn" not in share.options.recompute.modules:
        keys_values = share.inner(max(2 * kv // share.tp, 2 * c.kv_channels))
        # One mask for each of the rank's two chunks, up to its end, but for the very first chunk: the mean of
        # the ranks. Flash attention on a GPU needs none. The chunks' outputs are joined by a copy.
        share_of_square = (2 * share.cp**2 + share.cp - 1) / (4 * share.cp**3)
        mask = int(share.seq_length**2 * share_of_square) * share.element + 8 * share.seq_length
        joined = share.inner(q // share.tp)
        torch_core = (queries or mixed) + joined + share.cp * keys_values + mask
        core = core + keys_values if share.te else torch_core
    return {
        "norm": norm(c, share),
        "linear_qkv": share.stream(c.hidden_size),
        "core_attn": core,
        "softmax": share.tokens * (c.num_attention_heads // share.tp) * FLOAT,
        "linear_proj": share.inner(q // share.tp),
    }


def moe(c: Nemotron3Config, share: RankShare) -> Form:
    """The form of an E layer."""
    experts, topk, ffn = c.num_moe_experts or 0, c.moe_router_topk or 0, c.moe_ffn_hidden_size or 0
    width, shared = c.expert_input_size, c.moe_shared_expert_intermediate_size or 0
    rows = share.routed_rows(c)
    hidden = rows * (ffn // share.etp) * share.element
    # Scores, their sums and the chosen experts, once for routing and once for the balancing loss; then the
    # scores of the chosen experts.
    router = share.shard * (2 * (experts * FLOAT + topk * INDEX + FLOAT) + topk * FLOAT)
    indices = share.shard * (experts + topk) * INDEX
    # The order by expert of what other ranks sent, and its inverse.
    orders = 2 * rows * INDEX if share.sorts_received else 0
    row_maps = (share.shard * (2 * experts + 1) + 2 * rows) * ROW
    return {
        "norm": norm(c, share),
        "norm output": share.stream(c.hidden_size),
        "router": router + share.micro_batch_size * experts * INDEX,
        "dispatch": row_maps if share.te else indices + orders,
        "experts": rows * (width * share.element + FLOAT) + hidden,
        "activation": hidden if share.te else 0,
        "fc2_norm": norm(c, share, width) if c.moe_use_norm_before_up_proj else 0,
        "fc2_latent_proj": share.stream(width) if c.moe_latent_size else 0,
        "shared_experts": 2 * share.inner(shared // share.tp),
    }


def moe_backward(c: Nemotron3Config, share: RankShare, ep: int) -> int:
    """Bytes that exist in addition to the saved tensors during the backward of an E layer's experts.

    These are gradients of their inputs and outputs; on a GPU, which computes all experts at once, of the
    tensor between the two linears; and without gradient accumulation fusion (torch, auto) of all their
    weights, or of the adapters.
    """
    ffn, lora = (c.moe_ffn_hidden_size or 0) // share.etp, share.options.lora
    rows = share.routed_rows(c)
    between = 0 if share.backend == "torch" and lora is None else rows * ffn
    trained = 2 * ffn * c.expert_input_size
    if lora is not None:
        trained = 2 * lora.dim * (ffn + c.expert_input_size)
    weights = 0 if share.te else (c.num_moe_experts or 0) // ep * trained
    return (2 * rows * c.expert_input_size + between + weights) * share.element


def mlp(c: Nemotron3Config, share: RankShare) -> Form:
    """The form of a - layer."""
    hidden = share.inner((c.dense_ffn_hidden_size or 0) // share.tp)
    form = {"norm": norm(c, share), "linear_fc1": share.stream(c.hidden_size), "activation": hidden}
    return form | {"linear_fc2": hidden}


def mtp(c: Nemotron3Config, share: RankShare) -> Form:
    """The form of one MTP depth without its layers."""
    d = c.hidden_size
    return {
        "embedding": embedding(c, share)["word_embeddings"],
        "enorm": norm(c, share),
        "hnorm": norm(c, share),
        "eh_proj": share.stream(2 * d),
        # The output is gathered over the ranks and then sliced; the slice is a view that keeps the whole.
        "eh_proj output": share.inner(d) - share.stream(d),
        "final_layernorm": norm(c, share),
    }


def embedding(c: Nemotron3Config, share: RankShare) -> Form:
    """The token indices; with TP also the mask of those whose rows are on another rank."""
    return {"word_embeddings": share.tokens * (INDEX + (share.tp > 1))}


def output(c: Nemotron3Config, share: RankShare) -> Form:
    """Final norm, output layer and loss, of the next token and of all MTP depths.

    Each depth keeps its own softmax over a rank's part of the vocabulary until its backward. It is FP32, but
    Transformer Engine's loss keeps the logits instead and writes their gradient over them.
    """
    depths = c.mtp_num_layers
    heads = 1 + depths
    each = share.element if share.options.loss == IN_PLACE else FLOAT
    softmax = share.tokens * (share.padded_vocab // share.tp) * each
    return {
        "final_norm": norm(c, share),
        "output_layer": heads * share.stream(c.hidden_size),
        # The target, and whether it is on another rank; the loss and the mask of each depth.
        "loss": heads * (softmax + share.tokens * (INDEX + 1)) + depths * share.tokens * 2 * FLOAT,
    }


#: Layer kind -> its form.
FORMS: dict[str, Callable[[Nemotron3Config, RankShare], Form]] = {
    "M": mamba,
    "*": attention,
    "E": moe,
    "-": mlp,
    "mtp": mtp,
    "embedding": embedding,
    "output": output,
}

#: Module of `--recompute-modules` -> parts of its layer that are then not kept.
DROPPED: dict[str, tuple[str, ...]] = {
    "core_attn": ("softmax",),
    "mlp": ("linear_fc1", "activation", "linear_fc2"),
    "moe": ("router", "dispatch", "experts", "activation", "fc2_norm", "fc2_latent_proj", "shared_experts"),
    "shared_experts": ("shared_experts",),
    "moe_act": ("activation",),
    "layernorm": ("norm output",),
}
