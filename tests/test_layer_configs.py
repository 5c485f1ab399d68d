"""Models that Megatron builds from a list of layer configs (`hybrid_layer_config_list`, Megatron-LM #7153).

Where Megatron has the argument, a model of a list computes what the model of the same pattern computes, to
the bit. What our stack makes of a list is tested with any Megatron: `Listed` has one and builds by pattern.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from megatron.training import global_vars

from megatron_nemotron3 import cli, run
from megatron_nemotron3.checkpoints import own_loop, save_checkpoint
from megatron_nemotron3.checkpoints.state import StoredState
from megatron_nemotron3.cpu.async_save import forked_results
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models.stack_specs import ARGUMENT, experts_text
from megatron_nemotron3.post_training.distill.teacher import layout_of
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from megatron_nemotron3.specs import stack_spec
from megatron_nemotron3.train.build import build_model
from tests.support.models import VOCABULARY, build_hybrid, hybrid_config

OWN = get("super-tiny").but(
    name="mine", pattern="ME*EE", num_moe_experts=8, moe_layers=((32, 2), (96, 5), (64, 3)), moe_router_topk=4
)
ALIKE = OWN.but(moe_layers=None)
#: Those of `tests.support.models.SIZES`.
BASE = (64, 2)
PATTERN = f"{OWN.pattern}/*E/*E"
LOSSES = {"mtp_use_repeated_layer": True, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.01}
NO_LISTS = "this Megatron builds no model from a list of layer configs"
HAS_LISTS = "hybrid_layer_config_list" in inspect.signature(HybridModel.__init__).parameters
PRETENDED = pytest.mark.skipif(HAS_LISTS, reason="`Listed` is for a Megatron without lists")


class MoELayerConfig(SimpleNamespace):
    """An entry of a list, by Megatron's name."""


class MTPSplit:
    """The entry before each depth, by Megatron's name."""


class Listed(HybridModel):
    """A model that is built from a pattern, and has a list: an M layer, E layers, and a depth of `*E`."""

    #: Width and top-k of each E layer of the decoder.
    rows: tuple[tuple[int, int], ...] = ()
    #: What the E layer of the depth has besides the sizes of all layers, and the M layer.
    of_depth: dict[str, Any] = {}
    of_mamba: dict[str, Any] = {}

    @property
    def hybrid_layer_config_list(self) -> tuple[Any, ...]:
        alike = {**vars(self.config), "mtp_num_layers": None}
        e_layers = [
            MoELayerConfig(**alike | {"moe_ffn_hidden_size": width, "moe_router_topk": topk})
            for width, topk in self.rows
        ]
        depth = (MTPSplit, SimpleNamespace(**alike), MoELayerConfig(**alike | self.of_depth))
        return (SimpleNamespace(**alike | self.of_mamba), *e_layers, *depth)


def stored(model: Nemotron3Config, rows: tuple[tuple[int, int], ...], **others: Any) -> str:
    """What a checkpoint would say of the experts of a model with this list, or why it cannot be built."""
    initialize()
    args = Namespace(log_interval=1)
    with (
        mock.patch.object(global_vars, "_GLOBAL_ARGS", args),
        mock.patch("megatron.core.models.hybrid.hybrid_model.HybridModel", Listed),
        mock.patch.multiple(Listed, rows=rows, **others),
    ):
        try:
            build_hybrid(OWN.pattern, stack_spec("torch", model))
        except ValueError as problem:
            return str(problem)
    return getattr(args, ARGUMENT, "nothing")


@PRETENDED
def test_a_list_tells_the_experts_of_each_layer_and_must_agree_with_the_spec() -> None:
    """`nemotron3 convert --model` compares what is stored; the depth's experts do not belong to it."""
    own, base = OWN.moe_layers or (), (BASE,) * 3
    wanted = experts_text(OWN)
    assert wanted == "32:2 96:5 64:3"
    for model, rows, text in ((ALIKE, own, wanted), (OWN, own, wanted), (ALIKE, base, "")):
        assert run_distributed(stored, 1, model, rows) == [text]
    (said,) = run_distributed(stored, 1, OWN, base)
    assert f"mine, width:top-k {wanted}, but hybrid_layer_config_list has 64:2 64:2 64:2: give that" in said


