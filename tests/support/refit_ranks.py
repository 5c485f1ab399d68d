"""What the ranks of a refit do; for `run_distributed` and `run_apart`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_nemotron3.inference.refit.execute import Refit, RefitError
from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.parts import serving_parameters
from megatron_nemotron3.inference.refit.plan import RefitPlan
from megatron_nemotron3.inference.refit.planner import make_plan
from megatron_nemotron3.models import get
from tests.support.refit_reference import loaded, trained, whole

#: (model, trainer, engine, servers, settings of `make_plan`)
Case = tuple[str, str, str, str, dict[str, Any]]


def plan_of(case: Case) -> RefitPlan:
    """The plan of a case."""
    name, source, engine, target, settings = case
    config = get(name)
    return make_plan(Training.of(config, source), EngineLayout.of(config, target, engine=engine), **settings)


def empty_parameters(plan: RefitPlan, rank: int) -> dict[str, Tensor]:
    """Zeros for every parameter of a serving rank. Padding rows of a vocabulary stay zero."""
    made = serving_parameters(plan, rank)
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in made.items()}


class Rank:
    """This rank's tensors in a case, and its end of the refit."""

    def __init__(self, case: Case, dtype: str = "bfloat16") -> None:
        self.plan, self.case, self.dtype = plan_of(case), case, dtype
        self.refit = Refit(self.plan)
        self.wrap: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
        self.target: dict[str, Tensor] | None = None
        if self.refit.receiver is not None:
            self.target = empty_parameters(self.plan, self.refit.receiver)

    def run(self, hf: dict[str, Tensor], **settings: Any) -> Any:
        """Refit from these whole tensors, and compare a server's parameters with the loaders' bit for bit."""
        source = None
        config = self.plan.training.config
        if self.refit.sender is not None:
            source = self.wrap(trained(config, self.plan.training.layout, self.refit.sender, hf))
        report = self.refit.run(source, self.target, **settings)
        self.compare(hf)
        return report

    def compare(self, hf: dict[str, Tensor]) -> None:
        """Compare a server's parameters."""
        if self.refit.receiver is None or self.target is None:
            return
        serving = self.plan.serving
        sizes = {name: getattr(serving, name) for name in ("tp", "pp", "dp", "ep")}
        served = {
            n: t.to(torch.bfloat16) if t.dtype == torch.float32 and "e_score" not in n else t
            for n, t in hf.items()
        }
        if self.dtype == "float32":  # the exponent is taken of what the trainer holds
            served |= {n: t for n, t in hf.items() if n.endswith("A_log")}
        expected = loaded(serving.config, serving.engine, sizes, self.refit.receiver, served)
        if not serving.drafts:
            expected = {n: t for n, t in expected.items() if not n.startswith(("draft.", "mtp."))}
        assert expected.keys() == self.target.keys()
        different = [name for name, tensor in expected.items() if not torch.equal(tensor, self.target[name])]
        assert not different, different[:3]


def refitted(cases: list[Case], dtype: str) -> list[int]:
    """Refit every case; returns the bytes that this rank sent."""
    sent = []
    for case in cases:
        rank = Rank(case, dtype)
        sent.append(rank.run(whole(get(case[0]), dtype)).sent)
        rank.refit.close()
    return sent


#: An attention projection, which servers hold fused, and a weight of MTP.
TWO = ("backbone.layers.3.mixer.q_proj.weight", "mtp.layers.0.eh_proj.weight")


def twice(case: Case) -> list[Any]:
    """A first refit, one after all but MTP has changed, a delta of a vector, and one of two elements."""
    rank, hf = Rank(case), whole(get(case[0]))
    reports = [rank.run(hf)]
    for name in hf:
        if not name.startswith("mtp."):
            hf[name] = hf[name] + 1
    reports.append(rank.run(hf))
    hf["backbone.norm_f.weight"] = hf["backbone.norm_f.weight"] * 2
    reports.append(rank.run(hf, delta=True))
    for name in TWO:  # the last rows are of one trainer only
        hf[name] = hf[name].clone()
        hf[name].view(torch.int16)[-1, -1] ^= 1
    reports.append(rank.run(hf, delta=True))
    return [(r.sent, r.received, r.tensors, r.unchanged) for r in reports]


def subset(case: Case) -> list[Any]:
    """A refit of a plan in which some trainers send nothing, then an empty delta and one of one tensor."""
    plan, hf = plan_of(case), whole(get(case[0]))
    refit = Refit(plan)
    target = None if refit.receiver is None else empty_parameters(plan, refit.receiver)
    found = []
    for changed in (0, 0, 1):
        hf["mtp.layers.0.enorm.weight"] = hf["mtp.layers.0.enorm.weight"] + changed
        source = None
        if refit.sender is not None:
            source = trained(plan.training.config, plan.training.layout, refit.sender, hf)
        report = refit.run(source, target, delta=True)
        found.append((report.received, report.unchanged, report.tensors))
    return found


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RefitError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "right"


