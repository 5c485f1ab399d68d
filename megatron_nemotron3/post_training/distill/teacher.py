"""The teacher in the student's run: a frozen model of the family, in the student's layout.

Each chunk of the teacher runs with the student's chunk of the same pipeline stage, before it, so any schedule
of Megatron's drives both. The hidden states of the teacher go from stage to stage next to the student's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from torch import Tensor

from megatron_nemotron3 import cpu, specs
from megatron_nemotron3.checkpoints.convert.into_model import load_base, load_weights
from megatron_nemotron3.checkpoints.folders import is_hugging_face
from megatron_nemotron3.common.switches import megatron_options
from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.layers.context_parallel import all_gathered
from megatron_nemotron3.models.lora import adding_lora
from megatron_nemotron3.models.stack_specs import ARGUMENT
from megatron_nemotron3.precision import settings as emulation
from megatron_nemotron3.train.build import built, model_config
from megatron_nemotron3.train.monitor.settings import monitoring
from megatron_nemotron3.train.teacher import check
from megatron_nemotron3.train.teacher.settings import Distillation

#: A teacher's rows in its own tokens are padded to a multiple of this, so that few lengths occur.
_STEP = 64
#: Tensors of a broadcast, at most.
_MOST = 8


def layout_of(model: HybridModel) -> ParallelLayout:
    """The layout in which a model was built."""
    config, at = model.config, model.pg_collection
    return ParallelLayout(
        tp=at.tp.size(),
        sp=bool(config.sequence_parallel),
        pp=at.pp.size(),
        vpp=config.virtual_pipeline_model_parallel_size or 1,
        ep=at.ep.size(),
        etp=at.expt_tp.size(),
        cp=at.cp.size(),
        dp=at.dp.size(),
    )


class PipelineMessages:
    """Messages along this rank's pipeline. Every rank of the world constructs it.

    It has a communicator of its own, so that no message is taken for the student's. Messages from one
    place to another arrive in the order in which they were sent.

    Args:
        pipeline: the process group of the stages; a rank's place is its index there.
    """

    def __init__(self, pipeline: Any) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(pipeline))
        self.place = self.ranks.index(dist.get_rank())
        self._group: Any = None
        self._sending: list[tuple[Any, Tensor]] = []
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.ranks)
        for ranks in sorted(set(every)):
            group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            self._group = group if ranks == self.ranks else self._group

    def send(self, tensor: Tensor, place: int) -> None:
        """Start to send to a place, which may be busy; what has been sent is released.

        A message of gloo is completed only by waiting for it. With p places the last one is at most 2 (p - 1)
        passes behind the first, which sends 2 (p - 1) + 1 messages in each.
        """
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        if len(self._sending) >= 4 * len(self.ranks) ** 2:
            self._sending.pop(0)[0].wait()
        kept = tensor.contiguous()
        self._sending.append((dist.isend(kept, dst=self.ranks[place], group=self._group), kept))

    def receive(self, into: Tensor, place: int) -> Tensor:
        """Wait for a message of the shape of `into` from a place."""
        dist.recv(into, src=self.ranks[place], group=self._group)
        return into

    def broadcast(self, note: Sequence[Tensor]) -> None:
        """Send int64 matrices from the first place to all others."""
        if len(self.ranks) == 1:
            return
        shapes = torch.zeros(_MOST, 2, dtype=torch.int64)
        shapes[: len(note)] = torch.tensor([one.shape for one in note])
        body = torch.cat([shapes.to(note[0].device).flatten(), *(one.flatten() for one in note)])
        for place in range(1, len(self.ranks)):
            self.send(body[: 2 * _MOST], place)
            self.send(body[2 * _MOST :], place)

    def receive_broadcast(self, device: torch.device) -> list[Tensor]:
        """Wait for a note of the first place; behind its matrices follow empty ones."""

        def next_one(size: int) -> Tensor:
            return self.receive(torch.empty(size, dtype=torch.int64, device=device), 0)

        shapes = next_one(2 * _MOST).view(-1, 2).tolist()
        sizes = [n * m for n, m in shapes]
        return [part.view(shape) for part, shape in zip(next_one(sum(sizes)).split(sizes), shapes)]


class Teacher:
    """This rank's part of the teacher. Every rank of the world constructs it.

    Args:
        how: names its folder.
        student: one of the chunks that learn from it.
    """

    def __init__(self, how: Distillation, student: HybridModel) -> None:
        self.found = check.find(how.teacher)
        self.layout, self.groups = layout_of(student), student.pg_collection
        self._own_vocabulary = bool(how.projection)
        #: Along which hidden states and notes go.
        self.messages = PipelineMessages(self.groups.pp)
        #: Of the student's TP rank [v / tp, h]; None before `add` has built the last stage.
        self.head: Tensor | None = None
        #: Of the teacher's embedding, padding included; 0 before that.
        self.rows = 0
        #: What the first stage knows of micro-batches that later chunks of this rank will ask for.
        self.known: dict[int, list[Tensor]] = {}

    def add(self, student: HybridModel) -> TeacherChunk:
        """Build the chunk that runs with a chunk of the student, and load its weights."""
        virtual = student.vp_stage or 0
        weight = next(student.parameters())
        launch = Launch(
            config=self.found.config,
            layout=self.layout,
            precision="fp32" if weight.dtype == torch.float32 else "bf16",
            backend="torch" if specs.is_torch(student.hybrid_stack_spec) else "auto",
        )
        with _isolated():
            model: HybridModel = built(
                model_config(launch),
                self.groups,
                student.pre_process,
                student.post_process,
                virtual if self.layout.vpp > 1 else None,
            )
        model.requires_grad_(False)
        model.eval()
        load_teacher(model, self.found.place, self.groups.dp_cp)
        if model.post_process:
            rows = None if self._own_vocabulary else student.vocab_size // self.groups.tp.size()
            self.head = self._head(model.output_layer.weight.detach(), rows)
            model.post_process = False  # forward returns hidden states, behind the final norm
            del model.output_layer
        return TeacherChunk(self, student, model)

    def _head(self, weight: Tensor, rows: int | None) -> Tensor:
        """The output layer as the student's TP ranks share it, `rows` on each; None: all."""
        tp = self.groups.tp
        whole = torch.cat(all_gathered(weight, tp))
        self.rows = len(whole)
        rows = -(-len(whole) // tp.size()) if rows is None else rows
        kept = whole[tp.rank() * rows : (tp.rank() + 1) * rows]
        result = whole.new_zeros(rows, whole.shape[1])
        result[: len(kept)] = kept
        return result


class TeacherChunk:
    """The chunk of the teacher that runs with one of the student."""

    def __init__(self, teacher: Teacher, student: HybridModel, model: HybridModel) -> None:
        self._teacher, self._student = teacher, student
        self._model: Any = model
        self._notes = 0

    def from_first_stage(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """What the student's first stage makes of its next micro-batch, int64 matrices, on every stage."""
        teacher, number, virtual = self._teacher, self._notes, self._student.vp_stage or 0
        self._notes += 1
        if virtual == 0 and self._student.pre_process:
            note = make()
            teacher.messages.broadcast(note)
        elif virtual == 0:
            note = teacher.messages.receive_broadcast(next(self._student.parameters()).device)
        else:
            note = teacher.known.pop(number)
        if virtual < teacher.layout.vpp - 1:
            teacher.known[number] = note
        return note

    def length(self, longest: int) -> int:
        """Length of rows of `longest` tokens that TP and CP ranks can divide."""
        step = _STEP * self._teacher.layout.tp * self._teacher.layout.cp
        return -(-longest // step) * step

    @torch.no_grad()
    def forward(self, arguments: dict[str, Any], tokens: int, rows: int) -> Tensor | None:
        """Compute a micro-batch; on the last stage return [s / cp, b, h]."""
        at, messages, model = self._teacher.layout, self._teacher.messages, self._model
        stages = len(messages.ranks)
        if not model.pre_process:
            local = tokens // (at.tp if at.sequence_parallel else 1)
            like, config = next(model.parameters()), model.config
            empty = like.new_empty(local, rows, config.hidden_size, dtype=config.params_dtype)
            model.set_input_tensor(messages.receive(empty, (messages.place - 1) % stages))
        output: Tensor = model(
            arguments.get("input_ids"),
            None,  # the family has no embedding of positions
            arguments.get("attention_mask"),
            packed_seq_params=arguments.get("packed_seq_params"),
            padding_mask=arguments.get("padding_mask"),
        )
        if not model.decoder.post_process:
            messages.send(output, (messages.place + 1) % stages)
            return None
        return self._whole(output)

    def logits(self, hidden: Tensor) -> Tensor:
        """[s / cp, b, h] -> [s / cp, b, v / tp], as the student's output layer gives them."""
        assert self._teacher.head is not None
        return torch.nn.functional.linear(hidden, self._teacher.head)

    def _whole(self, hidden: Tensor) -> Tensor:
        """[s_local, b, h] -> [s / cp, b, h]."""
        if not self._teacher.layout.sequence_parallel or self._teacher.layout.tp == 1:
            return hidden
        whole: Tensor = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self._teacher.groups.tp
        )
        return whole


def load_teacher(chunk: Any, place: Path, dp_cp: Any = None) -> None:
    """Read this rank's weights from `TeacherCheckpoint.place` into a chunk of the teacher. Collective.

    Args:
        dp_cp: the chunk's data- and context-parallel group; None: Megatron's.

    Raises:
        ValueError: a file is damaged, or the tensors do not fit.
    """
    if is_hugging_face(place):
        load_weights(chunk, check.open_hf_teacher(place), dp_cp)
    else:
        load_base(chunk, place, option="teacher ", dp_cp=dp_cp)


@contextmanager
def _isolated() -> Iterator[None]:
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
        stack.enter_context(adding_lora(None))
        try:
            yield
        finally:
            tracker.set_states(states)
            if options is not None:
                vars(options).pop(ARGUMENT, None)
                vars(options).update(kept)
