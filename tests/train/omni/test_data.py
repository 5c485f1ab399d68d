"""The loader: the same batches for any workers and lanes, from any position; wrong files are named."""

from __future__ import annotations

import gc
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.omni_data import part, require_media, sample, say, tiny_omni, tiny_processor, write_media

require_media()

# MIMO's classes call themselves experimental.
pytestmark = pytest.mark.filterwarnings("ignore:.* is experimental:UserWarning")

from megatron_nemotron3.boundary.feed import RowFeed  # noqa: E402
from megatron_nemotron3.train.data.conversations import READING, Reading  # noqa: E402
from megatron_nemotron3.train.omni.data import ChatFile, MediaRows, build_loader, check, describe, in_order  # noqa: E402
from megatron_nemotron3.train.omni.media import MediaError  # noqa: E402
from tests.support.world import world_of_one  # noqa: E402

CONFIG = tiny_omni()
LENGTH = 192
#: One lane of every module.
WHOLE = dict.fromkeys(("language", "vision", "sound"), (0, 1))
CHATS: list[list[Any]] = [
    [part("image", "wide.png"), "what is it"],
    ["hello apples"],
    [part("audio", "short.flac"), part("image", "tall.jpg")],
    [part("video", "even.mp4"), "and", part("image", "wide.png")],
    ["one two three", part("audio", "long.wav")],
    ["pears"],
    [part("image", "turned.jpg"), part("video", "odd.mkv")],
    ["what"],
    [part("image", "tall.jpg"), "and", part("image", "wide.png")],
] * 2