def after_a_failure(case: Case) -> list[str]:
    """What a rank says of a refit that fails, and of the next one. A rank of the world has no part in it."""
    rank, hf = Rank(case), whole(get(case[0]))
    if rank.refit.receiver == 0 and rank.target is not None:
        del rank.target["model.norm_f.weight"]
    return [_said(lambda: rank.run(hf)), _said(lambda: Rank(case).run(hf, delta=True))]


def side_by_side(cases: list[Case]) -> list[str]:
    """Two refits in turn, then the first of them with an error: what a rank says."""
    ranks = [Rank(case) for case in cases]
    hf = [whole(get(case[0]), seed=number) for number, case in enumerate(cases)]
    for _ in range(2):
        for rank, tensors in zip(ranks, hf, strict=True):
            rank.run(tensors)
    if ranks[0].refit.receiver == 0 and ranks[0].target is not None:
        del ranks[0].target["model.norm_f.weight"]
    return [_said(partial(rank.run, tensors)) for rank, tensors in zip(ranks, hf, strict=True)]


def unwritten(case: Case, kinds: tuple[str, ...]) -> list[str]:
    """What a rank says of checks: of loaded parameters, then with those of one kind in memory not written."""
    rank, hf = Rank(case), whole(get(case[0]))
    rank.run(hf)
    report = rank.run(hf, check=True)
    said = [f"{report.sent} {report.received} {report.unchanged == rank.plan.names}"]
    for kind in kinds:
        held = {n: t.clone() for n, t in (rank.target or {}).items()}
        for name, tensor in (rank.target or {}).items():
            if name.endswith(kind):
                tensor.view(torch.uint8).fill_(0x7F)
        # A refit that failed ended its process group.
        rank.refit = Refit(rank.plan)
        said.append(_said(partial(rank.run, hf, check=True)))
        rank.target = held if rank.target is not None else None
    return said


def opposite(case: Case) -> str:
    """What a rank says where two servers that hold the same differ from the trainer by opposite amounts."""
    rank, hf = Rank(case), whole(get(case[0]))
    if rank.target is not None and rank.refit.receiver is not None:
        rank.target = Moved(rank.target, 1 - 2 * rank.refit.receiver)
    return _said(lambda: rank.run(hf))


def another_replica(case: Case, name: str, trainer: int) -> tuple[str, bool]:
    """What a rank says where a trainer holds another value, and whether its parameters are as before."""
    rank, hf = Rank(case), whole(get(case[0]))

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = {n: t.clone() if n == name else t for n, t in tensors.items()}
        changed[name].view(torch.int16).view(-1)[-1] ^= 1
        return changed

    if rank.refit.sender == trainer:
        rank.wrap = change
    said = _said(lambda: rank.run(hf))
    return said, not any(tensor.any() for tensor in (rank.target or {}).values())


class Moved(dict[str, Tensor]):
    """Parameters, one of which has other bits in the end, by a number."""

    def __init__(self, tensors: dict[str, Tensor], by: int) -> None:
        super().__init__(tensors)
        self._by = by

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        if name == "model.norm_f.weight" and sys._getframe(1).f_code.co_name == "run":
            tensor.view(torch.int16)[0] += self._by
        return tensor


