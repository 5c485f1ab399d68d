"""The definition of the family (`models.definition`), fast for few tokens at a time, and its states.

Activations are [tokens, d], the tokens of all rows concatenated, in the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.inventory import hf_tensors
from megatron_nemotron3.checkpoints.convert.logits.reader import TensorReader
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.inference.generate.attention import KVCache, attend
from megatron_nemotron3.inference.generate.batch import ForwardBatch
from megatron_nemotron3.inference.generate.experts import DecodeLinear, Experts
from megatron_nemotron3.inference.generate.scan import MambaPass, MambaState, Recurrence
from megatron_nemotron3.layers.functional import attention_of_any_length
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.config import GATED_NORM_EPSILON
from megatron_nemotron3.models.definition import Definition, Forward
from megatron_nemotron3.models.parameters import Prefix, prefixes
from megatron_nemotron3.models.tensors import Row, hf_root, rows_of

#: Tensors of `Recurrence`, below the layer.
_SCAN = ("conv1d.weight", "conv1d.bias", "A_log", "D", "dt_bias")
#: Weights of one product (`Decode.beside`), below the layer.
_LATENT, _SHARED = "fc1_latent_proj.weight", "shared_experts.up_proj.weight"
#: Ends of the names of tensors that are FP32, whatever the dtype of the others.
_FLOAT32 = (*_SCAN, "mixer.norm.weight", "gate.weight", "gate.e_score_correction_bias")


@dataclass(frozen=True)
class Rollback:
    """What `DecodeState.truncate` needs to undo a pass, or the end of it.

    lengths: of the rows before the pass; counts: tokens of each row in it.
    scans: of each Mamba-2 layer.
    """

    lengths: list[int]
    counts: list[int]
    scans: dict[str, MambaPass]


class DecodeState:
    """States of the layers of a stack by name, and the tokens that each row has seen.

    A KV cache grows with the sequence, by 2 * groups * head dimension elements per token and attention layer.
    A Mamba-2 layer keeps [kernel - 1, channels] and [heads, head dimension, state] elements at any length.
    """

    def __init__(self, lengths: list[int], layers: dict[str, KVCache | MambaState]) -> None:
        self.lengths, self.layers = lengths, layers

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def truncate(self, keep: int | Sequence[int], rollback: Rollback) -> None:
        """Roll the last pass back so that each row keeps the first `keep` of its tokens."""
        kept = [keep] * self.batch if isinstance(keep, int) else list(keep)
        if len(kept) != self.batch or not all(0 <= k <= c for k, c in zip(kept, rollback.counts)):
            raise ValueError(
                f"cannot keep {kept} tokens of a pass with {rollback.counts}: give one number per row, from "
                "0 to its tokens"
            )
        if self.lengths != [a + c for a, c in zip(rollback.lengths, rollback.counts)]:
            raise ValueError(
                f"the state has lengths {self.lengths}, but the pass added {rollback.counts} tokens to "
                f"{rollback.lengths}: give the rollback of the last pass"
            )
        if kept == rollback.counts:
            return
        for name, layer in self.layers.items():
            if isinstance(layer, MambaState):
                layer.set_lazily(rollback.scans[name], kept)
        self.lengths = [a + k for a, k in zip(rollback.lengths, kept)]

    def select(self, rows: Sequence[int]) -> DecodeState:
        """Return a copy of some rows, in the given order; a row may occur several times."""
        layers = {name: layer.select(list(rows)) for name, layer in self.layers.items()}
        return DecodeState([self.lengths[row] for row in rows], layers)


class Decode(Definition):
    """The definition with other steps, on one device.

    Args:
        read: Hugging Face name -> tensor; every tensor is read once, here.
        dtype: of activations, keys and values, and most weights. Routers, expert biases and the small
            tensors of a Mamba-2 mixer are FP32, and on a CPU the output layer.
        mtp: also read the MTP blocks.
    """

    def __init__(
        self,
        config: Nemotron3Config,
        read: Callable[[str], Tensor],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        mtp: bool = True,
    ) -> None:
        super().__init__(config, read, dtype)
        self.device = torch.device(device)
        self.blocks = self.blocks if mtp else []
        #: By name: norms, embeddings, routers and their biases; then weights of products; then by layer.
        self.kept: dict[str, Tensor] = {}
        self.products: dict[str, DecodeLinear] = {}
        self.recurrences: dict[str, Recurrence] = {}
        self.experts: dict[str, Experts] = {}
        self.channels = config.mamba_inner_size // (config.mamba_num_groups or 1)
        # Tensors, because an operation with a Python number would first create one. By width of a norm.
        widths = {config.hidden_size, config.expert_input_size}
        self.epsilons = {n: self._epsilon(n, config.layernorm_epsilon) for n in widths}
        self.gated_epsilon = self._epsilon(self.channels, GATED_NORM_EPSILON)
        for prefix in prefixes(config):
            if mtp or not prefix.hf.startswith("mtp."):
                self._prepare(prefix)

    def _epsilon(self, width: int, epsilon: float) -> Tensor:
        return torch.tensor((width * epsilon) ** 0.5, device=self.device)

    def _prepare(self, prefix: Prefix) -> None:
        layer, rows = prefix.hf + "mixer.", rows_of(prefix.config, prefix.part)
        for row in rows:
            names = [prefix.hf + t.name for t in row.hf]
            if names[0] == layer + _LATENT and prefix.config.moe_shared_expert_intermediate_size:
                names.append(layer + _SHARED)
            if not row.routed and (names[0] != layer + _SHARED or not prefix.config.moe_latent_size):
                self._keep(names[0], row, [self._read(name) for name in names])
        if prefix.part == "M":
            self.recurrences[layer] = Recurrence(
                prefix.config, *(self.kept.pop(layer + end) for end in _SCAN)
            )
        if prefix.part == "E":
            count = prefix.config.num_moe_experts or 0
            up, down = (self._stack(prefix.hf + row.hf[0].name, count) for row in rows if row.routed)
            self.experts[layer] = Experts(up, down)

    def _read(self, name: str) -> Tensor:
        return self.read(name).to(self.device, torch.float32 if name.endswith(_FLOAT32) else self.dtype)

    def _stack(self, name: str, count: int) -> Tensor:
        """[experts, columns, rows], without a second copy of all."""
        first = self._read(name.format(e=0)).t()
        stack = first.new_empty(count, *first.shape)
        for e in range(count):
            stack[e] = first if e == 0 else self._read(name.format(e=e)).t()
        return stack

    def _keep(self, name: str, row: Row, parts: list[Tensor]) -> None:
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if name == "lm_head.weight" and weight.device.type == "cpu":
            weight = weight.float()
        if name.endswith("norm.weight") or name.endswith("norm_f.weight"):
            # x / sqrt(mean(x^2) + eps) = x / sqrt(|x|^2 + n eps) * sqrt(n): a norm, a hypot, a division.
            n = self.channels if name.endswith("mixer.norm.weight") else len(weight)
            self.kept[name] = weight.float() * n**0.5
        elif row.linear == "router":
            self.kept[name] = weight.t().contiguous()
        elif row.linear in (None, "embedding", "convolution"):
            self.kept[name] = weight
        else:
            self.products[name] = DecodeLinear(weight)

    def new_state(self, layers: Sequence[Prefix], batch: int, capacity: int) -> DecodeState:
        """Empty sequences in a stack; `capacity`: tokens a row that KV caches have room for at first."""
        states: dict[str, Any] = {}
        for prefix in layers:
            c, name = prefix.config, prefix.hf + "mixer."
            if prefix.part == "M":
                states[name] = self.recurrences[name].new_state(batch, self.dtype)
            elif prefix.part == "*":
                shape = (batch, 2, c.num_query_groups, capacity, c.kv_channels)
                states[name] = KVCache(torch.zeros(shape, dtype=self.dtype, device=self.device))
        return DecodeState([0] * batch, states)

    def stack(self, layers: Sequence[Prefix], x: Tensor, run: Forward) -> Tensor:
        """As the definition's, in place, and as `ForwardBatch.last` says."""
        assert isinstance(run, ForwardBatch)
        stateless = 1 + max((i for i, prefix in enumerate(layers) if prefix.part in "M*"), default=-1)
        for i, prefix in enumerate(layers):
            if run.last and i == stateless:
                x = run.newest(x)
            x = self.layer(prefix, x, run).add_(x)
        return run.newest(x) if run.last and stateless == len(layers) else x

    def weight(self, name: str) -> Tensor:
        return self.kept[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x [tokens, in] -> [tokens, out]."""
        return self.products[name](x)

    def logits(self, h: Tensor) -> Tensor:
        """h [..., d] after a final norm -> [..., vocabulary]: FP32 on a CPU, else in the weights' dtype.

        In BF16 the two best logits of every fortieth step are equal, and the token is an accident.
        """
        output = self.products["lm_head.weight"]
        return output(h.to(output.dtype).flatten(0, -2)).view(*h.shape[:-1], -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm; statistics are FP32."""
        return _over_length(x.float(), self.epsilons[x.shape[-1]]).mul_(self.kept[name]).to(self.dtype)

    def gated_norm(self, y: Tensor, z: Tensor, gain: Tensor, groups: int) -> Tensor:
        """In FP32: y [tokens, inner] gated by z."""
        gated = F.silu(z.float()).mul_(y).view(len(y), groups, -1)
        return _over_length(gated, self.gated_epsilon).view(y.shape).mul_(gain).to(self.dtype)

    def activation(self, x: Tensor) -> Tensor:
        """Squared ReLU in place."""
        x = x.relu_()
        return x.mul_(x)

    def attention(self, name: str, c: Nemotron3Config, u: Tensor, run: Forward) -> Tensor:
        """Attention over the KV cache, q, k and v in one product: u [b * n, d] -> [b * n, d]."""
        assert isinstance(run, ForwardBatch) and run.state is not None
        b, n, heads, groups = run.b, run.n, c.num_attention_heads, c.num_query_groups
        qkv = self.linear(u, name + "q_proj.weight").view(b, n, heads + 2 * groups, -1)
        cache = run.state[name].append(qkv[:, :, heads:].view(b, n, 2, groups, -1), run)
        with attention_of_any_length(self.device):
            y = attend(qkv[:, :, :heads].view(b, n, groups, heads // groups, -1), cache, run)
        return self.linear(y, name + "o_proj.weight")

    def recurrence(self, name: str, c: Nemotron3Config, xbc: Tensor, dt: Tensor, run: Forward) -> Tensor:
        """xbc [b * n, channels], dt [b * n, h] -> [b * n, inner]."""
        assert isinstance(run, ForwardBatch) and run.state is not None
        mixer, state = self.recurrences[name], run.state[name]
        if run.single_token:
            return mixer.step(xbc, dt, state)
        y, scan = mixer.scan(xbc, dt, state, run)
        if run.rollback:
            run.scans[name] = scan
        return y

    def beside(self, name: str, c: Nemotron3Config, u: Tensor) -> tuple[Tensor, Tensor | None]:
        """With the latent projection and the shared expert's first in one product: both see the same u."""
        latent, shared = c.moe_latent_size, c.moe_shared_expert_intermediate_size
        if not latent or not shared:
            return super().beside(name, c, u)
        z, hidden = self.linear(u, name + _LATENT).split_with_sizes([latent, shared], 1)
        return z, self.linear(self.activation(hidden), name + "shared_experts.down_proj.weight")

    def router(self, u: Tensor, name: str) -> Tensor:
        """FP32."""
        return torch.mm(u.float(), self.kept[name])

    def routed(self, name: str, z: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As the definition's, of z [tokens, inner]."""
        return self.experts[name](z, chosen, weights)


def _over_length(x: Tensor, epsilon: Tensor) -> Tensor:
    """x over the root of its squared length plus epsilon squared."""
    return torch.div(x, torch.linalg.vector_norm(x, 2, -1, True).hypot_(epsilon))


def load(
    folder: Path | str,
    config: Nemotron3Config | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mtp: bool = True,
    **options: Any,
) -> Decode:
    """Load a checkpoint folder: Megatron's (torch_dist, fsdp_dtensor) or Hugging Face's.

    Args:
        config: the model; default: what config.json or the arguments in the checkpoint say.
        dtype: of the weights on the device; default: as stored. Some are always FP32 (`Decode`).
        mtp: also load the MTP block, if there is one.
        options: of `checkpoints.convert.checkpoints.open_checkpoint`: iteration, vocab_size, dequantize, ….

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it is of another model.
    """
    checkpoint = open_checkpoint(Path(folder), model=config, **options)
    return read_weights(checkpoint.hf_view(), checkpoint.config, device=device, dtype=dtype, mtp=mtp)


def read_weights(
    source: TensorSource,
    config: Nemotron3Config,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mtp: bool = True,
) -> Decode:
    """Load tensors under Hugging Face names from any source. Arguments and errors as for `load`."""
    tensors, shapes = TensorReader("checkpoint", source), {t.name: t.shape for t in hf_tensors(config)}
    if dtype is None:
        dtype = getattr(torch, source.tensors[tensors.find(f"{hf_root(config)}.embeddings.weight")].dtype)
    return Decode(config, lambda name: tensors.tensor(name, shapes[name]), dtype, device, mtp)
