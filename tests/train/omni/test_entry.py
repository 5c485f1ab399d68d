"""Megatron's training loop over Nano Omni: layouts train as one process does, and interrupted runs go on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.checkpoints.resume import before_start
from megatron_nemotron3.checkpoints.state import StoredState
from megatron_nemotron3.cpu import cpu_mode
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.train.omni import arguments
from megatron_nemotron3.train.omni.encoders import SoundEncoder
from megatron_nemotron3.train.omni.mock import MockSamples
from tests.support.omni_data import part, require_media, say, tiny_omni, tiny_processor, write_media
from tests.support.omni_runs import train, words

APART = ("--vision-layout", "tp=1,dp=1", "--sound-layout", "tp=1,dp=1")
#: ranks, sizes of the language model, and words: what the modules share, and what they do not.
LAYOUTS: dict[str, tuple[int, dict[str, int], tuple[str, ...]]] = {
    "shared, TP and EP": (2, {"tp": 2, "ep": 2}, ()),
    "shared, encoders without TP": (
        2,
        {"tp": 2, "ep": 2, "micro_batch_size": 2},
        ("--vision-layout", "tp=1,dp=2,offset=0", "--sound-layout", "tp=2,dp=1,offset=0"),
    ),
    "apart, TP with sequence parallelism": (4, {"tp": 2, "ep": 2}, APART),
    "apart, CP": (4, {"cp": 2}, APART),
    "apart, stages and replicas with EP": (6, {"pp": 2, "dp": 2, "ep": 2}, APART),
}
#: With Adam's default epsilon a gradient that is only rounding moves its weight as far as any other.
LOAD = ("--finetune", "--no-load-optim", "--no-load-rng", "--adam-eps", "1e-3")


def losses(ranks: list[Any]) -> list[float]:
    """Mean loss of each of two steps; every replica and context rank tells its share."""
    told = [one for one in ranks if one]
    found = []
    for step in range(2):
        mine = [pair for one in told for pair in one[step * len(one) // 2 : (step + 1) * len(one) // 2]]
        found.append(sum(total for total, _ in mine) / sum(count for _, count in mine))
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """Weights of one process after a step, and the losses of two steps of one process from there."""
    folder = str(tmp_path_factory.mktemp("start"))
    run_distributed(train, 1, words(("--save", folder, "--save-interval", "1"), steps=1), apart=True)
    return folder, losses(run_distributed(train, 1, words(("--load", folder, *LOAD), steps=2), apart=True))


def test_random_media_have_the_rows_of_their_tokens() -> None:
    """Whatever the number of frames."""
    omni = tiny_omni()
    sound, ids = omni.sound, omni.special_ids()
    assert sound is not None
    encoder, made = SoundEncoder(sound, seed=1), MockSamples(omni, 64, seed=1234)
    seen = set()
    for number in range(60):
        (media,) = made.media(number, ("sound",))
        if media:
            features = media["sound"]["parakeet"]
            seen.add(int(features["input_features_mask"].sum()) % 8)
            rows = encoder(**features)
            assert len(rows) == int((made.row(number).tokens == ids["sound"]).sum())
    assert seen == set(range(8))


def test_a_disjoint_job_trains() -> None:
    """A step of 4 samples on three ranks. Random words of 2,048: log 2048 = 7.62, and 0.4 for the logits."""
    (*encoders, told) = run_distributed(train, 3, words(APART, steps=1))
    assert encoders == [[], []] and len(told) == 4
    assert 7.5 < _mean(told) < 8.5


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process(name: str, start: tuple[str, list[float]]) -> None:
    """The second loss depends on all gradients of the first step."""
    folder, expected = start
    world, sizes, extra = LAYOUTS[name]
    found = run_distributed(train, world, words((*extra, "--load", folder, *LOAD), steps=2, **sizes))
    assert losses(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_an_interrupted_disjoint_run_goes_on(tmp_path: Path) -> None:
    """To the bit, on every rank; Megatron refused what such a run had saved on each of them."""
    save = ("--save", str(tmp_path), "--load", str(tmp_path), "--save-interval", "1")
    whole = run_distributed(train, 3, words(APART, steps=2))
    first = run_distributed(train, 3, words((*APART, *save, "--exit-interval", "1"), steps=2))
    second = run_distributed(train, 3, words((*APART, *save), steps=2))
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert [len(one) for one in whole] == [0, 0, 8]


@pytest.mark.full
def test_in_another_layout_and_behind_an_incomplete_save(tmp_path: Path) -> None:
    """Two replicas with encoders of their own; their last save did not end. One process goes on."""
    save = ("--save", str(tmp_path), "--save-interval", "1")
    words_of = {"steps": 3, "dp": 2}
    whole = run_distributed(train, 4, words((*APART, *save), **words_of))
    shutil.rmtree(tmp_path / "iter_0000003")
    (tmp_path / "iter_0000002/.metadata").unlink()
    (said,) = before_start(["--load", str(tmp_path)], rank=0)  # as `megatron_nemotron3.run` does
    assert "it now names 1, the last complete checkpoint" in said
    shared = run_distributed(train, 1, words(("--load", str(tmp_path)), steps=3), apart=True)
    both = [[one[step * 2 : step * 2 + 2] for one in whole if one] for step in (1, 2)]
    expected = [_mean(pair for one in step for pair in one) for step in both]
    assert len(shared[0]) == 8
    assert [_mean(shared[0][:4]), _mean(shared[0][4:])] == pytest.approx(expected, rel=2e-4)


@pytest.mark.full
def test_conversations(tmp_path: Path) -> None:
    """Packed, with frozen encoders on ranks of their own, as in one process."""
    require_media()
    tiny_processor(tmp_path).save_pretrained(tmp_path)
    write_media(tmp_path)
    asked = [
        [say("user", part("image", "wide.png"), "what is it"), say("assistant", "apples and pears")],
        [say("user", part("audio", "long.wav"), "what is it"), say("assistant", "three")],
        [say("user", "hello"), say("assistant", "hello hello")],
    ]
    lines = [json.dumps({"messages": messages}) for messages in asked * 3]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    extra = ("--data-path", str(tmp_path / "talks.jsonl"), "--omni-processor", str(tmp_path))
    extra += ("--freeze", "vision", "vision-projector", "sound", "--data-cache-path", str(tmp_path / "cache"))
    save = ("--save", str(tmp_path / "start"), "--save-interval", "1")
    run_distributed(train, 1, words(save, steps=1), apart=True)
    load = ("--load", str(tmp_path / "start"), *LOAD)
    (one,) = run_distributed(train, 1, words((*extra, *load), steps=2, mock=False, seq_length=96), apart=True)
    many = run_distributed(train, 4, words((*extra, *load, *APART), steps=2, tp=2, mock=False, seq_length=96))
    assert len(one) == 8 and len({total for total, _ in one}) > 2
    assert losses(many) == pytest.approx(losses([one]), rel=2e-4)


@pytest.mark.parametrize(
    ("world", "extra", "message"),
    [
        (4, ("--vision-layout", "tp=1,dp=1"), "--vision-layout is given: give --sound-layout, too"),
        (4, ("--vision-layout", "tp=1,dp=2", "--sound-layout", "tp=1,dp=2"), "leave none for the language"),
        (2, ("--load", "{saved}"), "and iter_0000001 of --load {saved} has vision.num_layers=3"),
        (2, ("--load", "{language}"), "iter_0000001 of --load {language} is a language model without"),
    ],
)
def test_one_clear_line(
    world: int, extra: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is set up; the two folders hold another model's arguments."""
    places = {name: str(tmp_path / name) for name in ("saved", "language")}
    given = words(tuple(word.format(**places) for word in extra))
    encoders = given[given.index("--omni-encoders") + 1].replace('"num_layers": 2', '"num_layers": 3', 1)
    stored = {"saved": {"omni_encoders": encoders}, "language": {}}

    def loaded(argv: list[str]) -> tuple[str, StoredState] | None:
        name = Path(argv[argv.index("--load") + 1]).name if "--load" in argv else ""
        return ("iter_0000001", StoredState(stored[name], {})) if name else None

    monkeypatch.setattr(arguments, "loaded", loaded)
    monkeypatch.setattr("sys.argv", ["pretrain_omni.py", *given])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with cpu_mode(), pytest.raises(ValueError, match=re.escape(message.format(**places))):
        arguments.parse(list(given))


def _mean(pairs: Any) -> float:
    totals, counts = zip(*pairs, strict=True)
    return float(sum(totals) / sum(counts))


def test_fsdp_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_omni.py", "--use-megatron-fsdp"])
    with cpu_mode(), pytest.raises(ValueError, match="--use-megatron-fsdp: a rank without media"):
        arguments.parse(["--use-megatron-fsdp"])
