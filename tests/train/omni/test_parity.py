"""Logits and gradients of our Omni model equal transformers' for every kind of medium, in FP32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_nemotron3.models.omni import get_omni
from tests.support import parity
from tests.support.model_mapping import to_transformers
from tests.support.omni_oracle import Media, pair, parts, without_mtp
from tests.support.world import world_of_one

MODEL = get_omni("nano-omni-tiny")
IMAGE, SOUND = 18, 27
SEED = 24
#: Patches [height, width] of pictures: tall, wide, as large as the stored positions, and larger.
GRIDS = [[4, 6], [2, 8], [8, 8], [6, 2], [4, 10]]


def _text(length: int, seed: int) -> list[int]:
    return torch.randint(30, 2048, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def _pictures(*which: int) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Patches [n, 3 * 16 * 16] and grids of pictures, and the ids of each."""
    grids = [GRIDS[i] for i in which]
    ids = [[IMAGE] * (height * width // 4) for height, width in grids]
    return _random(sum(h * w for h, w in grids), 3 * 16 * 16), torch.tensor(grids), ids


def _videos(*shapes: tuple[int, int, int]) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Frames of videos of (frames, height, width), and the ids of each."""
    videos = [_random(frames, 3, height, width) for frames, height, width in shapes]
    return videos, [[IMAGE] * (f // 2 * (h // 32) * (w // 32)) for f, h, w in shapes]


def _sounds(*frames: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Spectrograms as a processor pads them, one frame longer than their masks, and the ids of each."""
    longest = max(frames) + 1
    heard = torch.arange(longest)[None] < torch.tensor(frames)[:, None]
    given = {"input_features": _random(len(frames), longest, 32), "input_features_mask": heard}
    return given, [[SOUND] * _rows(n + 1) for n in frames]


def _rows(frames: int) -> int:
    """Positions of a spectrogram: three halvings."""
    for _ in range(3):
        frames = (frames - 1) // 2 + 1
    return frames


def _joined(*media: list[int]) -> list[int]:
    """Media with text of its own before each and behind the last."""
    lengths = [5, 7, 3, 2, 9, 4, 6, 8, 3]
    ids = [id for n, medium in enumerate(media) for id in (*_text(lengths[n], n), *medium)]
    return [*ids, *_text(4, 99)]


def media_of(kind: str) -> Media:
    """Sequences [b, s] with media of a kind."""
    if kind == "text":
        return Media(torch.tensor([_text(40, 1)]))
    if kind == "images":
        pixels, grids, ids = _pictures(0, 1, 2, 3, 4)
        return Media(torch.tensor([_joined(*ids)]), pixels, grids)
    if kind == "videos":
        videos, ids = _videos((4, 64, 96), (2, 128, 32), (6, 32, 64))
        return Media(torch.tensor([_joined(*ids)]), videos=videos)
    if kind == "sound":
        given, clips = _sounds(100, 60, 64)
        return Media(torch.tensor([_joined(*clips)]), **given)
    if kind == "mixture":
        pixels, grids, (one, two) = _pictures(0, 1)
        given, (long, short) = _sounds(100, 60)
        return Media(torch.tensor([_joined(long, one, short, two)]), pixels, grids, **given)
    if kind == "everything":
        pixels, grids, (one, two, three) = _pictures(0, 3, 2)
        videos, (film, clip) = _videos((4, 64, 96), (2, 32, 64))
        given, (long, short) = _sounds(100, 61)
        row = _joined(film, one, long, two, clip, three, short)
        return Media(torch.tensor([row]), pixels, grids, videos, torch.tensor([1, 2, 4, 0, 3]), **given)
    assert kind == "batch"
    # Two samples; the second begins with a picture and ends with a sound.
    pixels, grids, (one, two) = _pictures(0, 1)
    videos, (film,) = _videos((4, 32, 64))
    given, (long, short) = _sounds(80, 40)
    first, second = _joined(one, long, film), [*two, *_text(3, 5), *short]
    second = [*second[:-1], *_text(len(first) - len(second), 6), second[-1]]
    order = torch.tensor([0, 2, 1])
    return Media(torch.tensor([first, second]), pixels, grids, videos, order, **given)


@pytest.fixture(scope="module")
def models() -> Iterator[tuple[Any, Any]]:
    assert MODEL is not None
    with world_of_one():
        yield pair(MODEL, SEED)


@pytest.mark.parametrize("kind", ["images", pytest.param("videos", marks=pytest.mark.full)])
def test_super_vl(kind: str) -> None:
    """Without sound, and with a norm behind the vision encoder, which transformers builds with MTP."""
    model = get_omni("super-vl-tiny")
    assert model is not None and model.language.has_mtp
    with world_of_one():
        both = pair(model, SEED)
        test_logits_and_gradients(both, kind)
        norm = both[0].modality_submodules["vision"].encoders["radio"].final_layernorm
        with torch.no_grad():
            norm.weight[0] += 0.5  # and it matters
        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            test_logits_and_gradients(both, kind)


KINDS = ("text", "images", "videos", "sound", "mixture", "everything", "batch")
QUICK = ("text", "images", "everything", "batch")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.full) for kind in KINDS]
)
def test_logits_and_gradients(models: tuple[Any, Any], kind: str) -> None:
    ours, theirs = models
    media = media_of(kind)
    positions = torch.arange(media.ids.shape[1])[None].expand_as(media.ids)
    inputs = media.ours()
    with torch.no_grad():
        logits, _ = ours(input_ids=media.ids, position_ids=positions, modality_inputs=inputs)
        expected = theirs(**media.theirs(theirs)).logits
    torch.testing.assert_close(logits, expected, atol=parity.LOGITS_ATOL, rtol=0)

    ours.zero_grad()
    theirs.zero_grad()
    loss, _ = ours(
        input_ids=media.ids,
        position_ids=positions,
        labels=media.labels,
        loss_mask=torch.ones(media.ids.shape),
        modality_inputs=inputs,
    )
    loss.mean().backward()
    logits = theirs(**media.theirs(theirs)).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), media.labels.flatten()).backward()
    assert check_gradients(ours, theirs) - {"vision_final_layernorm"} == {"language_model"} | {
        part
        for medium, names in (
            (media.pixel_values is not None or media.videos, ("vision_model", "multi_modal_projector")),
            (media.input_features is not None, ("audio_tower", "embed_audio")),
        )
        for part in names
        if medium
    }


