"""Small encoders and a small language model through the stock 1F1B schedule, and the same in one process.

Every stage is one linear layer in float64. A rank's parallel copies compute the same thing (tensor ranks) or
their own positions (context ranks, sequence parallelism), so the sum of the gradients of one copy of each is
that of a single process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.support.boundary_reference import media_of, of_context, unit
from tests.support.boundary_upstream import gloo_groups

#: Token ids in whose place rows stand.
TOKENS = {"images": 1, "audio": 2}
HIDDEN = 4


class World(NamedTuple):
    """Layouts and options of one run.

    layouts: module -> `Layout.parse` text; "language" is the last.
    samples, length: of a global microbatch.
    fed: row counts come with the batch.
    stock: upstream's communicator.
    text_only: microbatches without any rows.
    frozen: modules that are not trained.
    uniform: every sample has as many rows, which is what upstream can do.

    The rows of encoders with context parallelism divide among their ranks (`boundary_reference.unit`).
    """

    layouts: dict[str, str]
    samples: int = 2
    length: int = 8
    fed: bool = False
    stock: bool = False
    text_only: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()
    uniform: bool = False


class Result(NamedTuple):
    """Of one rank: its modules' and stages' gradients, if this copy counts, its losses, and how many forward
    plans were left."""

    gradients: dict[tuple[str, int], np.ndarray]
    loss: float
    left: int


def microbatches(world: World, number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Token ids [samples, length] and features of every row of every encoder, by sample."""
    from megatron_nemotron3.boundary.layout import Layout

    random = np.random.default_rng(seed)
    found = []
    layouts = {name: Layout.parse(text) for name, text in world.layouts.items()}
    units = {name: unit(layouts[name]) if name in layouts else 1 for name in TOKENS}
    for i in range(number):
        shape = (world.samples, world.length)
        ids = np.tile([0, 1, 2, 1], world.length // 4) * np.ones(shape, int) if world.uniform else None
        if ids is None:
            ids = random.choice(3, shape, p=[0.5, 0.3, 0.2]) * (random.random((world.samples, 1)) < 0.7)
        ids = ids * (i not in world.text_only)
        for name, token in TOKENS.items():
            marked = ids == token
            ids[marked & (marked.cumsum(1) > (marked.sum(1) // units[name] * units[name])[:, None])] = 0
        media = {
            name: [media_of(layouts[name], int((row == token).sum())) for row in ids]
            for name, token in TOKENS.items()
            if name in layouts and layouts[name].cp > 1
        }
        features = {
            name: [random.standard_normal((int((row == token).sum()), HIDDEN)) for row in ids]
            for name, token in TOKENS.items()
        }
        found.append({"ids": ids, "media": media, **features})
    return found


def layer(module: str, stage: int) -> Any:
    """The weights of a stage, the same everywhere."""
    import torch

    seed = sum(map(ord, module)) + 100 * stage
    weight = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64)
    found.weight.data.copy_(weight)
    return found


def scattered(ids: Any, rows: dict[str, Any]) -> Any:
    """[n, HIDDEN] hidden states of positions `ids` [n], rows in their places, in order."""
    import torch

    ids = torch.as_tensor(ids)
    found = torch.zeros(len(ids), HIDDEN, dtype=torch.float64) + 0.5
    for name, mine in rows.items():
        found = found.masked_scatter((ids == TOKENS[name])[:, None], mine)
    return found


def reference(world: World, batches: list[dict[str, Any]]) -> Result:
    """All of it in one process."""
    import torch

    stages = {name: depth(text) for name, text in world.layouts.items()}
    layers = {(name, i): layer(name, i) for name, n in stages.items() for i in range(n)}
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        rows = {}
        for name in (n for n in stages if n != "language"):
            hidden = torch.as_tensor(np.concatenate(batch[name]))
            for i in range(stages[name]):
                hidden = torch.tanh(layers[name, i](hidden))
            rows[name] = hidden.detach() if name in world.frozen else hidden
        hidden = scattered(batch["ids"].reshape(-1), rows)
        for i in range(stages["language"]):
            hidden = torch.tanh(layers["language", i](hidden))
        total = total + (hidden**2).sum()
    total.backward()
    gradients = {
        at: np.zeros((HIDDEN, HIDDEN)) if one.weight.grad is None else one.weight.grad.numpy()
        for at, one in layers.items()
    }
    return Result(gradients, float(total), 0)


def depth(text: str) -> int:
    """Pipeline stages of a layout."""
    from megatron_nemotron3.boundary.layout import Layout

    return Layout.parse(text).pp


class Stages:
    """The modules of one rank, called by the schedule."""

    def __init__(self, world: World, config: Any) -> None:
        import torch
        import torch.distributed as dist

        from megatron_nemotron3.boundary.layout import Layout

        self.config, self.world, self.rank = config, world, dist.get_rank()
        self.layouts = {name: Layout.parse(text) for name, text in world.layouts.items()}
        self.at = {
            name: layout.coordinates(self.rank)
            for name, layout in self.layouts.items()
            if self.rank in layout.ranks
        }
        self.layers = torch.nn.ModuleDict({name: layer(name, at["pp"]) for name, at in self.at.items()})
        for name in world.frozen:
            if name in self.layers:
                self.layers[name].requires_grad_(False)
        self.inputs: dict[str, Any] = {}

    def set_input_tensor(self, tensors: Any) -> None:
        found = tensors[0] or {}
        self.inputs = {name: t[0] if isinstance(t, list) else t for name, t in found.items()}

    def __call__(self, batch: dict[str, Any]) -> Any:
        import torch

        outputs = {}
        for name in self.at:
            hidden = self._input(name, batch)
            outputs[name] = torch.tanh(self.layers[name](hidden))
            if name != "language" and not self.world.fed:
                outputs[name]._mimo_bridge_split_sizes = [len(batch[name][s]) for s in self._samples(name)]
        if "language" in outputs and self.is_end:
            return (outputs["language"] ** 2).sum()
        return outputs

    @property
    def is_end(self) -> bool:
        """Whether this rank has the loss."""
        return "language" in self.at and self.at["language"]["pp"] == self.layouts["language"].pp - 1

    def _input(self, name: str, batch: dict[str, Any]) -> Any:
        import torch

        layout, at = self.layouts[name], self.at[name]
        mine = self._samples(name)
        if at["pp"] > 0:
            return self.inputs[name]
        if name != "language":
            whole = np.concatenate([batch[name][s] for s in mine])
            if layout.cp > 1:
                whole = whole[
                    of_context(layout, [n for s in mine for n in batch["media"][name][s]], at["cp"])
                ]
            return torch.as_tensor(whole)
        places = self._positions()
        ids = np.concatenate([batch["ids"][s][places] for s in mine])
        return scattered(ids, self.inputs)

    def _samples(self, name: str) -> range:
        share, lane = self.world.samples // self.layouts[name].dp, self.at[name]["dp"]
        return range(lane * share, (lane + 1) * share)

    def _positions(self) -> list[int]:
        """Positions that this rank of the language model computes."""
        from megatron_nemotron3.boundary.partition import positions

        layout, at = self.layouts["language"], self.at["language"]
        owned = positions(
            self.world.length, layout.cp, layout.tp, sequence_parallel=layout.sequence_parallel
        )[at["cp"] * layout.tp + at["tp"]]
        return [p for start, stop in owned for p in range(start, stop)]

    def counts(self, name: str) -> bool:
        """Whether this copy's gradient is part of the sum."""
        layout, at = self.layouts[name], self.at[name]
        return at["tp"] == 0 or (name == "language" and layout.sequence_parallel)


class Runner:
    """Grids, communicator and modules of this rank, for several batches."""

    def __init__(self, world: World, **options: Any) -> None:
        import torch
        from megatron.core.hyper_comm_grid import HyperCommGrid
        from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
        from megatron.core.process_groups_config import (
            MultiModuleProcessGroupCollection,
            ProcessGroupCollection,
        )
        from megatron.core.transformer import TransformerConfig

        from megatron_nemotron3.boundary.layout import Layout
        from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator

        self.world = world
        config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, calculate_per_token_loss=True
        )
        # On a model of more than one stage Megatron sets these; here no Megatron model has any.
        config.pipeline_dtype, config.variable_seq_lengths = torch.float64, True
        config.deallocate_pipeline_outputs = True
        layouts = {name: Layout.parse(text) for name, text in world.layouts.items()}
        grids, groups = {}, {}
        for name, at in layouts.items():
            grid = HyperCommGrid(
                [at.size_of(d) for d in ("tp", "cp", "pp", "dp")], ["tp", "cp", "pp", "dp"], at.offset
            )
            collection = ProcessGroupCollection()
            for dimension in ("tp", "cp", "pp", "dp"):
                setattr(collection, dimension, grid.create_pg([dimension]))
            torch.distributed.barrier()  # gloo: nobody leaves a group before all have come
            grids[name] = grid
            if torch.distributed.get_rank() in at.ranks:
                groups[name] = collection
        topology = {name: [] if name == "language" else ["language"] for name in grids}
        common: Any = {
            "module_output_ndim": dict.fromkeys(grids, 2),
            "dim_mapping": {"s": 0, "b": 1, "h": 2},
        }
        if world.stock:
            gloo_groups()
            self.communicator: Any = MultiModulePipelineCommunicator(grids, topology, config, **common)
        else:
            self.communicator = BoundaryCommunicator(
                grids,
                topology,
                config,
                **common,
                sequence_parallel=[name for name, at in layouts.items() if at.sequence_parallel],
                share={name: at.share for name, at in layouts.items()},
                **{"frozen": world.frozen, **options},
            )
        named = "language" if "language" in groups else None
        self.groups = MultiModuleProcessGroupCollection(groups, named) if groups else None  # an idle rank
        self.model = Stages(world, config)

    def run(self, batches: list[dict[str, Any]], forward_only: bool = False, times: int = 1) -> Result:
        """`times` passes over the same batches; gradients of all, losses of the last."""
        from megatron.core.pipeline_parallel.schedules import (
            forward_backward_pipelining_without_interleaving as schedule,
        )

        from megatron_nemotron3.boundary.feed import RowFeed, tokens

        if self.groups is None:
            return Result({}, 0.0, 0)
        feed: Any = iter([batch for _ in range(times) for batch in batches])
        if self.world.fed:
            feed = self.communicator.feed = RowFeed(feed, tokens("ids", TOKENS, media="media"))
        losses = []
        for _ in range(times):
            losses = schedule(
                forward_step_func=_forward_step,
                data_iterator=feed,
                model=self.model,
                num_microbatches=len(batches),
                seq_length=self.world.length,
                micro_batch_size=1,
                forward_only=forward_only,
                p2p_communicator=self.communicator,
                pg_collection=self.groups,
            )
        coordinators = {} if self.world.stock else self.communicator._coordinators
        left = sum(len(waiting) for c in coordinators.values() for waiting in c._outstanding.values())
        gradients = {}
        for name, one in self.model.layers.items():
            if self.model.counts(name):
                gradient = one.weight.grad
                at = (name, self.model.at[name]["pp"])
                gradients[at] = np.zeros((HIDDEN, HIDDEN)) if gradient is None else gradient.numpy()
        mine = self.model.is_end and self.model.counts("language")
        return Result(gradients, sum(losses) if mine else 0.0, left)


def _forward_step(batches: Any, model: Stages) -> Any:
    import torch

    output = model(next(batches))

    def loss(total: Any) -> Any:
        return total, torch.ones((), dtype=torch.int), float(total.detach())

    return output, loss


def compare(world: World, results: list[Result], batches: list[dict[str, Any]]) -> None:
    """Assert that the ranks together have the values of a single process."""
    expected = reference(world, batches)
    for at, gradient in expected.gradients.items():
        found = sum(result.gradients[at] for result in results if at in result.gradients)
        np.testing.assert_allclose(found, gradient, rtol=1e-12, atol=1e-12, err_msg=str(at))
    np.testing.assert_allclose(sum(result.loss for result in results), expected.loss, rtol=1e-12)