def random_cases(seed: int, number: int) -> list[Case]:
    """Cases of four trainers and four servers, or of the same four, drawn from all layouts that fit."""
    draw = random.Random(seed)
    found: list[Case] = []
    while len(found) < number:
        name = draw.choice(("super-tiny", "nano-tiny", "nano-4b-tiny", "puzzle-tiny", "nemotron-h-8b-tiny"))
        source = {key: draw.choice((1, 1, 2, 4)) for key in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")}
        engine = draw.choice(("vllm", "sglang", "hf"))
        target = {key: draw.choice((1, 1, 2, 4)) for key in ("tp", "pp", "dp", "ep", "replicas")}
        settings = {"buffer": draw.choice((200_000, 1 << 28)), "colocated": draw.random() < 0.5}
        words = [",".join(f"{key}={size}" for key, size in sizes.items()) for sizes in (source, target)]
        if target["pp"] > 1:
            words[1] += ",mtp=0"
        case: Case = (name, words[0], engine, words[1], settings)
        with contextlib.suppress(ValueError):
            plan = plan_of(case)
            if plan.training.layout.world_size == plan.serving.size == 4:
                found.append(case)
    return found


def streamed(case: Case) -> tuple[list[str], bool]:
    """The names that this rank got from the stream, and whether all tensors are right."""
    plan, hf = plan_of(case), whole(get(case[0]))
    refit = Refit(plan)
    source = trained(plan.training.config, plan.training.layout, dist.get_rank(), hf)
    got = dict(refit.stream(source))
    return sorted(got), all(torch.equal(tensor, hf[name]) for name, tensor in got.items())


class Killed(dict[str, Tensor]):
    """Tensors that end the process when a function looks one up for the nth time."""

    def __init__(self, tensors: dict[str, Tensor], function: str, times: int) -> None:
        super().__init__(tensors)
        self._function, self._left = function, times

    def __getitem__(self, name: str) -> Tensor:
        self._left -= sys._getframe(1).f_code.co_name == self._function
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(name)


class Unreadable(dict[str, Tensor]):
    """Tensors that cannot be read when a function looks them up."""

    def __init__(self, tensors: dict[str, Tensor], function: str) -> None:
        super().__init__(tensors)
        self._function = function

    def __getitem__(self, name: str) -> Tensor:
        if sys._getframe(1).f_code.co_name == self._function:
            raise OSError("the disk has gone")
        return super().__getitem__(name)


class Hurt(dict[str, Tensor]):
    """Parameters, one of which has a wrong element in the end: its memory is not what was written."""

    def __getitem__(self, name: str) -> Tensor:
        tensor = super().__getitem__(name)
        if name.endswith("conv1d.weight"):
            tensor = tensor.clone()
            tensor.view(-1)[0] = 3
        return tensor


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
EMBEDDING, TRAINED, SERVED = "backbone.embeddings.weight", "backbone.norm_f.weight", "model.norm_f.weight"


def _server(number: int, change: Change) -> Callable[[Rank], None]:
    """A server has other parameters."""

    def fault(rank: Rank) -> None:
        if rank.refit.receiver == number and rank.target is not None:
            rank.target = change(rank.target)

    return fault


def _trainer(number: int, change: Change) -> Callable[[Rank], None]:
    """A trainer has other tensors."""

    def fault(rank: Rank) -> None:
        if rank.refit.sender == number:
            rank.wrap = change

    return fault


def _dies_as_host(rank: Rank) -> None:
    if rank.refit.sender == 0:
        os._exit(1)


FAULTS: dict[str, Callable[[Rank], None]] = {
    "the first trainer dies": _dies_as_host,
    "a wrong byte": _server(1, Hurt),
    "a name is missing": _server(0, lambda given: {n: t for n, t in given.items() if n != SERVED}),
    "an unknown name": _server(
        0, lambda given: given | {"model.layers.0.mixer.gate_proj.weight": torch.zeros(2)}
    ),
    "another shape": _server(1, lambda given: given | {SERVED: torch.zeros(3, dtype=torch.bfloat16)}),
    "a tensor of another layout": _trainer(
        1, lambda given: given | {EMBEDDING: torch.cat([given[EMBEDDING]] * 2)}
    ),
    "a tensor of bytes": _trainer(0, lambda given: given | {TRAINED: given[TRAINED].to(torch.uint8)}),
    "a tensor with NaN": _trainer(1, lambda given: given | {TRAINED: given[TRAINED] * torch.nan}),
    "a trainer cannot read its tensors": _trainer(1, lambda given: Unreadable(given, "_start")),
    "a trainer cannot pack": _trainer(1, lambda given: Unreadable(given, "__missing__")),
    "a server cannot prove": _server(1, lambda given: Unreadable(given, "run")),
    "a server is killed while it unpacks": _server(1, lambda given: Killed(given, "unpack", 50)),
    "a server is killed before the proof": _server(1, lambda given: Killed(given, "run", 1)),
    "a trainer is killed while it packs": _trainer(1, lambda given: Killed(given, "__missing__", 100)),
}


def faulty(case: Case, fault: str) -> str:
    """What this rank says of a refit with a fault, and of the next one."""
    rank, hf = Rank(case), whole(get(case[0]))
    FAULTS[fault](rank)
    begin = time.monotonic()
    try:
        rank.run(hf)
    except RefitError as error:
        untouched = (
            rank.target is None or not rank.target.keys() or not any(t.any() for t in rank.target.values())
        )
        try:
            rank.run(hf)
        except RefitError as again:
            assert str(again) == str(error)
        else:
            return "the next refit has no error"
        return f"RefitError after {time.monotonic() - begin:.0f} s, untouched {untouched}: {error}"
    return "no error"


def left(case: Case, how: str) -> str:
    """What this rank says where the second server ends, or leaves the stream, after its first tensor."""
    plan, hf = plan_of(case), whole(get(case[0]))
    refit = Refit(plan)
    source = trained(plan.training.config, plan.training.layout, dist.get_rank(), hf)
    stream = refit.stream(source)
    try:
        for _ in stream:
            if refit.receiver == 1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                break
        else:
            return "no error"
    except RefitError as error:
        return f"RefitError: {error}"
    stream.close()
    return "left"
