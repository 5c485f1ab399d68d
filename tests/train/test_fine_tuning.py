"""`nemotron3 train --conversations`: wrong lines end at once, and the loss of what is held out falls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.train import log, processes
from tests.support.programs import follow_forked
from tests.train.data.test_conversations import say, write_lines, write_tokenizer


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    """The command line of a run that could start."""
    chats = [[say("user", f"{i} apples?"), say("assistant", f"{i} apples and pears")] for i in range(60)]
    file = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    words = ["train", "nano", "--tiny", "--device", "cpu", "--output", str(tmp_path / "run")]
    return [*words, "--conversations", str(file), "--tokenizer", str(tokenizer), "--seq-length", "64"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--text", "x"], "--text and --conversations both say what to train on"),
        (["--micro-batch-size", "2"], "--micro-batch-size 2: conversations are packed into rows"),
        (["--pretrained", "/nowhere"], "--pretrained /nowhere has no latest_checkpointed_iteration.txt"),
        (["--", "--sft"], "--sft (give --conversations before --)"),
        (["--conversations", "/nowhere"], "--conversations /nowhere: there is no such file"),
        (["--conversations", "0", "a", "1", "b"], "weight 0 of a: give a finite number above 0"),
    ],
)
def test_wrong_lines(
    inputs: list[str], more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if more[0] in inputs:  # in place of that, not as well
        del inputs[(at := inputs.index(more[0])) : at + 2]
    assert cli.main([*inputs, *more]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_without_the_library_of_the_tokenizer(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert cli.main(inputs) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "package tokenizers is not installed: pip install" in line
    assert not (tmp_path / "run").exists()


def test_files_with_weights_are_mixed_and_read_as_often_as_needed(tmp_path: Path) -> None:
    from megatron_nemotron3.train import fine_tuning

    files = []
    for name, count in (("a", 60), ("b", 40)):
        answer = say("assistant", "apples and pears")
        lines = [{"messages": [say("user", f"{i} {name}?"), answer]} for i in range(count)]
        files.append(str(write_lines(tmp_path / f"{name}.jsonl", lines)))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    args = SimpleNamespace(tokenizer_model=str(tokenizer), context_parallel_size=1)
    settings = {"random_seed": 1, "sequence_length": 64, "split": "90,10,0", "path_to_cache": str(tmp_path)}
    train, _, _ = fine_tuning.datasets(args, [400, 8, 0], {**settings, "blend": (files, [0.25, 0.75])})
    assert len(train) == 400 > sum(map(len, (set_.dataset for set_ in train.datasets)))
    origins = [int(train[i]["dataset_id"]) for i in range(400)]
    assert [origins.count(0), origins.count(1)] == [100, 300]


def test_a_released_model_needs_a_schedule() -> None:
    """Pre-training's rate and batch would be wrong for fine-tuning."""
    from megatron_nemotron3.launch import ParallelLayout
    from megatron_nemotron3.models import get
    from megatron_nemotron3.train.training import schedule_of

    with pytest.raises(ValueError, match="no default schedule: give --steps and --lr"):
        schedule_of(get("nano"), ParallelLayout(), conversations=True)
    found = schedule_of(get("nano"), ParallelLayout(dp=2), conversations=True, steps=50, lr=2e-5)
    assert (found.train_samples, found.lr, found.lr_decay_style) == (50 * 8, 2e-5, "constant")
    assert (found.micro_batch_size, found.global_batch_size) == (1, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"micro_batch_size": 2}, "--micro-batch-size 2 with --sft"),
        ({"calculate_per_token_loss": False}, "--sft needs --calculate-per-token-loss"),
        ({"sft_tokenizer_prompt_format": "identity"}, "uses the tokenizer's own chat template"),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "--tokenizer-type HuggingFaceTokenizer"),
        ({"mock_data": True}, "--mock-data with --sft"),
    ],
)
def test_the_script_refuses_other_options(change: dict[str, object], message: str | None) -> None:
    from megatron_nemotron3.train import fine_tuning

    good = {
        "micro_batch_size": 1,
        "calculate_per_token_loss": True,
        "tokenizer_type": "SFTTokenizer",
        "sft_tokenizer_prompt_format": "default",
        "mock_data": False,
    }
    said = fine_tuning.problem(SimpleNamespace(**{**good, **change}))
    assert said is None if message is None else message in str(said)


@pytest.mark.full
@pytest.mark.parametrize("mean", ["tokens", "conversations"])
def test_held_out_loss_falls(
    inputs: list[str],
    tmp_path: Path,
    mean: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Numbers that were not trained on, in sentences like those that were; the run resumes in between."""
    held_out = [
        [say("user", f"{i} apples?"), say("assistant", f"{i} apples and pears")] for i in range(60, 70)
    ]
    file = write_lines(tmp_path / "held.jsonl", [{"messages": chat} for chat in held_out])
    measure = ["--conversations", str(file), "--tokenizer", inputs[inputs.index("--tokenizer") + 1], "--json"]

    def loss() -> float:
        assert cli.main(["evaluate", str(tmp_path / "run"), "--device", "cpu", *measure]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["conversations"] == 10
        return float(found["per_token"])

    monkeypatch.setattr(processes, "follow", follow_forked)
    train = [*inputs, "--mean", mean, "--lr", "4e-3", "--steps"]
    assert cli.main([*train, "1", "--", "--eval-iters", "1", "--save-interval", "1"]) == 0
    said = capsys.readouterr().out
    assert "60 conversations in" in said and "% full" in said
    before = loss()
    assert cli.main([*train, "12", "--", "--eval-iters", "1"]) == 0
    assert "resuming from step 1" in capsys.readouterr().out
    assert loss() < before - 0.5
    assert max(log.read(str(tmp_path / "run" / "train.log")).steps) == 12


@pytest.mark.full
def test_three_conversations_with_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row: no validation, which is said; the run ends, and its file repeats it."""
    pytest.importorskip("wandb")
    import io
    from contextlib import redirect_stdout

    from megatron_nemotron3 import cli
    from tests.train.data.test_conversations import say, write_lines, write_tokenizer

    monkeypatch.setenv("WANDB_MODE", "offline")
    write_tokenizer(tmp_path / "chat")
    lines = [{"messages": [say("user", f"{i} apples?"), say("assistant", "yes")]} for i in range(3)]
    write_lines(tmp_path / "chats.jsonl", lines)
    words = ["train", "nano", "--tiny", "--steps", "2", "--seq-length", "128", "--device", "cpu"]
    words += ["--conversations", str(tmp_path / "chats.jsonl"), "--tokenizer", str(tmp_path / "chat")]
    words += [
        "--output",
        str(tmp_path / "run"),
        "--wandb",
        "apples",
        "--tensorboard",
        str(tmp_path / "events"),
    ]
    with redirect_stdout(io.StringIO()) as text:
        assert cli.main(words) == 0
    assert "no validation: too few rows (1)" in text.getvalue()
    assert list((tmp_path / "run/wandb").glob("offline-run-*")) and list((tmp_path / "events").iterdir())
    again = ["train", "--config", str(tmp_path / "run/config.yaml"), "--output", str(tmp_path / "again")]
    assert cli.main(again) == 0
    assert (tmp_path / "again/checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
