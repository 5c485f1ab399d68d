"""What a checkpoint computes for given tokens, in FP32, a layer at a time from disk.

    model = Recomputation.open(folder)
    x = model.embed(ids)                                  # ids [rows, s] -> [rows, s, d]
    for step in model.run(x):                             # after each layer: step.stream, step.routing
        ...
    logprobs = model.logprobs(step.stream, ids)           # [rows, s - 1]

`run` starts from the residual stream before any layer, and takes changes of layers: a hypothesis costs one
layer, or the layers from there on. Nothing is stored but one residual stream, and the weights of one layer
with one routed expert at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.logits.reader import TensorReader
from megatron_nemotron3.checkpoints.convert.logits.reference import ReferenceModel
from megatron_nemotron3.checkpoints.convert.logits.routing import Selection
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.prefixes import Prefix, prefixes
from megatron_nemotron3.proof.bisect.noise import Noise

#: Tokens that run through a layer at a time, if a sequence is not longer.
TOKENS = 8192
#: Methods of `ReferenceModel` that a change may replace.
STEPS = (
    *("layer", "norm", "linear", "mamba", "in_proj", "conv", "time_steps", "scan", "gated_norm"),
    *("attention", "positions", "attend", "mlp", "activation", "moe", "scores", "ranking", "probabilities"),
    *("routed", "shared", "final_norm", "logits"),
)


#: Noise of each row, None where a row has none; () if no row has any.
Noises = Sequence[Noise | None]


@dataclass(frozen=True)
class Change:
    """A hypothesis about one layer, or about what follows the last one: what it computes instead.

    Attributes:
        steps: method of `ReferenceModel` (one of `STEPS`) -> a function called with the original method, and
        then
            with its arguments.
        weights: name -> a function from the tensor to one of the same shape; of stacked experts it gets those
            of one expert. Names are those of a torch_dist folder below the layer's prefix, such as
            "mixer.in_proj.weight.z"; after the last layer, whole names.
        experts: expert -> the expert whose weights it has; others keep theirs.
    """

    steps: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    weights: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    experts: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RowRouting:
    """What a router decided for s tokens of one row.

    Attributes:
        scores: of every expert, plus its bias [s, experts].
        experts: the selected ones, the best first [s, topk].
        margin: distance of the last selected from the best rejected score [s]; infinite if none is rejected.
    """

    scores: Tensor
    experts: Tensor
    margin: Tensor


@dataclass(frozen=True)
class LayerStep:
    """A layer's result: its number, kind, residual stream after it and update to it, both [rows, s, d]."""

    layer: int
    kind: str
    stream: Tensor
    update: Tensor
    #: One per row for an E layer, else empty.
    routing: list[RowRouting]


