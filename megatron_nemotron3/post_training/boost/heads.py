"""The loss of MTP's heads against the frozen model, and the mixing of their hidden states.

    depth k, position i    predicts token i + k + 1 from token i + k and a hidden state h_{k-1}[i]
    the model, position j  predicts token j + 1

So the model's distribution at position j is what depth k at position j - k is trained for. The loss of
position j is the mean over the depths (`Boost.weights`); it takes the place of the model's own loss, so the
training script masks, sums and averages it as ever, at any layout, and logs it as "lm loss".

Mixing: h_j[i + k - 1 - j], for j = 0 (the model) to k - 1, all belong to the token that depth k reads. A
mixed position is given one of them at random. In generation the deeper ones appear, too: a depth attends to
positions whose drafts came out of all numbers of steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import pad

from megatron_nemotron3.common.switches import megatron_options
from megatron_nemotron3.launch.boosting import ARGUMENT, Boost
from megatron_nemotron3.layers.context_parallel import document_borders
from megatron_nemotron3.layers.frozen import freeze_biases
from megatron_nemotron3.layers.registration import completing, keep_argument
from megatron_nemotron3.layers.ssd import seq_idx_from_cu_seqlens
from megatron_nemotron3.post_training.distill.divergences import divergence


def training_heads(boost: Boost) -> AbstractContextManager[None]:
    """Inside, every model with a stack of this package is built with `train_heads`."""
    return completing(partial(train_heads, boost=boost))


def train_heads(model: Any, boost: Boost) -> None:
    """Freeze a model and train its MTP heads. Call it before DDP wraps the model.

    Args:
        model: `HybridModel` of this rank, with a stack of this package.

    Raises:
        ValueError: it has no MTP, context parallelism, or logits that Megatron scales.
    """
    config = model.config
    if not config.mtp_num_layers:
        raise ValueError("the model has no MTP block to train: give --mtp-num-layers and a pattern with one")
    if config.context_parallel_size > 1 or config.use_mup:
        raise ValueError("MTP heads are not trained with context parallelism or muP: use neither")
    freeze(model)
    keep_argument(ARGUMENT, boost.text())
    trunk = Trunk(model.decoder, model.post_process)
    model.decoder.around = trunk
    if model.mtp_process:
        Heads(model, boost, trunk).install(model)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"megatron_nemotron3: only MTP's weights are trained: {boost.text()}", flush=True)


@dataclass
class Heads:
    """Forward hooks of a model's last stage."""

    model: Any
    boost: Boost
    trunk: Trunk
    #: Of this micro-batch: labels [b, s], tokens [b, s], document of each token [s], logits by depth.
    labels: Tensor | None = None
    tokens: Tensor | None = None
    documents: Tensor | None = None
    logits: list[Tensor] = field(default_factory=list)
    #: Hidden states that depths so far were given, [s, b, d].
    history: list[Tensor] = field(default_factory=list)

    def install(self, model: Any) -> None:
        model.register_forward_pre_hook(self.begin, with_kwargs=True)
        for layer in model.mtp.layers:
            layer.register_forward_pre_hook(self.mix, with_kwargs=True)
        model.output_layer.register_forward_hook(self.keep_logits)
        model.register_forward_hook(self.end)

    def begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Before the model: note the labels."""
        self.labels = None
        self.logits, self.history = [], []
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        if InferenceMode.is_active() or given.get("labels") is None:
            return
        self.labels, self.tokens = given["labels"], given["input_ids"]
        packed, self.documents = given.get("packed_seq_params"), None
        if packed is not None:
            total = self.labels.shape[1]
            borders = document_borders(packed, total).to(self.labels.device)
            self.documents = seq_idx_from_cu_seqlens(borders, total)[0]

    def mix(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before an MTP depth: give some positions the hidden state of another depth."""
        if self.labels is None:
            return None
        # Megatron asks the model's hidden states for a gradient, which nobody needs.
        newest = kwargs["hidden_states"] if self.history else kwargs["hidden_states"].detach()
        if not self.boost.mix or not layer.training:
            self.history.append(newest)
            return args, {**kwargs, "hidden_states": newest}
        group, parallel = self.model.pg_collection.tp, self.model.config.sequence_parallel
        if parallel:
            newest = gather_from_sequence_parallel_region(
                newest, tensor_parallel_output_grad=False, group=group
            )
        self.history.append(newest)
        mixed = self._mixed(newest)
        if parallel:
            mixed = scatter_to_sequence_parallel_region(mixed, group=group)
        return args, {**kwargs, "hidden_states": mixed}

    def _mixed(self, newest: Tensor) -> Tensor:
        """Hidden states for the next depth, [s, b, d]; of all depths so far, `newest` is the deepest."""
        assert self.tokens is not None
        depth = len(self.history)
        if depth == 1:
            return newest
        share = _uniform(self.tokens, self.boost.seed, _iteration(), depth).T  # [s, b]
        pick = (share * (depth / self.boost.mix)).long()  # number in the history; those above are not mixed
        mixed = newest
        for number, older in enumerate(self.history[:-1]):
            shift = depth - 1 - number
            chosen = (pick == number) & self._reaches(shift, newest.device)[:, None]
            aligned = pad(older[shift:], (0, 0, 0, 0, 0, shift))
            mixed = torch.where(chosen.unsqueeze(-1), aligned, mixed)
        return mixed

    def _reaches(self, shift: int, device: torch.device) -> Tensor:
        """Whether the position `shift` after each is of the same document, [s]."""
        assert self.labels is not None
        s = self.labels.shape[1]
        if self.documents is None:
            return torch.arange(s, device=device) < s - shift
        return pad(self.documents[shift:] == self.documents[: s - shift], (0, shift))

    def keep_logits(self, layer: Any, inputs: Any, output: Any) -> Any:
        """After the output layer, which Megatron calls for every depth, then for the decoder."""
        if self.labels is None:
            return None
        self.logits.append(output[0])
        # Megatron's cross-entropy, which is only logged, computes in place.
        return output[0].detach().clone(), *output[1:]

    def end(self, model: Any, inputs: Any, output: Tensor) -> Tensor | None:
        """After the model: the loss of the heads [b, s] in place of its own."""
        if self.labels is None:
            return None
        *drafted, own = self.logits
        depths = model.config.mtp_num_layers
        if len(drafted) != depths:
            raise RuntimeError(
                f"the output layer ran {len(self.logits)} times for {depths} MTP depths and the model, so "
                "Megatron computes their losses in another way: drop --cross-entropy-fusion-impl"
            )
        total = torch.zeros(self.labels.shape, device=own.device)
        for depth, (weight, logits) in enumerate(zip(self.boost.weights(depths), drafted), 1):
            loss = self._loss(logits[:-depth], own[depth:].detach(), self.labels[:, depth:])
            reached = self._reaches(depth, own.device)[: loss.shape[1]]
            total = total + pad(loss * reached, (depth, 0)) * weight
        self.logits, self.history, self.labels = [], [], None
        return self.trunk.linked(total)

    def _loss(self, drafted: Tensor, own: Tensor, labels: Tensor) -> Tensor:
        """Loss [b, n] of drafted logits [n, b, v / tp] against the model's own and the labels [b, n]."""
        if self.boost.loss == "ce":
            plain: Tensor = self.model.compute_language_model_loss(labels, drafted.clone())
            return plain
        group, temperature = self.model.pg_collection.tp, self.boost.temperature
        found = divergence(drafted, own, self.boost.loss, temperature, group if group.size() > 1 else None)
        return found.T * temperature**2