def write_chats(path: Path, chats: list[list[Any]]) -> Path:
    lines = [{"messages": [say("user", *one), say("assistant", f"it is {i}")]} for i, one in enumerate(chats)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tiny_processor(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    write_media(folder)
    return write_chats(folder / "chats.jsonl", CHATS)


def batches(path: Path, processor: Any, count: int, **how: Any) -> list[dict[str, Any]]:
    rows = {name: how.pop(name) for name in ("pack", "multiple", "cache") if name in how}
    file = ChatFile(path, processor, CONFIG, how.pop("seq_length", LENGTH), **rows)
    return list(itertools.islice(build_loader(file, **{"samples": 1, "lanes": WHOLE, **how}), count))


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_workers_and_resuming(processor: Any, chats: Path) -> None:
    """Two workers make the batches of none; from the middle of the second epoch on they are the same."""
    rows = len(MediaRows(ChatFile(chats, processor, CONFIG, LENGTH)).packed)
    assert rows > 3
    alone = batches(chats, processor, 2 * rows)
    assert all(map(same, alone, batches(chats, processor, 2 * rows, workers=2)))
    resumed = batches(chats, processor, rows - 1, consumed_samples=rows + 1, workers=1)
    assert all(map(same, alone[rows + 1 :], resumed))
    first, second = (
        [tuple(one["input_ids"][0].tolist()) for one in half] for half in (alone[:rows], alone[rows:])
    )
    assert first != second and sorted(first) == sorted(second)
    other = batches(chats, processor, rows, seed=7)
    assert sorted(tuple(one["input_ids"][0].tolist()) for one in other) == sorted(first)
    assert not all(map(same, alone, other))


def test_rows_are_the_conversations(processor: Any, chats: Path) -> None:
    """Each conversation is in one row with its own tokens, labels and media, text-only ones among them."""
    found: list[list[int]] = []
    packed = 0
    rows = len(MediaRows(ChatFile(chats, processor, CONFIG, LENGTH)).packed)
    for batch in batches(chats, processor, rows):
        borders = batch["packing_kwargs"]["cu_seqlens_q"].tolist()
        assert borders[0] == 0 and borders[-1] == LENGTH
        packed = max(packed, len(borders))
        pictures = videos = sounds = 0
        for start, end in itertools.pairwise(borders):
            ids = batch["input_ids"][0, start:end]
            if not ids.any():
                continue
            ids = ids[: int(ids.nonzero().max()) + 1]
            number = next(
                i for i, one in enumerate(expected(processor, chats)) if same(one["input_ids"][0], ids)
            )
            one = expected(processor, chats)[number]
            found.append([number])
            here = slice(start, start + len(ids))
            assert batch["position_ids"][0, here].tolist() == list(range(len(ids)))
            assert torch.equal(batch["loss_mask"][0, here], one["loss_mask"][0])
            assert torch.equal(batch["labels"][0, here], one["labels"][0])
            media, ours = one["modality_inputs"], batch["modality_inputs"]
            if seen := media.get("vision"):
                seen, mine = seen["radio"], ours["vision"]["radio"]
                for grid in seen.get("image_grid_hw", torch.zeros(0, 2)).tolist():
                    assert mine["image_grid_hw"][pictures].tolist() == grid
                    pictures += 1
                for video in seen.get("pixel_values_videos", []):
                    assert torch.equal(mine["pixel_values_videos"][videos], video)
                    videos += 1
            if heard := media.get("sound"):
                features = heard["parakeet"]["input_features"]
                whole = ours["sound"]["parakeet"]["input_features"]
                assert torch.equal(whole[sounds : sounds + len(features), : features.shape[1]], features)
                sounds += len(features)
        vision = batch["modality_inputs"].get("vision", {}).get("radio", {})
        assert (pictures, videos) == (len(vision.get("image_grid_hw", ())), len(vision.get("clips", ())))
    assert sorted(found) == [[i] for i in range(len(CHATS))] and packed > 3


_EXPECTED: dict[Path, list[dict[str, Any]]] = {}


def expected(processor: Any, chats: Path) -> list[dict[str, Any]]:
    """Each conversation alone."""
    if chats not in _EXPECTED:
        lines = [json.loads(line)["messages"] for line in chats.read_text().splitlines()]
        _EXPECTED[chats] = [sample(one, processor, CONFIG, folder=chats.parent) for one in lines]
    return _EXPECTED[chats]


def test_rows_are_read_as_the_environment_says(
    processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two forms fit each row, and the template writes a variable; rows are read again for their media."""
    write_media(tmp_path)
    picture = [say("user", part("image", "wide.png")), say("assistant", "apples")]
    row = {"messages": [say("user", "what"), say("assistant", "three")], "prompt": picture[:1]}
    (tmp_path / "both.jsonl").write_text(json.dumps({**row, "completion": picture[1:]}) + "\n")
    write_chats(tmp_path / "one.jsonl", [[part("image", "wide.png")]])
    monkeypatch.setattr(processor, "chat_template", processor.chat_template + "{{ ending }}")

    def rows(name: str) -> MediaRows:
        return MediaRows(ChatFile(tmp_path / name, processor, CONFIG, LENGTH))

    decode, expected = processor.tokenizer.decode, rows("one.jsonl").decoded(0, ("vision",))
    assert decode(rows("both.jsonl").packed.tokens_of(0)).rstrip().endswith("three<|im_end|>")
    with READING.using(Reading.of("prompt", '{"ending": "pears"}')):
        found = rows("both.jsonl")
        assert decode(found.packed.tokens_of(0)).rstrip().endswith("pears")
        assert expected and same(found.decoded(0, ("vision",)), expected)


def test_lanes_share_the_samples(processor: Any, chats: Path) -> None:
    """Two lanes of the language model and four of an encoder have what one lane has, in its order."""
    whole = batches(chats, processor, 2, samples=4, pack=False)
    language = [
        batches(chats, processor, 2, samples=4, pack=False, lanes={"language": (i, 2)}) for i in (0, 1)
    ]
    vision = [batches(chats, processor, 2, samples=4, pack=False, lanes={"vision": (i, 4)}) for i in range(4)]
    for number, one in enumerate(whole):
        for name in ("input_ids", "labels", "loss_mask", "position_ids"):
            assert torch.equal(torch.cat([lane[number][name] for lane in language]), one[name])
        assert all(lane[number]["modality_inputs"] == {} for lane in language)
        assert all(lane[number]["microbatch"] == one["microbatch"] for lane in (*language, *vision))
        seen = [lane[number]["modality_inputs"].get("vision", {}).get("radio", {}) for lane in vision]
        assert all("sound" not in lane[number]["modality_inputs"] for lane in vision)
        expect = one["modality_inputs"]["vision"]["radio"]
        pixels = [lane["pixel_values"] for lane in seen if "pixel_values" in lane]
        assert torch.equal(torch.cat(pixels), expect["pixel_values"])
        videos = [video for lane in seen for video in lane.get("pixel_values_videos", ())]
        assert same(videos, expect.get("pixel_values_videos", []))
        rows = one["microbatch"].rows_of("vision")
        assert rows == tuple((one["input_ids"] == CONFIG.image_token_id).sum(1).tolist())
    assert any("sound" in one["modality_inputs"] for one in whole)


def test_lanes_of_packed_rows(processor: Any, chats: Path) -> None:
    """Colocated: each rank a row of the language model, and the media of both rows or of its own."""
    whole = batches(chats, processor, 2, samples=2, lanes={"vision": (0, 1), "sound": (0, 1)})
    lanes = [
        batches(chats, processor, 2, samples=2, lanes={"language": (i, 2), "vision": (i, 2), "sound": (0, 1)})
        for i in (0, 1)
    ]
    for number, one in enumerate(whole):
        assert torch.equal(torch.cat([lane[number]["input_ids"] for lane in lanes]), one["input_ids"])
        assert one["microbatch"] == lanes[0][number]["microbatch"] == lanes[1][number]["microbatch"]
        assert "packing_kwargs" not in one and "packing_kwargs" in lanes[0][number]
        heard = [x[number]["modality_inputs"].get("sound") for x in (whole, *lanes)]
        assert same(heard[0], heard[1]) and same(heard[0], heard[2])
    feed = RowFeed(iter(lanes[0]), describe)
    assert feed.at(1) == whole[1]["microbatch"] and same(next(feed), lanes[0][0])


def test_documents_stay_apart_in_the_model(processor: Any, chats: Path) -> None:
    """The loss of packed conversations with media is that of each alone."""
    from megatron_nemotron3.boundary.layout import Layout
    from megatron_nemotron3.train.omni.model import build

    one = Layout.of()
    rows = MediaRows(ChatFile(chats, processor, CONFIG, LENGTH))
    number = max(range(len(rows.packed)), key=lambda i: len(rows.packed.members(i)))
    members = rows.packed.members(number)
    assert len(members) > 1
    drawn = batches(chats, processor, len(rows.packed))
    batch = next(b for b in drawn if b["input_ids"][0].tolist() == rows.packed.row(number).tokens.tolist())
    with world_of_one(), torch.no_grad():
        model, _ = build(CONFIG, {"language": one, "vision": one, "sound": one})
        model.eval()
        packed, mask = model(**batch)
        assert torch.equal(mask, batch["loss_mask"])
        start = 0
        for member in members:
            alone = dict(expected(processor, chats)[member])
            length = alone["input_ids"].shape[1]
            loss, mask = model(**alone)
            here = packed[:, start : start + length]
            torch.testing.assert_close(here[mask > 0], loss[mask > 0], atol=2e-4, rtol=0)
            start += length
    assert float(packed[batch["loss_mask"] > 0].std()) > 0


class Collecting(torch.utils.data.Dataset[int]):
    """Collects garbage in the process that makes an item, and counts what was collected there."""

    def __init__(self, collected: list[int]) -> None:
        self.collected = collected

    def __getitem__(self, number: int) -> int:
        gc.collect()
        return len(self.collected)


def test_a_worker_leaves_its_parents_garbage() -> None:
    """A process group among it would wait in the worker for threads that only the parent has."""

    class Garbage:
        def __init__(self, collected: list[int]) -> None:
            self.itself, self.collected = self, collected

        def __del__(self) -> None:
            self.collected.append(1)

    collected: list[int] = []
    gc.disable()
    try:
        Garbage(collected)
        assert list(in_order(Collecting(collected), [0, 1], 1)) == [0, 0]
    finally:
        gc.enable()
    gc.collect()
    assert collected == [1], "the parent collects it as before"


def _half_a_picture(folder: Path) -> list[Any]:
    """A line whose picture cannot be decoded."""
    good = folder / "tall.jpg"
    (folder / "half.jpg").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    return [part("image", "half.jpg")]


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        (2, "half.jpg: not a picture that can be decoded"),
        (0, "its media have [0-9]+ tokens, the sequence has 192"),
    ],
)
def test_check_names_the_line(processor: Any, chats: Path, workers: int, message: str) -> None:
    damaged = _half_a_picture(chats.parent)
    bad = [*CHATS[:3], damaged if workers else [part("image", "tall.jpg")] * 20, *CHATS[3:], damaged]
    path = write_chats(chats.parent / f"bad-{workers}.jsonl", bad)
    with pytest.raises(MediaError, match=rf"^\S*bad-{workers}\.jsonl:4: .*{message}") as raised:
        check(ChatFile(path, processor, CONFIG, LENGTH), workers=workers)
    assert "\n" not in str(raised.value)


def test_a_good_file_passes(processor: Any, chats: Path) -> None:
    text = check(ChatFile(chats, processor, CONFIG, LENGTH))
    assert f"{len(CHATS)} conversations in" in text and "% full" in text


def test_every_rank_raises_the_same(processor: Any, chats: Path, tmp_path: Path) -> None:
    """The second rank decodes the damaged picture; the first raises its error, too."""
    bad = [CHATS[1], _half_a_picture(chats.parent), *CHATS[2:4]]
    path = write_chats(chats.parent / "bad-ranks.jsonl", bad)
    said = ranks(path, processor, tmp_path)
    assert said[0] == said[1] and "bad-ranks.jsonl:2: " in said[0] and "half.jpg" in said[0]


def ranks(path: Path, processor: Any, folder: Path) -> list[str]:
    """What `check` raises on each of two forked ranks."""
    import multiprocessing

    def run(rank: int) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
        )
        try:
            check(ChatFile(path, processor, CONFIG, LENGTH))
            text = "nothing"
        except ValueError as problem:
            text = f"{type(problem).__name__}: {problem}"
        (folder / f"{rank}.txt").write_text(text)
        os._exit(0)

    context = multiprocessing.get_context("fork")
    started = [context.Process(target=run, args=(rank,)) for rank in (0, 1)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    return [(folder / f"{rank}.txt").read_text() for rank in (0, 1)]


def test_an_error_of_a_worker_is_one_line(processor: Any, chats: Path, tmp_path: Path) -> None:
    """A medium that is damaged, or another one, after its tokens were made."""
    write_media(tmp_path)
    path = write_chats(tmp_path / "chats.jsonl", [CHATS[0]])
    check(ChatFile(path, processor, CONFIG, LENGTH))
    (tmp_path / "wide.png").write_bytes((tmp_path / "tall.jpg").read_bytes())
    for workers in (0, 1):
        with pytest.raises(MediaError, match=r"chats\.jsonl:1: its media are not those .*: remove \S*cache"):
            batches(path, processor, 1, workers=workers)
    (tmp_path / "wide.png").unlink()
    with pytest.raises(MediaError, match=r"chats\.jsonl:1: \S*wide.png: there is no such file$"):
        batches(path, processor, 1, workers=1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"samples": 3, "lanes": {"language": (0, 2)}}, "3 samples of a microbatch do not divide among 2"),
        (
            {"samples": 2, "lanes": {"language": (0, 1)}},
            "a lane of 2 packed rows: use a micro-batch size of 1",
        ),
        ({"samples": 2, "consumed_samples": 3, "lanes": {"vision": (0, 1)}}, "3 consumed samples"),
        ({"lanes": {"audio": (0, 1)}}, "lanes of audio: give some of language, vision, sound"),
    ],
)
def test_wrong_sizes(processor: Any, chats: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batches(chats, processor, 1, **how)
