"""The plan reads a launch's performance options: each changes what it should, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch.plan.activations import layer_activations
from megatron_nemotron3.launch.plan.hardware import GPUS
from megatron_nemotron3.launch.plan.memory import RankMemory, memory
from megatron_nemotron3.launch.plan.options import CostOptions, dispatcher_options
from megatron_nemotron3.launch.plan.timing import (
    LayerTime,
    Machine,
    captured,
    layer_times,
    one_replica,
    step_time,
)
from megatron_nemotron3.launch.plan.traffic import ALL_GATHER, REDUCE_SCATTER, step_traffic
from megatron_nemotron3.models import get
from tests.support.launches import launch

LIGHTNING = get("lightning")
LAYOUT = ParallelLayout(ep=8, dp=16)
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules"
SHORT = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"


def te(options: str = "", layout: ParallelLayout = LAYOUT, precision: str = "bf16", **more: int) -> Launch:
    words = tuple(options.split())
    sizes = {"seq_length": 8192, **more}
    return launch(LIGHTNING, layout, backend="te", precision=precision, extra=words, **sizes)


def held(options: str = "", precision: str = "bf16") -> RankMemory:
    return memory(te(options, precision=precision))


def layers(options: str, tp: int = 1) -> dict[str, LayerTime]:
    what = te(options, ParallelLayout(tp=tp, ep=8, dp=16))
    return layer_times(one_replica(what), Machine(GPUS["gb200"]))


def test_graphs_take_away_launches_of_the_captured_layers() -> None:
    # 64 tensor ranks leave so little work that the GPU waits for the host.
    eager, graphs = layers("", 8), layers(f"{GRAPHS} mamba moe_router", 8)
    assert eager["M"].layers > 0 and graphs["M"].layers == 0
    assert graphs["*"] == eager["*"] and graphs["E"].layers < eager["E"].layers
    assert graphs["M"].products == eager["M"].products
    everything = CostOptions.of(te("--cuda-graph-impl local"))
    assert [captured(kind, everything) for kind in "M*E-"] == [1, 1, 1, 1]
    assert [captured(kind, CostOptions.of(te(f"{GRAPHS} attn"))) for kind in "M*E-"] == [0, 1, 0, 0]


def test_a_deduplicating_dispatcher_is_read_from_the_launch() -> None:
    machine = Machine(GPUS["h100"])
    layout = ParallelLayout(ep=32, dp=32)
    seconds = {
        name: step_time(te(" ".join(dispatcher_options(name)), layout), machine).ep
        for name in ("alltoall", "deepep", "hybridep")
    }
    assert seconds["hybridep"] == seconds["deepep"] < seconds["alltoall"] / 1.4
    # Without a backend, flex is Megatron's DeepEP.
    assert CostOptions.of(te("--moe-token-dispatcher-type flex")).dispatcher == "deepep"
    with pytest.raises(ValueError, match="use one of alltoall, deepep, hybridep"):
        dispatcher_options("ring")


def test_types_of_the_optimizer() -> None:
    plain, short = held(), held(SHORT)
    assert short.optimizer == pytest.approx(plain.optimizer / 2)  # 2 + 2 + 2 of 4 + 4 + 4
    # FP8 with scales of its own keeps an FP32 copy: 4 + 2 + 2.
    assert held(SHORT, "mxfp8").optimizer == pytest.approx(plain.optimizer * 8 / 12, rel=1e-3)
    assert held("--use-precision-aware-optimizer").optimizer == pytest.approx(plain.optimizer * 10 / 12)
    assert held("--grad-reduce-in-bf16").gradients * 2 == plain.gradients


def test_the_loss() -> None:
    fused, in_place = held(), held("--cross-entropy-fusion-impl te")
    logits = 8192 * 131072
    kept = fused.activations["output"] - in_place.activations["output"]
    assert kept == 3 * logits * 2  # FP32 against BF16, of the next token and two depths
    assert fused.buffers - in_place.buffers == 2 * logits * 4
    assert memory(launch(LIGHTNING, LAYOUT, seq_length=8192)).buffers < in_place.buffers + logits * 2


def test_offloading() -> None:
    def experts(options: str) -> int:
        return layer_activations(te(f"--fine-grained-activation-offloading {options}"), "E")["experts"]

    rows, whole = 8192 * 6, layer_activations(te(), "E")["experts"]
    inputs, hidden = rows * 2688 * 2, rows * 1856 * 2
    assert whole - experts("--offload-modules expert_fc1") == inputs
    assert whole - experts("--offload-modules moe_act") == hidden
    fused = "--offload-modules fused_group_mlp --min-offloaded-tensor-size"
    assert whole - experts(f"{fused} 1000") == inputs + hidden
    assert whole - experts(f"{fused} {rows * 2000}") == inputs
    assert layer_activations(te("--offload-modules expert_fc1"), "E")["experts"] == whole  # not switched on
    plain, moved = held(), held("--fine-grained-activation-offloading --offload-modules expert_fc1")
    assert plain.activations["E"] - moved.activations["E"] == 25 * inputs


def test_fsdp_divides_weights_and_gradients() -> None:
    plain, sharded = held(), held(FSDP)
    assert sharded.optimizer == plain.optimizer
    assert sharded.weights * 2 == sharded.gradients < plain.gradients / 1.9  # two copies of the experts
    assert sharded.buffers > plain.buffers
    instances = held(f"{FSDP} --num-distributed-optimizer-instances 2")
    assert sharded.weights < instances.weights < plain.weights
    once, each = step_traffic(te(microbatches=4)), step_traffic(te(FSDP, microbatches=4))
    calls = {
        (name, kind): sum(t.calls for t in found if t.link == "dp" and t.collective == kind)
        for name, found in (("plain", once), ("fsdp", each))
        for kind in (ALL_GATHER, REDUCE_SCATTER)
    }
    assert calls == {
        ("plain", ALL_GATHER): 1, ("plain", REDUCE_SCATTER): 1,
        ("fsdp", ALL_GATHER): 8, ("fsdp", REDUCE_SCATTER): 4,
    }  # fmt: skip


def test_layers_that_stay_bf16() -> None:
    none = "--num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 0"
    tail, whole = held(precision="mxfp8"), held(none, "mxfp8")
    assert whole.packed_weights > tail.packed_weights and whole.activations["E"] < tail.activations["E"]
    machine = Machine(GPUS["gb200"])
    times = [
        layer_times(one_replica(te(words, precision="mxfp8")), machine)["E"].products for words in ("", none)
    ]
    assert times[1] < times[0]


def test_published_options_of_a_gpu() -> None:
    """`Launch.gpu` counts as if its options were given."""
    published = replace(te(layout=LAYOUT), gpu="h100")
    options = CostOptions.of(published)
    assert options.dispatcher == "hybridep" and options.graphs == {"attn", "mamba"}
    assert options.offload == ("expert_fc1",) and options.moments == 4 and options.gradient == 2
    assert CostOptions.of(published).recompute.modules == ("moe_act", "layernorm")
    words = tuple(word for name, values in published.options.items() for word in (name, *values))
    given = te(" ".join(words))
    assert CostOptions.of(given) == options and memory(given) == memory(published)
    assert CostOptions.of(replace(published, without=("cuda-graph-impl",))).graphs == frozenset()
    # Super's run on H100 does not overlap its traffic.
    late = Launch.of("super", ParallelLayout(pp=2, ep=32, dp=32), backend="te", gpu="h100")
    assert options.overlap and not CostOptions.of(late).overlap


def test_gathered_in_fp8_no_bf16_weight_is_left() -> None:
    plain, packed = held(precision="mxfp8"), held("--fp8-param-gather", "mxfp8")
    assert packed.packed_weights == plain.packed_weights
    # Both packed copies of an element take 2 * 33 / 32 bytes, its BF16 weight 2.
    saved = plain.weights - packed.weights
    assert saved == pytest.approx(plain.packed_weights * 32 / 33, rel=1e-6) and saved > plain.weights / 2


def test_padded_experts_take_their_capacity() -> None:
    padded = te("--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity")
    assert layer_activations(padded, "E") == layer_activations(te(), "E", imbalance=1.5)
    dropping = te("--moe-expert-capacity-factor 1.5")
    assert layer_activations(dropping, "E") == layer_activations(te(), "E")
