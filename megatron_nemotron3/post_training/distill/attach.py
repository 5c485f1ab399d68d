"""What teaches a student, attached to the models that Megatron builds. No script has to know of it.

    with distilling(how):
        ...                      # build the model and train it, by whatever script

Hooks of a `HybridModel` in training run the teacher's chunk of its pipeline stage, compute each token's
divergence when the output layer has made the logits, and return

    weight * T ** 2 * divergence + (1 - weight) * cross-entropy

(of several teachers the sum) in place of the cross-entropy [b, s], so that masks, means and all loss
functions of Megatron's scripts apply. In evaluation the model returns its cross-entropy. MTP keeps its loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_nemotron3.common.hooks import at_first_forward
from megatron_nemotron3.layers.context_parallel import borders_of, gathered, zigzag
from megatron_nemotron3.post_training.distill.across import across_tokenizers
from megatron_nemotron3.post_training.distill.divergences import divergence
from megatron_nemotron3.post_training.distill.stored import Reader
from megatron_nemotron3.post_training.distill.teacher import Teacher
from megatron_nemotron3.post_training.distill.topk import TeacherTokens, topk_divergence
from megatron_nemotron3.train.teacher.settings import Distillation, Distillations, is_stored, rest_of

if TYPE_CHECKING:  # Python 3.10 has none
    from typing import Self


class Hooks(torch.nn.Module):
    """Hooks of one chunk of the student. Without parameters, and so without a trace in checkpoints.

    It is a module of the student's because all ranks call `train()` of all modules before the first step:
    only then may the teacher be built, which is collective. When a chunk is constructed, other ranks may
    wait for it inside the construction of another one, and in the schedule they wait for its activations.
    """

    def __init__(
        self, model: HybridModel, start: Callable[[], list[TeacherSignal]], teachers: Distillations
    ) -> None:
        super().__init__()
        self._start, self._calls, self._depths = start, 0, 0
        self._teachers, self._rest = teachers, rest_of(teachers)
        self._install = partial(self._hook, model)  # the model itself would become a module of this one
        self._signals: list[TeacherSignal] = []
        self._active = False
        self._tokens: list[Tensor] = []
        #: Cross-entropy and each teacher's divergence [b, s / cp] of the last micro-batch, without gradients.
        self.parts: list[Tensor] = []

    def finish_init(self, quant_config: Any) -> None:
        """Hook the model; Megatron calls it of all modules of a model that is complete."""
        self._install()

    def _hook(self, model: HybridModel) -> None:
        # MTP calls the output layer at each depth, before the decoder's hidden states reach it.
        self._depths = model.config.mtp_num_layers if model.mtp_process else 0
        model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._end)
        if model.post_process:
            model.output_layer.register_forward_hook(self._made)

    def train(self, mode: bool = True) -> Self:
        """Build the teachers when training begins."""
        if mode and not self._signals:
            self._signals = self._start()
        return super().train(mode)

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._calls, self._tokens, self.parts = 0, [], []
        self._active = model.training and torch.is_grad_enabled()
        if not self._active:
            return
        if not self._signals:
            raise RuntimeError("distillation: call train() of the model on every rank before the first step")
        given = dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
        if model.post_process and given.get("labels") is None:
            raise ValueError("distillation needs the model to be called with labels: it changes their loss")
        for signal in self._signals:
            signal.prepare(given, *_size(model, given))

    def _made(self, _layer: Any, _inputs: Any, output: Any) -> None:
        self._calls += 1
        if self._active and self._calls == self._depths + 1:
            self._tokens = [one.divergence(output[0]).transpose(0, 1) for one in self._signals]

    def _end(self, model: Any, _inputs: Any, output: Any) -> Any:
        if not (self._active and model.post_process):
            return None
        shapes = {one.shape for one in self._tokens}
        if self._calls != self._depths + 1 or shapes != {output.shape}:
            raise RuntimeError(
                f"distillation: the output layer was called {self._calls} times, not {self._depths + 1} (MTP "
                f"depths and the decoder), or returned no loss of each token: this version of Megatron-Core "
                "computes its loss otherwise"
            )
        self.parts = [output.detach(), *(one.detach() for one in self._tokens)]
        terms = [how.weight * how.temperature**2 * one for how, one in zip(self._teachers, self._tokens)]
        self._tokens = []
        terms += [self._rest * output] * (self._rest > 0)
        return sum(terms[1:], terms[0])


def _size(model: HybridModel, given: dict[str, Any]) -> tuple[int, int]:
    """s / cp and b of a micro-batch."""
    for name in ("input_ids", "labels"):
        if isinstance(tokens := given.get(name), Tensor):
            return tokens.shape[1], tokens.shape[0]
    local, rows = model.decoder.input_tensor.shape[:2]
    return local * (model.pg_collection.tp.size() if model.config.sequence_parallel else 1), rows


@contextmanager
def distilling(*teachers: Distillation) -> Iterator[None]:
    """Attach these teachers to every `HybridModel` that is built inside.

    Raises (when `train()` of a model is called):
        ValueError: as `Teacher` and `Reader`.
    """
    sources: list[Teacher | Reader] = []
    building = False

    def begun(model: HybridModel) -> list[TeacherSignal]:
        nonlocal building
        building = True
        try:
            for how in teachers[len(sources) :]:
                stored = is_stored(Path(how.teacher))
                sources.append(Reader(Path(how.teacher)) if stored else Teacher(how, model))
                _announce(sources[-1], how)
            return [_signal(source, model, how) for source, how in zip(sources, teachers)]
        finally:
            building = False

    def taken(parent: torch.nn.Module, _name: str, child: torch.nn.Module | None) -> None:
        if isinstance(parent, HybridModel) and isinstance(child, HybridStack) and not building:
            parent.distillation = Hooks(parent, partial(begun, parent), teachers)

    def require_hooks(module: torch.nn.Module) -> None:
        if not hasattr(module, "distillation"):
            raise ValueError(f"a teacher was given, and nothing teaches this {type(module).__name__}")

    hook = torch.nn.modules.module.register_module_module_registration_hook(taken)
    looking = at_first_forward(LanguageModule, require_hooks)
    try:
        yield
    finally:
        hook.remove()
        looking.remove()


def _signal(source: Teacher | Reader, student: HybridModel, how: Distillation) -> TeacherSignal:
    if isinstance(source, Reader):
        return StoredSignal(source, student, how)
    return (across_tokenizers if how.projection else OnlineSignal)(source, student, how)


def _announce(source: Teacher | Reader, how: Distillation) -> None:
    if torch.distributed.get_rank() != 0:
        return
    if isinstance(source, Reader):
        found = source.manifest
        drawn = f" and {found.drawn} drawn" if found.drawn else ""
        what = f"the {found.k} most probable{drawn} tokens in {source.folder}, of {found.teacher}"
    else:
        config = source.found.config
        sizes = f"{config.num_layers} layers of width {config.hidden_size}, {source.layout}"
        what = f"{source.found.place} ({sizes})"
    print(f"megatron_nemotron3: distils from {what}: {how.how}", flush=True)


class TeacherSignal(Protocol):
    """What a chunk of the student learns from, one micro-batch after the other."""

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        """Before the student's forward with these arguments, on each stage; s / cp and b."""

    def divergence(self, logits: Tensor) -> Tensor:
        """Logits [s / cp, b, v / tp] of the student -> [s / cp, b], nats; on the last stage."""


