"""What `nemotron3 show` prints."""

from __future__ import annotations

import pytest

from megatron_nemotron3.models import SUPER, count, get, names
from megatron_nemotron3.models.show import WIDTH, describe, render

EVERY = [*names(), "super-tiny", "nano-4b-tiny"]


@pytest.mark.parametrize("name", EVERY)
def test_render_fits_and_says_everything(name: str) -> None:
    config = get(name)
    text, facts = render(config), describe(config)
    assert max(map(len, text.splitlines())) <= WIDTH
    numbers = [layer["parameters"] for layer in facts["layers"].values()]
    numbers += [facts["parameters"]["checkpoint"]["stored"], *facts["active_parameters"].values()]
    for number in numbers:
        assert f"{number:,}" in text
    squeezed = "".join(text.split())
    assert facts["hybrid_layer_pattern"] in squeezed
    assert "".join((config.source or "").split()) in squeezed
    assert "None" not in text


def test_parts_add_up() -> None:
    facts = describe(SUPER)
    parts = facts["parameters"]
    total = sum(layer["parameters"] for layer in facts["layers"].values())
    total += sum(parts[part] for part in ("embedding", "output_layer", "final_norm", "mtp"))
    assert total == parts["checkpoint"]["stored"] == count(SUPER).stored == 123_611_033_088
    assert parts["without_mtp"]["stored"] == total - parts["mtp"]
    assert facts["sizes"]["mixture of experts (E)"]["moe_latent_size"] == 1024
    assert facts["published"] == {"total": "120.6B", "active": "12.7B"}


def test_absent_parts_are_not_shown() -> None:
    dense = render(get("nano-4b"))
    assert "expert" not in dense and "multi-token" not in dense and "MTP  " not in dense
    assert "latent" not in render(get("nano"))
