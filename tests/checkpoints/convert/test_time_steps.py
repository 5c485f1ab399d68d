"""transformers' clamp of time steps: what config.json says, and what transformers makes of it before and
after its pull request 48989, which takes the limits of config.json instead of `time_step_min`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert.config_json import clamp_note, write
from megatron_nemotron3.checkpoints.convert.config_keys import NO_CLAMP
from megatron_nemotron3.models import get
from megatron_nemotron3.train.build import build_model
from tests.support import parity
from tests.support.hf_folders import write_hf
from tests.support.model_mapping import randomize, to_transformers, transformers_from, unclamped
from tests.support.world import world_of_one

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")

MODEL = get("nano-tiny").but(pattern="MEM*", num_moe_experts=4, moe_router_topk=2)


class Fixed(modeling.NemotronHMamba2Mixer):
    """The mixer as it is after the pull request."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.time_step_limit = tuple(config.time_step_limit)


@pytest.fixture(params=["installed", "fixed"])
def fixed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether transformers' mixers limit no time step of this family."""
    if request.param == "fixed":
        (kind,) = (k for k, made in modeling.MIXER_TYPES.items() if made is modeling.NemotronHMamba2Mixer)
        monkeypatch.setitem(modeling.MIXER_TYPES, kind, Fixed)
    with torch.device("meta"):
        mixer = transformers_from(write(MODEL)).model.layers[0].mixer
    return tuple(mixer.time_step_limit) == (0.0, math.inf)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with world_of_one():
        yield


def first_dt(data: dict[str, Any]) -> torch.Tensor:
    """softplus(dt_bias) of new models that transformers makes of a config.json, of 40 heads and more."""
    found = []
    for seed in range(8):
        torch.manual_seed(seed)
        config = transformers.NemotronHConfig.from_dict({**data, "dtype": "float32"})
        model = transformers.AutoModelForCausalLM.from_config(config)
        found += [F.softplus(m.dt_bias.detach()) for m in model.modules() if hasattr(m, "dt_bias")]
    return torch.cat(found)


def test_a_new_model_of_our_file_begins_as_usual(fixed: bool) -> None:
    """Log-uniform from 0.001 to 0.1, whose median is 0.01; 1e-30 sent nearly all heads to the floor."""
    for reference in (None, {**write(MODEL), "time_step_min": 0.001, "time_step_floor": 1e-4}):
        dt = first_dt(write(MODEL, reference=reference))
        assert len(dt) >= 100 and dt.min() > 0.00099 and dt.max() < 0.1001
        assert 0.006 < dt.median() < 0.016
    dt = first_dt(write(MODEL) | {"time_step_min": NO_CLAMP})
    assert (dt < 1.01e-4).float().mean() > 0.8


@pytest.mark.usefixtures("world")
def test_logits_are_megatrons_once_nothing_is_clamped(fixed: bool) -> None:
    """With small time steps, as trained weights have them. Setting the limit is the cure before the pull
    request, and changes nothing after it."""
    ours = build_model(MODEL, precision="fp32", backend="torch").eval()
    randomize(ours, 3)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("dt_bias"):
                parameter.copy_(torch.linspace(-12, -2, len(parameter)))
    theirs = transformers_from(write(MODEL) | {"dtype": "float32"}).float().eval()
    theirs.load_state_dict(to_transformers(parity.weights_of(ours), MODEL), strict=True)
    ids = parity.text(MODEL, 1, 60, 3)
    with torch.no_grad():
        expected, found, cured = parity.forward(ours, ids), theirs(ids).logits, unclamped(theirs)(ids).logits
    torch.testing.assert_close(cured, expected, rtol=0, atol=parity.LOGITS_ATOL)
    assert torch.equal(found, cured) == fixed
    if not fixed:
        assert not torch.allclose(found, expected, rtol=0, atol=10 * parity.LOGITS_ATOL)


def test_what_is_said_of_a_file() -> None:
    data = write(MODEL)
    released = {**data, "time_step_min": 0.001, "time_step_floor": 0.0001}
    assert data["time_step_min"] == 0.001 and write(MODEL, reference=released) == released
    for stated, said in (
        (data, "config.json has time_step_min=0.001: transformers without its pull request 48989 clamps"),
        ({k: v for k, v in data.items() if k != "time_step_min"}, "no time_step_min, whose default is 0.001"),
        (data | {"mamba_dt_min": 0.01}, "mamba_dt_min=0.01: "),
        (data | {"time_step_min": 1e-30}, "=1e-30: most heads of a new model of it would begin at"),
    ):
        note = clamp_note(stated)
        assert note is not None and said in note
    assert "time_step_min" not in write(MODEL.but(pattern="*E"))


def test_conversions_say_that_transformers_clamps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fixed: bool
) -> None:
    """`--check-logits` says it of the installed transformers only if that clamps."""
    config = get("nano-tiny").but(pattern="ME", num_moe_experts=2, moe_router_topk=2)
    write_hf(tmp_path / "hf", config, dtype="float32")
    one, other = map(str, (tmp_path / "hf", tmp_path / "megatron"))

    def said(*words: str) -> list[str]:
        assert cli.main(["convert", *words]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "time_step_min=0.001" in line]

    imported, *checked = said("from-hf", one, other, "--check-logits", "9")
    assert imported.startswith("time steps ") and len(checked) == (not fixed)
    assert all("computes without its clamp" in line for line in checked)
    # What the original said comes back without --reference, too.
    assert len(said("to-hf", other, str(tmp_path / "like"), "--reference", one)) == 1
    assert len(said("to-hf", other, str(tmp_path / "plain"), "--check-logits", "9")) == 2 - fixed
