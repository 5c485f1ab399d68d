"""`--isolate-documents` of `nemotron3 train` and of the launcher: what it adds, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3 import cli, run
from megatron_nemotron3.train import log, processes
from megatron_nemotron3.train.data import indexed
from megatron_nemotron3.train.isolation import ISOLATE, ISOLATION_OPTIONS, require_possible
from tests.support.programs import follow_forked
from tests.train.data.test_conversations import write_tokenizer

TORCH = ["--spec", "megatron_nemotron3.specs", "nemotron3_torch_stack_spec"]


def write(prefix: Path, documents: list[list[int]]) -> str:
    """A data set of these tokens, as `write_dataset` writes it."""
    with Path(f"{prefix}.bin").open("wb") as stream:
        for ids in documents:
            indexed._append(stream, ids, "uint16")
    indexed._write_index(Path(f"{prefix}.idx"), [len(ids) for ids in documents], "uint16")
    return str(prefix)


def test_ends_of_documents(tmp_path: Path) -> None:
    ended = write(tmp_path / "ended", [[5, 6, 2], [2], [7, 2]])
    assert indexed.require_ended(ended) == ""
    joined = write(tmp_path / "joined", [[5, 2, 6, 2], [7, 2]])
    assert "its first 2 documents hold their last token, 2, 3 times" in indexed.require_ended(joined)
    with pytest.raises(ValueError, match=r"first 2 documents end with 2 different tokens.*--append-eod"):
        indexed.require_ended(write(tmp_path / "open", [[5, 6], [7, 2]]))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--micro-batch-size", "2"], "--isolate-documents with --micro-batch-size 2: documents are packed"),
        (["--teacher", "runs/demo"], "--isolate-documents and --teacher do not go together: drop one"),
        (["--conversations", "README.md"], "--isolate-documents with --conversations: none sees another"),
        (["--data-path", "PREFIX"], "documents end with 2 different tokens"),
    ],
)
def test_wrong_lines(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write(tmp_path / "open", [[5, 6], [7, 2]])
    more = [prefix if word == "PREFIX" else word for word in more]
    if more[0] in ("--data-path", "--conversations"):
        more += ["--tokenizer", str(write_tokenizer(tmp_path / "tokenizer"))]
    words = ["train", "nano", "--tiny", "--device", "cpu", "--output", str(tmp_path / "run"), ISOLATE]
    assert cli.main([*words, *more]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [[ISOLATE, "x.py", "--lr", "1"], ["x.py", ISOLATE, "--lr", "1"]])
def test_the_launcher_adds_megatrons_options(words: list[str]) -> None:
    found = run.split_arguments(words)
    assert found.isolate_documents and found.script == "x.py"
    assert found.arguments == ["--lr", "1", *ISOLATION_OPTIONS]
    again = run.split_arguments(["x.py", *found.arguments])
    assert again.arguments == found.arguments and not again.isolate_documents


def test_the_launcher_refuses(tmp_path: Path) -> None:
    path = write(tmp_path / "open", [[5, 6], [7, 2]])
    for words, message in (
        (["--micro-batch-size", "4"], "--micro-batch-size 4: documents are packed into one row"),
        (["--sft"], "with --sft: none of its conversations"),
        (["--data-path", "0.5", path], "2 different tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            require_possible(words, distilled=False)
    with pytest.raises(ValueError, match="and --nemotron3-teacher do not go together"):
        require_possible(["--micro-batch-size", "1"], distilled=True)


def test_rows_are_cut_for_our_layers_only(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_nemotron3 import specs

    cut = [*ISOLATION_OPTIONS, "--context-parallel-size", "2"]
    ours, te = specs.nemotron3_torch_stack_spec, specs.nemotron3_te_stack_spec
    run.verify_rows(cut, "", ours, True)
    run.verify_rows(cut[:-2], "", te, True)
    run.verify_rows([*cut, "--sft"], "", te, False)
    for spec, isolate, message in (
        (te, False, "Megatron cuts the whole row, and Transformer Engine's layers take one that is cut"),
        (None, True, "--isolate-documents: no --spec is no stack of this package: use --spec megatron_nemo"),
    ):
        with pytest.raises(SystemExit):
            run.verify_rows(cut, "", spec, isolate)
        assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_run_isolates_its_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses are others than those of a plain run, and a folder goes on as it began."""
    monkeypatch.setattr(processes, "follow", follow_forked)
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(" ".join(f"{number} apples and {i} pears" for i in range(20)))
    losses = []
    for name, more in (("plain", ["--micro-batch-size", "1"]), ("isolated", [ISOLATE])):
        words = ["train", "super", "--tiny", "--device", "cpu", "--seq-length", "64", "--text", str(text)]
        words += ["--output", str(tmp_path / name), "--steps", "1"]
        assert cli.main([*words, *more, "--", "--eval-iters", "1"]) == 0
        losses.append(log.read(str(tmp_path / name / "train.log")).steps[1].values)
    assert abs(losses[0]["lm loss"] - losses[1]["lm loss"]) > 1e-4
    capsys.readouterr()
    words[-1] = "2"
    assert cli.main(words) == 2
    assert "(dataloader-inter-document-masking on -> not given)" in capsys.readouterr().err