def test_documents_in_one_row(models: tuple[Any, Any]) -> None:
    """Packed conversations are the conversations one by one: Mamba's state and attention end with each."""
    ours, theirs = models
    documents = [media_of(kind) for kind in ("mixture", "text", "everything", "videos")]
    lengths = [document.ids.shape[1] for document in documents]
    theirs.zero_grad()
    expected = []
    for document in documents:
        logits = theirs(**document.theirs(theirs)).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), document.labels.flatten(), reduction="sum"
        ).backward()
        expected.append(logits.detach())

    borders = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = torch.tensor(max(lengths), dtype=torch.int32)
    row = packed(documents)
    common = {
        "input_ids": row.ids,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "modality_inputs": row.ours(),
        "packing_kwargs": {f"cu_seqlens_{side}": borders for side in ("q", "kv")}
        | {f"max_seqlen_{side}": longest for side in ("q", "kv")},
    }
    ours.zero_grad()
    with torch.no_grad():
        logits, _ = ours(**common)
    torch.testing.assert_close(logits, torch.cat(expected, 1), atol=parity.LOGITS_ATOL, rtol=0)
    loss, _ = ours(**common, labels=torch.cat([document.labels for document in documents], 1))
    loss.sum().backward()
    assert len(check_gradients(ours, theirs)) == 5
    with torch.no_grad():  # a row without borders is another computation
        unlike, _ = ours(**{**common, "packing_kwargs": None})
    assert float((unlike - logits)[:, lengths[0] :].abs().max()) > 100 * parity.LOGITS_ATOL
    torch.testing.assert_close(unlike[:, : lengths[0]], logits[:, : lengths[0]], atol=1e-4, rtol=0)


def packed(documents: list[Media]) -> Media:
    """One row of several; sounds are padded to the longest."""
    pictures = [d for d in documents if d.pixel_values is not None]
    counts = [0 if d.image_grid_hw is None else len(d.image_grid_hw) for d in documents]
    places, films, before = [], [], 0
    for document, count in zip(documents, counts, strict=True):
        own = torch.arange(count + len(document.videos)) if document.order is None else document.order
        places += (before + own[:count]).tolist()
        films += (before + own[count:]).tolist()
        before += len(own)
    clips = [d for d in documents if d.input_features is not None]
    longest = max(d.input_features.shape[1] for d in clips if d.input_features is not None)

    def filled(values: Any) -> torch.Tensor:
        pad = [0] * (2 * (values.dim() - 2)) + [0, longest - values.shape[1]]
        return torch.nn.functional.pad(values, pad)

    return Media(
        torch.cat([d.ids for d in documents], 1),
        torch.cat([d.pixel_values for d in pictures if d.pixel_values is not None]),
        torch.cat([d.image_grid_hw for d in pictures if d.image_grid_hw is not None]),
        [video for d in documents for video in d.videos],
        torch.tensor(places + films),
        torch.cat([filled(d.input_features) for d in clips]),
        torch.cat([filled(d.input_features_mask) for d in clips]),
    )


def check_gradients(ours: Any, theirs: Any) -> set[str]:
    """Compare every parameter's gradient relative to its own norm; return the parts that have gradients."""
    model = MODEL if "sound" in ours.modality_submodules else get_omni("super-vl-tiny")
    assert model is not None
    compared = set()
    found = {
        f"{part}.{name}": p.grad
        for part, module in parts(ours).items()
        for name, p in module.named_parameters()
    }
    language = {n: p.grad for n, p in ours.language_model.named_parameters()}
    found |= {
        f"language_model.{n}": g for n, g in to_transformers(language, without_mtp(model).language).items()
    }
    largest = max(float(g.abs().max()) for g in found.values() if g is not None)
    for name, parameter in theirs.named_parameters():
        if "layer_scale" in name:  # 1 in every released model, and no parameter of ours
            continue
        got, want = found[name], parameter.grad
        if want is None or not want.any():
            assert got is None or not got.any(), name
            continue
        assert got is not None, name
        if name.startswith("vision_model.") and name.endswith(".k_proj.bias"):
            # Adds q b to all scores of a query, which its softmax does not see: the gradient is 0, and what
            # both sides have is rounding.
            assert max(float(g.abs().max()) for g in (got, want)) < 1e-7 * largest, name
            continue
        assert float((got - want).norm()) <= parity.GRADIENT_RTOL * float(want.norm()), name
        compared.add(name.split(".")[0])
    return compared
