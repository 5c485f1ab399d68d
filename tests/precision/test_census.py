"""Every linear of built models has the table's format, at full size, and so have stock TE modules."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

import megatron_nemotron3 as n3
from megatron_nemotron3 import models
from megatron_nemotron3.models.parameters import elements_outside_layers, layer_tensors
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.precision.census import Entry, census, structure_of
from megatron_nemotron3.precision.model_formats import ModelFormats
from megatron_nemotron3.precision.table import Structure, bf16_tail, kind_named
from megatron_nemotron3.precision.yaml_file import NO_FILE, PrecisionFile
from megatron_nemotron3.proof.certify import built
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.support.models import GOLDEN_MODELS, golden_file
from tests.support.recipe_table import expected

GOLDEN: dict[str, Any] = json.loads(golden_file().read_text())
#: Of the names of modules: the model alone, and in another.
PREFIXES = ("", "language_model.")
#: All linears of the last layers, which stay BF16.
TAIL = "tail"


def content(config: models.Nemotron3Config) -> Any:
    import yaml

    return yaml.safe_load(yaml_file.render(config))


def file_of(config: models.Nemotron3Config) -> PrecisionFile:
    return yaml_file.parse(content(config), config)


def on_meta(name: str) -> Any:
    with built.on_meta():
        model = n3.build_model(
            name, backend="torch", extra=["--no-initialization", "--use-cpu-initialization"]
        )
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    return model


# -- full size -----------------------------------------------------------------------------------------------


def counted(entries: Iterable[Entry]) -> Counter[str]:
    """Linears that can be quantized, by the format they compute in."""
    return Counter(entry.effective for entry in entries if entry.kind.quantizable)


def take_full(name: str) -> tuple[dict[str, list[Entry]], list[Entry], Structure]:
    """Census of a full model, alone and in another; without a file; what its names depend on."""
    config, model = models.get(name), on_meta(name)
    published, plain = (ModelFormats.of(config, "nvfp4", file=file) for file in (file_of(config), NO_FILE))
    modules = list(model.named_modules())
    entries = {
        prefix: census([(prefix + path, module) for path, module in modules], published)
        for prefix in PREFIXES
    }
    return entries, census(modules, plain), structure_of(model)


def matrix_elements(config: models.Nemotron3Config) -> Counter[str]:
    """Matrix elements of a model by the name of their kind, in closed form; linears of MTP and tail apart."""
    found: Counter[str] = Counter(elements_outside_layers(config))
    found["mtp"] *= config.mtp_num_blocks
    first = config.num_layers - bf16_tail(config)
    decoder = [(s, config.at(i), 1, "" if i < first else TAIL) for i, s in enumerate(config.pattern)]
    mtp = [(s, config, config.mtp_num_blocks, "mtp") for s in config.mtp_pattern or ""]
    for symbol, layer, blocks, linears in decoder + mtp:
        for tensor in layer_tensors(layer, symbol):
            kind = kind_named(tensor.linear)
            if kind is not None:
                name = linears if linears and kind.quantizable else kind.name
                found[name] += tensor.elements * blocks
    return found


@pytest.mark.parametrize(
    "name", ["super", *(pytest.param(n, marks=pytest.mark.full) for n in ("nano", "ultra"))]
)
def test_full_models_are_the_table(name: str) -> None:
    config = models.get(name)
    by_prefix, plain, structure = run_distributed(take_full, 1, name)[0]
    assert structure == Structure.of(config)
    first = config.num_layers - bf16_tail(config)
    for prefix, entries in by_prefix.items():
        found = {e.name.removeprefix(prefix): e.format for e in entries if e.kind.quantizable}
        assert found == expected(config, "nvfp4")
        numbers = {e.layer for e in entries if ".decoder." in f".{e.name}"}
        assert numbers == set(range(config.num_layers))
        # Elements by row are the closed form's, and nothing with a matrix is left out of the census.
        elements: Counter[str] = Counter()
        for entry in entries:
            late = entry.kind.quantizable and entry.kind.name != "mtp" and (entry.layer or 0) >= first
            elements[TAIL if late else entry.kind.name] += entry.parameters
        assert elements == matrix_elements(config)
        # Torch linears have no `finish_init`: nothing follows, whatever was asked for.
        assert counted(entries) == {"bf16": len(found)}
    # Without the file more is NVFP4: MTP's layers, too, but not its eh_proj.
    other = {e.name: e.format for e in plain if e.kind.quantizable}
    assert {n for n, fmt in other.items() if fmt == "bf16" and n.startswith("mtp.")} <= {
        "mtp.layers.0.eh_proj"
    }
    assert Counter(other.values())["nvfp4"] > Counter(found.values())["nvfp4"]
    assert not [n for n, fmt in found.items() if fmt == "nvfp4" and other[n] != "nvfp4"]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("nano", {"nvfp4": 95, "mxfp8": 19, "bf16": 36}),
        ("super", {"nvfp4": 166, "mxfp8": 34, "bf16": 145}),
        ("ultra", {"nvfp4": 201, "mxfp8": 41, "bf16": 175}),
    ],
)
def test_numbers_by_hand(name: str, numbers: dict[str, int]) -> None:
    """M: in_proj NVFP4, out_proj MXFP8; E: four NVFP4; all of it only before the tail."""
    config = models.get(name)
    body = config.pattern[: config.num_layers - bf16_tail(config)]
    assert numbers["nvfp4"] == body.count("M") + 4 * body.count("E")
    assert numbers["mxfp8"] == body.count("M")
    assert Counter(expected(config, "nvfp4").values()) == numbers


# -- golden: stock TE modules --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", GOLDEN)
def test_stock_te_modules(model: str) -> None:
    """Names and resolved formats of what stock megatron-core built on TransformerEngine 2.20.2."""
    recorded = GOLDEN[model]["precision"]
    pattern, fields = GOLDEN_MODELS[model.split("_tp2")[0]]
    main, *depths = pattern.split("/")
    structure = Structure(main, tuple(depths[:1]), "moe_latent_size" in fields)
    assert {linear.name for linear in structure.linears()} == set(recorded)
    # The dense model was recorded without a file.
    file = file_of(models.SUPER) if depths else NO_FILE
    assert {name: file.format(name, "ambient") for name in recorded} == recorded
    assert Counter(recorded.values())["ambient"] > 0
