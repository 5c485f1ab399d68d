"""Closed forms of activations equal what autograd saves on models that Megatron built of the torch spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.plan.activations import KINDS, layer_activations
from megatron_nemotron3.launch.plan.flops import letter, symbols
from megatron_nemotron3.launch.plan.options import MODULES, NONE, Recompute, modules
from megatron_nemotron3.models import LoRASettings, Nemotron3Config, get, names, tiny
from megatron_nemotron3.models.lora import LINEARS
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.parallel.case import Case
from tests.support.launches import launch, stage_activations

SUPER, NANO, DENSE = (tiny(get(name)) for name in ("super", "nano", "nano-9b-v2"))
TOLERANCE = 0.01


@dataclass
class Saved:
    """Storages that autograd saved: bytes by kind, each under the kind that saved it first."""

    kinds: dict[str, int] = field(default_factory=dict)
    #: Rows that the experts of each E layer got, in the order of the layers.
    rows: list[int] = field(default_factory=list)


@contextmanager
def saving(model: Any, config: Nemotron3Config, pattern: str) -> Iterator[Saved]:
    """Count what a forward pass of `model` saves, its parameters and buffers left out.

    Args:
        pattern: layers of this model chunk.
    """
    import torch

    skipped = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found, kept, stack = Saved(), {}, ["output"]

    def kind(name: str) -> str:
        """The kind of what a module saves itself; of what a checkpoint between the layers saves: "layers"."""
        words = name.split(".")
        if words[0] == "mtp":
            if "mtp_model_layer" not in words:
                return "mtp"
            if words[-1] == "mtp_model_layer":
                return "layers"
            return (config.mtp_pattern or "")[int(words[words.index("mtp_model_layer") + 2])]
        if words[0] == "decoder" and "final_norm" not in words:
            return pattern[int(words[2])] if len(words) > 2 else "layers"
        if words[0] == "embedding":
            return "mtp" if "mtp" in stack else "embedding"
        return "output"

    def add(saver: str, number: int) -> None:
        if number:
            found.kinds[saver] = found.kinds.get(saver, 0) + number

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in skipped and place not in kept and storage.nbytes():
            kept[place] = tensor  # alive, so that no other storage gets this address
            saver, number = stack[-1], storage.nbytes()
            if "mtp" in stack and saver != "mtp" and tensor.shape[-1:] == (config.hidden_size,):
                # MTP's first layer holds what eh_proj gathered: more than it reads.
                add("mtp", number - tensor.nbytes)
                number = tensor.nbytes
            add(saver, number)
        return tensor

    hooks = []
    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(lambda m, a, n=name: stack.append(kind(n))))
            hooks.append(module.register_forward_hook(lambda m, a, o: (stack.pop(), None)[1]))
        if name.endswith("mlp.experts"):
            hooks.append(module.register_forward_pre_hook(lambda m, a: found.rows.append(len(a[0]))))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found
    for hook in hooks:
        hook.remove()


def measured(cases: Sequence[Case]) -> list[list[Saved]]:
    """Of each case what each of this rank's chunks saves for one microbatch."""
    from megatron.core import parallel_state

    found = []
    for case in cases:
        found.append(_measured(case))
        parallel_state.destroy_model_parallel()
    return found


def _measured(case: Case) -> list[Saved]:
    import torch
    from megatron.core import parallel_state as groups

    from megatron_nemotron3.launch.plan.state import stage_patterns
    from megatron_nemotron3.proof.certify.world import batches, build

    layout, found = case.layout, []
    patterns = stage_patterns(case.config, layout.stages, case.seq_length)
    for index, chunk in enumerate(build(case)[0]):
        stage = groups.get_pipeline_model_parallel_rank() + index * layout.pp
        batch = {key: tensor.clone() for key, tensor in next(batches(case)(0))[0].items()}
        batch["loss_mask"] = batch.pop("model_mask", None)
        chunk.train()
        model = chunk
        while hasattr(model, "module"):
            model = model.module
        if not model.pre_process:
            tokens = case.seq_length // layout.cp // (layout.tp if layout.sequence_parallel else 1)
            shape = (tokens, case.micro_batch_size, case.config.hidden_size)
            wide = torch.float32 if case.precision == "fp32" else torch.bfloat16
            model.set_input_tensor(torch.randn(shape, dtype=wide, requires_grad=True))
        with saving(model, case.config, patterns[stage]) as saved:
            chunk(batch.pop("tokens"), batch.pop("position_ids"), None, **batch)
        found.append(saved)
    return found


def case(
    config: Nemotron3Config,
    seq_length: int,
    micro_batch_size: int,
    precision: str = "bf16",
    recompute: Recompute = NONE,
    layout: ParallelLayout | None = None,
    lora: str | None = None,
) -> tuple[Case, Recompute]:
    layout = layout or ParallelLayout()
    return Case(
        config=config,
        layout=layout,
        extra=tuple(recompute.flags()),
        precision=precision,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        sequences=micro_batch_size * layout.dp * layout.pp,  # the interleaved schedule wants pp microbatches
        mask="none",
        lora=lora,
    ), recompute


