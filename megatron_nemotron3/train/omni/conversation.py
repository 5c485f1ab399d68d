"""A conversation with pictures, sounds and videos as the model's inputs.

    encoder = OmniEncoder(load_processor("HF_DIR"), config)
    ask = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What is it?"}]
    encoded = encoder.encode(Conversation([{"role": "user", "content": ask}], None, "chat"), prompt=True)
    inputs = encoder.decode(encoded.media)

A message's content is a text or a list of parts: {"type": "text", "text": …} or {"type": KIND, "path": FILE}
with KIND image, audio or video, as chat templates of Hugging Face expect. The template writes the name of the
medium's token for each part; transformers' processor replaces it by as many tokens as the medium has rows.
The tokens are computed from the files' headers alone, so conversations are packed before anything is decoded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.train.data.conversations import READING, Conversation, Encoded, Encoder
from megatron_nemotron3.train.omni import media, processor
from megatron_nemotron3.train.omni.media import MediaError

#: Kinds of parts, and the modality that encodes them.
MODALITY = {"image": "vision", "video": "vision", "audio": "sound"}
#: Modality -> name of its encoder in MIMO's model.
ENCODER = {"vision": "radio", "sound": "parakeet"}


@dataclass(frozen=True)
class Medium:
    """A part of a conversation: its file, and what is known of it before it is decoded."""

    kind: str
    path: str
    #: Rows of the encoder, which are positions of the language model.
    rows: int
    #: Patches (rows, columns) of a picture or of a frame; () for a sound.
    grid: tuple[int, ...] = ()
    #: transformers' metadata of a video's frames.
    frames: Any = None

    @property
    def modality(self) -> str:
        return MODALITY[self.kind]


@dataclass(frozen=True)
class WithMedia(Encoded):
    """Tokens of a conversation, and its media in the order of their positions."""

    media: list[Medium]


class OmniEncoder:
    """Tokens of conversations with media, and the media's contents.

    Args:
        processor_: transformers' (`load_processor`, `make_processor`).
        folder: that paths of media are relative to.
        text: makes tokens of conversations, like `Encoder`; default: the chat template does.
        most: tokens that the media of a conversation may have.

    Raises:
        ValueError: processor and model do not fit; as `Encoder`.
    """

    def __init__(
        self,
        processor_: Any,
        config: OmniConfig,
        folder: str | os.PathLike[str] = "",
        text: Any = None,
        most: int | None = None,
    ) -> None:
        processor.check_processor(processor_, config)
        self.processor, self.config, self.folder, self.most = processor_, config, os.fspath(folder), most
        if text is not None:
            self.text = text

    @cached_property
    def text(self) -> Encoder:
        tokenizer = self.processor.tokenizer
        if self.processor.chat_template is not None:
            tokenizer.chat_template = self.processor.chat_template
        return Encoder(tokenizer, variables=READING.current().variables, media=True)

    def encode(self, conversation: Conversation, prompt: bool = False) -> WithMedia:
        """Tokens of a conversation; `prompt`: with the beginning of the assistant's next turn.

        Raises:
            MediaError: a medium cannot be used, a medium has no token or a token no medium, or a text has the
                name of a medium's token.
        """
        try:
            return self._encode(conversation, prompt)
        except MediaError as problem:
            raise MediaError(f"{conversation.place}: {problem}") from None

    def key(self) -> bytes:
        """Changes with what the tokens depend on, but for the media's files."""
        given = self.processor
        sizes = [
            part.to_dict() if part is not None else None
            for part in (given.image_processor, given.video_processor, given.feature_extractor)
        ]
        rest = [given.tokenizer.backend_tokenizer.to_str(), self.text.tokenizer.chat_template]
        rest += [self.config.encoders_json(), os.path.abspath(self.folder), self.most]
        return hashlib.sha256(json.dumps([sizes, rest], default=str).encode()).digest()

    def decode(self, found: Sequence[Medium], place: str = "") -> dict[str, Any]:
        """`modality_inputs` of media, in the order of their positions; {} without any.

        Raises:
            MediaError: a medium cannot be decoded, or changed since its header was read.
        """
        try:
            made = {"vision": self._vision(found), "sound": self._sound(found)}
        except MediaError as problem:
            raise MediaError(f"{place}: {problem}" if place else str(problem)) from None
        return {name: {ENCODER[name]: inputs} for name, inputs in made.items() if inputs}

    def _encode(self, conversation: Conversation, prompt: bool) -> WithMedia:
        given = self.processor
        names = processor.names_of(given)
        parts = list(_media_parts(conversation, names))
        pictures = sum(kind == "image" for kind, _ in parts)
        found = {kind: [] for kind in names}  # type: dict[str, list[Medium]]
        for kind, path in parts:
            found[kind].append(self._header(kind, os.path.join(self.folder, path), pictures))
        rows = sum(one.rows for of_kind in found.values() for one in of_kind)
        if self.most is not None and rows > self.most:
            raise MediaError(
                f"its media have {rows:,} tokens, the sequence has {self.most:,}: take smaller or shorter "
                "media, or a longer sequence"
            )
        text, spans = (self.text.prompt(conversation), []) if prompt else self.text.text(conversation)
        for kind, name in names.items():
            if (count := text.count(name)) != len(found[kind]):
                raise MediaError(
                    f"the chat template wrote {name} {count} times for {len(found[kind])} parts of type "
                    f"{kind!r}"
                )
        words = {kind: [self._token_text(one) for one in found[kind]] for kind in names}
        (text,), (moves,) = (
            given.get_text_with_replacements([text], words["image"], words["video"], words["audio"])
            if parts
            else ((text,), ((),))
        )
        spans = [(_moved(start, moves), _moved(end, moves)) for start, end in spans]
        encoded = self.text.tokens(text, spans)
        special = {token: modality for modality, token in self.config.special_ids().items()}
        ordered = [found[move["type"]].pop(0) for move in moves]
        for token, modality in special.items():
            rows = sum(one.rows for one in ordered if one.modality == modality)
            if encoded.ids.count(token) != rows:
                raise MediaError(
                    f"{encoded.ids.count(token)} tokens of id {token} for {rows} rows of the {modality} "
                    "encoder: the tokenizer does not know the processor's tokens"
                )
        trained = [here and token not in special for token, here in zip(encoded.ids, encoded.trained)]
        return WithMedia(encoded.ids, trained, ordered, remarks=encoded.remarks)

    def _header(self, kind: str, path: str, pictures: int) -> Medium:
        given, merged = self.processor, self.config.vision.merged_patches**2
        if kind == "image":
            size = media.picture_size(path)
            try:
                rows, columns = processor.picture_grid(given, size, pictures)
            except MediaError as problem:
                raise MediaError(f"{path}: {problem}") from None
            return Medium(kind, path, rows * columns // merged, (rows, columns))
        if kind == "video":
            video = media.video_size(path)
            frames = processor.frames_of(given, video)
            rows, columns = processor.frame_grid(given, video)
            each = self.config.vision.temporal_patch_size
            groups = -(-len(frames.frames_indices) // each)
            return Medium(kind, path, groups * (rows * columns // merged), (rows, columns), frames)
        if self.config.sound is None:
            raise MediaError(f"{path}: {self.config.name} has no sound encoder")
        length = media.sound_length(path, given.feature_extractor.sampling_rate)
        return Medium(kind, path, processor.sound_rows(given, length))

    def _token_text(self, one: Medium) -> str:
        given = self.processor
        if one.kind == "image":
            return str(given.replace_image_token({"image_grid_hw": [torch.tensor(one.grid)]}, 0))
        if one.kind == "audio":
            return str(given.replace_audio_token({"num_tokens": [one.rows]}, 0))
        vision, (rows, columns) = self.config.vision, one.grid
        count, each = len(one.frames.frames_indices), rows * columns // vision.merged_patches**2
        groups, side = -(-count // vision.temporal_patch_size), vision.patch_size
        pixels = torch.empty(1, groups, 3, rows * side, columns * side, device="meta")
        # transformers 5.23 takes the two as arguments; 5.24 finds them, and the pixels' shape, in the inputs.
        arguments = {"num_frames": count, "video_metadata": one.frames}
        sizes = {"num_tokens": [each], "pixel_values_videos": pixels}
        sizes |= {name: [value] for name, value in arguments.items()}
        return str(given.replace_video_token(sizes, 0, **arguments))

    def _vision(self, found: Sequence[Medium]) -> dict[str, Any]:
        visual = [one for one in found if one.modality == "vision"]
        pictures = [one for one in visual if one.kind == "image"]
        clips = [one for one in visual if one.kind == "video"]
        inputs: dict[str, Any] = {}
        if pictures:
            loaded = [media.load_picture(one.path) for one in pictures]
            made = self.processor.image_processor(images=loaded, return_tensors="pt")
            for one, grid in zip(pictures, made["image_grid_hw"].tolist(), strict=True):
                _unchanged(one, tuple(grid))
            inputs |= {name: made[name] for name in ("pixel_values", "image_grid_hw")}
        if clips:
            frames = [self._frames(one) for one in clips]
            each = self.config.vision.temporal_patch_size
            inputs["pixel_values_videos"] = frames
            inputs["clips"] = torch.tensor([len(one) // each for one in frames])
        if pictures and clips:
            places = {id(one): i for i, one in enumerate(visual)}
            inputs["order"] = torch.tensor([places[id(one)] for one in (*pictures, *clips)])
        return inputs

    def _frames(self, one: Medium) -> Tensor:
        """Frames of a video, the last one repeated to a multiple of the temporal patch as the model does."""
        loaded = media.load_video(one.path, one.frames.frames_indices)
        made = self.processor.video_processor(
            videos=[loaded],
            video_metadata=[one.frames],
            do_sample_frames=False,
            input_data_format="channels_last",
            return_tensors="pt",
        )["pixel_values_videos"]
        # transformers 5.23: [frames, 3, height, width]; 5.24: [1, groups, group * 3, height, width], where it
        # has repeated the last frame.
        made = made.reshape(-1, 3, *made.shape[-2:])[: len(one.frames.frames_indices)]
        side = self.config.vision.patch_size
        _unchanged(one, (made.shape[2] // side, made.shape[3] // side))
        short = -len(made) % self.config.vision.temporal_patch_size
        return torch.cat([made, made[-1:].expand(short, -1, -1, -1)])

    def _sound(self, found: Sequence[Medium]) -> dict[str, Any]:
        sounds = [one for one in found if one.kind == "audio"]
        if not sounds:
            return {}
        extractor = self.processor.feature_extractor
        rate = extractor.sampling_rate
        loaded = [media.load_sound(one.path, rate) for one in sounds]
        for one, samples in zip(sounds, loaded, strict=True):
            if (rows := processor.sound_rows(self.processor, len(samples))) != one.rows:
                raise MediaError(f"{one.path}: {rows} rows, {one.rows} by its header: the file changed")
        made = extractor(loaded, sampling_rate=rate, return_tensors="pt")
        return {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}


def join(inputs: Iterable[dict[str, Any]], modality: str) -> dict[str, Any]:
    """Join `modality_inputs` of several conversations, in their order; {} if none has the modality."""
    parts = [one[modality][ENCODER[modality]] for one in inputs if modality in one]
    if not parts:
        return {}
    if modality == "sound":
        longest = max(one["input_features"].shape[1] for one in parts)
        return {ENCODER[modality]: {name: _padded(parts, name, longest) for name in parts[0]}}
    made: dict[str, Any] = {}
    for name in ("pixel_values", "image_grid_hw", "clips"):
        if given := [one[name] for one in parts if name in one]:
            made[name] = torch.cat(given)
    if videos := [video for one in parts for video in one.get("pixel_values_videos", ())]:
        made["pixel_values_videos"] = videos
    if "image_grid_hw" in made and "clips" in made:
        places: tuple[list[int], list[int]] = [], []
        before = 0
        for one in parts:
            pictures, clips = len(one.get("image_grid_hw", ())), len(one.get("clips", ()))
            order = one["order"].tolist() if "order" in one else range(pictures + clips)
            places[0].extend(before + i for i in order[:pictures])
            places[1].extend(before + i for i in order[pictures:])
            before += pictures + clips
        made["order"] = torch.tensor([*places[0], *places[1]])
    return {ENCODER[modality]: made}


def _padded(parts: Sequence[dict[str, Tensor]], name: str, longest: int) -> Tensor:
    """Join along the clips; what is padded is 0."""
    made = []
    for one in parts:
        tensor = one[name]
        new = tensor.new_zeros(len(tensor), longest, *tensor.shape[2:])
        new[:, : tensor.shape[1]] = tensor
        made.append(new)
    return torch.cat(made)


def _media_parts(conversation: Conversation, names: dict[str, str]) -> Iterable[tuple[str, str]]:
    for number, message in enumerate(conversation.messages, 1):
        content = message.get("content")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                for name in names.values():
                    if name in part["text"]:
                        raise MediaError(
                            f"the text of message {number} contains {name}, which stands for a medium: take "
                            "it out, or give a part with a path"
                        )
            elif kind in MODALITY and isinstance(path := part.get("path", part.get(str(kind))), str):
                yield str(kind), path
            else:
                raise MediaError(
                    f'message {number}: a part is {{"type": "text", "text": …}} or {{"type": '
                    f'"{" | ".join(MODALITY)}", "path": FILE}}, not {str(part)[:80]}'
                )


def _moved(place: int, moves: Sequence[dict[str, Any]]) -> int:
    """Where a place in a text is after its replacements."""
    return place + sum(
        len(move["replacement"]) - len(move["text"]) for move in moves if move["span"][1] <= place
    )


def _unchanged(one: Medium, grid: tuple[int, ...]) -> None:
    if grid != one.grid:
        raise MediaError(f"{one.path}: {grid} patches, {one.grid} by its header: the file changed")
