"""Each fault gives one warning, within three measurements and before the loss moves; healthy runs give none.

Real tiny runs are hurt while they train, and series of Super's size after they were drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_nemotron3.models import get
from megatron_nemotron3.train.monitor.alarms import Alarm, scan
from tests.support import faults
from tests.support.monitored_run import MonitoredRun, alone
from tests.support.series import INTERVAL, SET_ON, History, hurt, recorded, super_like

#: Measurements in which a fault must be reported.
IN_TIME = 3
#: A loss that has not moved: by less than 1 %.
STILL = 0.01


RECORDED = [f"{name}_{seed}" for name in ("nano-tiny", "super-tiny", "wide") for seed in (SET_ON, 2)]


@pytest.mark.parametrize(
    "run",
    [pytest.param(r, marks=pytest.mark.full if r.endswith(f"_{SET_ON}") else ()) for r in RECORDED]
    + ["nano-tiny_3"],
)
def test_healthy_recorded_runs_give_no_warning(run: str) -> None:
    """2,000 steps each. Thresholds were set on seed 1, the others judge them."""
    history = recorded()[run]
    assert [i for i, _ in history["monitor/lm_loss"]] == [*range(INTERVAL, 2001, INTERVAL)]
    assert max(v for _, v in history["monitor/worst_max_vio"][:10]) > 0.9 * (
        history["monitor/experts"][0][1] / history["monitor/top_k"][0][1]
    ), "the uneven start is in it"
    assert scan(history) == []


@functools.cache
def drawn(seed: int) -> History:
    return super_like(seed)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.full if s else ()) for s in range(3)])
def test_healthy_runs_of_supers_size_give_no_warning(seed: int) -> None:
    history = drawn(seed)
    assert len([tag for tag in history if tag.startswith("residual_rms/")]) == 88
    assert scan(history) == []


MOE = [n for n, kind in enumerate(get("super").pattern, 1) if kind == "E"]
BOUND = 512 / 22


def tags(kind: str, layers: list[int]) -> list[str]:
    return [f"{kind}/layer_{n:03d}" for n in layers]


Change = Callable[[History, int], History]


def over(kinds: str, layers: list[int], fault: Callable[[int, float], float]) -> Change:
    """Other values of these kinds of series in some layers."""
    rows = [tag for kind in kinds.split() for tag in tags(kind, layers)]
    return lambda history, begin: hurt(history, begin, rows, fault)


def collapsed(layers: list[int]) -> Change:
    """All tokens go to the same 22 experts from one step to the next."""
    vio = over("max_vio max_vio_interval", layers, lambda n, v: BOUND)
    dead = over("dead_experts_interval", layers, lambda n, v: 490.0)
    return lambda history, begin: dead(vio(history, begin), begin)


def louder(history: History, begin: int) -> History:
    """Layer 60 and what follows write 970 times more: last / first is 9.7e5."""
    rows = [*tags("residual_rms", list(range(60, 89))), "monitor/residual_rms_last_over_first"]
    return hurt(history, begin, rows, lambda n, v: 970 * v)


def mtp_up(history: History, begin: int) -> History:
    return hurt(history, begin, ["mtp_1 loss", "mtp_2 loss"], lambda n, v: v + 1)


#: Name -> (what happens to series, rule, words of the warning).
SUPER: dict[str, tuple[Change, str, str]] = {
    "one router": (collapsed(MOE[7:8]), "router_collapse", "23.27 is the most possible"),
    "half of the routers": (collapsed(MOE[::2]), "router_collapse", "and 19 more"),
    "all routers": (collapsed(MOE), "router_collapse", "and 39 more"),
    # Four fifths of the bound within twenty steps.
    "a router in part": (
        over("max_vio max_vio_interval", MOE[:1], lambda n, v: v + (0.8 * BOUND - v) * min(1.0, n / 20)),
        "router_collapse",
        "layer 2",
    ),
    "24 dead experts": (
        over("dead_experts_interval", MOE[9:10], lambda n, v: 24.0),
        "dead_experts",
        "24 of 512 experts of layer",
    ),
    "one dead expert in each layer": (
        over("dead_experts_interval", MOE, lambda n, v: 11.0),
        "dead_experts",
        "and 39 more",
    ),
    "spread of a bias": (
        over("expert_bias_spread", MOE[3:4], lambda n, v: v + 0.005 * n),
        "bias_drift",
        "at most 0.002",
    ),
    "all biases": (over("expert_bias_mean", MOE, lambda n, v: v + 0.002 * n), "bias_drift", "and 39 more"),
    "a Mamba layer's gradients": (
        over("zero_gradients", [1], lambda n, v: 1.0),
        "no_gradient",
        "100.0 % of the gradients of layer 1 are exactly zero",
    ),
    "residual stream": (louder, "residual_jump", "behind layer 60 "),
    "MTP losses": (mtp_up, "mtp_loss_jump", "MTP depth"),
}


@pytest.mark.parametrize("fault", SUPER)
def test_a_fault_at_supers_size(fault: str) -> None:
    """One line for the fault, in time, and none for the next 30 measurements of it. The loss stays."""
    change, rule, words = SUPER[fault]
    begin = 1300
    history = change(drawn(0), begin)
    window = {t: [(i, v) for i, v in p if begin - 300 < i <= begin + 300] for t, p in history.items()}
    (finding,) = scan(window)
    assert finding.rule == rule and words in finding.message, finding
    assert begin < finding.iteration <= begin + IN_TIME * INTERVAL
    assert len(str(finding)) < 600 and "\n" not in str(finding)


def test_a_main_loss_that_falls_alone() -> None:
    """As when it learns rows by heart: the difference rises, and the loss of MTP does not."""
    history = hurt(drawn(0), 1300, ["monitor/lm_loss"], lambda n, v: 0.3 * v)
    assert scan(history) == []


#: Measured every so many steps.
EVERY = 5


@dataclass
class Patient:
    """A trained tiny run, the state to go back to, and how it would go on."""

    run: MonitoredRun
    state: Any
    #: Losses of the next steps without a fault.
    twin: list[float]

    def probe(self) -> None:
        """A forward pass, so that routers see tokens."""
        rows = torch.arange(512).reshape(8, 64) % 256
        with torch.no_grad():
            self.run.model(rows, torch.arange(64).expand(8, -1), None, labels=rows)

    def suffer(self, fault: Callable[[Patient], Any]) -> tuple[list[Alarm], list[float]]:
        """Warnings in `IN_TIME` measurements after a fault, and the share by which each one's loss moved."""
        self.run.restore(self.state)
        begin, before = self.run.iteration, len(self.run.warnings)
        action = fault(self)
        repeated = action if callable(action) else None
        with faults.until_removed([] if action is None or repeated else action):
            self.run.train(IN_TIME * EVERY, (lambda n: repeated()) if repeated else None)
        assert self.run.iteration == begin + IN_TIME * EVERY
        lines = zip(chunks(self.run.losses[begin:]), chunks(self.twin), strict=True)
        return self.run.warnings[before:], [abs(now / then - 1) for now, then in lines]


