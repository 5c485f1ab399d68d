"""`nemotron3 certify`: what it prints and writes, its exit status, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.common import lock, ranks
from megatron_nemotron3.launch import Launch, flags
from megatron_nemotron3.launch.flag import render
from megatron_nemotron3.proof.certify import certificate, command, compare
from megatron_nemotron3.proof.certify.bench import Bench, Finding, PropertyState, passed, untested
from megatron_nemotron3.proof.certify.proof import STAGES, Stage

Capture = pytest.CaptureFixture[str]

NO_TRAINING = (
    "Megatron's parser",
    "rules",
    "number formats of the model",
    "memory of a GPU",
    "what needs a GPU",
)


@pytest.fixture(autouse=True)
def static_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only stages that train nothing; and the server of the other tests goes on."""
    chosen = tuple(stage for stage in STAGES if stage.title in NO_TRAINING)
    assert len(chosen) == len(NO_TRAINING)
    monkeypatch.setattr(command, "STAGES", chosen)
    monkeypatch.setattr(ranks, "start_server", lambda output, preload: None)
    monkeypatch.delenv("MEGATRON_LM_DIR", raising=False)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    words = render(flags(Launch.of("super", tp=2, pp=2, ep=4, dp=4, backend="te")), shell=True)
    path = tmp_path / "launch.sh"
    path.write_text(f"TP=2\ntorchrun --nproc-per-node 8 --nnodes 2 pretrain_hybrid.py --save $OUT {words}\n")
    return path


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".md"))


