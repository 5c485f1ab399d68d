"""What a checkpoint computes for given tokens, in FP32, a layer at a time from disk; and rounding as noise.

A hypothesis costs one layer, or the layers from there on. Nothing is stored but one residual stream, and the
weights of one layer with one routed expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.logits.reader import StoredDefinition, TensorReader
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.definition import Forward, Routing
from megatron_nemotron3.models.parameters import Prefix

#: Relative rounding error of a number of each type. Types below BF16 are treated as it.
ROUNDING = {"float64": 2.0**-24, "float32": 2.0**-24, "float16": 2.0**-11}
BF16_ROUNDING = 2.0**-9
#: Standard deviation of a layer's output in roundings of one number, its products, norm and activation: in
#: FP32, and in types of fewer bits.
INSIDE = 6.0, 3.0
#: Runs with noise. In FP32 routers rarely have near ties: the first run decides each the other way.
DRAWS = 6


def rounding(dtype: str) -> float:
    """Relative rounding error of a system's numbers."""
    return ROUNDING.get(dtype, BF16_ROUNDING)


class Noise:
    """Random rounding in one sequence: of layers, of the stream after them, of routers' scores, of logits.

    Args:
        unit: relative rounding error of a number.
        draw: number of the run with noise.
        sequence: number of the sequence.
    """

    def __init__(self, unit: float, draw: int, sequence: int) -> None:
        self.unit = unit
        self.inside = INSIDE[unit > 1e-6] * unit
        self.generator = torch.Generator().manual_seed(draw and 1000 * draw + sequence)
        self._flips_ties = draw == 0 and unit < 1e-6
        #: Rows at the end that are no tokens; the noise of the others does not depend on them.
        self.padding = 0

    def _random(self, like: Tensor, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
        numbers = draw(len(like) - self.padding, *like.shape[1:], generator=self.generator)
        return F.pad(numbers, (0, 0, 0, self.padding))

    def experts(self, ranked: Tensor, topk: int) -> Tensor:
        """What a router selects by [s, experts]: [s, topk]."""
        if not self._flips_ties:
            ranked = ranked + self.unit * self._random(ranked)
        elif ranked.shape[-1] > topk:
            # Scores are below 1; those of two correct systems differ by a few roundings.
            best = ranked.topk(topk + 1, dim=-1)
            tie = best.values[:, -2] - best.values[:, -1] < 8 * self.inside
            last, rejected = best.indices[:, -2:-1], best.indices[:, -1:]
            other = ranked.scatter(-1, rejected, ranked.gather(-1, last) + 1e-3)
            ranked = torch.where(tie[:, None], other, ranked)
        return ranked.topk(topk, dim=-1).indices

    def stream(self, x: Tensor, update: Tensor) -> Tensor:
        """The residual stream after a layer [s, d], from that before it and the layer's update."""
        size = update.square().mean(-1, keepdim=True).sqrt()
        stream = x + update + self.inside * size * self._random(update)
        return stream * (1 + self.unit * (2 * self._random(stream, torch.rand) - 1))

    def logits(self, band: Tensor) -> Tensor:
        return band * (1 + self.unit * self._random(band))


#: Tokens that run through a layer at a time, if a sequence is not longer.
TOKENS = 8192
#: Noise of each row, None where a row has none; () if no row has any.
Noises = Sequence[Noise | None]
#: What a layer, or what follows the last one, computes instead: the arguments of `Definition.but`.
Steps = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class LayerStep:
    """A layer's result: its number, kind, residual stream after it and update to it, both [rows, s, d]."""

    layer: int
    kind: str
    stream: Tensor
    update: Tensor
    #: Of an E layer.
    routing: Routing | None


class Recomputation:
    """A checkpoint, run a layer at a time in FP32.

    Args:
        source: tensors under their Hugging Face names.
        tokens: as many tokens run through a layer at a time; memory grows with it, and reads shrink.
    """

    def __init__(self, source: TensorSource, config: Nemotron3Config, *, tokens: int = TOKENS) -> None:
        self.config, self.tokens, self.depth = config, tokens, len(config.pattern)
        self.definition = StoredDefinition(config, TensorReader("checkpoint", source))
        blocks = self.definition.blocks
        #: The decoder's layers, then those of MTP's blocks.
        self.layers: list[Prefix] = sum((layers for _, layers, _ in blocks), self.definition.layers)

    @classmethod
    def open(cls, folder: Path | str, model: Nemotron3Config | None = None, **options: Any) -> Recomputation:
        """Open a Megatron or Hugging Face folder; packed weights are read as BF16, an adapter is merged.

        Raises:
            ValueError: there is no checkpoint, it is damaged, or it is of another model.
        """
        opened = find_checkpoint(Path(folder)).open(model)
        if opened.omni is not None:
            opened = opened.language_part()
        return cls(opened.hf_view(), opened.config, **options)

    @torch.no_grad()
    def embed(self, ids: Tensor, steps: Steps | None = None) -> Tensor:
        """[rows, s] token ids -> [rows, s, d]."""
        return self.definition.but(**steps or {}).embed(ids)

    @torch.no_grad()
    def layer(self, number: int, x: Tensor, steps: Steps | None = None, noise: Noises = ()) -> LayerStep:
        """Run one layer on the residual stream before it [rows, s, d], with noise of each row or of none."""
        prefix, model = self.layers[number], self.definition.but(**steps or {})
        updates, routings, size = [], [], max(1, self.tokens // max(1, x.shape[1]))
        for start in range(0, len(x), size):
            choose = partial(_experts, noise[start : start + size]) if noise else None
            run = Forward([x.shape[1]], choose=choose)
            updates.append(model.layer(prefix, x[start : start + size], run))
            routings += run.routings
        update = torch.cat(updates)
        stream = x + update
        for row, one in enumerate(noise):
            if one is not None:
                stream[row] = one.stream(x[row], update[row])
        parts = ([getattr(r, name) for r in routings] for name in ("logits", "ranked", "chosen"))
        routing = Routing(prefix.megatron, *map(torch.cat, parts)) if routings else None
        return LayerStep(number, prefix.part, stream, update, routing)

    def run(
        self,
        x: Tensor,
        first: int = 0,
        changes: Mapping[int, Steps] | None = None,
        noise: Noises = (),
        stop: int | None = None,
    ) -> Iterator[LayerStep]:
        """Run the decoder's layers from `first` on, to `stop` - 1.

        Args:
            x: the residual stream before layer `first` [rows, s, d].
            changes: layer -> its other steps.
        """
        for number in range(first, self.depth if stop is None else stop):
            step = self.layer(number, x, (changes or {}).get(number), noise)
            x = step.stream
            yield step

    @torch.no_grad()
    def logprobs(self, x: Tensor, ids: Tensor, steps: Steps | None = None, noise: Noises = ()) -> Tensor:
        """Log-probability of each next token.

        Args:
            x: the residual stream after the last layer [rows, s, d].
            ids: [rows, s].
            steps: of the final norm (`norm`) and the output layer (`vocabulary`).
            noise: of each row, or of none.

        Returns:
            [rows, s - 1]: entry t is that of ids[:, t + 1] given ids[:, : t + 1].
        """
        model = self.definition.but(**steps or {})
        return _scored(model, model.norm(x[:, :-1], f"{model.root}.norm_f.weight"), ids[:, 1:], noise)

    @torch.no_grad()
    def mtp_logprobs(
        self,
        x: Tensor,
        ids: Tensor,
        changes: Mapping[int, Steps] | None = None,
        noise: Noises = (),
        blocks: Recomputation | None = None,
    ) -> dict[int, Tensor]:
        """Log-probabilities of MTP by depth; arguments as for `logprobs`. Its layers follow the decoder's.

        Args:
            blocks: another checkpoint, whose MTP blocks run instead of this one's.

        Returns:
            depth -> [rows, s - 1 - depth]: entry t is that of ids[:, t + 1 + depth].
        """
        result, mtp = {}, blocks or self
        x = self.definition.norm(x, f"{self.definition.root}.norm_f.weight")
        for depth in range(1, (self.config.mtp_num_layers or 0) + 1):
            first, layers, last = mtp.definition.blocks[min(depth, self.config.mtp_num_blocks) - 1]
            x = mtp.definition.mtp_input(first, self.embed(ids[:, depth:]), x[:, :-1])
            for number in map(mtp.layers.index, layers):
                x = mtp.layer(number, x, (changes or {}).get(number), noise).stream
            x = mtp.definition.norm(x, last + "final_layernorm.weight")
            result[depth] = _scored(self.definition, x[:, :-1], ids[:, 1 + depth :], noise)
        return result


def _experts(noise: Noises, routing: Routing) -> Tensor:
    """What routers choose with noise: [rows, s, topk]."""
    rows = zip(noise, routing.ranked, routing.chosen, strict=True)
    return torch.stack([own if one is None else one.experts(r, own.shape[-1]) for one, r, own in rows])


def _scored(model: StoredDefinition, h: Tensor, ids: Tensor, noise: Noises) -> Tensor:
    """h [rows, s, d] after a final norm, and the tokens that follow [rows, s] -> [rows, s]."""
    total, taken, start = torch.full(ids.shape, -torch.inf), torch.zeros(ids.shape), 0
    for logits in model.vocabulary(h):
        for row, one in enumerate(noise):
            if one is not None:
                logits[row] = one.logits(logits[row])
        total = torch.logaddexp(total, logits.logsumexp(-1))
        place = ids - start
        inside = (place >= 0) & (place < logits.shape[-1])
        found = logits.gather(-1, place.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        taken, start = torch.where(inside, found, taken), start + logits.shape[-1]
    return taken - total
