"""The loss of held-out conversations in the layout of a training is that of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.models import get
from megatron_nemotron3.post_training import measure
from megatron_nemotron3.post_training.measure import HeldOut, measure_held_out
from megatron_nemotron3.train import processes
from megatron_nemotron3.train.data.conversations import Encoder, Reading, read_conversations
from tests.support.engines import agreeing_tensors
from tests.support.hf_folders import write_hf
from tests.support.programs import follow_forked
from tests.train.data.test_conversations import say, write_lines, write_tokenizer

#: The second has no token of the assistant, and the last alone fills a row.
CHATS = [
    *([say("user", f"{i} apples?"), say("assistant", "yes, " + f"{i} pears " * i)] for i in range(1, 8)),
    [say("user", "apples?")],
    [say("user", "pears?"), say("assistant", "apples and pears " * 40)],
]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, HeldOut]:
    """A converted model with MTP, and conversations."""
    folder = tmp_path_factory.mktemp("given")
    config = get("super-tiny").but(pattern="M*E*", hidden_size=64, vocab_size=384, num_moe_experts=8)
    write_hf(folder / "hf", config, values=agreeing_tensors(config, 0.05, seed=4), dtype="float32")
    assert cli.main(["convert", "from-hf", str(folder / "hf"), str(folder / "base")]) == 0
    tokenizer = write_tokenizer(folder / "chat")
    file = write_lines(folder / "held_out.jsonl", [{"messages": chat} for chat in CHATS])
    encoder = Encoder(tokenizer)
    encoded = [encoder.encode(one) for one in read_conversations(file)]
    return folder / "base", HeldOut(config, encoded, file, Reading(), tokenizer, "cpu")


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2, ep=2),
        pytest.param(ParallelLayout(pp=2, vpp=2), marks=pytest.mark.full),
        pytest.param(ParallelLayout(dp=2, ep=2), marks=pytest.mark.full),
        pytest.param(ParallelLayout(cp=2), marks=pytest.mark.full),
        pytest.param(ParallelLayout(tp=2, etp=2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_ranks_of_a_training(
    layout: ParallelLayout, given: tuple[Path, HeldOut], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, held_out = given
    expected = measure_held_out(base, held_out, tmp_path / "one.json")
    monkeypatch.setattr(processes, "follow", follow_forked)
    launch = Launch(config=held_out.config, layout=layout, precision="fp32", backend="torch", own_script=True)
    apart = HeldOut(**{**vars(held_out), "launch": launch})
    found = measure_held_out(base, apart, tmp_path / "ranks.json")
    assert found.per_token == pytest.approx(expected.per_token, rel=1e-6)
    assert found.per_conversation == pytest.approx(expected.per_conversation, rel=1e-6)
    assert expected.answer is not None and found.answer is None
    # What was measured is kept.
    monkeypatch.setattr(processes, "follow", lambda *_: pytest.fail("it is measured again"))
    assert measure_held_out(base, apart, tmp_path / "ranks.json") == found


def _ranks(script: Path) -> Iterator[psutil.Process]:
    """Processes of this one that run a script, but for their launcher."""
    for one in psutil.Process().children(recursive=True):
        words = one.cmdline()
        if str(script) in words and "megatron_nemotron3.train.agent" not in words:
            yield one


@pytest.mark.full
@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_a_measurement_that_ends_early_is_made_again(
    end: str, given: tuple[Path, HeldOut], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, held_out = given
    seen: list[psutil.Process] = []

    class Ending(measure.ProcessWatch):
        """Ends them after their first row."""

        def line(self, text: str) -> None:
            super().line(text)
            if " rows" in text and not seen:
                seen.extend(_ranks(measure.SCRIPT))
                if end == "killed":
                    seen[-1].kill()
                else:
                    os.kill(os.getpid(), signal.SIGINT)

    layout = ParallelLayout(tp=2, ep=2)
    launch = Launch(config=held_out.config, layout=layout, precision="fp32", backend="torch", own_script=True)
    apart, kept = HeldOut(**{**vars(held_out), "launch": launch}), tmp_path / "ranks.json"
    with monkeypatch.context() as patch:
        patch.setattr(measure, "ProcessWatch", Ending)
        with pytest.raises(ValueError if end == "killed" else KeyboardInterrupt) as problem:
            measure_held_out(base, apart, kept)
    if end == "killed":
        assert f"the ranks that measure the held-out loss ended with 1 (see {tmp_path}/ranks.log)" in str(
            problem
        )
    assert len(seen) == 2 and not psutil.wait_procs(seen, timeout=10)[1]
    assert not kept.exists() and not (tmp_path / "ranks.totals.json").exists()
    found, expected = (
        measure_held_out(base, one, kept.with_name(f"{i}.json")) for i, one in enumerate((apart, held_out))
    )
    assert found.per_token == pytest.approx(expected.per_token, rel=1e-6)