@PRETENDED
@pytest.mark.parametrize(
    "others", [{"of_depth": {"moe_router_topk": 3}}, {"of_mamba": {"mamba_state_dim": 8}}]
)
def test_a_checkpoint_says_nothing_of_layers_that_differ_otherwise(others: dict[str, Any]) -> None:
    assert run_distributed(partial(stored, **others), 1, ALIKE, OWN.moe_layers or ()) == ["nothing"]


def layer_list(base: Any) -> list[Any]:
    """Configs of `PATTERN` with the experts of `OWN`, in Megatron's own classes."""
    kinds = {
        "M": ("ssm.mamba_layer_config", "MambaLayerConfig"),
        "*": ("transformer.attention_layer_config", "AttentionLayerConfig"),
        "E": ("transformer.moe.moe_layer_config", "MoELayerConfig"),
    }
    classes = {kind: getattr(import_module(f"megatron.core.{m}"), name) for kind, (m, name) in kinds.items()}
    base = copy(base)
    base.mtp_num_layers = None
    layers = [classes[kind].from_config(base) for kind in OWN.pattern]
    for number, layer in enumerate(layers):
        sizes = OWN.at(number)
        if OWN.pattern[number] == "E":
            layer.moe_ffn_hidden_size, layer.moe_router_topk = (
                sizes.moe_ffn_hidden_size,
                sizes.moe_router_topk,
            )
    depth = [classes[kind].from_config(base) for kind in "*E"]
    split = import_module("megatron.core.models.hybrid").MTPSplit
    return [*layers, split, *depth, split, *depth]


class WithoutDepths(MoETransformerLayer):
    """An E layer whose config does not know the depths of MTP, as one from a list."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        own = copy(config)
        own.mtp_num_layers = None
        super().__init__(own, *args, **kwargs)


def step(how: str) -> dict[str, torch.Tensor]:
    """Loss and gradients of one backward pass of a model of `PATTERN` with the experts of `OWN`."""
    initialize()
    if how == "list":
        config = hybrid_config(PATTERN, **LOSSES)
        given: dict[str, Any] = {"hybrid_layer_config_list": layer_list(config)}
        model = HybridModel(config, stack_spec("torch"), VOCABULARY, 64, **given)
    else:
        spec = stack_spec("torch", OWN)
        if how == "without depths":
            spec = stack_spec("torch")
            e_layer = replace(spec.submodules.moe_layer, module=WithoutDepths)
            spec = replace(spec, submodules=replace(spec.submodules, moe_layer=e_layer))
        elif how == "alike":
            spec = stack_spec("torch")
        model = build_hybrid(PATTERN, spec, **LOSSES)
    torch.manual_seed(7)
    for _, parameter in sorted(model.named_parameters()):
        torch.nn.init.normal_(parameter, std=0.05)
    tokens = torch.randint(0, VOCABULARY, (2, 32))
    loss = model(tokens, torch.arange(32).expand(2, -1), None, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(one: str, other: str) -> None:
    (first,), (second,) = run_distributed(step, 1, one), run_distributed(step, 1, other)
    assert first.keys() == second.keys() and len(first) > 50
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_losses_of_routers_count_once_if_a_layers_config_does_not_know_the_depths() -> None:
    assert_equal("alike", "without depths")


@pytest.mark.skipif(not HAS_LISTS, reason=NO_LISTS)
def test_a_list_computes_what_the_pattern_computes() -> None:
    assert_equal("table", "list")


def test_the_layout_of_a_student_without_a_pattern() -> None:
    """A teacher is built in it."""
    sizes = {"tp": 2, "pp": 4, "ep": 8, "expt_tp": 1, "cp": 3, "dp": 8}
    groups = {name: SimpleNamespace(size=partial(int, size)) for name, size in sizes.items()}
    config = SimpleNamespace(sequence_parallel=True, virtual_pipeline_model_parallel_size=5)
    student: Any = SimpleNamespace(config=config, pg_collection=SimpleNamespace(**groups))
    assert layout_of(student) == ParallelLayout(tp=2, sp=True, pp=4, vpp=5, ep=8, etp=1, cp=3, dp=8)
    config.virtual_pipeline_model_parallel_size = None
    assert layout_of(student).vpp == 1


def test_a_run_of_a_list_continues_a_checkpoint_of_the_same_experts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which experts a list has is known when the model is built; with a pattern the stack's name says it."""
    checks: list[Any] = []
    monkeypatch.setattr(
        run, "loaded", lambda words: ("iter_0000003", StoredState({ARGUMENT: "32:2 96:5"}, {}))
    )
    monkeypatch.setattr(run, "require_our_stack", lambda *words: None)
    monkeypatch.setattr(run, "at_first_forward", checks.append)
    run.verify_stack("--spec ours", stack_spec("torch"), ["--load", "somewhere"])
    (check,) = checks
    for experts in ("32:2 96:5", "32:2 96:6", ""):
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", Namespace(**{ARGUMENT: experts}))
        with nullcontext() if experts == "32:2 96:5" else pytest.raises(SystemExit, match="2"):
            check(None)
    with pytest.raises(SystemExit, match="2"):
        run.verify_stack("--spec ours", stack_spec("torch"), ["--hybrid-layer-pattern", "ME*E"])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and all(
        "was trained with layers of experts (width:top-k) 32:2 96:5" in s for s in said
    )
    assert "builds layers of experts (width:top-k) 32:2 96:6, and iter_0000003 of --load" in said[0]


