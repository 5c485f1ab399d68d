"""What `build` makes besides the layouts: precision, frozen parts, initial weights, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.models.omni import get_omni
from megatron_nemotron3.train.omni.encoders import Projector, SoundEncoder, VisionEncoder
from megatron_nemotron3.train.omni.model import LANGUAGE, SOUND, VISION, build
from tests.support.omni_oracle import pair
from tests.train.omni.test_parity import media_of

pytestmark = pytest.mark.usefixtures("world")
MODEL = get_omni("nano-omni-tiny")
ONE = dict.fromkeys((LANGUAGE, VISION, SOUND), Layout.of())


@pytest.mark.full
def test_bfloat16_is_that_of_transformers() -> None:
    """Encoders bit for bit; the whole model as close to FP32 as transformers' model is.

    Rounding sends some tokens to another expert, which moves their logits and those after them by far more
    than rounding itself; where it does depends on the CPU's kernels. So the quarter of the positions with the
    smallest errors is compared, over several models.
    """
    errors = torch.cat([torch.stack(errors_of_bfloat16(seed), 1) for seed in range(24, 28)])
    ours, theirs = errors.quantile(0.25, dim=0).tolist()
    assert ours < 1.25 * theirs


def errors_of_bfloat16(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative errors of the logits of every position, ours and transformers'. Checks the encoders' rows."""
    assert MODEL is not None
    whole, theirs = pair(MODEL, seed)
    ours, _ = build(MODEL, ONE, precision="bf16")
    ours.eval().load_state_dict(whole.state_dict(), strict=False)
    assert {p.dtype for p in ours.modality_submodules.parameters()} == {torch.bfloat16}
    frequencies = theirs.audio_tower.encode_positions.inv_freq
    theirs.bfloat16()
    # As after from_pretrained, and so that both sides choose the same kernels.
    theirs.audio_tower.encode_positions.inv_freq = frequencies
    theirs.vision_model.config.dtype = torch.bfloat16
    theirs.set_attn_implementation({"vision_config": "sdpa", "audio_config": "sdpa"})
    media = media_of("mixture")
    given = media.ours()
    assert media.input_features_mask is not None
    with torch.no_grad():
        rows = ours.exchange_rows(given, None, media.ids)
        seen = theirs.get_image_features(media.pixel_values, media.image_grid_hw)
        heard = theirs.get_audio_features(media.input_features, media.input_features_mask)
        encoder = ours.modality_submodules[SOUND].encoders["parakeet"]
        assert torch.equal(rows[VISION], torch.cat(seen.pooler_output))
        hidden = heard.last_hidden_state
        lengths = encoder._get_subsampling_output_length(media.input_features_mask.sum(-1) + 1)
        kept = hidden[torch.arange(hidden.shape[1]) < lengths[:, None]]
        assert torch.equal(encoder(**given[SOUND]["parakeet"]), kept)
        # Their projector multiplies the padding, too, which on a CPU may change the last bit of a product.
        assert relative(rows[SOUND], heard.pooler_output).max() < 2**-8

        exact, _ = whole(media.ids, modality_inputs=given)
        half, _ = ours(media.ids, modality_inputs=given)
        expected = theirs(**media.theirs(theirs)).logits
    return relative(half, exact), relative(expected, exact)