class Recomputation:
    """A checkpoint, run a layer at a time in FP32.

    Args:
        source: tensors under the names of a torch_dist folder.
        tokens: as many tokens run through a layer at a time; memory grows with it, and reads shrink.
    """

    def __init__(self, source: TensorSource, config: Nemotron3Config, *, tokens: int = TOKENS) -> None:
        self.config, self.tokens = config, tokens
        self.reference = ReferenceModel(source, config)
        found = [p for p in prefixes(config) if p.part in "M*-E"]
        #: The decoder's layers, then those of MTP's blocks.
        self.layers: list[Prefix] = found
        self.depth = len(config.pattern)

    @classmethod
    def open(cls, folder: Path | str, model: Nemotron3Config | None = None, **options: Any) -> Recomputation:
        """Open a Megatron or Hugging Face folder; packed weights are read as BF16.

        Raises:
            ValueError: there is no checkpoint, it is damaged, or it is of another model.
        """
        opened = find_checkpoint(Path(folder)).open(model)
        if opened.omni is not None:
            opened = opened.language_part()
        return cls(canonical(opened), opened.config, **options)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """[rows, s] token ids -> [rows, s, d]."""
        return self.reference.embed(ids.flatten()).view(*ids.shape, -1)

    @torch.no_grad()
    def layer(
        self,
        number: int,
        x: Tensor,
        change: Change | None = None,
        experts: Tensor | None = None,
        noise: Noises = (),
    ) -> LayerStep:
        """Run one layer.

        Args:
            x: the residual stream before it [rows, s, d].
            change: of this layer.
            experts: for an E layer, what to use instead of its own selection [rows, s, topk]; -1: its own.
            noise: of each row, or of none.
        """
        prefix = self.layers[number]
        reference = self._changed(prefix.megatron, change)
        updates: list[Tensor] = []
        routing: list[RowRouting] = []
        select = None if prefix.part != "E" else partial(_select_experts, routing, experts, noise)
        size = max(1, self.tokens // max(1, x.shape[1]))
        for start in range(0, len(x), size):
            updates.append(reference.layer(prefix, x[start : start + size], select)[0])
        update = torch.cat(updates)
        stream = x + update
        for row, one in enumerate(noise):
            if one is not None:
                stream[row] = one.stream(x[row], update[row])
        return LayerStep(number, prefix.part, stream, update, routing)

    def run(
        self,
        x: Tensor,
        first: int = 0,
        changes: Mapping[int, Change] | None = None,
        noise: Noises = (),
        stop: int | None = None,
    ) -> Iterator[LayerStep]:
        """Run the decoder's layers from `first` on, to `stop` - 1.

        Args:
            x: the residual stream before layer `first` [rows, s, d].
            changes: layer -> its change.
        """
        for number in range(first, self.depth if stop is None else stop):
            step = self.layer(number, x, (changes or {}).get(number), noise=noise)
            x = step.stream
            yield step

    @torch.no_grad()
    def logprobs(self, x: Tensor, ids: Tensor, change: Change | None = None, noise: Noises = ()) -> Tensor:
        """Log-probability of each next token.

        Args:
            x: the residual stream after the last layer [rows, s, d].
            ids: [rows, s].
            change: of the final norm and the output layer.
            noise: of each row, or of none.

        Returns:
            [rows, s - 1]: entry t is that of ids[:, t + 1] given ids[:, : t + 1].
        """
        reference = self._changed("", change)
        return _scored(reference, reference.final_norm(x[:, :-1]), ids[:, 1:], noise)

    @torch.no_grad()
    def mtp_logprobs(
        self,
        x: Tensor,
        ids: Tensor,
        changes: Mapping[int, Change] | None = None,
        noise: Noises = (),
        blocks: Recomputation | None = None,
    ) -> dict[int, Tensor]:
        """Log-probabilities of MTP by depth; arguments as for `logprobs`. Its layers follow the decoder's.

        Args:
            blocks: another checkpoint, whose MTP blocks run instead of this one's.

        Returns:
            depth -> [rows, s - 1 - depth]: entry t is that of ids[:, t + 1 + depth].
        """
        result, blocks = {}, blocks or self
        inner = len(self.config.mtp_pattern or "")
        x = self.reference.final_norm(x)
        for depth in range(1, (self.config.mtp_num_layers or 0) + 1):
            block = min(depth, self.config.mtp_num_blocks) - 1
            prefix = f"mtp.layers.{block}."
            x = blocks.reference.mtp_input(prefix, self.embed(ids[:, depth:]), x[:, :-1])
            for number in range(self.depth + block * inner, self.depth + (block + 1) * inner):
                x = blocks.layer(number, x, (changes or {}).get(number), noise=noise).stream
            x = blocks.reference.norm(x, prefix + "final_layernorm.weight")
            result[depth] = _scored(self.reference, x[:, :-1], ids[:, 1 + depth :], noise)
        return result

    def _changed(self, prefix: str, change: Change | None) -> ReferenceModel:
        if change is None:
            return self.reference
        reference = copy.copy(self.reference)
        reference.weights = _ChangedReader(self.reference.weights, prefix, change)
        for name, function in change.steps.items():
            if name not in STEPS:
                raise ValueError(f"there is no step {name!r}: use one of {', '.join(STEPS)}")
            setattr(reference, name, partial(function, getattr(reference, name)))
        return reference


def _scored(reference: ReferenceModel, normed: Tensor, ids: Tensor, noise: Noises = ()) -> Tensor:
    """normed [rows, s, d] and the tokens that follow [rows, s] -> [rows, s]."""
    total = torch.full(ids.shape, -torch.inf)
    taken = torch.zeros(ids.shape)
    for start, stop, logits in reference.logits(normed):
        for row, one in enumerate(noise):
            if one is not None:
                logits[row] = one.logits(logits[row])
        total = torch.logaddexp(total, logits.logsumexp(-1))
        inside = (ids >= start) & (ids < stop)
        place = (ids - start).clamp(0, stop - start - 1).unsqueeze(-1)
        taken = torch.where(inside, logits.gather(-1, place).squeeze(-1), taken)
    return taken - total


class _ChangedReader(TensorReader):
    def __init__(self, reader: TensorReader, prefix: str, change: Change) -> None:
        super().__init__(reader.side, reader.source, reader.names)
        self.experts = change.experts
        self.changes = {prefix + name: function for name, function in change.weights.items()}
        if missing := self.changes.keys() - self.names.keys():
            raise ValueError(f"{self.side}: no tensor {min(missing)}")

    def bands(
        self, name: str, shape: tuple[int, ...], *, within: tuple[int, ...] = (), stop: int | None = None
    ) -> Iterator[tuple[int, int, Tensor]]:
        """As `TensorReader.bands`; a changed tensor is one band."""
        if within and ".experts." in name:
            within = (self.experts.get(within[0], within[0]),)
        found = super().bands(name, shape, within=within, stop=stop)
        if name not in self.changes:
            yield from found
            return
        whole = torch.cat([band for _, _, band in found])
        changed = self.changes[name](whole)
        if changed.shape != whole.shape:
            raise ValueError(f"{name}: changed from {list(whole.shape)} to {list(changed.shape)}")
        yield 0, len(changed), changed


def _select_experts(
    found: list[RowRouting], given: Tensor | None, noise: Noises, selection: Selection
) -> Tensor:
    """Note what the router decided for the next row, and return the experts to use."""
    scores, experts, row = selection.scores, selection.experts, len(found)
    topk = experts.shape[1]
    margin = torch.full(scores.shape[:1], torch.inf)
    if scores.shape[1] > topk:
        best = scores.topk(topk + 1, dim=-1).values
        margin = best[:, -2] - best[:, -1]
    one = noise[row] if noise else None
    if one is not None:
        experts = one.experts(scores, topk)
    found.append(RowRouting(scores, experts, margin))
    if given is None:
        return experts
    other = given[row].long()
    return torch.where((other < 0).any(-1, keepdim=True), experts, other)


def canonical(opened: Checkpoint) -> TensorSource:
    """The weights under the names of a torch_dist folder, an adapter merged into them."""
    rows = opened.padded_vocab_size or opened.config.vocab_size
    there = list(inventory.mappings(opened.config, padded_vocab_size=rows))
    names = {t.name for mapping in there for t in mapping.megatron}
    if opened.kind != "hugging face" and opened.adapter is None and names == opened.weights.tensors.keys():
        return opened.weights
    return Converted(opened.hf_view(), there, to_hf=False)
