"""`nemotron3 bisect`: its findings as text and as JSON, and what it refuses before any work."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_nemotron3.cli import main
from megatron_nemotron3.common import output
from megatron_nemotron3.inference.generate.decode import load
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.bisect import diagnose
from megatron_nemotron3.proof.bisect.diagnose import cause_table
from megatron_nemotron3.proof.bisect.engine import sequence
from megatron_nemotron3.proof.bisect.recording import Recording, read, write
from tests.support import engines
from tests.support.hf_folders import write_hf

Capture = pytest.CaptureFixture[str]

CONFIG = get("nano-tiny").but(pattern="M*EM", vocab_size=300)
TOKENS = 48


def recorded(folder: Path, name: str, change: Callable[[Engine], Any] = lambda engine: None) -> Recording:
    """What the decoding engine computes for two texts, perhaps with changed weights."""
    engine = Engine(load(folder), max_context=engines.CONTEXT)
    change(engine)
    ids = torch.randint(CONFIG.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    logits = engine.logits(engine.forward(ids, engine.new_state(2)).hidden)[:, :-1]
    values = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    rows = zip(ids.tolist(), values.tolist(), strict=True)
    return Recording(name, "float32", [sequence(row, [None, *found]) for row, found in rows])


def without_scaling(engine: Engine) -> None:
    scale = CONFIG.moe_router_topk_scaling_factor or 1.0
    engine.model = engine.model.but(probabilities=lambda original, *args: original(*args) / scale)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, and recordings of a right trainer, a right engine and a wrong one."""
    folder = tmp_path_factory.mktemp("command")
    write_hf(folder / "hf", CONFIG, values=engines.tensors(CONFIG, seed=2), dtype="float32")
    write(folder / "trainer.pt", recorded(folder / "hf", "megatron"))
    write(folder / "engine.pt", recorded(folder / "hf", "vllm"))
    write(folder / "wrong.pt", recorded(folder / "hf", "vllm", without_scaling))
    return folder


def run(place: Path, engine: str = "engine.pt", *more: str, trainer: str = "trainer.pt") -> int:
    return main(
        [
            *("bisect", str(place / "hf")),
            *("--trainer", str(place / trainer), "--engine", str(place / engine), *more),
        ]
    )


def test_two_that_agree(place: Path, capsys: Capture) -> None:
    assert run(place) == 0
    said = capsys.readouterr().out
    assert "layers M*EM; sequences 2, tokens 96, in the longest 48" in said
    assert "neither deviates" in said and "Traceback" not in said


def test_the_wrong_side_is_named_on_either_side(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [cause for cause in cause_table(get("super-tiny")) if cause.name.startswith("a routed scaling")]
    monkeypatch.setattr(diagnose, "cause_table", lambda config: few)
    monkeypatch.setattr(output, "INTERVAL", 0.0)
    assert run(place, "wrong.pt", "--json") == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert re.search(r"^recompute: 3 of \d+ layers, .* s left$", printed.err, re.M)
    assert re.search(rf"^engine: 1 of {len(few)} trials?, .* s left$", printed.err, re.M)
    assert found["deviates"] == ["engine"] and found["model"] == "custom" and found["tokens"] == 96
    assert found["engine"]["cause"] is not None and found["engine"]["layer"] == 2
    assert any(line.startswith("engine (vllm, float32) deviates") for line in found["findings"])
    assert run(place, "engine.pt", "--first", "1", trainer="wrong.pt") == 1
    said = capsys.readouterr().out
    assert "trainer (vllm, float32) deviates" in said and "sequences 1, tokens 48" in said
    # What is known is said before the search.
    assert re.search(r"^trainer: it deviates from token \d+ of sequence 0 on\ntrainer: trying", said, re.M)


def test_without_a_cause(place: Path, capsys: Capture) -> None:
    assert run(place, "wrong.pt", "--no-cause") == 1
    said = capsys.readouterr().out
    assert "engine (vllm, float32) deviates" in said and "  from token " in said
    assert "  no cause was tried; record hidden states to find the layer\n" in said and "trying" not in said


def changed(place: Path, edit: Callable[[Recording], Any]) -> str:
    recording = copy.deepcopy(read(place / "engine.pt"))
    edit(recording)
    write(place / "changed.pt", recording)
    return "changed.pt"


#: What is wrong -> a function that makes the engine's file and gives its name, and the message.
REFUSED: dict[str, tuple[Callable[[Path], str], str]] = {
    "no file": (lambda place: "missing.pt", "missing.pt: No such file or directory"),
    "other tokens": (
        lambda place: changed(place, lambda r: r.sequences[1].ids[7].add_(1)),
        "sequence 1: the tokens differ from position 7 on (48 tokens of megatron, 48 of vllm)",
    ),
    "a layer too many": (
        lambda place: changed(place, lambda r: r.sequences[0].hidden.update({4: torch.zeros(TOKENS, 128)})),
        "hidden of layer 4: ",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(place: Path, what: str, capsys: Capture) -> None:
    make, message = REFUSED[what]
    assert run(place, make(place)) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_where_a_log_probability_is_nan_no_cause_is_tried(place: Path, capsys: Capture) -> None:
    name = changed(place, lambda r: r.sequences[1].logprobs[3:5].fill_(torch.nan))
    assert run(place, name) == 1
    said = capsys.readouterr().out
    assert "2 log-probabilities are no finite numbers" in said and "from token 4 of sequence 1 on" in said
    assert "trying" not in said
    assert (
        run(place, changed(place, lambda r: [s.logprobs.fill_(torch.nan) for s in r.sequences]), "--json")
        == 1
    )
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert found["deviates"] == ["engine"] and found["engine"]["none"] == 2 * (TOKENS - 1)


def test_tokens_outside_the_vocabulary(place: Path, capsys: Capture) -> None:
    for name in ("trainer", "engine"):
        recording = read(place / f"{name}.pt")
        recording.sequences[0].ids[5] = 300
        write(place / f"{name}-other.pt", recording)
    assert run(place, "engine-other.pt", trainer="trainer-other.pt") == 2
    assert "token id 300 is outside the vocabulary of" in capsys.readouterr().err
    assert run(place, "engine.pt", "--first", "0") == 2
    assert "--first 0: give 1 or more" in capsys.readouterr().err
    assert main(["bisect", "nowhere", "--trainer", str(place / "trainer.pt"), "--engine",
                 str(place / "engine.pt")]) == 2  # fmt: skip
    assert "nowhere" in capsys.readouterr().err