def relative(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of every row."""
    return ((found.float() - expected).norm(dim=-1) / expected.float().norm(dim=-1)).flatten()


def test_frozen_parts_have_no_gradients() -> None:
    """The gradients of the rest are those of the model that trains everything."""
    assert MODEL is not None
    media = media_of("everything")
    gradients = []
    for frozen in ((), (VISION, SOUND, "sound-projector")):
        model, _ = build(MODEL, ONE, frozen=frozen)
        model.eval()
        loss, _ = model(media.ids, labels=media.labels, modality_inputs=media.ours())
        loss.mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert set(gradients[-1]) == {name for name, p in model.named_parameters() if p.requires_grad}
    trained, some = gradients
    assert set(some) == {
        name for name in trained if "encoders" not in name and "sound.input_projections" not in name
    }
    for name, gradient in some.items():
        # A norm sums in another order if its input needs no gradient.
        assert relative(gradient.flatten(), trained[name].flatten()) < 1e-5, name


@pytest.mark.parametrize("part", [LANGUAGE, "vision-projector"])  # the others: above
def test_each_part_can_be_frozen(part: str) -> None:
    assert MODEL is not None
    model, _ = build(MODEL, ONE, frozen=[part])
    projector = "modality_submodules.vision.input_projections."
    place = "language_model." if part == LANGUAGE else projector
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(place), name
    # What a router counts would move its bias.
    frozen = {m.frozen_expert_bias for m in model.modules() if hasattr(m, "frozen_expert_bias")}
    assert frozen == {part == LANGUAGE}


def test_initial_encoders_do_not_depend_on_other_modules() -> None:
    """Ranks without vision draw the same weights for sound."""
    assert MODEL is not None and MODEL.sound is not None
    model, _ = build(MODEL, ONE, seed=5)
    vision, sound = model.modality_submodules[VISION], model.modality_submodules[SOUND]
    torch.manual_seed(99)
    alone: dict[str, tuple[Any, Any]] = {
        "sound": (SoundEncoder(MODEL.sound, seed=5), sound.encoders["parakeet"]),
        "vision": (VisionEncoder(MODEL.vision, seed=5), vision.encoders["radio"]),
    }
    size = MODEL.sound.hidden_size, MODEL.sound_projector_size, MODEL.language.hidden_size
    alone["projector"] = Projector(*size, seed=5), sound.input_projections[0]
    for found, expected in alone.values():
        for (name, a), (_, b) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("layouts", "options", "message"),
    [
        ({LANGUAGE: Layout.of()}, {}, "layouts of language: give those of language, vision, sound"),
        ({**ONE, "video": Layout.of()}, {}, "give those of language, vision, sound"),
        (ONE, {"frozen": ["encoder"]}, "frozen: encoder: no part of the model; use language, vision, "),
        (ONE, {"ep": 3}, "EP 3 x ETP 1 do not divide the 1 neighboring ranks of a stage"),
    ],
)
def test_refused(layouts: dict[str, Layout], options: dict[str, Any], message: str) -> None:
    assert MODEL is not None
    with pytest.raises(ValueError, match=message):
        build(MODEL, layouts, **options)


def test_a_model_without_sound() -> None:
    assert MODEL is not None
    model, groups = build(
        MODEL.but(sound=None, sound_token_id=None), {LANGUAGE: Layout.of(), VISION: Layout.of()}
    )
    assert list(model.modality_submodules) == [VISION] and set(groups) == {LANGUAGE, VISION}
    media = media_of("images")
    with torch.no_grad():
        logits, _ = model(media.ids, modality_inputs=media.ours())
    assert logits.shape == (*media.ids.shape, MODEL.language.vocab_size)


PIXELS, FRAMES = torch.zeros(24, 768), torch.zeros(4, 3, 32, 64)
GRID = torch.tensor([[4, 6]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "without pictures and videos"),
        ({"pixel_values": PIXELS}, "pixel_values without its counterpart"),
        ({"pixel_values": PIXELS[:20], "image_grid_hw": GRID}, "24 patches of 1 pictures, but .* has 20"),
        ({"pixel_values": PIXELS[:, 1:], "image_grid_hw": GRID}, "give patches of 768 numbers"),
        (
            {"pixel_values": PIXELS, "image_grid_hw": torch.tensor([[3, 8]])},
            "3 x 8 patches: .* multiples of 2",
        ),
        ({"pixel_values_videos": FRAMES, "clips": torch.tensor([1, 2])}, r"clips=\[1, 2\]: 6 frames, but"),
        (
            {"pixel_values_videos": [FRAMES[:3]]},
            r"frames \[3, 3, 32, 64\] of a video: .* multiple of 2 frames",
        ),
        ({"pixel_values_videos": [FRAMES[..., :48]]}, "multiples of 32 pixels"),
        ({"pixel_values_videos": [FRAMES[:, :1]]}, r"give \[frames, 3, height, width\]"),
        (
            {"pixel_values_videos": [FRAMES, FRAMES], "order": torch.tensor([0, 2])},
            r"order=\[0, 2\] for 2 pictures and videos: give each of 0 to 1 once",
        ),
    ],
)
def test_vision_input_that_does_not_fit(given: dict[str, Any], message: str) -> None:
    assert MODEL is not None
    with pytest.raises(ValueError, match=message):
        VisionEncoder(MODEL.vision)(**given)


@pytest.mark.parametrize(
    ("features", "mask"), [((2, 40, 128), (2, 40)), ((2, 40, 32), (2, 41)), ((40, 32), (40,))]
)
def test_sound_input_that_does_not_fit(features: tuple[int, ...], mask: tuple[int, ...]) -> None:
    assert MODEL is not None and MODEL.sound is not None
    with pytest.raises(ValueError, match=r"give \[clips, frames, 32\] and \[clips, frames\]"):
        SoundEncoder(MODEL.sound)(torch.zeros(features), torch.ones(mask, dtype=torch.bool))


def test_videos_in_one_tensor_are_those_in_a_list() -> None:
    assert MODEL is not None
    encoder = VisionEncoder(MODEL.vision, seed=1).eval()
    films = [torch.randn(n, 3, 32, 64, generator=torch.Generator().manual_seed(n)) for n in (4, 2)]
    with torch.no_grad():
        for order in (torch.tensor([1, 0]), None):
            together = encoder(pixel_values_videos=torch.cat(films), clips=torch.tensor([2, 1]), order=order)
            apart = encoder(pixel_values_videos=films, order=order)
            torch.testing.assert_close(together, apart)
