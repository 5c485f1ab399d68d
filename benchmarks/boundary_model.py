"""An alpha-beta model of upstream's leaders and our plans, for up to 1,280 ranks; not a measurement.

    python benchmarks/boundary_model.py [--quick] [--ragged] [--concurrent]

Forward and backward of one microbatch. V is the input of one data lane of the language model: 44 MB are
8192 rows of 2688 bf16 numbers. Modules are on different nodes, except with "NVLink only".

A message costs alpha + bytes / beta. A rank's messages go one after another, out and in at the same time;
ranks that share a NIC share its beta. A collective over k ranks is a ring: an all-gather alpha + (k - 1)
steps + (k - 1) / k of the bytes, a broadcast alpha + 1 step + all bytes. The same rules for both sides:

stock   Read in megatron-core 0.19.2, `BridgeCommunicator`: for every lane the leader (last rank of the source
        lane, first of the destination's) exchanges shapes, sends or receives lane by lane, and broadcasts
        shape and rows to the lane's TP x CP ranks. Its assertion of CP 1 is left out. Waits of the host for
        the shapes (`.tolist()`) cost nothing here.
plan    `megatron_nemotron3.boundary`: the plan's messages, each with its whole alpha, then the gathers.

So the latencies of many messages and the cheap broadcast count against the plans; with --concurrent a plan's
messages, which are posted together, overlap their latencies. Latencies are those of NCCL's own cost model
for its ring (src/graph/tuning.cc at commit 01afd20a, Simple protocol: base 8.4 us, step 3.4 us over NVLink,
9.6 us over a network). Bandwidths are assumed: 300 GB/s inside a node, 50 GB/s per NIC. The share of a
microbatch takes Nano's 6 * active parameters FLOPs per token, all tokens image rows, at an assumed 400
TFLOP/s per GPU: text makes the true share smaller.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from common import print_table

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.plan import LEADER_BYTES, TransferPlan, make_plan, slices_of
from megatron_nemotron3.models import get
from megatron_nemotron3.models.parameters import count

ROW_BYTES = 2688 * 2
SIZES_MB = (0.1, 1.0, 10.0, 44.0, 100.0, 500.0)
BASE_US = 8.4
FLOPS_PER_US = 400e12 / 1e6
#: Of a shape: three int64 numbers.
SHAPE_BYTES = 24

Transfer = tuple[int, int, float]


@dataclass(frozen=True)
class Network:
    """Ranks share nodes of `ranks_per_node`; a node has `nics`. Microseconds, and bytes per microsecond."""

    name: str
    ranks_per_node: int
    nics: int
    node_step: float = 3.4
    net_step: float = 9.6
    node_beta: float = 300e3
    net_beta: float = 50e3

    def messages(self, transfers: Iterable[Transfer], concurrent: bool = False) -> float:
        """Time until all messages (sender, receiver, bytes) have arrived."""
        ranks: dict[tuple[str, int], float] = defaultdict(float)
        nics: dict[tuple[str, int], float] = defaultdict(float)
        alpha = 0.0
        for source, destination, size in transfers:
            a, b = source // self.ranks_per_node, destination // self.ranks_per_node
            step, beta = (self.node_step, self.node_beta) if a == b else (self.net_step, self.net_beta)
            for way, rank in (("out", source), ("in", destination)):
                ranks[way, rank] += size / beta + (0.0 if concurrent else BASE_US + step)
                if a != b:
                    nics[way, rank * self.nics // self.ranks_per_node] += size / beta
            alpha = max(alpha, BASE_US + step)
        waits = [time + alpha * concurrent for time in ranks.values()]
        return max([0.0, *waits, *(time + alpha for time in nics.values())])

    def ring(self, ranks: Sequence[int], sent: float, every_step: bool) -> float:
        """Time of a collective in which each rank sends `sent` bytes, in k - 1 steps or in one stream."""
        k, nodes = len(ranks), len({rank // self.ranks_per_node for rank in ranks})
        if k == 1:
            return 0.0
        beta = self.node_beta
        if nodes > 1:  # rings of a node use the NICs of their ranks
            beta = min(beta, self.net_beta * self.nics * (k / nodes) / self.ranks_per_node)
        steps = (k - nodes) * self.node_step + (nodes - 1) * self.net_step
        return BASE_US + (steps if every_step else steps / (k - 1)) + sent / beta

    def broadcast(self, ranks: Sequence[int], size: float) -> float:
        """Time of a broadcast from one rank to all."""
        return self.ring(ranks, size, every_step=False)


NETWORKS = (
    Network("NVLink only", ranks_per_node=10**6, nics=1),
    Network("8 NICs of 400 Gb/s per node of 8", ranks_per_node=8, nics=8),
    Network("1 NIC of 400 Gb/s per node of 8", ranks_per_node=8, nics=1),
)


@dataclass(frozen=True)
class Case:
    """Two layouts; `sliced`: the plan delivers the positions that each rank computes (CP, SP)."""

    source: dict[str, int]
    destination: dict[str, int]
    sliced: bool = False

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts whose destination starts on a new node."""
        source = Layout.of(**self.source)
        return source, Layout.of(
            **self.destination, offset=-(-source.size // 8) * 8, sp=self.sliced and self.destination["tp"] > 1
        )

    def __str__(self) -> str:
        def words(sizes: dict[str, int]) -> str:
            return " ".join(f"{name}{size}" for name, size in sizes.items())

        return f"{words(self.source)} -> {words(self.destination)}{', slices' * self.sliced}"

    def rows(self, v: float, ragged: bool) -> list[int]:
        """Rows of each sample, on average V bytes per destination lane; ragged: 1 to 7 times the smallest."""
        source, destination = self.layouts
        samples = math.lcm(source.dp, destination.dp)
        weights = [1 + 3 * (i * 7919 % 3) if ragged else 1 for i in range(samples)]
        total = v * destination.dp / ROW_BYTES / sum(weights)
        return [max(1, round(total * weight)) for weight in weights]


CASES = (
    Case({"tp": 1, "dp": 1}, {"tp": 8, "dp": 1}),
    Case({"tp": 1, "dp": 4}, {"tp": 4, "dp": 1}),
    Case({"tp": 4, "dp": 1}, {"tp": 1, "dp": 4}),
    Case({"tp": 8, "dp": 1}, {"tp": 8, "dp": 1}),
    Case({"tp": 1, "dp": 8}, {"tp": 8, "dp": 1}),
    Case({"tp": 2, "dp": 16}, {"tp": 8, "dp": 4}),
    Case({"tp": 1, "dp": 64}, {"tp": 8, "dp": 32}),
    Case({"tp": 1, "dp": 256}, {"tp": 8, "dp": 128}),
    Case({"tp": 1, "dp": 8}, {"tp": 8, "dp": 1}, sliced=True),
    Case({"tp": 1, "dp": 8}, {"tp": 8, "cp": 4, "dp": 1}, sliced=True),
    Case({"tp": 1, "dp": 256}, {"tp": 8, "cp": 4, "dp": 32}, sliced=True),
)
QUICK = (CASES[1], CASES[8])


def forward_plan(case: Case, rows: Sequence[int], leader_bytes: int = LEADER_BYTES) -> TransferPlan:
    """The plan of a case; with slices every position of a sequence is an image row."""
    source, destination = case.layouts
    slices = None
    if case.sliced:
        multiple = 2 * destination.tp * destination.cp
        lengths = [-(-n // multiple) * multiple for n in rows]
        slices = slices_of(destination, [((0, n),) for n in rows], lengths)
    return replace(
        make_plan(source, destination, rows, row_bytes=ROW_BYTES, slices=slices), leader_bytes=leader_bytes
    )


def plan_time(plan: TransferPlan, network: Network, concurrent: bool) -> float:
    """Time of the messages and then of the gathers, which all groups run at the same time."""
    sent = network.messages(
        ((m.source, m.destination, m.rows * plan.row_bytes) for m in plan.messages), concurrent
    )
    gathers = []
    for ranks, rows, part in plan.gathers:
        if part == rows:
            gathers.append(network.broadcast(ranks, rows * plan.row_bytes))
        else:
            gathers.append(network.ring(ranks, (len(ranks) - 1) * part * plan.row_bytes, every_step=True))
    return sent + max(gathers, default=0.0)


def stock_time(case: Case, rows: Sequence[int], network: Network) -> float:
    """Time of forward and backward through leaders, with lanes paired in blocks as in 0.19."""
    source, destination = case.layouts
    senders, receivers = source.lanes(source.pp - 1), destination.lanes(0)
    share = len(rows) // max(len(senders), len(receivers))
    fine = [sum(rows[i * share : (i + 1) * share]) * ROW_BYTES for i in range(len(rows) // share)]
    pairs = [
        (senders[i * len(senders) // len(fine)], receivers[i * len(receivers) // len(fine)], size)
        for i, size in enumerate(fine)
    ]
    total = 0.0
    for forward in (True, False):
        lanes: dict[tuple[int, ...], float] = defaultdict(float)
        ends: list[Transfer] = []
        for giver, taker, size in pairs:
            leads = (giver[-1], taker[0]) if forward else (taker[0], giver[-1])
            ends.append((*leads, size))
            lanes[taker if forward else giver] += size
        total += network.messages((a, b, SHAPE_BYTES) for a, b, _ in ends) + network.messages(ends)
        total += max(
            network.broadcast(lane, SHAPE_BYTES) + network.broadcast(lane, size)
            for lane, size in lanes.items()
        )
    return total


@dataclass(frozen=True)
class Rules:
    """Options of the command line."""

    ragged: bool = False
    concurrent: bool = False


def there_and_back(plan: TransferPlan, network: Network, rules: Rules) -> float:
    """Microseconds of forward and backward."""
    ways = (plan, plan.backward)
    return sum(plan_time(way, network, rules.concurrent) for way in ways)


def both(case: Case, v: float, network: Network, rules: Rules) -> tuple[float, float]:
    """(stock, plan), microseconds of forward and backward."""
    rows = case.rows(v, rules.ragged)
    return stock_time(case, rows, network), there_and_back(forward_plan(case, rows), network, rules)


def crossover(case: Case, network: Network, rules: Rules, points: int) -> str:
    """The largest V, on a grid from one row to 500 MB, for which stock is quicker."""
    for i in range(points, -1, -1):
        v = ROW_BYTES * (500e6 / ROW_BYTES) ** (i / points)
        stock, plan = both(case, v, network, rules)
        if stock < plan:
            return f"{v / 1e6:,.2g} MB"
    return "never"


def leaders(rules: Rules) -> list[list[str]]:
    """Size of a group's rows from which equal parts are faster than a leader and a broadcast."""
    found: list[list[str]] = []
    for tp in (2, 4, 8):
        case = Case({"tp": tp, "dp": 1}, {"tp": tp, "dp": 1})
        cells: list[str] = []
        for network in NETWORKS:

            def gain(rows: int, case: Case = case, network: Network = network) -> float:
                split, led = (
                    there_and_back(forward_plan(case, [rows], leader_bytes), network, rules)
                    for leader_bytes in (0, 10**12)
                )
                return led - split

            size = bisect_left(range(1, 8192), True, key=lambda rows: gain(rows) > 0) + 1
            cells.append(f"{size * ROW_BYTES / 1024:,.0f} KiB" if size < 8192 else "none up to 43 MB")
        found.append([f"model: {case}", *cells])
    return found


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two cases, a coarse crossover")
    parser.add_argument("--ragged", action="store_true", help="samples of 1 to 7 times the fewest rows")
    parser.add_argument("--concurrent", action="store_true", help="a plan's messages overlap their latencies")
    options = parser.parse_args()
    rules = Rules(options.ragged, options.concurrent)
    cases, points = (QUICK, 8) if options.quick else (CASES, 32)
    nano = count(get("nano"))
    flops = 6 * (nano.active_layers + nano.output_layer)
    for network in NETWORKS:
        print(
            f"\n{network.name}: stock time / plan time, forward and backward. A model, not a measurement.\n"
        )
        lines: list[list[str]] = []
        for case in cases:
            times = [both(case, v * 1e6, network, rules) for v in SIZES_MB]
            stock, plan = times[SIZES_MB.index(44.0)]
            source, destination = case.layouts
            step = 44e6 / ROW_BYTES * flops / (destination.tp * destination.cp * FLOPS_PER_US)
            lines.append(
                [
                    f"model: {case}",
                    f"{source.size}+{destination.size}",
                    *(f"{a / b:.2f}" for a, b in times),
                    crossover(case, network, rules, points),
                    f"{stock:,.0f} / {plan:,.0f}",
                    f"{stock / step:.1%} / {plan / step:.1%}",
                ]
            )
        sizes = [f"{v:g} MB" for v in SIZES_MB]
        print_table(
            ["modelled, not measured", "ranks", *sizes, "stock wins up to", "us at 44 MB", "of a microbatch"],
            lines,
        )
    print("\nRows of a group from which equal parts beat a leader, in the model:\n")
    print_table(["modelled, not measured", *(network.name for network in NETWORKS)], leaders(rules))


if __name__ == "__main__":
    main()
