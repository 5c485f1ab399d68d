"""Record what a Megatron model computes, in any layout: ours, or the stock model with any stack.

Forward hooks take what each rank has: router choices and hidden states of its layers, with the rows of
sequence-parallel and context-parallel ranks gathered; log-probabilities on the last pipeline stage, over the
shards of the vocabulary. Nothing is computed a second time, and no logits are kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.common.hooks import first_forward, unwrapped
from megatron_nemotron3.layers.context_parallel import all_gathered, borders_of, gathered, zigzag
from megatron_nemotron3.post_training.distill.divergences import normalizer, real_entries
from megatron_nemotron3.proof.bisect.recording import Recording, Sequence, write

#: What a rank has of one micro-batch: "ids" [b, s], "logprobs", ("mtp", depth), ("routing", layer), …
Pass = dict[Any, Any]


@dataclass(kw_only=True)
class Recorder:
    """Hooks on this rank's part of a model while the block runs.

    Attributes:
        model: `HybridModel`, wrapped or not; with virtual pipeline stages the list of chunks.
        system: who computes, for the file.
        vocab_size: entries of the vocabulary without padding; default: all rows of the output layer count.
        routing: record which experts each token selects in every E layer.
        hidden: layers, numbered from 0, whose residual streams are recorded.
        mtp: record MTP's log-probabilities, if the model computes them.
        name: of the model, for the file.

    Raises:
        ValueError: the model has no such layer.
    """

    model: Any = field(kw_only=False)
    system: str = "megatron"
    vocab_size: int | None = None
    routing: bool = False
    hidden: Collection[int] = ()
    mtp: bool = True
    name: str | None = None

    def __post_init__(self) -> None:
        given = self.model if isinstance(self.model, (list, tuple)) else [self.model]
        chunks = [unwrapped(one) for one in given]
        self._chunks, self._groups = chunks, chunks[0].pg_collection
        self.dtype = str(next(chunks[0].parameters()).dtype).removeprefix("torch.")
        layers = chunks[0].config.num_layers
        if wrong := [n for n in self.hidden if not 0 <= n < layers]:
            raise ValueError(f"hidden: layer {wrong[0]}: the model has {layers} layers, numbered from 0")
        self._passes: list[list[Pass]] = [[] for _ in chunks]
        self._scores: list[list[Tensor]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Recorder:
        for chunk, passes in zip(self._chunks, self._passes):
            begin = partial(self._begin, passes)
            # Before our own hook, which replaces the borders of documents by those of their padding.
            self._handles.append(chunk.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            hooks: list[tuple[Any, Any]] = []
            for layer in chunk.decoder.layers:
                number = layer.layer_number - 1
                if number in self.hidden:
                    hooks.append((layer, partial(self._hidden, passes, number)))
                router = getattr(getattr(layer, "mlp", None), "router", None)
                if self.routing and router is not None:
                    hooks.append((router, partial(self._routed, passes, number)))
            if chunk.post_process:
                hooks.append((chunk.output_layer, partial(self._computed, passes)))
                hooks.append((chunk, partial(self._end, passes)))
            self._handles += [module.register_forward_hook(hook) for module, hook in hooks]
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def recording(
        self, prompts: Iterable[int] | None = None, lengths: Iterable[int] | None = None
    ) -> Recording | None:
        """Gather what all ranks recorded. Collective: every rank of the world calls it.

        Sequences are in the order of micro-batches, data-parallel ranks and rows, as Megatron's sampler deals
        them; documents of a pack are sequences of their own.

        Args:
            prompts: tokens of each sequence that were not scored; default: all but the first are.
            lengths: of each sequence without padding at its end; default: as long as it is.

        Returns:
            On the first rank of the world; None on others.

        Raises:
            ValueError: on the first rank: no log-probabilities, or another number of prompts or lengths than
                sequences.
        """
        own = [_merged(passes) for passes in zip(*self._passes, strict=True)]
        keeper = self._groups.tp.rank() == 0 and self._groups.cp.rank() == 0
        mine = (self._groups.dp.rank(), own if keeper else [])
        ranks: list[Any] = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            first = dist.get_rank() == 0
            ranks = [None] * dist.get_world_size()
            dist.gather_object(mine, ranks if first else None, dst=0)
            if not first:
                return None
        return self._assembled(ranks, prompts, lengths)

    def write(self, path: Path | str, **options: Any) -> None:
        """Write the recording; arguments and errors as for `recording` and `recording.write`. Collective."""
        recording = self.recording(**options)
        if recording is not None:
            write(path, recording)

    def _assembled(
        self, ranks: list[Any], prompts: Iterable[int] | None, lengths: Iterable[int] | None
    ) -> Recording:
        lanes: dict[int, list[list[Pass]]] = {}
        for lane, passes in ranks:
            if passes:
                lanes.setdefault(lane, []).append(passes)
        # Of each lane its micro-batches, each merged of all stages; then of each micro-batch all lanes.
        merged = [[_merged(stages) for stages in zip(*lanes[lane], strict=True)] for lane in sorted(lanes)]
        rows = [row for batch in zip_longest(*merged) for found in batch if found for row in _rows(found)]
        starts = [0] * len(rows) if prompts is None else list(prompts)
        ends = [None] * len(rows) if lengths is None else list(lengths)
        for what, values in (("prompts", starts), ("lengths", ends)):
            if len(values) != len(rows):
                raise ValueError(
                    f"{len(values)} {what} for {len(rows)} recorded sequences: give one for each"
                )
        sequences = [_sequence(*each) for each in zip(rows, starts, ends, strict=True)]
        return Recording(self.system, self.dtype, sequences, self.name)

    # What follows runs as hooks.

    def _begin(self, passes: list[Pass], model: Any, args: Any, kwargs: Any) -> None:
        if not first_forward():
            return
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        ids, labels = given.get("input_ids"), given.get("labels")
        own, cp = ids if ids is not None else labels, self._groups.cp
        found: Pass = {}
        if own is not None:
            packed = given.get("packed_seq_params")
            borders, ends = borders_of(packed, own.shape[1] * cp.size())
            found["ends"] = ends
            whole = gathered(own, ends, cp)
            # Token t + 1 at position t, which the last position has not.
            found["next"] = whole.roll(-1, 1) if ids is not None else whole
            if ids is not None:
                found["ids"] = whole.cpu()
            if packed is not None and borders is not None:
                real = packed.cu_seqlens_q.cpu().diff().tolist()
                found["documents"] = list(zip(borders[:-1].tolist(), real))
        passes.append(found)
        self._scores.clear()

    def _hidden(self, passes: list[Pass], number: int, _layer: Any, _inputs: Any, output: Any) -> None:
        if first_forward():
            stream = output[0] if isinstance(output, tuple) else output
            passes[-1]["hidden", number] = self._whole(passes[-1], stream.detach())

    def _routed(self, passes: list[Pass], number: int, router: Any, inputs: Any, output: Any) -> None:
        if not first_forward():
            return
        chosen = output[1].detach()
        if chosen.dtype == torch.bool:  # [tokens, experts]
            taken, chosen = chosen.int().topk(router.topk, dim=-1)
            kept = (taken > 0).all(-1, keepdim=True)
            chosen = torch.where(kept, chosen, -1)  # -1: a token with dropped experts
        x = inputs[0]
        rows = chosen.int().sort(-1).values.view(*x.shape[:-1], -1)
        passes[-1]["routing", number] = self._whole(passes[-1], rows)

    def _computed(self, passes: list[Pass], layer: Any, _inputs: Any, output: Any) -> None:
        """Score at once: Megatron's loss turns the logits into something else, in place."""
        if not first_forward():
            return
        found, logits = passes[-1], (output[0] if isinstance(output, tuple) else output).detach()
        if "next" not in found:
            raise ValueError("the last pipeline stage needs input_ids or labels to know which tokens follow")
        # MTP's depths use the layer first, in their order, then the model itself; only the end tells which.
        self._scores.append(self._scored(found, layer, logits, (0, 1 + len(self._scores))))

    def _end(self, passes: list[Pass], _model: Any, _inputs: Any, _output: Any) -> None:
        if not first_forward() or not self._scores:
            return
        *depths, (passes[-1]["logprobs"], _) = self._scores
        for depth, (_, scores) in enumerate(depths if self.mtp else (), 1):
            passes[-1]["mtp", depth] = scores
        self._scores.clear()

    def _scored(self, found: Pass, layer: Any, logits: Tensor, depths: Iterable[int]) -> list[Tensor]:
        """For each depth the log-probability [b, s] of the token `1 + depth` behind."""
        ends, cp, tp = found["ends"], self._groups.cp, self._groups.tp
        flat = logits.flatten(0, 1)
        width = flat.shape[1]
        group = tp if tp.size() > 1 and width == layer.output_size_per_partition else None
        entries = real_entries(width, group, self.vocab_size)
        largest, rest = normalizer(flat, 1.0, group, entries)
        result = []
        for depth in depths:
            following = found["next"].roll(-depth, 1)
            if cp.size() > 1:
                following = following[:, zigzag(ends, cp.size(), cp.rank(), following.device)]
            local = following.t().reshape(-1) - (0 if group is None else group.rank() * width)
            inside = (local >= 0) & (local < entries)
            taken = flat.gather(1, local.clamp(0, width - 1).unsqueeze(1)).squeeze(1).to(largest.dtype)
            taken = torch.where(inside, taken, 0.0)
            if group is not None:
                dist.all_reduce(taken, group=group)
            scores = (taken - largest - rest).float().view(logits.shape[:2]).t()
            result.append(gathered(scores.contiguous(), ends, cp).cpu())
        return result

    def _whole(self, found: Pass, rows: Tensor) -> Tensor:
        """[s / cp / tp, b, …] of this rank -> [b, s, …]."""
        tp, cp = self._groups.tp, self._groups.cp
        if self._chunks[0].config.sequence_parallel and tp.size() > 1:
            rows = torch.cat(all_gathered(rows, tp))
        rows = rows.transpose(0, 1).contiguous()
        ends = found.get("ends", [0, rows.shape[1] * cp.size()])
        return gathered(rows, ends, cp).cpu()


