"""Number formats as Megatron's own parser and builder see them: the real model built without memory, and the
proxy's linears as they emulate the format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_nemotron3.launch.flag import to_argv
from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.launch.precision_file import formats_of
from megatron_nemotron3.precision.formats import EMULATED, counted
from megatron_nemotron3.precision.model_formats import Ambient
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.precision.table import Structure
from megatron_nemotron3.precision.yaml_file import NO_FILE
from megatron_nemotron3.proof.certify.bench import Bench, Finding, failed, last_line, passed, untested

WHOLE, PROXY = "number formats of the built model", "number formats that the proxy computes in"
#: Options of formats that Megatron takes on any machine; those that name one need Transformer Engine.
_KEPT = ("--te-precision-config-file", "--bf16", "--fp16")


def census(bench: Bench) -> Iterator[Finding]:
    """Yield the format of every linear of the real model and of the proxy, as Megatron builds them."""
    launch = bench.launch
    path = None if launch is None else launch.precision_file
    if launch is None or (path is not None and not Path(path).exists()):
        yield untested(WHOLE, f"{path or 'the layout'} is not known on this machine")
        return
    if launch.emulate is not None and launch.emulate.packed:
        yield untested(PROXY, f"{launch.emulate.packed} packs weights of a plain run")
        return
    yield from _whole(bench, launch)
    if launch.precision in EMULATED:
        yield from _proxy(bench, launch)
    elif launch.quantized:
        yield untested(PROXY, f"{launch.precision} has no emulation")


def _whole(bench: Bench, launch: Launch) -> Iterator[Finding]:
    from megatron_nemotron3.proof.certify.ranks import run_distributed

    model = launch.config
    if model.moe_layers is not None:
        yield untested(WHOLE, "its experts differ by layer")
        return
    # Megatron's arguments for one process, as the proxy has them, with the sizes of the real model.
    arguments = replace(bench.proxy, config=model.but(source=None)).arguments(None)
    arguments += to_argv(flag for flag in bench.flags if flag.name in _KEPT)
    arguments += ["--vocab-size", str(model.vocab_size), "--micro-batch-size", "1"]
    arguments += ["--no-initialization", "--use-cpu-initialization", "--train-iters", "1", "--lr", "1e-4"]
    ambient = formats_of(launch, NO_FILE).ambient
    try:
        ((found, wrong),) = run_distributed(
            build_whole, 1, arguments, ambient, timeout=bench.timeout, apart=True
        )
    except (RuntimeError, TimeoutError) as problem:
        yield failed(WHOLE, detail=last_line(problem))
        return
    expected = Counter(linear.kind.name for linear in Structure.of(model).linears())
    if sum(found.values()) != sum(expected.values()):
        count = sum(expected.values())
        yield failed(
            WHOLE, detail=f"Megatron builds {sum(found.values())} linears, and the model has {count}"
        )
    yield from (failed(WHOLE, detail=f"not the published recipe: {text}") for text in wrong)
    if not wrong:
        yield passed(WHOLE, detail=f"linears: {counted(found)}")


def build_whole(arguments: Sequence[str], ambient: Ambient) -> tuple[Counter[str], list[str]]:
    """Build the whole model without memory on this rank; return formats, and those that nothing selects."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import hybrid_config_from_args

    from megatron_nemotron3.precision.census import census as listed
    from megatron_nemotron3.precision.census import formats_of_model
    from megatron_nemotron3.proof.certify.ranks import initialize
    from megatron_nemotron3.train.build import megatron_args

    args = megatron_args(arguments, 1)
    initialize()
    config = hybrid_config_from_args(args)
    recipe = config.transformer.quant_recipe
    config.transformer.quant_recipe = None  # our torch linears refuse one that they would not follow
    with on_meta():
        model = config.get_builder_cls()(config).build_model(
            ProcessGroupCollection.use_mpu_process_groups(), True, True, None
        )
    model.config.quant_recipe = recipe
    formats = formats_of_model(model, ambient)
    count = Counter(entry.format for entry in listed(model, formats) if entry.kind.quantizable)
    wrong = [str(one) for one in formats.deviations() if not one.source]
    return count, wrong


def on_meta() -> Any:
    """Return a block in which whatever is allocated has no memory, also where the caller names a device."""
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if getattr(func, "__name__", "") in ("empty", "zeros", "ones", "full", "arange", "tensor"):
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    return OnMeta()


def _proxy(bench: Bench, launch: Launch) -> Iterator[Finding]:
    from megatron_nemotron3.proof.certify.ranks import run_distributed

    small = Launch(
        # Formats have blocks of 16 numbers and more, also along the rows of Mamba's in_proj.
        config=bench.proxy.config.but(mamba_num_heads=16, mamba_head_dim=4),
        precision=launch.precision,
        backend="torch",
        te_precision_config_file=launch.precision_file,
        allow_plain_nvfp4=True,
        emulate=launch.emulate or Emulation(format=launch.precision),
        # At most one layer of the proxy's few stays in BF16 at each end.
        extra=[
            *("--num-layers-at-start-in-bf16", str(min(1, launch.bf16_at_start))),
            *("--num-layers-at-end-in-bf16", str(min(1, launch.bf16_at_end))),
        ],
    )
    try:
        (entries,) = run_distributed(emulated, 1, small, timeout=bench.timeout, apart=True)
    except (RuntimeError, TimeoutError) as problem:
        yield failed(PROXY, detail=last_line(problem))
        return
    other = [entry for entry in entries if entry[1] != entry[2]]
    count = Counter(entry[2] for entry in entries)
    if other:
        name, wanted, has = other[0]
        yield failed(
            PROXY, detail=f"{name} computes in {has}, not in {wanted} ({len(other)} of {len(entries)})"
        )
    elif not count[launch.precision]:
        yield failed(PROXY, detail=f"none of {len(entries)} linears computes in {launch.precision}")
    else:
        yield passed(PROXY, detail=f"linears after a step: {counted(count)}")


def emulated(launch: Launch) -> list[tuple[str, str, str]]:
    """Train a step of the emulating proxy; return each linear with its specified format and the one used."""
    import torch

    from megatron_nemotron3.precision.census import census as listed
    from megatron_nemotron3.precision.census import formats_of_model
    from megatron_nemotron3.precision.formats import BF16
    from megatron_nemotron3.precision.install import ambient_of
    from megatron_nemotron3.train.build import build

    model = build(launch)
    model.train()
    length = launch.config.seq_length
    tokens = torch.arange(length).remainder(launch.config.vocab_size)[None]
    positions = torch.arange(length)[None]
    model(tokens, positions, None, labels=tokens).sum().backward()
    modules = dict(model.named_modules())
    result = []
    assert launch.emulate is not None
    for entry in listed(model, formats_of_model(model, ambient_of(model.config, launch.emulate))):
        if entry.kind.quantizable:
            products = getattr(modules[entry.name], "products", None)
            ran = products.formats[0] if products is not None else BF16
            result.append((entry.name, entry.format, ran))
    return result
