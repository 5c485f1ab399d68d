"""What a training script computes, seen through torch's public hooks. Runs on the ranks.

Nothing of the script or of Megatron is replaced. The optimizers' hooks see the gradients that an optimizer
gets, its state, and the weights before and after its step; the model's hooks see the weights that a step
computes with. In FP32 a distributed optimizer's shards are views of the parameters, so each finds its place
by its address; in mixed precision Megatron's optimizer has such a view beside each master weight.
"""

from __future__ import annotations

import bisect
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.common.files import atomic
from megatron_nemotron3.proof.certify.first_step import FirstStep
from megatron_nemotron3.proof.certify.tensors import Pieces, Tensors, gather, pieces_of, without_biases

#: Of a parameter, besides what the optimizer keeps of it ("exp_avg" …), before or after a step.
GRADIENTS, WEIGHTS = "gradients", "weights"
BEFORE = "before: "
#: The weights that the forward pass of a step computes with, in the model's precision.
MODEL = "model"
#: What a rank holds where its optimizers had nothing: 0 of frozen parameters, NaN of others.
_NOTHING = "nothing"
#: (step, kind) -> tensors, step 1 being the first that a process makes.
Observed = dict[tuple[int, str], Tensors]


def read(folder: Path, ranks: int) -> Observed:
    """Put together what the ranks have seen.

    Raises:
        RanksDiffer: two ranks hold different values of the same element, or no rank holds it.
    """
    files = [torch.load(_file(folder, rank, "seen"), weights_only=True) for rank in range(ranks)]
    kinds = dict.fromkeys(what for held in files for what in held if what[1] != _NOTHING)
    return {
        (step, kind): gather([held.get((step, kind), held[step, _NOTHING]) for held in files])
        for step, kind in kinds
    }


