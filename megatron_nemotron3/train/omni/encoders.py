"""The encoders and projectors of an Omni model: transformers' RADIO and Parakeet.

Each encoder gives rows [n, width], one for each position of its token, in the order of the media. A rank of
the encoder computes whole media; with tensor parallelism every rank of it computes the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import ParakeetEncoder, ParakeetEncoderConfig, RadioConfig, RadioModel

from megatron_nemotron3.models.omni import OmniConfig, Sound, Vision


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from a generator of its own; None: from torch's."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def draw_weights(module: nn.Module) -> None:
    """Draw initial weights with variance 1 / fan-in, which suit any width."""
    # transformers' deviation of 0.02 is for widths of 1000. In the tiny model Parakeet's convolutions then
    # pass 6e-8 of a sound on, and RADIO's positions are 4 % of its patches.
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("position_embedding", "cls_register_token")):
                parameter.normal_(0, 0.5)
            elif name.endswith(("bias_u", "bias_v")):
                parameter.normal_(0, 0.1)
            elif parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)


class VisionEncoder(RadioModel):
    """RADIO over pictures of any size and over frames of videos; the pixel shuffle joins 2 x 2 patches.

    Parameters have the names of transformers' `RadioModel`, which has scales of its layers' outputs besides:
    they are 1 and are not stored in released checkpoints.
    """

    def __init__(self, sizes: Vision, seed: int | None = None) -> None:
        with seeded(seed):
            super().__init__(radio_config(sizes))
            draw_weights(self)
        self.sizes = sizes
        self.make_preprocessor_external()
        size, epsilon = sizes.hidden_size, sizes.layernorm_epsilon
        self.final_layernorm = nn.LayerNorm(size, epsilon) if sizes.final_layernorm else nn.Identity()
        for layer in self.encoder.layer:
            layer.layer_scale1 = layer.layer_scale2 = nn.Identity()
        self.register_buffer("summary_idxs", self.summary_idxs, persistent=False)

    def forward(
        self,
        pixel_values: Tensor | None = None,
        image_grid_hw: Tensor | None = None,
        pixel_values_videos: Tensor | Sequence[Tensor] | None = None,
        clips: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Tensor:
        media: list[Tensor] = []
        if pixel_values is not None or image_grid_hw is not None:
            grids = self._grids(pixel_values, image_grid_hw)
            assert pixel_values is not None
            features = super().forward(pixel_values.to(self.dtype), image_grid_hw=image_grid_hw).features
            parts = features.split([height * width for height, width in grids])
            media += [self._merged(part[None], *grid) for part, grid in zip(parts, grids, strict=True)]
        if isinstance(pixel_values_videos, Tensor):
            groups = [] if clips is None else clips.tolist()
            frames = sum(groups) * self.sizes.temporal_patch_size
            if frames != len(pixel_values_videos):
                raise ValueError(
                    f"clips={groups}: {frames} frames, but pixel_values_videos has "
                    f"{len(pixel_values_videos)}: give the groups of {self.sizes.temporal_patch_size} frames "
                    "of each video"
                )
            rows = self._clips(pixel_values_videos)
            each = rows.shape[0] // sum(groups)
            media += rows.split([each * count for count in groups])
        elif pixel_values_videos is not None:
            media += [self._clips(video) for video in pixel_values_videos]
        if not media:
            raise ValueError("input of the vision encoder without pictures and videos: leave it out")
        if order is not None:
            places = order.tolist()
            if sorted(places) != list(range(len(media))):
                raise ValueError(
                    f"order={places} for {len(media)} pictures and videos: give each of 0 to "
                    f"{len(media) - 1} once"
                )
            media = [media[places.index(place)] for place in range(len(media))]
        return torch.cat(media)

    def _grids(self, pixel_values: Tensor | None, image_grid_hw: Tensor | None) -> list[list[int]]:
        """Check pictures and return the patches [height, width] of each."""
        if pixel_values is None or image_grid_hw is None:
            given = "pixel_values" if image_grid_hw is None else "image_grid_hw"
            raise ValueError(f"{given} without its counterpart: give pixel_values and image_grid_hw")
        grids: list[list[int]] = image_grid_hw.tolist()
        width, m = 3 * self.sizes.patch_size**2, self.sizes.merged_patches
        if pixel_values.shape[1:] != (width,):
            raise ValueError(
                f"pixel_values {list(pixel_values.shape)}: give patches of {width} numbers, 3 colors of "
                f"{self.sizes.patch_size} x {self.sizes.patch_size} pixels"
            )
        if (patches := sum(h * w for h, w in grids)) != len(pixel_values):
            raise ValueError(
                f"image_grid_hw describes {patches} patches of {len(grids)} pictures, but pixel_values has "
                f"{len(pixel_values)}"
            )
        if odd := next((grid for grid in grids if grid[0] % m or grid[1] % m or min(grid) < 1), None):
            raise ValueError(f"a picture of {odd[0]} x {odd[1]} patches: both must be multiples of {m}")
        return grids

    def _clips(self, frames: Tensor) -> Tensor:
        """Encode groups of frames: [groups * temporal patch, 3, height, width] -> [rows, 4 * hidden]."""
        together, side = self.sizes.temporal_patch_size, self.sizes.patch_size
        unit = side * self.sizes.merged_patches
        shape = list(frames.shape)
        fits = len(shape) == 4 and shape[1] == 3 and shape[0] and not shape[0] % together
        if not fits or any(size < unit or size % unit for size in shape[2:]):
            raise ValueError(
                f"frames {shape} of a video: give [frames, 3, height, width] with a multiple of {together} "
                f"frames, and multiples of {unit} pixels"
            )
        _, channels, height, width = shape
        packed = frames.to(self.dtype).reshape(-1, channels * self.sizes.temporal_patch_size, height, width)
        return self._merged(super().forward(packed).features, height // side, width // side)

    def _merged(self, features: Tensor, height: int, width: int) -> Tensor:
        """Join m x m patches: [n, height * width, h] -> [n * rows, m * m * h], channels in RADIO's order."""
        n, m = features.shape[0], self.sizes.merged_patches
        cut = self.final_layernorm(features).view(n, height // m, m, width // m, m, -1)
        return cut.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.sizes.merged_size)