def test_a_script(script: Path, capsys: Capture) -> None:
    assert cli.main(["certify", "launch.sh"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "launch.sh: TP2 PP2 EP4",
        "pass  accepted by Megatron",
        "pass  rules",
        "passed: 3 properties",
    ):
        assert text in printed
    assert "not testable here:\n" in printed and "number formats: FP32" in printed
    assert written(script.parent) == ["certificate.json", "certificate.md"]
    data = certificate.read(script.parent / "certificate.json")
    assert data["passed"] and data["title"] == "launch.sh" and data["layout"].startswith("TP2 PP2 EP4")
    assert cli.main(["certify", "launch.sh", "--check", "certificate.json"]) == 0
    script.write_text(script.read_text().replace("$OUT", "/elsewhere"))
    assert cli.main(["certify", "launch.sh", "--check", "certificate.json"]) == 0
    capsys.readouterr()
    script.write_text(script.read_text().replace("--hidden-size 4096", "--hidden-size 8192"))
    assert cli.main(["certify", "launch.sh", "--check", "certificate.json"]) == 1
    printed = capsys.readouterr().out
    assert "of another command" in printed and "--hidden-size: certified 4096, now 8192" in printed


def test_check_says_which_versions_differ(script: Path, capsys: Capture) -> None:
    assert cli.main(["certify", "launch.sh"]) == 0
    file = script.parent / "certificate.json"
    data = json.loads(file.read_text())
    data["versions"]["torch"] = "2.0.0"
    file.write_text(json.dumps(data))
    capsys.readouterr()
    assert cli.main(["certify", "launch.sh", "--check", "certificate.json", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["belongs"] and found["passed"] and "torch: certified with 2.0.0, now" in found["versions"][0]


def test_words_and_a_name_are_the_same_command(script: Path, capsys: Capture) -> None:
    layout = ["--tp", "2", "--pp", "2", "--ep", "4", "--dp", "4", "--backend", "te"]
    assert cli.main(["certify", "super", *layout, "--output", "named"]) == 0
    words = script.read_text().split("pretrain_hybrid.py ")[1].replace("\\\n", "").replace("'", "").split()
    assert cli.main(["certify", "--gpus", "16", "--output", "words", "--", *words]) == 0
    named, spelled = (certificate.read(Path(name) / "certificate.json") for name in ("named", "words"))
    assert named["hash"] == spelled["hash"] and spelled["title"] == "command"


def test_json_is_one_document(script: Path, capsys: Capture) -> None:
    assert cli.main(["certify", "launch.sh", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    stored = json.loads((script.parent / "certificate.json").read_text())
    assert found.pop("certificate") == "certificate.json" and found == stored


def test_a_violated_rule_fails_and_is_named(script: Path, capsys: Capture) -> None:
    script.write_text(script.read_text().replace("--sequence-parallel", ""))
    assert cli.main(["certify", "launch.sh"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL  rules" in printed and "FAILED: 1 property" in printed
    data = certificate.read(script.parent / "certificate.json")
    assert not data["passed"]
    (wrong,) = [one for one in data["findings"] if one["state"] == "fail"]
    assert wrong["property"] == "rules" and wrong["where"] == "moe-tp-without-sp"
    # A gate: the certificate belongs to this command, and it failed.
    assert cli.main(["certify", "launch.sh", "--check", "certificate.json"]) == 1
    assert "certificate.json: of this command, FAILED" in capsys.readouterr().out


def test_an_unknown_option_fails(script: Path, capsys: Capture) -> None:
    script.write_text(
        script.read_text().replace("--sequence-parallel", "--sequence-parallel --no-such-option")
    )
    assert cli.main(["certify", "launch.sh"]) == 1
    assert "no option --no-such-option" in capsys.readouterr().out


def test_memory_of_a_gpu(script: Path, capsys: Capture) -> None:
    assert cli.main(["certify", "launch.sh", "--gpu", "h100"]) == 1
    assert "FAIL  memory of a GPU" in capsys.readouterr().out


def refusals(tmp_path: Path) -> Iterator[tuple[str, list[str], str]]:
    (tmp_path / "empty.sh").write_text("echo hello\n")
    (tmp_path / "gpt.sh").write_text("torchrun pretrain_gpt.py --num-layers 8 --hidden-size 64 --swiglu\n")
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "variable.sh").write_text(
        "torchrun pretrain_hybrid.py --hybrid-layer-pattern 'M*' --hidden-size $HIDDEN\n"
    )
    (tmp_path / "other.json").write_text("{}")
    yield "no launch", ["empty.sh"], "no Megatron option"
    yield "other family", ["gpt.sh"], "--hybrid-layer-pattern"
    yield "no text", ["binary.sh"], "not a text file"
    yield "unknown size", ["variable.sh"], "--set"
    yield "missing", ["nothing.sh"], "nothing.sh"
    yield "nothing", [], "give a script"
    yield "both", ["launch.sh", "--", "--bf16"], "drop -- --bf16"
    yield "layout of a script", ["launch.sh", "--tp", "2"], "drop --tp"
    yield "variable of a name", ["super", "--set", "A=1"], "--set A=1"
    yield "gpus", ["super", "--tp", "2", "--gpus", "3"], "--gpus 3"
    yield "not a multiple", ["launch.sh", "--gpus", "6"], "6 ranks"
    yield "ranks", ["launch.sh", "--ranks", "3"], "--ranks"
    yield "output", ["launch.sh", "--output", "launch.sh"], "not a folder"
    yield "certificate", ["launch.sh", "--check", "other.json"], "is no certificate"
    yield "replaces", ["launch.sh", "--output", "mine"], "is no certificate"


def test_bad_input(script: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "certificate.json").write_text('{"mine": 1}')
    for name, words, said in refusals(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        status: object
        try:
            status = cli.main(["certify", *words])
        except SystemExit as end:  # argparse
            status = end.code
        printed = capsys.readouterr()
        assert status == 2, name
        assert said in printed.err and len(printed.err.strip().splitlines()) <= 2, (name, printed.err)
        assert printed.out == "" and sorted(tmp_path.rglob("*")) == before, name


def test_missing_checkout(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for folder in (script.parent / "none", script.parent):
        monkeypatch.setenv("MEGATRON_LM_DIR", str(folder))
        assert cli.main(["certify", "launch.sh"]) == 2
        assert "no pretrain_hybrid.py" in capsys.readouterr().err
    assert written(script.parent) == []


def test_more_ranks_than_memory(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(command, "available", lambda: 1.5)
    assert cli.main(["certify", "launch.sh"]) == 2
    assert (
        "8 ranks take about 4.8 GiB (0.5 each)" in (said := capsys.readouterr().err)
        and "1.5 GiB are free" in said
    )
    assert written(script.parent) == []


def test_memory_of_small_layouts(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """One process runs as often at the same time as its noise takes, more often than there are ranks."""
    assert command.AT_ONCE == 1 + compare.NUDGES
    monkeypatch.setattr(command, "available", lambda: 2.0)
    assert cli.main(["certify", "launch.sh", "--ranks", "2"]) == 2
    assert "3 ranks take about 2.3 GiB (0.5 each)" in capsys.readouterr().err
    assert written(script.parent) == []


def test_an_interrupt_leaves_nothing(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    folders: list[Path] = []

    def interrupted(bench: Bench) -> Iterator[Finding]:
        folders.append(bench.folder)
        (bench.folder / "checkpoint").mkdir()
        yield passed("one")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "STAGES", (Stage("interrupted", interrupted),))
    assert cli.main(["certify", "launch.sh"]) == 130
    assert written(script.parent) == [] and not folders[0].exists()


def test_two_at_once_in_one_folder(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The second is refused before any work, so that page and JSON are of one run; elsewhere it may run."""
    other = script.with_name("other.sh")
    other.write_text(script.read_text().replace("--hidden-size 4096", "--hidden-size 8192"))
    status: list[int] = []

    def second(bench: Bench) -> Iterator[Finding]:
        monkeypatch.setattr(command, "STAGES", ())
        for words in (["other.sh"], ["other.sh", "--json"], ["other.sh", "--output", "else/where"]):
            status.append(cli.main(["certify", *words]))
        yield passed("one")

    monkeypatch.setattr(command, "STAGES", (Stage("second", second),))
    assert cli.main(["certify", "launch.sh"]) == 0
    assert status == [2, 2, 0]
    said = capsys.readouterr().err.strip().splitlines()
    refused = [line for line in said if " is in use by " in line]
    assert len(refused) == 2 and all(line.endswith("choose another folder)") for line in refused)
    for folder, title in ((script.parent, "launch.sh"), (script.parent / "else/where", "other.sh")):
        assert sorted(p.name for p in folder.iterdir() if "certificate" in p.name) == written(folder)
        assert certificate.read(folder / "certificate.json")["title"] == title
        assert (folder / "certificate.md").read_text().startswith(f"# Certificate: {title}\n")
        assert not (folder / lock.NAME).exists()


def test_what_was_not_tried_everywhere_is_said(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def partly(bench: Bench) -> Iterator[Finding]:
        yield Finding("gradients", PropertyState.PASS, "TP2", 0.25, 1.0, "one.weight")
        yield Finding("gradients", PropertyState.PASS, "PP2", 0.5, 1.0, "two.weight")
        yield untested("gradients", "too many ranks", "EP2")
        yield Finding("rules", PropertyState.PASS, "a-rule", detail="warning: slow")

    monkeypatch.setattr(command, "STAGES", (Stage("partly", partly),))
    assert cli.main(["certify", "launch.sh"]) == 0
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["pass", "gradients", *["0.5", "of", "1", "PP2:", "two.weight", "(and", "1", "more)"]] in found
    assert ["-", "gradients", *["EP2:", "too", "many", "ranks"]] in found
    assert ["pass", "rules", *["a-rule:", "warning:", "slow"]] in found


def test_a_stage_that_breaks_fails_and_the_others_go_on(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def broken(bench: Bench) -> Iterator[Finding]:
        yield passed("gradients")
        raise KeyError("router")

    def fine(bench: Bench) -> Iterator[Finding]:
        yield passed("weights")

    monkeypatch.setattr(command, "STAGES", (Stage("first", broken), Stage("second", fine)))
    assert cli.main(["certify", "launch.sh"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL  first" in printed and "KeyError: 'router'" in printed and "pass  weights" in printed
