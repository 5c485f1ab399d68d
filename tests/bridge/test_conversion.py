"""Hugging Face -> Megatron and back through Megatron-Bridge: equal to `nemotron3 convert`, to the bit.

Opt-in: `make test-bridge`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.cli import main
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import gather
from tests.bridge.marks import MARKS
from tests.support.convert_models import DISTINCT
from tests.support.engines import tensors
from tests.support.hf_folders import write_hf
from tests.support.loaded_weights import same, written

pytestmark = MARKS
LAYOUTS: dict[str, dict[str, int]] = {"one rank": {}, "TP2": {"tp": 2}, "PP2": {"pp": 2}, "EP2": {"ep": 2}}
MODELS = {name: get(f"{name}-tiny") for name in ("nano", "super", "ultra", "nemotron-h-8b", "lightning")} | {
    # All kinds of layers inside MTP, a block per depth, every size of its own.
    "distinct": DISTINCT.but(pattern="M-E*ME"),
}


@pytest.fixture(scope="module", params=MODELS)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Nemotron3Config, Path, Any]:
    """(Model, folder with hf/ and what `nemotron3 convert` made of it in megatron/, tensors of hf/)."""
    config, folder = MODELS[request.param], tmp_path_factory.mktemp(request.param)
    values = write_hf(folder / "hf", config, values=tensors(config), dtype="float32")
    words = ["convert", "from-hf", str(folder / "hf"), str(folder / "megatron"), "--workers", "1"]
    assert main([*words, "--dtype", "float32"]) == 0
    return config, folder, values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_directions_are_those_of_our_converter(
    folders: tuple[Nemotron3Config, Path, Any], layout: str
) -> None:
    from tests.bridge import ranks

    config, folder, values = folders
    sizes = LAYOUTS[layout]
    if "ep" in sizes and not config.is_moe:
        pytest.skip("no experts")
    results = run_distributed(ranks.round_trip, 2 if sizes else 1, folder / "hf", sizes, timeout=300)
    same(written(folder / "megatron"), gather([result["pieces"] for result in results]), config)
    for result in results:
        assert result["decoder"] == "Nemotron3Stack"
        assert result["mtp"] == (config.mtp_num_layers, config.has_mtp and config.mtp_use_repeated_layer)
        assert result["hf"].keys() == values.keys()
        assert [name for name, value in values.items() if not result["hf"][name].equal(value)] == []


def test_logits_are_those_of_our_own_build(folders: tuple[Nemotron3Config, Path, Any]) -> None:
    """MTP's, too. Bit for bit: the weights are equal, so any difference is one of configuration."""
    from tests.bridge import ranks

    config, folder, _ = folders
    (theirs,) = run_distributed(ranks.imported_logits, 1, folder / "hf", config)
    (ours,) = run_distributed(ranks.own_logits, 1, written(folder / "megatron"), config)
    depths = config.mtp_num_layers if config.has_mtp else 0
    assert theirs.shape == ours.shape and theirs.shape[0] == 70 * (1 + depths)
    assert ours.std() > 0.1 and theirs.equal(ours), (theirs - ours).abs().max()


@pytest.mark.parametrize("layout", ["one rank", "TP2"])
def test_config_and_builder_build_and_import_the_same(
    folders: tuple[Nemotron3Config, Path, Any], layout: str
) -> None:
    from tests.bridge import ranks

    config, folder, _ = folders
    if config.name not in ("super-tiny", "distinct"):
        pytest.skip("one of each kind")
    sizes = LAYOUTS[layout]
    found = run_distributed(ranks.built, 2 if sizes else 1, folder / "hf", sizes, timeout=300)
    same(written(folder / "megatron"), gather(found), config)


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    """Puzzle by the name of its model type; its blocks in a config.json of a plain NemotronH by theirs."""
    import megatron_nemotron3.bridge  # noqa: F401  isort: skip
    from megatron.bridge import AutoBridge

    write_hf(tmp_path / "hf", get("puzzle-tiny"))
    with pytest.raises(ValueError, match="nemotron_h_puzzle"):
        AutoBridge.from_hf_pretrained(str(tmp_path / "hf")).to_megatron_provider()
    file = tmp_path / "hf" / "config.json"
    plain = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | plain))
    with pytest.raises(ValueError, match="block_configs: Megatron-Bridge builds all E layers alike"):
        AutoBridge.from_hf_pretrained(str(tmp_path / "hf")).to_megatron_provider()
