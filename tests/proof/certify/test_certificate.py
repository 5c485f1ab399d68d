"""A certificate belongs to one command: what decides numbers changes its hash, what does not leaves it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import Launch, flags
from megatron_nemotron3.launch.command_line import read_launch
from megatron_nemotron3.launch.flag import Flag, render
from megatron_nemotron3.precision import yaml_file
from megatron_nemotron3.precision.settings import Emulation
from megatron_nemotron3.proof.certify import certificate, proxy
from megatron_nemotron3.proof.certify.bench import Finding, PropertyState, failed, passed, untested
from megatron_nemotron3.proof.certify.large import LaunchRequest


@pytest.fixture
def launch(tmp_path: Path) -> list[Flag]:
    file = tmp_path / "precision.yaml"
    yaml_file.write_precision_file(models.get("super"), file)
    return flags(
        Launch.of(
            "super",
            tp=2,
            pp=2,
            ep=4,
            dp=4,
            precision="nvfp4",
            backend="te",
            te_precision_config_file=str(file),
            extra=("--log-interval", "10", "--save", "/runs/a", "--adam-beta2", "0.95", "--seed", "3"),
        )
    )


def request(flags: list[Flag], world_size: int = 16, **known: Any) -> LaunchRequest:
    return LaunchRequest(flags=tuple(flags), world_size=world_size, **known)


def hash_of(found: list[Flag]) -> str:
    return certificate.hash_of(certificate.normalised(request(found)))


def changed(found: list[Flag], name: str, *values: str) -> list[Flag]:
    assert any(flag.name == name for flag in found), name
    return [Flag(name, values) if flag.name == name else flag for flag in found]


def test_order_paths_and_logs_keep_it(launch: list[Flag]) -> None:
    before = hash_of(launch)
    shuffled = list(launch)
    random.Random(0).shuffle(shuffled)
    assert shuffled != launch and hash_of(shuffled) == before
    for name, value in (("--log-interval", "1"), ("--save", "/elsewhere"), ("--seed", "4")):
        assert hash_of(changed(launch, name, value)) == before, name
    more = [*launch, Flag("--wandb-project", ("one",)), Flag("--data-path", ("1.0", "/data/a"))]
    assert hash_of(more) == before


def test_another_spelling_keeps_it(launch: list[Flag]) -> None:
    before = hash_of(launch)
    assert hash_of(changed(launch, "--adam-beta2", "95e-2")) == before
    text = render(launch, shell=True)
    assert hash_of(read_launch(text).flags) == before
    joined = text.replace("--hidden-size 4096", "--hidden-size=4096")
    assert joined != text and hash_of(read_launch(joined).flags) == before


def test_what_decides_numbers_changes_it(launch: list[Flag], tmp_path: Path) -> None:
    before = hash_of(launch)
    assert hash_of(changed(launch, "--tensor-model-parallel-size", "4")) != before
    assert hash_of(changed(launch, "--adam-beta2", "0.951")) != before
    assert hash_of([*launch, Flag("--recompute-granularity", ("full",))]) != before
    assert hash_of([flag for flag in launch if flag.name != "--sequence-parallel"]) != before
    assert certificate.hash_of(certificate.normalised(request(launch, world_size=32))) != before
    assert (
        certificate.hash_of(certificate.normalised(request(launch, emulate=Emulation(format="nvfp4"))))
        != before
    )
    assert certificate.hash_of(certificate.normalised(request(launch, lora="rank=8"))) != before


def test_content_of_the_precision_file_counts_and_not_its_name(launch: list[Flag], tmp_path: Path) -> None:
    before = hash_of(launch)
    file = tmp_path / "precision.yaml"
    copy = tmp_path / "copy.yaml"
    copy.write_bytes(file.read_bytes())
    assert hash_of(changed(launch, "--te-precision-config-file", str(copy))) == before
    copy.write_text(file.read_text().replace("enabled: true", "enabled: false", 1))
    assert hash_of(changed(launch, "--te-precision-config-file", str(copy))) != before
    copy.unlink()
    assert hash_of(changed(launch, "--te-precision-config-file", str(copy))) != before


def make(launch: list[Flag], findings: list[Finding]) -> dict[str, Any]:
    return certificate.make(
        title="launch.sh",
        command=certificate.normalised(request(launch)),
        proxy=proxy.make(request(launch), 8),
        findings=findings,
        checkout=None,
        seconds=12.34,
    )


def test_both_files_say_the_same(launch: list[Flag], tmp_path: Path) -> None:
    nan = Finding("losses", PropertyState.FAIL, "TP2", float("nan"), 1.0)
    infinite = Finding("expert biases", PropertyState.FAIL, "TP2", float("inf"), 1.0, "layers.1|bias")
    found = [passed("rules"), nan, infinite, untested("fused kernels", "the torch operations")]
    data = make(launch, found)
    assert data["passed"] is False
    certificate.write(tmp_path / "new", data)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [certificate.JSON, certificate.PAGE]
    again = certificate.read(tmp_path / "new" / certificate.JSON)
    assert again == json.loads(json.dumps(data))
    assert [one["difference"] for one in again["findings"]] == [None, "nan", "inf", None]
    page = (tmp_path / "new" / certificate.PAGE).read_text()
    for text in (
        "**FAILED** (2 of the properties): losses, expert biases.",
        "**Passed** (1 of the properties) on a proxy in FP32",
        "hidden size 64 of 4096",
        "**Not proved**: fused kernels.",
        "layers.1\\|bias",
        "- fused kernels",
    ):
        assert text in page
    assert certificate.render(again) == page
    # Nothing of the user's paths.
    assert "/runs/a" not in page and str(tmp_path) not in page
    assert make(launch, [passed("rules")])["passed"] is True
    assert make(launch, [*found, failed("rules")])["passed"] is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not JSON"),
        ("[]", "not an object"),
        ("{}", "no schema"),
        ("\x00\xff", "it is not JSON"),
    ],
)
def test_a_file_that_is_none(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        certificate.read(tmp_path / "x.json")


def test_a_changed_file_is_refused(launch: list[Flag], tmp_path: Path) -> None:
    data = make(launch, [passed("rules")])
    file = tmp_path / "c.json"
    file.write_text(json.dumps(data | {"command": {"--bf16": []}}))
    with pytest.raises(ValueError, match="was changed"):
        certificate.read(file)
    file.write_text(json.dumps(data | {"schema": 99}))
    with pytest.raises(ValueError, match="schema 99"):
        certificate.read(file)
