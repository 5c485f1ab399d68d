"""The teacher in the student's run: a frozen model of the family, in a layout of its own if asked for.

Each chunk of the teacher runs with the student's chunk of the same pipeline stage, before it, so any schedule
of Megatron's drives both. The hidden states of the teacher go from stage to stage beside the student's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from torch import Tensor

from megatron_nemotron3 import cpu, specs
from megatron_nemotron3.args import Launch, ParallelLayout
from megatron_nemotron3.boundary.grids import grid, groups
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.build import model_config, verified
from megatron_nemotron3.distill import check
from megatron_nemotron3.distill.lanes import Batch, Lanes
from megatron_nemotron3.distill.settings import Distillation
from megatron_nemotron3.distill.weights import load
from megatron_nemotron3.lora import training as with_lora
from megatron_nemotron3.models.stack_specs import ARGUMENT
from megatron_nemotron3.monitor.settings import megatron_options, monitoring
from megatron_nemotron3.precision import settings as emulation


def layout_of(model: HybridModel) -> ParallelLayout:
    """The layout in which a model was built."""
    config, at = model.config, model.pg_collection
    pp = at.pp.size()
    return ParallelLayout(
        tp=at.tp.size(),
        sp=bool(config.sequence_parallel),
        pp=pp,
        vpp=max(1, (model.hybrid_layer_pattern.count("|") + 1) // pp),
        ep=at.ep.size(),
        etp=at.expt_tp.size(),
        cp=at.cp.size(),
        dp=at.dp.size(),
    )


class Teacher:
    """This rank's part of the teacher. Every rank of the world constructs it.

    Args:
        how: names its folder and its layout.
        student: one of the chunks that learn from it.

    Raises:
        ValueError: as `check.find` and `check.layout_of`.
    """

    def __init__(self, how: Distillation, student: HybridModel) -> None:
        self.found = check.find(how.teacher)
        self.layout, own = check.layout_of(how, layout_of(student)), layout_of(student)
        self._student, self._own_vocabulary = student.pg_collection, bool(how.projection)
        self.groups: ProcessGroupCollection = student.pg_collection
        #: None: the layouts are the same, and nothing moves.
        self._lanes: Lanes | None = None
        if self.layout != own:
            at = self.layout
            sizes = (("tp", at.tp), ("cp", at.cp), ("dp", at.dp), ("pp", at.pp))
            self.groups = groups(grid(Layout(sizes), at.ep, at.etp))
            self._lanes = Lanes(at, own, self._student.dp_cp)
        #: Stages of the teacher in a stage of the student, and which of them this rank has.
        self._parts = self.layout.pp // own.pp
        self._part = dist.get_rank() // (self.layout.world_size // self.layout.pp) % self._parts
        #: The chunk behind which hidden states go to the student.
        self._last: Any = None
        self._line = _lines(dist.get_process_group_ranks(self.groups.pp))
        self._sending: list[tuple[Any, Tensor]] = []
        #: Of the student's TP rank [v / tp, h]; None before `add` has built the last stage.
        self.head: Tensor | None = None
        #: Of the teacher's embedding, padding included; 0 before that.
        self.rows = 0

    def add(self, student: HybridModel) -> HybridModel:
        """Build the chunk that runs with a chunk of the student, and load its weights."""
        weight = next(student.parameters())
        launch = Launch(
            config=self.found.config,
            layout=self.layout,
            precision="fp32" if weight.dtype == torch.float32 else "bf16",
            backend="torch" if specs.is_torch(student.hybrid_stack_spec) else "auto",
        )
        with _unnoticed():
            config = model_config(launch)
            chunk: HybridModel = verified(
                config.get_builder_cls()(config).build_model(
                    self.groups,
                    student.pre_process and self._part == 0,
                    student.post_process and self._part == self._parts - 1,
                    student.vp_stage,
                )
            )
        chunk.requires_grad_(False)
        chunk.eval()
        load(chunk, self.found.place, self.groups.dp_cp)
        if student.post_process:
            self._last = chunk
            rows = None if self._own_vocabulary else student.vocab_size // self._student.tp.size()
            self.head = self._head(chunk, rows)
        if chunk.post_process:
            chunk.post_process = False  # forward returns hidden states, behind the final norm
            del chunk.output_layer
        return chunk

    def _head(self, chunk: HybridModel, rows: int | None) -> Tensor:
        """The output layer as the student's TP ranks share it, `rows` on each; None: all."""
        whole = None
        if chunk.post_process:
            weight: Tensor = chunk.output_layer.weight.detach()
            parts = [torch.empty_like(weight) for _ in range(self.groups.tp.size())]
            dist.all_gather(parts, weight.contiguous(), group=self.groups.tp)
            whole = torch.cat(parts)
        if self._lanes is not None and self._parts > 1:
            whole = self._lanes.everywhere(whole, next(chunk.parameters()))
        assert whole is not None
        self.rows = len(whole)
        tp = self._student.tp
        rows = len(whole) // tp.size() if rows is None else rows
        kept = whole[tp.rank() * rows : (tp.rank() + 1) * rows]
        result = whole.new_zeros(rows, whole.shape[1])
        result[: len(kept)] = kept
        return result

    @torch.no_grad()
    def forward(self, chunk: HybridModel, given: dict[str, Any], tokens: int, rows: int) -> Tensor | None:
        """Run one chunk on a micro-batch of the student; on the last stage return [s / cp, b, h].

        Args:
            given: arguments of the student's forward; on stages without an embedding there may be no tokens.
            tokens, rows: s / cp and b of the student.
        """
        batch = Batch(given, tokens, rows)
        hidden = []
        for one in [batch] if self._lanes is None else self._lanes.batches(batch):
            if not chunk.pre_process:
                chunk.set_input_tensor(self._receive(chunk, one))
            output = chunk(
                one.arguments.get("input_ids"),
                one.arguments.get("position_ids"),
                one.arguments.get("attention_mask"),
                packed_seq_params=one.arguments.get("packed_seq_params"),
                padding_mask=one.arguments.get("padding_mask"),
            )
            if chunk.decoder.post_process:
                hidden.append(self._whole(output))
            else:
                self._send(output)
        if self._lanes is None or chunk is not self._last:
            return hidden[0] if hidden else None
        nothing = next(chunk.parameters()).new_empty(0, rows, chunk.config.hidden_size)
        return self._lanes.back(hidden or [nothing], batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """[s / cp, b, h] -> [s / cp, b, v / tp], as the student's output layer gives them."""
        assert self.head is not None
        return torch.nn.functional.linear(hidden, self.head)

    def _whole(self, hidden: Tensor) -> Tensor:
        """[s_local, b, h] -> [s / cp, b, h]."""
        if not self.layout.sequence_parallel or self.layout.tp == 1:
            return hidden
        whole: Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.groups.tp
        )
        return whole

    def _receive(self, chunk: HybridModel, batch: Batch) -> Tensor:
        """[s_local, b, h] of the stage before."""
        at = self.layout
        local = batch.tokens // (at.tp if at.sequence_parallel else 1)
        like = next(chunk.parameters())
        hidden = like.new_empty(local, batch.rows, chunk.config.hidden_size, dtype=chunk.config.params_dtype)
        line, ranks = self._line
        dist.recv(hidden, src=ranks[ranks.index(dist.get_rank()) - 1], group=line)
        return hidden

    def _send(self, hidden: Tensor) -> None:
        """Start to send to the next stage, which may be busy; what has been sent is released."""
        line, ranks = self._line
        to = ranks[(ranks.index(dist.get_rank()) + 1) % len(ranks)]
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        kept = hidden.contiguous()
        self._sending.append((dist.isend(kept, dst=to, group=line), kept))


def _lines(mine: list[int]) -> tuple[Any, list[int]]:
    """A group of its own for this rank's pipeline, so that messages cannot be taken for the student's."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, tuple(mine))
    group = None
    for ranks in sorted(set(every)):
        made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        group = made if ranks == tuple(mine) else group
    return group, mine


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Build another model: random streams and stored arguments stay, settings of the student do not count."""
    tracker, options = get_cuda_rng_tracker(), megatron_options()
    states = tracker.get_states()
    devices = [] if cpu.is_active() else [torch.cuda.current_device()]
    kept = {} if options is None else {k: v for k, v in vars(options).items() if k == ARGUMENT}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(emulation.emulating(None))
        stack.enter_context(emulation.logging_precision(None))
        stack.enter_context(monitoring(0))
        stack.enter_context(with_lora(None))
        try:
            yield
        finally:
            tracker.set_states(states)
            if options is not None:
                vars(options).pop(ARGUMENT, None)
                vars(options).update(kept)
