"""Operations in closed form: against torch's counter on built models, and against Megatron's own count."""

from __future__ import annotations

import pytest
import torch

from megatron_nemotron3 import build_model, cpu_mode
from megatron_nemotron3.launch import Launch, ParallelLayout, flags, to_argv
from megatron_nemotron3.launch.plan.flops import layer_operations, model_operations, step_flops
from megatron_nemotron3.models import Nemotron3Config, get, names, tiny
from megatron_nemotron3.models.parameters import weightless_flops
from megatron_nemotron3.train.build import megatron_args
from tests.support.distributed import run_fresh

LENGTH = 128
#: Not matrix products, or (scores on a CPU) products that torch's counter does not know.
UNCOUNTED = {"conv1d", "scan", "scores"}


def counted(name: str) -> dict[str, int]:
    """mm operations that torch counts in a forward pass, by module."""
    from torch.utils.flop_counter import FlopCounterMode

    config = tiny(get(name))
    with cpu_mode():
        model = build_model(config, precision="fp32")
        ids = torch.randint(0, config.vocab_size, (1, LENGTH))
        # torch does not count oneDNN's products.
        with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=False):
            model(ids, torch.arange(LENGTH)[None], None, labels=ids)
    found = {}
    for module, operations in counter.get_flop_counts().items():
        found[module] = sum(n for op, n in operations.items() if str(op) in ("aten.mm", "aten.addmm"))
    return found


@pytest.mark.parametrize("name", ["super", "nano-4b"])
def test_products_equal_what_torch_counts(name: str) -> None:
    found = run_fresh(counted, name)
    config = tiny(get(name))
    expected = {}
    for line in model_operations(config, LENGTH):
        if line.module not in UNCOUNTED:
            expected[line.kind] = expected.get(line.kind, 0) + line.forward * LENGTH
    assert found["Global"] == sum(expected.values())
    assert found["HybridModel.output_layer"] == expected["output"]
    for kind in {"M", "*", "E", "-"} & set(config.pattern):
        layer = config.pattern.index(kind)
        share = expected[kind] / (config.pattern + (config.mtp_pattern or "") * config.mtp_num_layers).count(
            kind
        )
        assert found[f"HybridModel.decoder.layers.{layer}"] == share


def stock(names: list[str]) -> list[float]:
    from megatron.training.training import num_floating_point_operations

    found = []
    for name in names:
        config = get(name)
        args = megatron_args(
            to_argv(flags(Launch.of(config, ParallelLayout(), backend="torch", precision="fp32"))), 1
        )
        args.seq_length = 8192
        args.padded_vocab_size = config.vocab_size
        found.append(num_floating_point_operations(args, 4))
    return found


def stock_differences(config: Nemotron3Config, length: int) -> dict[str, float]:
    """Forward FLOPs of one token that Megatron 0.19 counts in addition to ours (negative: fewer), by cause.

    Both counts include the layers of all MTP depths.
    """
    depths = config.mtp_num_layers if config.has_mtp else 0
    applied = config.pattern + (config.mtp_pattern or "") * depths
    mamba, moe = applied.count("M"), applied.count("E")
    inner, stock_inner = config.mamba_inner_size, 2 * config.hidden_size
    state = config.mamba_state_dim
    found = {
        # It assumes an expansion of 2, for z and x of in_proj and for out_proj.
        "Mamba's inner size taken as 2 * hidden": mamba * 6.0 * config.hidden_size * (stock_inner - inner),
        "7 * inner * state for the scan": mamba
        * (7.0 * stock_inner * state - weightless_flops(config, "M", length)),
        "convolution left out": -mamba * (layer_operations(config, "M", length)["conv1d"] if mamba else 0.0),
        "router left out": -moe * (layer_operations(config, "E", length)["router"] if moe else 0.0),
        "MTP's eh_proj left out": -4.0 * config.hidden_size**2 * depths,
        # It knows one width and one number of experts per token.
        "MoE layers taken to be alike": taken_alike(config, length),
    }
    return {cause: value for cause, value in found.items() if value}


def taken_alike(config: Nemotron3Config, length: int) -> float:
    """Operations of E layers that all have the sizes of the config, less those of its own (`moe_layers`)."""
    owns = [config.at(layer) for layer, kind in enumerate(config.pattern) if kind == "E"]
    if config.moe_layers is None:
        return 0.0
    alike = sum(layer_operations(config, "E", length).values())
    return sum(alike - sum(layer_operations(own, "E", length).values()) for own in owns)


def test_megatrons_own_count_differs_by_exactly_what_we_say() -> None:
    for name, theirs in zip(names(), run_fresh(stock, list(names())), strict=True):
        tokens = 4 * 8192
        ours = step_flops(get(name), tokens, 8192)
        explained = 3 * tokens * sum(stock_differences(get(name), 8192).values())
        assert theirs == pytest.approx(ours + explained, rel=1e-12), name
        if name in ("super", "ultra"):  # inner size 2 * hidden: the rest is small
            assert theirs == pytest.approx(ours, rel=0.01)


def test_published_throughput_is_of_the_same_count() -> None:
    # Megatron-Bridge: (tokens/s/GPU, model TFLOP/s/GPU) on GB300; three digits each, and #5719's 6,357.94 ms.
    later = 512 * 8192 / 64 / 6.35794
    tables = (("super", 10240, 864), ("super", 9856, 831), ("ultra", 3552, 1281), ("super", later, 873.33))
    for name, rate, tflops in tables:
        assert step_flops(get(name), 1, 8192) * rate / 1e12 == pytest.approx(tflops, rel=0.015)
