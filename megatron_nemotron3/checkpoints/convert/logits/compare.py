"""Run both sides of a conversion in lockstep, one layer at a time, and compare after every layer.

Three streams of the same tokens run through Megatron's tensors, one through Hugging Face's:

    OWN        starts from Megatron's embedding: its logits are those of the Megatron checkpoint
    PERTURBED  the same, with noise of the size of each layer's difference added after the layer
    THEIRS     the input of Hugging Face's layer, so that outputs are compared independently of earlier layers

All three share each read of a weight. `report` defines the tolerances.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.logits.hugging_face import HuggingFace
from megatron_nemotron3.checkpoints.convert.logits.megatron_names import MegatronReader
from megatron_nemotron3.checkpoints.convert.logits.reader import StoredDefinition
from megatron_nemotron3.checkpoints.convert.logits.report import (
    LayerComparison,
    Logits,
    LogitsReport,
    Selection,
    SelectionDifference,
    agree,
)
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.definition import Forward, Routing
from megatron_nemotron3.models.parameters import Prefix

#: Indices of the streams in [3, s, d].
OWN, PERTURBED, THEIRS = range(3)
#: Rounding error of one addition in FP32.
_FP32_ROUNDING = 2.0**-24

#: Called for each band of the vocabulary with the name as in `Logits`, the first token id, and the logits
#: [s, n] of Megatron's and of Hugging Face's side.
OnLogits = Callable[[str, int, Tensor, Tensor], None]


@dataclass(frozen=True)
class LogitsCheckOptions:
    """How `check_logits` runs.

    Args:
        tokens: length of the sequence. Only sequences longer than `mamba_chunk_size` test the scan across
            chunks.
        seed: of the random tokens.
        echo: called with one line per layer, and with the lines of the report.
        on_logits: called with the logits of both sides.
    """

    tokens: int
    seed: int = 0
    echo: Callable[[str], Any] = print
    on_logits: OnLogits | None = None


def check_logits(
    megatron: TensorSource, hf: TensorSource, config: Nemotron3Config, options: LogitsCheckOptions
) -> LogitsReport:
    """Run one sequence of random tokens through both checkpoints, a layer at a time, in FP32."""
    tokens, seed, echo = options.tokens, options.seed, options.echo
    least = config.mtp_num_blocks + 2
    if tokens < least:
        raise ValueError(f"{tokens} tokens are too few: use at least {least}")
    echo(
        f"{config.name}: {tokens} random tokens (seed {seed}) through {config.full_pattern}, FP32; memory at "
        f"most {memory_bound(config, tokens) / 2**30:.1f} GiB"
    )
    if tokens <= config.mamba_chunk_size and "M" in config.full_pattern:
        echo(
            f"{tokens} tokens stay within the first chunk of {config.mamba_chunk_size}: errors of the scan "
            f"across chunks cannot show; use {config.mamba_chunk_size + 1} or more"
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (tokens,), generator=generator)
    with torch.no_grad():
        sides = StoredDefinition(config, MegatronReader(megatron, config)), HuggingFace(hf, config)
        if (note := sides[1].note) is not None:
            echo(f"transformers computes without its clamp of time steps here; {note}")
        comparison = _Comparison(*sides, config, generator, options)
        comparison.run(ids)
    comparison.report.peak_memory = _peak_memory()
    for line in comparison.report.lines():
        echo(line)
    return comparison.report


def memory_bound(config: Nemotron3Config, tokens: int) -> int:
    """Upper bound on the memory of `check_logits` in bytes, including Python, torch and transformers.

    Weights: the largest layer of the Hugging Face side in FP32 without its routed experts, plus one expert;
    Megatron's side holds one band. Activations: transformers' scan with its [heads, chunk, chunk] matrices is
    largest; the four streams and the attention scores take less.
    """
    c, d = config, config.hidden_size
    inner, bc = c.mamba_inner_size, c.mamba_num_groups * c.mamba_state_dim
    heads, chunk = c.mamba_num_heads, c.mamba_chunk_size
    mamba = (3 * inner + 2 * bc + heads) * d
    attention = 2 * (c.num_attention_heads + c.num_query_groups) * c.kv_channels * d
    weights = max(mamba, attention, 2 * d * (c.dense_ffn_hidden_size or 0), 2 * d * d)
    if c.is_moe:
        shared, latent = c.moe_shared_expert_intermediate_size or 0, c.moe_latent_size or 0
        moe = (2 * shared + 2 * latent + (c.num_moe_experts or 0)) * d
        width = max([c.moe_ffn_hidden_size or 0, *(width for width, _ in c.expert_sizes)])
        weights = max(weights, moe + 2 * width * c.expert_input_size)
    padded = -(-tokens // chunk) * chunk
    scan = padded * heads * (8 * chunk + 6 * c.mamba_state_dim + 8 * c.mamba_head_dim)
    scores = 8 * c.num_attention_heads * tokens**2
    streams = 24 * tokens * max(2 * inner + 2 * bc, d)
    return 4 * (weights + max(scan, scores) + streams) + (5 << 28)


@dataclass
class _Comparison:
    ours: StoredDefinition
    theirs: HuggingFace
    config: Nemotron3Config
    generator: torch.Generator
    options: LogitsCheckOptions
    report: LogitsReport = field(default_factory=LogitsReport)

    def run(self, ids: Tensor) -> None:
        ours, layers = self.ours, [*self.ours.layers, *(p for _, block, _ in self.ours.blocks for p in block)]
        self.report.experts = sum(p.part == "E" for p in layers) * (self.config.num_moe_experts or 0)
        rows, y = ours.embed(ids).expand(3, -1, -1).clone(), self.theirs.embed(ids)
        self.record(LayerComparison("embedding", *self.compare(rows[OWN], y[0], rows[OWN], y[0])))
        rows[THEIRS] = y[0]
        for prefix in ours.layers:
            rows, y = self.layer(prefix, rows, y)
        rows, y = self.head("logits", f"{ours.root}.norm_f.weight", rows, y)
        for depth, (first, layers, last) in enumerate(ours.blocks, 1):
            # The last token has no next token and leaves the streams.
            rows, y = self.enter_mtp(depth, first, ids[depth:], rows[:, :-1], y[:, :-1])
            for prefix in layers:
                rows, y = self.layer(prefix, rows, y)
            rows, y = self.head(f"logits of MTP depth {depth}", last + "final_layernorm.weight", rows, y)

    def layer(self, prefix: Prefix, rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        step = self.theirs.layer(prefix, y)
        agreements: list[SelectionDifference] = []

        def choose(routing: Routing) -> Tensor:
            assert step.selection is not None
            pairs = zip(routing.ranked, routing.chosen, strict=True)
            found = [agree(Selection(*pair), step.selection) for pair in pairs]
            agreements.extend(agreement for _, agreement in found)
            return torch.stack([experts for experts, _ in found])

        update = self.ours.layer(prefix, rows, Forward([rows.shape[1]], choose=choose))
        rows += update
        self.perturb(rows, update[THEIRS] - step.update[0])
        name = f"{prefix.megatron.rstrip('.')} and {prefix.hf.rstrip('.')} ({prefix.part})"
        figures = self.compare(update[THEIRS], step.update[0], rows[OWN], step.stream[0])
        if step.selection is None:
            self.record(LayerComparison(name, *figures))
        else:
            own, used = agreements[OWN], step.selection.experts.unique().numel()
            self.record(
                LayerComparison(name, *figures, agreements[THEIRS].scores, own.ties, own.others, used)
            )
        rows[THEIRS] = step.stream[0]
        return rows, step.stream

    def enter_mtp(
        self, depth: int, prefix: str, ids: Tensor, rows: Tensor, y: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compare the input of an MTP block."""
        y = self.theirs.mtp_input(prefix, self.theirs.embed(ids), y)
        rows = self.ours.mtp_input(prefix, self.ours.embed(ids).expand_as(rows), rows)
        self.perturb(rows, rows[THEIRS] - y[0])
        name = f"mtp.layers.{depth - 1}.eh_proj and {prefix}eh_proj"
        self.record(LayerComparison(name, *self.compare(rows[THEIRS], y[0], rows[OWN], y[0])))
        rows[THEIRS] = y[0]
        return rows, y

    def perturb(self, rows: Tensor, difference: Tensor) -> None:
        """Add noise of the size of each token's difference and of the rounding of an addition."""
        noise = torch.randn(difference.shape, generator=self.generator)
        size = difference.square().mean(-1, keepdim=True).sqrt()
        rows[PERTURBED] += noise * (size + _FP32_ROUNDING * rows[PERTURBED].abs())

    @staticmethod
    def compare(ours: Tensor, theirs: Tensor, own: Tensor, stream: Tensor) -> tuple[float, float, float]:
        """`LayerComparison.difference`, `.streams` and `.scale` of [s, d] each."""
        size, difference = theirs.norm(dim=-1), (ours - theirs).norm(dim=-1)
        # A token whose update nearly cancels has the rounding error of its large terms.
        relative = difference / size.clamp_min(0.1 * size.square().mean().sqrt().item())
        relative[difference == 0] = 0.0  # both may be zero
        scale = stream.square().mean().sqrt().item()
        return relative.max().item(), (own - stream).abs().max().item(), scale

    def record(self, layer: LayerComparison) -> None:
        self.report.layers.append(layer)
        routing = "" if layer.scores is None else f"; {layer.experts} experts, {layer.ties} near ties"
        failed = "  DIFFERENT" if layer.problem else ""
        self.options.echo(
            f"[{len(self.report.layers)}] {layer.name}: difference {layer.difference:.1e} of its output, "
            f"streams {layer.streams:.1e} apart (size {layer.scale:.2g}){routing}{failed}"
        )

    def head(self, name: str, norm: str, rows: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Compare a final norm with the output layer behind it."""
        rows, y = self.ours.norm(rows, norm), self.theirs.norm(y, norm)
        count, start = y.shape[1], 0
        apart = torch.zeros(3)  # difference, head, floor
        best = [[torch.full((count,), -torch.inf), torch.zeros(count, dtype=torch.long)] for _ in range(2)]
        total = squares = elements = 0.0
        for ours, theirs in zip(self.ours.vocabulary(rows), self.theirs.vocabulary(y), strict=True):
            sides = (ours[OWN], theirs[0])
            pairs = (sides, (ours[THEIRS], theirs[0]), (ours[PERTURBED], ours[OWN]))
            largest = torch.stack([(a - b).abs().max() for a, b in pairs])
            apart = torch.maximum(apart, largest)  # a NaN stays
            for top, side in zip(best, sides):
                value, place = side.max(-1)
                top[1] = torch.where(value > top[0], place + start, top[1])
                top[0] = torch.maximum(value, top[0])
            total += theirs.double().sum().item()
            squares += theirs.double().square().sum().item()
            elements += theirs.numel()
            if self.options.on_logits is not None:
                self.options.on_logits(name, start, *sides)
            start += theirs.shape[-1]
        mean = total / elements
        scale = max(0.0, squares / elements - mean**2) ** 0.5
        same = int((best[0][1] == best[1][1]).sum())
        difference, head, floor = apart.tolist()
        self.report.logits.append(Logits(name, difference, head, floor, scale, count, same))
        rows[THEIRS] = y[0]
        return rows, y


def _peak_memory() -> int:
    """Peak resident memory of this process in bytes."""
    # On Linux getrusage gives that of the process which started this one, if it was larger.
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