class SoundEncoder(ParakeetEncoder):
    """Parakeet over mel spectrograms. Dropout is off, and batch norms keep their statistics: those of a batch
    would depend on which clips share a rank."""

    def __init__(self, sizes: Sound, seed: int | None = None) -> None:
        with seeded(seed):
            super().__init__(parakeet_config(sizes))
            draw_weights(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SoundEncoder:
        """Keep the frequencies of positions in FP32, as transformers loads them into a model in BF16."""
        super()._apply(fn, recurse)
        positions = self.encode_positions
        exact = positions.compute_default_relative_positional_parameters(self.config)
        positions.inv_freq = exact.to(positions.inv_freq.device)
        return self

    def train(self, mode: bool = True) -> SoundEncoder:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self

    def forward(self, input_features: Tensor, input_features_mask: Tensor) -> Tensor:
        features, mask = list(input_features.shape), list(input_features_mask.shape)
        mels = self.config.num_mel_bins
        if len(features) != 3 or features[2] != mels or mask != features[:2] or 0 in mask:
            raise ValueError(
                f"input_features {features} and input_features_mask {mask}: give [clips, frames, {mels}] and "
                "[clips, frames]"
            )
        inputs = input_features.to(self.dtype)
        rows = super().forward(input_features=inputs, attention_mask=input_features_mask).last_hidden_state
        # One frame more: the processor's spectrogram is centered, its mask does not count the last one.
        lengths = self._get_subsampling_output_length(input_features_mask.sum(-1) + 1)
        return rows[torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]]


class Projector(nn.Module):
    """RMSNorm, linear, squared ReLU, linear: rows of an encoder to the width of the language model."""

    def __init__(self, input_size: int, inner_size: int, output_size: int, seed: int | None = None) -> None:
        super().__init__()
        self.layer_norm = nn.RMSNorm(input_size, eps=1e-5)
        with seeded(seed):
            self.linear_1 = nn.Linear(input_size, inner_size, bias=False)
            self.linear_2 = nn.Linear(inner_size, output_size, bias=False)
            draw_weights(self)

    def forward(self, rows: Tensor) -> Tensor:
        """[n, input] -> [n, output]."""
        weight = self.layer_norm.weight.float()
        normed = nn.functional.rms_norm(rows.float(), weight.shape, weight, self.layer_norm.eps)
        inner: Tensor = self.linear_1(normed.to(rows.dtype)).relu().square()
        projected: Tensor = self.linear_2(inner)
        return projected


def projector_sizes(config: OmniConfig, encoder: str) -> dict[str, int]:
    """The arguments of the `Projector` behind an encoder, "vision" or "sound"."""
    if encoder == "vision":
        width, inner = config.vision.merged_size, config.vision_projector_size
    else:
        assert config.sound is not None
        width, inner = config.sound.hidden_size, config.sound_projector_size
    return {"input_size": width, "inner_size": inner, "output_size": config.language.hidden_size}


def radio_config(sizes: Vision) -> RadioConfig:
    """transformers' configuration of a vision encoder."""
    return RadioConfig(
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_attention_heads,
        mlp_ratio=sizes.ffn_hidden_size / sizes.hidden_size,
        patch_size=sizes.patch_size,
        max_img_size=sizes.max_image_size,
        num_cls_tokens=sizes.class_tokens,
        num_registers=sizes.registers,
        video_temporal_patch_size=sizes.temporal_patch_size,
        layer_norm_eps=sizes.layernorm_epsilon,
    )


def parakeet_config(sizes: Sound) -> ParakeetEncoderConfig:
    """transformers' configuration of a sound encoder, without dropout."""
    no_dropout = dict.fromkeys(("dropout", "layerdrop", "activation_dropout", "attention_dropout"), 0.0)
    return ParakeetEncoderConfig(
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_attention_heads,
        intermediate_size=sizes.ffn_hidden_size,
        num_mel_bins=sizes.mel_bins,
        subsampling_factor=sizes.subsampling_factor,
        subsampling_conv_channels=sizes.subsampling_channels,
        conv_kernel_size=sizes.conv_kernel_size,
        attention_bias=False,
        convolution_bias=False,
        scale_input=False,
        **no_dropout,
    )