def trained(how: str, folder: str) -> str:
    """Save a model of `OWN` after three steps; that of a list under arguments without a pattern."""
    text = torch.randint(0, OWN.vocab_size, (2, 33), generator=torch.Generator().manual_seed(1))
    args, made = Namespace(log_interval=1), own_loop.args_of
    initialize()
    model: Any = build_model(OWN, precision="fp32", backend="torch", auxiliary_losses=False, seed=3)
    if how == "list":
        config, start = copy(model.config), model.state_dict()
        given: dict[str, Any] = {"hybrid_layer_config_list": layer_list(config)}
        with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
            model = HybridModel(config, stack_spec("torch"), model.vocab_size, 64, **given)
        model.load_state_dict(start)
        model.nemotron3_config = OWN
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(text[:, :-1], torch.arange(32).expand(2, -1), None, labels=text[:, 1:]).mean().backward()
        optimizer.step()

    def without_pattern(*given: Any, **options: Any) -> Namespace:
        values = vars(made(*given, **options)) | {
            "spec": None,
            "hybrid_layer_pattern": None,
            "hybrid_override_pattern": None,
        }
        del values[ARGUMENT]
        return Namespace(**values | vars(args))

    with (
        forked_results(),
        mock.patch.object(own_loop, "args_of", made if how == "pattern" else without_pattern),
    ):
        return str(save_checkpoint(folder, model, optimizer, 3))


@pytest.mark.skipif(not HAS_LISTS, reason=NO_LISTS)
def test_a_checkpoint_of_a_list_converts_as_that_of_a_pattern(tmp_path: Path) -> None:
    for how in ("list", "pattern"):
        run_distributed(trained, 1, how, str(tmp_path / how))
        words = ("convert", "to-hf", str(tmp_path / how), str(tmp_path / f"{how}-hf"), "--workers", "1")
        assert cli.main([*words]) == 0
    for name in ("model.safetensors", "config.json"):
        one, other = ((tmp_path / f"{how}-hf" / name).read_bytes() for how in ("list", "pattern"))
        assert one == other