class OnlineSignal:
    """A chunk of a teacher in the same run."""

    def __init__(self, teacher: Teacher, student: HybridModel, how: Distillation) -> None:
        self._how, self._group = how, student.pg_collection.tp
        self._chunk = teacher.add(student)
        self._hidden: Tensor | None = None
        # Rows of the embedding that only one of the two has are padding.
        self._vocabulary = min(student.vocab_size, teacher.found.vocabulary.entries or teacher.rows)

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        self._hidden = self._chunk.forward(given, tokens, rows)

    def divergence(self, logits: Tensor) -> Tensor:
        assert self._hidden is not None
        target, self._hidden = self._chunk.logits(self._hidden), None
        how = self._how
        return divergence(logits, target, how.kind, how.temperature, self._group, vocabulary=self._vocabulary)


class StoredSignal:
    """Stored log-probabilities, which ranks of the last stage look up by their labels."""

    def __init__(self, source: Reader, student: HybridModel, how: Distillation) -> None:
        self._source, self._how, self._student = source, how, student
        self._target: TeacherTokens | None = None

    def prepare(self, given: dict[str, Any], tokens: int, rows: int) -> None:
        if not self._student.post_process:
            return
        labels: Tensor = given["labels"]
        cp = self._student.pg_collection.cp
        borders, ends = borders_of(given.get("packed_seq_params"), labels.shape[1] * cp.size())
        here = zigzag(ends, cp.size(), cp.rank()) if cp.size() > 1 else torch.arange(labels.shape[1])
        found = [self._source.row(row, borders) for row in gathered(labels, ends, cp).cpu().numpy()]
        ids, log_p = (torch.stack([torch.from_numpy(pair[i])[here] for pair in found], 1) for i in range(2))
        self._target = TeacherTokens(
            ids.to(labels.device, torch.long, non_blocking=True),
            log_p.to(labels.device, non_blocking=True),
            self._source.manifest.drawn,
        )

    def divergence(self, logits: Tensor) -> Tensor:
        assert self._target is not None
        target, self._target = self._target, None
        how, group, size = self._how, self._student.pg_collection.tp, self._student.vocab_size
        return topk_divergence(logits, target, how.kind, how.temperature, group, vocabulary=size)