def expected(case: Case, recompute: Recompute, stage: int, imbalance: float = 1.0) -> dict[str, int]:
    """The closed form."""
    what = launch(
        case.config,
        case.layout,
        seq_length=case.seq_length,
        micro_batch_size=case.micro_batch_size,
        precision=case.precision,
        recompute=recompute,
    )
    lora = None if case.lora is None else LoRASettings.parse(case.lora)
    found = stage_activations(what, stage, imbalance=imbalance, lora=lora)
    if lora is not None:
        found = {kind: number for kind, number in found.items() if number}
    return merged(found) if as_one(recompute) else found


def as_one(recompute: Recompute) -> bool:
    """Whether layers are compared as one: one may keep the input of several, and `mlp` makes an attention
    layer keep the input of the layer behind it."""
    return recompute.full or "mlp" in recompute.modules


def merged(kinds: dict[str, int]) -> dict[str, int]:
    result: dict[str, int] = {}
    for kind, number in kinds.items():
        name = kind if kind in ("mtp", "embedding", "output") else "layers"
        result[name] = result.get(name, 0) + number
    return result


def compare(*pairs: tuple[Case, Recompute]) -> None:
    """Every kind of every rank within tolerance; E summed over the ranks, for routing is not balanced."""
    layout = pairs[0][0].layout
    ranks = run_distributed(measured, layout.world_size, [case for case, _ in pairs], apart=True, timeout=280)
    for number, (case, recompute) in enumerate(pairs):
        sums: dict[str, list[int]] = {}
        for rank, cases in enumerate(ranks):
            pp_rank = rank // (layout.world_size // layout.pp)
            for index, saved in enumerate(cases[number]):
                form = expected(case, recompute, pp_rank + index * layout.pp)
                kinds = merged(saved.kinds) if as_one(recompute) else saved.kinds
                where = (case.config.name, case.precision, case.seq_length, str(layout), str(recompute), rank)
                assert set(kinds) == set(form), where
                for kind in form:
                    both = sums.setdefault(kind, [0, 0])
                    both[0] += kinds[kind]
                    both[1] += form[kind]
                    # Masks of context parallelism differ by rank, as routed tokens do.
                    if kind != "E" and (kind != "*" or layout.cp == 1):
                        assert form[kind] == pytest.approx(kinds[kind], rel=TOLERANCE), (where, kind)
        for kind, (found, form_sum) in sums.items():
            assert form_sum == pytest.approx(found, rel=TOLERANCE), (case, recompute, kind)


def test_each_kind_on_one_rank() -> None:
    compare(
        case(SUPER, 128, 2),
        case(SUPER, 64, 1, "fp32"),
        case(NANO, 256, 1),
        case(NANO, 96, 3, "fp32"),
        case(DENSE, 128, 2),
        case(DENSE, 512, 1, "fp32"),
    )


@pytest.mark.full
def test_recomputed_on_one_rank() -> None:
    full = [Recompute("full", num_layers=1), Recompute("full", method="block", num_layers=3)]
    compare(
        *(case(SUPER, 128, 2, recompute=choice) for choice in full),
        case(NANO, 128, 1, recompute=Recompute("full", num_layers=4)),
        *(case(SUPER, 128, 1, recompute=Recompute("selective", (name,))) for name in modules(SUPER, "torch")),
        case(DENSE, 128, 2, recompute=Recompute("selective", ("mlp", "core_attn"))),
        case(SUPER, 128, 1, "fp32", Recompute("selective", ("moe", "core_attn", "shared_experts"))),
    )


#: The default adapters, one linear, every linear.
ADAPTERS = ("dim=8", "dim=4,targets=linear_qkv", "dim=16,targets=" + "+".join(LINEARS))


def test_adapters_on_one_rank() -> None:
    """What a frozen linear would read is kept only where its adapter or another module reads it."""
    compare(
        case(SUPER, 64, 1, lora=ADAPTERS[2]),
        case(NANO, 128, 1, lora="dim=8,targets=*.experts.linear_fc1+out_proj"),
        case(DENSE, 128, 1, "fp32", lora="dim=8,targets=in_proj"),
    )


@pytest.mark.full
def test_more_adapters_on_one_rank() -> None:
    compare(
        *(case(SUPER, 128, 2, lora=lora) for lora in ADAPTERS),
        case(DENSE, 128, 2, "fp32", lora="dim=8"),
        case(SUPER, 128, 1, recompute=Recompute("selective", ("core_attn",)), lora="dim=4,targets=in_proj"),
        case(SUPER, 128, 1, recompute=Recompute("full"), lora="dim=8"),
    )