def _merged(parts: Iterable[Pass]) -> Pass:
    result: Pass = {}
    for part in parts:
        result |= {key: value for key, value in part.items() if key != "next"}
    return result


def _rows(found: Pass) -> list[Pass]:
    """The sequences of a micro-batch: its rows, or the documents of its pack."""
    if "ids" not in found or "logprobs" not in found:
        raise ValueError(
            "a pass without token ids on the first stage or without logits on the last one: give input_ids "
            "to the model, and leave fusions of the output layer with the loss out"
        )
    count, total = found["ids"].shape
    tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    spans = found.get("documents", [(0, total)])
    return [
        {key: value[row, start : start + length] for key, value in tensors.items()}
        for row in range(count)
        for start, length in spans
        if length > 1
    ]


def _sequence(row: Pass, prompt: int, length: int | None) -> Sequence:
    ids = row["ids"][:length].long()

    def of(what: str) -> dict[int, Tensor]:
        return {key[1]: value[: len(ids)] for key, value in row.items() if key[0] == what}

    def scored(values: Tensor, depth: int) -> Tensor:
        """Of tokens from the prompt on; entry t is of token t + 1 + depth."""
        start = max(prompt - 1 - depth, 0)
        return values[start : max(start, len(ids) - 1 - depth)]

    mtp = {depth: scored(values, depth) for depth, values in of("mtp").items()}
    return Sequence(ids, prompt, scored(row["logprobs"], 0), of("routing"), of("hidden"), mtp)