def read_facts(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Return what each rank notes of its first step, besides tensors (`FirstStep`)."""
    return [torch.load(_file(folder, rank, "facts"), weights_only=True) for rank in range(ranks)]


def _file(folder: Path, rank: int, what: str) -> Path:
    return folder / f"rank{rank}.{what}.pt"


class OptimizerObserver:
    """Writes what this rank's optimizers see to a file, again after each step.

    Args:
        own: note the weights that a step computes with (`MODEL`) and the facts of `read_facts`, too.
        each_step: called before each step.
    """

    def __init__(
        self, folder: Path, rank: int, own: bool = False, each_step: Callable[[], None] | None = None
    ) -> None:
        self._file = _file(folder, rank, "seen")
        self._facts = FirstStep(_file(folder, rank, "facts")) if own else None
        self._models: dict[int, Any] = {}
        self._each_step = each_step
        self._step = 0
        self._forward = False
        #: (step, kind) -> (address, values) of each shard.
        self._shards: dict[tuple[int, str], list[tuple[int, Tensor]]] = defaultdict(list)
        self._seen: dict[tuple[int, str], Pieces] = {}
        #: Chunk -> copies of its parameters in the forward pass of this step.
        self._computed: dict[int, list[Tensor]] = {}

    def install(self) -> None:
        """Look from now on, until the process ends."""
        from megatron.core.models.hybrid.hybrid_model import HybridModel
        from torch.optim import optimizer

        def forward(module: torch.nn.Module, _inputs: object) -> None:
            if isinstance(module, HybridModel):
                self._models[id(module)] = module
                if not self._forward:
                    self._forward, self._computed = True, {}

        def computed(module: torch.nn.Module, _inputs: object, _output: object) -> None:
            # Behind the pass, because an overlapped gather completes the weights inside of it.
            if isinstance(module, HybridModel) and id(module) not in self._computed:
                self._computed[id(module)] = [p.detach().clone() for p in module.parameters()]

        torch.nn.modules.module.register_module_forward_pre_hook(forward)
        if self._facts is not None:
            torch.nn.modules.module.register_module_forward_hook(computed)
            self._facts.install()
        optimizer.register_optimizer_step_pre_hook(self._before)
        optimizer.register_optimizer_step_post_hook(self._after)

    def _before(self, inner: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if self._forward:  # the first of a step's optimizers
            self._forward, self._step = False, self._step + 1
            if self._each_step is not None:
                self._each_step()
        if not self._step:  # Megatron makes a step to allocate the state that it is to load
            return
        if self._facts is not None:
            self._facts.write(self._models.values())
        for parameter in _parameters(inner):
            if parameter.grad is not None:
                self._note(GRADIENTS, parameter, parameter.grad)
            if self._step == 1:
                for kind, value in _state(inner, parameter):
                    self._note(BEFORE + kind, parameter, value)

    def _after(self, inner: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if not self._step:
            return
        for parameter in _parameters(inner):
            for kind, value in _state(inner, parameter):
                self._note(kind, parameter, value)
        self._write()

    def _note(self, kind: str, parameter: Tensor, value: Tensor) -> None:
        place = self._views.get(id(parameter), parameter).data_ptr()
        self._shards[self._step, kind].append((place, value.detach().float().clone().flatten()))

    @cached_property
    def _views(self) -> dict[int, Tensor]:
        """Master weight -> the part of the model's parameter that it is the master of."""
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as WholeOptimizer

        pairs: list[tuple[list[list[Tensor | None]], list[list[Tensor]]]] = []
        for one in gc.get_objects():  # a script keeps its optimizer in a local variable
            # Megatron-FSDP keeps its own.
            if isinstance(one, DistributedOptimizer) and hasattr(one, "shard_float16_groups"):
                pairs.append((one.shard_fp32_from_float16_groups, one.shard_float16_groups))
            elif isinstance(one, WholeOptimizer) and hasattr(one, "float16_groups"):
                pairs.append((one.fp32_from_float16_groups, one.float16_groups))
        return {
            id(master): view
            for masters, views in pairs
            for group in zip(masters, views, strict=True)
            for master, view in zip(*group, strict=True)
            if master is not None
        }

    def _write(self) -> None:
        """Write all that was seen: after each of a step's optimizers again, so the last one counts."""
        models = list(self._models.values())
        for kind in (_NOTHING, WEIGHTS, *((BEFORE + WEIGHTS,) if self._step == 1 else ())):
            self._shards[self._step, kind]  # of a rank that trains nothing, too
        for (step, kind), shards in self._shards.items():
            if step == self._step:
                self._seen[step, kind] = _whole(models, kind, shards)
        if self._facts is not None:
            self._seen[self._step, MODEL] = [
                piece for one in models for piece in _computed_pieces(one, self._computed[id(one)])
            ]
        with atomic(self._file) as part:
            torch.save(self._seen, part)


def _parameters(inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in inner.param_groups:
        yield from group["params"]


def _state(inner: torch.optim.Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parameter, and what the optimizer keeps of each of its elements."""
    yield WEIGHTS, parameter
    for name, value in inner.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            yield name, value
        elif name == "step":
            yield name, torch.full_like(parameter, float(value))


def _computed_pieces(model: Any, values: Sequence[Tensor]) -> Pieces:
    return without_biases(pieces_of([model], list(model.parameters()), values))


def _whole(models: Sequence[Any], kind: str, shards: Sequence[tuple[int, Tensor]]) -> Pieces:
    """Pieces of the models with values in place of the parameters; NaN where this rank holds none."""
    parameters = sorted((p for model in models for p in model.parameters()), key=Tensor.data_ptr)
    addresses = [p.data_ptr() for p in parameters]
    kept = kind.removeprefix(BEFORE) == WEIGHTS
    values = [
        torch.full(p.shape, torch.nan) if p.requires_grad else p.data.float() * kept for p in parameters
    ]
    for address, shard in shards:
        owner = bisect.bisect_right(addresses, address) - 1
        begin = (address - addresses[owner]) // parameters[owner].element_size()
        values[owner].view(-1)[begin : begin + len(shard)] = shard
    found = pieces_of(models, parameters, values)
    return found if kind == WEIGHTS else without_biases(found)
