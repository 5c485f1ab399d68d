"""The teacher in the student's run: a frozen model of the family, in a layout of its own if asked for.

Each chunk of the teacher runs with the student's chunk of the same pipeline stage, before it, so any schedule
of Megatron's drives both. The hidden states of the teacher go from stage to stage beside the student's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
from megatron_nemotron3.distill.line import Line
from megatron_nemotron3.distill.rows import all_gathered
from megatron_nemotron3.distill.settings import Distillation
from megatron_nemotron3.distill.weights import load
from megatron_nemotron3.lora import training as with_lora
from megatron_nemotron3.models.stack_specs import ARGUMENT
from megatron_nemotron3.monitor.settings import megatron_options, monitoring
from megatron_nemotron3.precision import settings as emulation

#: A teacher's rows in its own tokens are padded to a multiple of this, so that few lengths occur.
_STEP = 64


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
        own = layout_of(student)
        self.layout = at = check.layout_of(how, own)
        #: Chunks of the student on a rank.
        self.chunks = own.vpp
        self.student, self._own_vocabulary = student.pg_collection, bool(how.projection)
        self.groups: ProcessGroupCollection = student.pg_collection
        #: None: the layouts are the same, and nothing moves.
        self.lanes: Lanes | None = None
        #: Copies of the teacher that take turns at the micro-batches: each lies on every n-th stage of the
        #: student.
        self.turns = max(1, own.pp // at.pp)
        #: Of the student's pipeline.
        self.notes = Line(dist.get_process_group_ranks(student.pg_collection.pp))
        #: Along which hidden states go, of the teacher's own pipeline if that has more stages.
        self.line = self.notes
        if at != own:
            sizes = (("tp", at.tp), ("cp", at.cp), ("dp", at.dp), ("turn", self.turns), ("pp", at.pp))
            self.groups = groups(grid(Layout(sizes), at.ep, at.etp))
            self.lanes = Lanes(at, own, self.student)
            if at.pp > own.pp:
                self.line = Line(dist.get_process_group_ranks(self.groups.pp))
        #: By what the rows of both models divide.
        self.multiple = math.lcm(own.tp * own.cp, at.tp * at.cp)
        #: Of the student's TP rank [v / tp, h]; None before `add` has built the last stage.
        self.head: Tensor | None = None
        #: Of the teacher's embedding, padding included; 0 before that.
        self.rows = 0
        #: What the first stage knows of micro-batches that later chunks of this rank will ask for.
        self.known: dict[int, list[Tensor]] = {}

    def add(self, student: HybridModel) -> Chunk:
        """Build the chunk that runs with a chunk of the student, and load its weights.

        A teacher without virtual stages runs with the last of a rank.
        """
        virtual = student.vp_stage or 0
        if self.layout.vpp < self.chunks:
            if virtual < self.chunks - 1:
                return Chunk(self, student, None)
            virtual = 0
        weight = next(student.parameters())
        launch = Launch(
            config=self.found.config,
            layout=self.layout,
            precision="fp32" if weight.dtype == torch.float32 else "bf16",
            backend="torch" if specs.is_torch(student.hybrid_stack_spec) else "auto",
        )
        stage = self.groups.pp.rank()
        first = (stage, virtual) == (0, 0)
        last = (stage, virtual) == (self.layout.pp - 1, self.layout.vpp - 1)
        with _unnoticed():
            config = model_config(launch)
            model: HybridModel = verified(
                config.get_builder_cls()(config).build_model(
                    self.groups, first, last, virtual if self.layout.vpp > 1 else None
                )
            )
        model.requires_grad_(False)
        model.eval()
        load(model, self.found.place, self.groups.dp_cp)
        if student.post_process:
            rows = None if self._own_vocabulary else student.vocab_size // self.student.tp.size()
            self.head = self._head(model, rows)
        if last:
            model.post_process = False  # forward returns hidden states, behind the final norm
            del model.output_layer
        return Chunk(self, student, model)

    def _head(self, model: HybridModel, rows: int | None) -> Tensor:
        """The output layer as the student's TP ranks share it, `rows` on each; None: all."""
        whole = None
        if model.post_process:
            weight: Tensor = model.output_layer.weight.detach()
            whole = torch.cat(all_gathered(weight, self.groups.tp))
        if self.lanes is not None and self.line is not self.notes:
            whole = self.lanes.everywhere(whole, next(model.parameters()))
        assert whole is not None
        self.rows = len(whole)
        tp = self.student.tp
        rows = -(-len(whole) // tp.size()) if rows is None else rows
        kept = whole[tp.rank() * rows : (tp.rank() + 1) * rows]
        result = whole.new_zeros(rows, whole.shape[1])
        result[: len(kept)] = kept
        return result


class Chunk:
    """The chunk of the teacher that runs with one of the student.

    If the student has n times as many stages, n copies of the teacher take turns, so that each micro-batch
    is computed on every n-th stage. Only the ranks of one stage meet in a forward pass: stages of a pipeline
    are at different micro-batches at the same time.
    """

    def __init__(self, teacher: Teacher, student: HybridModel, model: HybridModel | None) -> None:
        self.teacher, self._student = teacher, student
        self._model: Any = model
        self._told = self._run = 0

    def told(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """What the student's first stage makes of its next micro-batch, int64 matrices, on every stage."""
        teacher, number, virtual = self.teacher, self._told, self._student.vp_stage or 0
        self._told += 1
        if virtual == 0 and self._student.pre_process:
            note = make()
            teacher.notes.tell(note)
        elif virtual == 0:
            note = teacher.notes.hear(next(self._student.parameters()).device)
        else:
            note = teacher.known.pop(number)
        if virtual < teacher.chunks - 1:
            teacher.known[number] = note
        return note

    def length(self, longest: int) -> int:
        """Length of rows of `longest` tokens that both models can divide, and all lanes of the student have.

        Ranks of the student's first stage call it.
        """
        step = _STEP * self.teacher.multiple
        length = torch.tensor(-(-longest // step) * step, device=next(self._student.parameters()).device)
        if self.teacher.lanes is not None:
            dist.all_reduce(length, dist.ReduceOp.MAX, group=self.teacher.student.dp)
        return int(length)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor | None:
        """Compute a micro-batch in the student's layout; on its last stage return [s / cp, b, h].

        Without an embedding on this stage the batch need not have tokens.
        """
        teacher, model, last = self.teacher, self._model, self._student.post_process
        line, turn = teacher.line, self._run % teacher.turns
        self._run += 1
        mine = turn == line.place % teacher.turns
        if model is None or not (mine or last):
            return None
        hidden = []
        for one in [batch] if teacher.lanes is None else teacher.lanes.batches(batch):
            if mine:
                output = self._computed(one)
                if not model.decoder.post_process:
                    line.send(output, (line.place + teacher.turns) % len(line.ranks))
                    continue
                output = self._whole(output)
                if not last:
                    line.send(output, len(line.ranks) - 1)
                    continue
            else:
                place = len(line.ranks) - teacher.turns + turn
                output = line.receive(self._empty(one.tokens, one.rows), place)
            hidden.append(output)
        if teacher.lanes is None or not last:
            return hidden[0] if hidden else None
        return teacher.lanes.back(hidden or [self._empty(0, batch.rows)], batch)

    def logits(self, hidden: Tensor) -> Tensor:
        """[s / cp, b, h] -> [s / cp, b, v / tp], as the student's output layer gives them."""
        assert self.teacher.head is not None
        return torch.nn.functional.linear(hidden, self.teacher.head)

    def _computed(self, batch: Batch) -> Tensor:
        """What this chunk makes of a micro-batch of its data lane, [s_local, b, h]."""
        at, line, given = self.teacher.layout, self.teacher.line, batch.arguments
        if not self._model.pre_process:
            local = batch.tokens // (at.tp if at.sequence_parallel else 1)
            before = (line.place - self.teacher.turns) % len(line.ranks)
            self._model.set_input_tensor(line.receive(self._empty(local, batch.rows), before))
        output: Tensor = self._model(
            given.get("input_ids"),
            None,  # the family has no embedding of positions
            given.get("attention_mask"),
            packed_seq_params=given.get("packed_seq_params"),
            padding_mask=given.get("padding_mask"),
        )
        return output

    def _empty(self, tokens: int, rows: int) -> Tensor:
        config = self._model.config
        like = next(self._model.parameters())
        return like.new_empty(tokens, rows, config.hidden_size, dtype=config.params_dtype)

    def _whole(self, hidden: Tensor) -> Tensor:
        """[s_local, b, h] -> [s / cp, b, h]."""
        if not self.teacher.layout.sequence_parallel or self.teacher.layout.tp == 1:
            return hidden
        whole: Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.teacher.groups.tp
        )
        return whole


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
