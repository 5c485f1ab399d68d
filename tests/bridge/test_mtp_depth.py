"""Where a Bridge provider has the depth of MTP from, which Hugging Face's format does not state.

Opt-in: `make test-bridge`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.checkpoints.convert.config_json import MTP_BLOCKS, OWN
from megatron_nemotron3.models import Nemotron3Config, get
from tests.bridge.marks import MARKS
from tests.support.hf_folders import write_hf

pytestmark = MARKS
SUPER = get("super-tiny")
#: In no catalog, and not as often as any catalog model.
OTHER = SUPER.but(name="other", pattern="M*E", mtp_num_layers=3, mtp_loss_scaling_factor=0.25)
BLOCK_PER_DEPTH = OTHER.but(mtp_use_repeated_layer=False, mtp_num_layers=2)


def provider(config: Nemotron3Config, folder: Path, own: bool, **changed: Any) -> Any:
    """Of a folder with other values in config.json, and without our key if not `own`."""
    import megatron_nemotron3.bridge  # noqa: F401  isort: skip
    from megatron.bridge import AutoBridge

    write_hf(folder, config)
    file = folder / "config.json"
    data = json.loads(file.read_text()) | changed
    file.write_text(json.dumps(data if own else {k: v for k, v in data.items() if k != OWN}))
    return AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider()


@pytest.mark.parametrize(
    ("config", "own", "changed", "expected"),
    [
        pytest.param(OTHER, True, {}, (3, True, 0.25), id="our key"),
        pytest.param(BLOCK_PER_DEPTH, True, {}, (2, False, 0.25), id="our key, a block per depth"),
        # Tiny Super and tiny Ultra are alike but for the factor, which is then Megatron's default.
        pytest.param(SUPER, False, {}, (2, True, 0.1), id="the catalog"),
        pytest.param(OTHER, False, {}, (1, True, 0.3), id="one block"),
        pytest.param(OTHER, False, {MTP_BLOCKS: 3}, (3, True, 0.3), id="one block, as Bridge writes it"),
        pytest.param(BLOCK_PER_DEPTH, False, {}, (2, False, 0.3), id="a block per depth"),
    ],
)
def test_depth(
    config: Nemotron3Config, own: bool, changed: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    from megatron_nemotron3.bridge import Nemotron3Bridge

    made = provider(config, tmp_path / "hf", own, **changed)
    assert (made.mtp_num_layers, made.mtp_use_repeated_layer, made.mtp_loss_scaling_factor) == expected
    made.finalize()
    assert made.hybrid_layer_pattern == "/".join([config.pattern, *[config.mtp_pattern] * expected[0]])
    written = Nemotron3Bridge.megatron_to_hf_config(made)
    assert written[MTP_BLOCKS] == (1 if expected[1] else expected[0])
    assert tuple(written[OWN].values()) == expected


def test_without_mtp(tmp_path: Path) -> None:
    from megatron_nemotron3.bridge import Nemotron3Bridge

    made = provider(OTHER.but(mtp_pattern=None, mtp_num_layers=0), tmp_path / "hf", own=True)
    assert not made.mtp_num_layers and OWN not in Nemotron3Bridge.megatron_to_hf_config(made)
