"""Launches that other people wrote: what certify makes of them, and what is beyond it."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from megatron_nemotron3 import cpu_mode
from megatron_nemotron3.launch import parser
from megatron_nemotron3.launch.flag import Flag
from megatron_nemotron3.proof.certify import proof
from megatron_nemotron3.proof.certify.bench import Bench, PropertyState
from megatron_nemotron3.proof.certify.large import LaunchRequest
from megatron_nemotron3.proof.certify.proof import layouts
from megatron_nemotron3.proof.certify.proxy import make
from megatron_nemotron3.train.build import megatron_args
from tests.proof.certify.launches import FILES, FOLDER, VERSION, flags_of, proxy_of, text_of

#: Launches without a proxy, and why.
REFUSED = {
    "mamba-example": "an activation other than squared ReLU",
    "nemotron-lightning": "run_config.yaml that Bridge writes",
    "nemotron-super-sft": "run_config.yaml that Bridge writes",
    "nano-rl": "--use-checkpoint-args needs --load",
}
#: Launches that do not compute what one process computes: what makes them right, and the rule that says so.
WRONG = {"pico-distilled": ("--calculate-per-token-loss", "masked-mean-cp")}
PROVEN = [name for name in FILES if name not in REFUSED]


@pytest.mark.parametrize("name", FILES)
def test_what_is_said_of_a_launch(name: str) -> None:
    """`python -m tests.proof.certify.launches` writes the expected texts."""
    found = text_of(name)
    assert found == (FOLDER / f"{name}.txt").read_text()
    assert ("refused: " in found) == (name in REFUSED) and REFUSED.get(name, "") in found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if i % 4 else ()) for i, n in enumerate(PROVEN)]
)
def test_megatron_accepts_the_proxy(name: str, tmp_path: Path) -> None:
    bench = Bench(proxy=proxy_of(name), flags=tuple(flags_of(name)), folder=tmp_path)
    for sizes in (None, *bench.proxy.sizes):
        case = bench.case(sizes)
        with cpu_mode():
            assert megatron_args(case.argv(), case.layout.world_size).hybrid_layer_pattern


def test_what_a_launch_of_main_asks_of_an_older_megatron() -> None:
    lacking = {name: parser.unknown((flag.name for flag in flags_of(name)), VERSION) for name in PROVEN}
    assert {name: found for name, found in lacking.items() if found} == {}


@pytest.mark.full
@pytest.mark.parametrize("name", PROVEN)
def test_proof_of_a_launch(name: str, tmp_path: Path) -> None:
    """In each small layout the proxy trains as in one process."""
    cure = [Flag(WRONG[name][0])] if name in WRONG else []
    bench = _bench([*flags_of(name), *cure], tmp_path)
    found = list(layouts(bench))
    assert len(found) >= 5 * len(bench.proxy.sizes)
    assert [finding for finding in found if finding.state is PropertyState.FAIL] == []


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG)
def test_a_launch_that_is_wrong(name: str, tmp_path: Path) -> None:
    bench = _bench(flags_of(name), tmp_path)
    wrong = {finding.name for finding in layouts(bench) if finding.state is PropertyState.FAIL}
    assert {"losses", "gradients", "weights"} <= wrong
    assert WRONG[name][1] in {
        finding.where for finding in proof.rules(bench) if finding.state is PropertyState.FAIL
    }


def _bench(flags: list[Flag], folder: Path) -> Bench:
    return Bench(proxy=make(LaunchRequest(flags=tuple(flags)), 8, VERSION), flags=tuple(flags), folder=folder)


@pytest.mark.checkout
@pytest.mark.skipif(not os.environ.get("MEGATRON_LM_DIR"), reason="MEGATRON_LM_DIR names no checkout")
def test_the_options_are_those_of_the_checkout() -> None:
    make = runpy.run_path(str(FOLDER / "make.py"))
    checkout = Path(os.environ["MEGATRON_LM_DIR"])
    for name, (repository, path) in make["SOURCES"].items():
        if repository == "megatron-0.19":
            assert flags_of(name) == make["flags_of"](checkout / path, name), name