@pytest.mark.full
@pytest.mark.parametrize("layout", [ParallelLayout(tp=2, ep=2), ParallelLayout(tp=2, etp=2)], ids=str)
def test_adapters_in_a_layout(layout: ParallelLayout) -> None:
    compare(*(case(SUPER, 256, 1, layout=layout, lora=lora) for lora in ADAPTERS))


LAYOUTS = [
    pytest.param(ParallelLayout(pp=2, vpp=2), id="pp2-vpp2", marks=pytest.mark.full),
    pytest.param(ParallelLayout(tp=2, ep=2), id="tp2-ep2", marks=pytest.mark.full),
    pytest.param(ParallelLayout(tp=2, etp=2), id="tp2-etp2", marks=pytest.mark.full),
    pytest.param(ParallelLayout(tp=2, cp=2), id="tp2-cp2"),
    pytest.param(ParallelLayout(tp=4, ep=2, etp=2), id="tp4-ep2-etp2", marks=pytest.mark.full),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_kind_in_a_layout(layout: ParallelLayout) -> None:
    full = Recompute("full", num_layers=1)
    chosen = Recompute("selective", ("core_attn", "shared_experts"))
    compare(
        case(SUPER, 256, 1, layout=layout),
        case(SUPER, 128, 2, "fp32", full, layout),
        case(NANO, 128, 2, recompute=chosen, layout=layout),
    )


@pytest.mark.full
def test_busiest_expert_rank() -> None:
    layout = ParallelLayout(dp=2, ep=2)
    what, recompute = case(SUPER, 256, 1, layout=layout)
    ranks = [cases[0][0] for cases in run_distributed(measured, 2, [what], apart=True)]
    busiest = max(ranks, key=lambda saved: sum(saved.rows))
    mean = what.seq_length * (SUPER.moe_router_topk or 0)
    imbalance = sum(busiest.rows) / len(busiest.rows) / mean
    assert imbalance > 1.001, "routing of these weights happens to be balanced: take another seed"
    form = expected(what, recompute, 0, imbalance)
    assert form["E"] == pytest.approx(busiest.kinds["E"], rel=0.001)
    assert form["E"] > expected(what, recompute, 0)["E"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["nano", "super"])
def test_layers_of_real_width(name: str) -> None:
    """One layer of each kind as published, with fewer experts and words: those would fill the memory here."""
    config = get(name)
    whole = config.but(pattern="M*E", num_moe_experts=32, vocab_size=4096, mtp_pattern=None, mtp_num_layers=0)
    compare(case(whole, 256, 1), case(whole, 512, 1))


def test_refused() -> None:
    wrong: list[tuple[dict, dict, str]] = [
        ({}, {"kind": "X"}, "kind='X': use one of M"),
        ({"precision": "fp7"}, {}, "unknown precision 'fp7'"),
        ({"backend": "jax"}, {}, "unknown backend 'jax'"),
        ({}, {"imbalance": 0.5}, "imbalance=0.5"),
    ]
    for fields, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            layer_activations(launch(SUPER, seq_length=64, **fields), **{"kind": "E", **options})
    for fields, message in (
        ({"granularity": "half"}, "granularity='half'"),
        ({"granularity": "selective"}, "name modules"),
        ({"modules": ("moe",)}, "name modules"),
        ({"granularity": "selective", "modules": ("mla_up_proj",)}, "unknown module 'mla_up_proj'"),
        ({"granularity": "full", "method": "random"}, "method='random'"),
        ({"granularity": "full", "num_layers": 0}, "num_layers=0"),
    ):
        with pytest.raises(ValueError, match=message):
            Recompute(**fields)


@pytest.mark.parametrize("name", names())
def test_layers_add_up_to_stages(name: str) -> None:
    """A stage is its layers; both backends, every model of the catalog."""
    config = get(name)
    layout = ParallelLayout(tp=2, pp=2, dp=2)
    for backend in ("te", "torch"):
        for module in modules(config, backend):
            plain = launch(config, layout, seq_length=4096, backend=backend)
            what = replace(plain, extra=tuple(Recompute("selective", (module,)).flags()))
            whole = [stage_activations(what, stage) for stage in range(2)]
            every = [*symbols(config), *(config.mtp_pattern or "") * config.mtp_num_layers]
            every += ["mtp"] * config.mtp_num_layers + ["embedding", "output"]
            for kind in KINDS:
                parts = [layer_activations(what, symbol) for symbol in every if letter(symbol) == kind]
                total = sum(sum(one.values()) for one in parts)
                assert sum(stage.get(kind, 0) for stage in whole) == total
            kind = MODULES[module][0]
            kept, everything = layer_activations(what, kind), layer_activations(plain, kind)
            assert sum(kept.values()) < sum(everything.values()), f"{module} saves nothing"