def _iteration() -> int:
    """The training script's step, with which the same tokens are mixed anew; 0 without a script."""
    return int(getattr(megatron_options(), "curr_iteration", 0))


def _uniform(tokens: Tensor, *numbers: int) -> Tensor:
    """Random numbers in [0, 1) for tokens [b, s], made of a row's tokens and `numbers`."""
    positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    rows = (_scrambled(tokens.long() * 0x9E3779B1 + positions)).sum(1, keepdim=True)
    for number in numbers:
        rows = _scrambled(rows + number)
    return (_scrambled(rows + positions) >> 11 & (1 << 52) - 1).double() / (1 << 52)


def _scrambled(x: Tensor) -> Tensor:
    for multiplier, shift in ((-0x40A7B892E31B1A47, 30), (-0x6B2FB644ECCEEE15, 27)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * multiplier
    return x ^ (x >> 31 & (1 << 33) - 1)


def freeze(model: Any) -> None:
    """Leave only the MTP block trainable. Call it before DDP wraps the model.

    The correction of the decoder's routers (`expert_bias`), which is no parameter, stays as it is, too: it
    moves by what the routers count, and without gradients they count nothing.
    """
    for parameter in model.parameters():
        parameter.requires_grad = False
    if model.mtp_process:
        for parameter in model.mtp.parameters():
            parameter.requires_grad = True
    freeze_biases(model.decoder)


class _ZeroGradient(torch.autograd.Function):
    """Pass a tensor on, and give another one, which it was not computed from, a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, output: Tensor) -> Tensor:
        ctx.like = received.shape, received.dtype, received.device
        # Megatron frees the memory of what a stage sends, and refuses to free that of a view.
        result = torch.empty(1, dtype=output.dtype, device=output.device)
        result.data = output.data
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return torch.zeros(shape, dtype=dtype, device=device), gradient


@dataclass
class Trunk:
    """What runs the layers of a frozen stack (`Nemotron3Stack.around`).

    last: whether this is the last stage, whose output is what MTP reads.
    """

    stack: Any
    last: bool

    def __call__(self, run: Callable[[], Tensor]) -> Tensor:
        """Return this stage's output; its layers have no gradient."""
        with torch.no_grad():
            output = run()
        return output if self.last else self.linked(output)

    def linked(self, output: Tensor) -> Tensor:
        """Return what this stage ends in, so that the stage before is sent a gradient: zeros."""
        received = None if self.stack.pre_process else self.stack.input_tensor
        if received is None or not received.requires_grad:
            return output
        linked: Tensor = _ZeroGradient.apply(received, output)
        return linked