def chunks(losses: list[float]) -> list[float]:
    """What the log line has: means over the steps since the last one."""
    return [sum(losses[i : i + EVERY]) / EVERY for i in range(0, len(losses), EVERY)]


#: Name -> (steps before the fault, steps of the schedule, rate of the bias update, which ends the early phase
#: of the warnings). At the end of the decay, and in the middle of the run: a tiny model that is trained out
#: notices at once that all of its routers are gone.
PATIENTS = {"late": (100, 104, "1e-2"), "young": (80, 400, "2e-2")}


@pytest.fixture(scope="module")
def patients() -> Iterator[Callable[[str], Patient]]:
    """Ultra's layers, small, trained."""
    model = get("ultra-tiny").but(
        name="patient",
        title="patient",
        pattern="ME*EE",
        num_moe_experts=16,
        moe_router_topk=4,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=64,
    )

    @functools.cache
    def train(name: str) -> Patient:
        begin, steps, rate = PATIENTS[name]
        extra = ("--moe-router-bias-update-rate", rate)
        run = MonitoredRun(model, seed=3, steps=steps, lr=2e-3, interval=EVERY, extra=extra)
        run.train(begin)
        state = run.state()
        run.train(IN_TIME * EVERY)
        assert run.warnings == []
        return Patient(run, state, run.losses[begin:])

    with alone():
        yield train


def collapse(patient: Patient, which: slice) -> None:
    """Weights of routers by which every token prefers the same four experts."""
    for router in faults.routers(patient.run.model)[which]:
        faults.favor(router, 4, patient.probe)


def drift(patient: Patient, speeds: torch.Tensor) -> Callable[[], None]:
    """Biases that something moves besides their update."""
    router = faults.routers(patient.run.model)[1]
    return lambda: router.expert_bias.add_(speeds)


def starve(patient: Patient) -> None:
    """Weights by which no token prefers six of the experts of the last router."""
    faults.shun(faults.routers(patient.run.model)[-1], 6, patient.probe)


def tire_mtp(patient: Patient) -> None:
    """MTP's output loses most of its size."""
    mtp: Any = patient.run.model.mtp
    with torch.no_grad():
        mtp.layers[0].final_layernorm.weight.mul_(0.35)


def layers(patient: Patient) -> Any:
    decoder: Any = patient.run.model.decoder
    return decoder.layers


#: Name -> (what is done, rule, layers that the warning names).
TINY: dict[str, tuple[Callable[[Patient], Any], str, set[str]]] = {
    "one router": (lambda p: collapse(p, slice(1, 2)), "router_collapse", {"layer_004"}),
    "all routers": (
        lambda p: collapse(p, slice(None)),
        "router_collapse",
        {"layer_002", "layer_004", "layer_005"},
    ),
    "dead experts": (starve, "dead_experts", {"layer_005"}),
    "all biases of a router": (lambda p: drift(p, torch.tensor(0.06)), "bias_drift", {"layer_004"}),
    "biases apart": (lambda p: drift(p, torch.linspace(-0.06, 0.06, 16)), "bias_drift", {"layer_004"}),
    "a layer's gradients": (lambda p: faults.no_gradients(layers(p)[2]), "no_gradient", {"layer_003"}),
    "residual stream": (lambda p: faults.louder(layers(p)[-1], 2e5), "residual_jump", {"layer_005"}),
    "MTP losses": (tire_mtp, "mtp_loss_jump", {"mtp_1", "mtp_2"}),
}


@pytest.mark.full  # values: test_values.py; a warning of a real run: test_layouts.py
@pytest.mark.parametrize("fault", TINY)
def test_a_fault_of_a_real_run(fault: str, patients: Callable[[str], Patient]) -> None:
    action, rule, rows = TINY[fault]
    patient = patients("young" if fault == "all routers" else "late")
    found, moved = patient.suffer(action)
    assert [finding.rule for finding in found] == [rule], found
    assert set(found[0].rows) <= rows and found[0].rows
    measurements = (found[0].iteration - (patient.run.iteration - IN_TIME * EVERY)) // EVERY
    assert max(moved[:measurements]) < STILL, (found[0].iteration, moved)
