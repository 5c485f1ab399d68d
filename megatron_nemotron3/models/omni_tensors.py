"""Tensors of the encoders and projectors of an Omni model, as data, and their counts.

`ROWS` is in the notation of `models.tensors`, with the names of the released checkpoint and of transformers'
saved folders. The spelling "modules" has the names of transformers' modules and of Megatron's checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.models.parameters import StoredTensor, count, stored_tensors
from megatron_nemotron3.models.tensors import NamedShape, Row, table_row

#: Spelling of transformers' modules, below `vision_model`, `audio_tower` and the projectors.
MODULES = "modules"
_RADIO = "vision_model.radio_model.model"
_PARAKEET = "sound_encoder.encoder"


def _copies(part: str, root: str, rows: str, **fields: object) -> tuple[Row, ...]:
    """Rows "stored name = module's name [shape]" that are copied; "=" alone for equal names."""
    made = []
    for line in rows.strip().splitlines():
        stored, _, rest = line.strip().partition(" = ")
        module, _, shape = rest.rpartition("[")
        made.append(
            table_row(
                part,
                f"{root}{stored} [{shape}",
                f"{MODULES}: copy: {module.strip() or stored} [{shape}",
                **fields,
            )
        )
    return tuple(made)


def _vision_layer(kind: str, *shape: str) -> Row:
    """The fused query, key and value of a RADIO layer."""
    fused, parts = " ".join(("3h", *shape)), " ".join(("h", *shape))
    names = ", ".join(f"encoder.layer.{{n}}.attention.{c}_proj.{kind} [{parts}]" for c in "qkv")
    return table_row(
        "vision layer", f"{_RADIO}.blocks.{{n}}.attn.qkv.{kind} [{fused}]", f"{MODULES}: concat: {names}"
    )


#: Every tensor of the encoders and projectors; `{n}` stands for the number of a layer.
ROWS: tuple[Row, ...] = (
    *_copies(
        "vision",
        f"{_RADIO}.patch_generator.",
        """
        embedder.weight = embeddings.patch_projection.weight [h patch]
        video_embedder.weight = embeddings.video_patch_projection.weight [h video_patch]
        pos_embed = embeddings.position_embedding [1 positions h]
        cls_token.token = embeddings.cls_register_token [prefix h]
        """,
    ),
    *(_vision_layer("weight", "h"), _vision_layer("bias")),
    *_copies(
        "vision layer",
        f"{_RADIO}.blocks.{{n}}.",
        """
        attn.proj.weight = encoder.layer.{n}.attention.o_proj.weight [h h]
        attn.proj.bias = encoder.layer.{n}.attention.o_proj.bias [h]
        norm1.weight = encoder.layer.{n}.norm1.weight [h]
        norm1.bias = encoder.layer.{n}.norm1.bias [h]
        norm2.weight = encoder.layer.{n}.norm2.weight [h]
        norm2.bias = encoder.layer.{n}.norm2.bias [h]
        mlp.fc1.weight = encoder.layer.{n}.mlp.fc1.weight [ffn h]
        mlp.fc1.bias = encoder.layer.{n}.mlp.fc1.bias [ffn]
        mlp.fc2.weight = encoder.layer.{n}.mlp.fc2.weight [h ffn]
        mlp.fc2.bias = encoder.layer.{n}.mlp.fc2.bias [h]
        """,
    ),
    *_copies(
        "vision norm",
        "vision_projector.vision_final_layernorm.",
        """
        weight = final_layernorm.weight [h]
        bias = final_layernorm.bias [h]
        """,
    ),
    *_copies(
        "vision projector",
        "mlp1.",
        """
        0.weight = layer_norm.weight [merged]
        1.weight = linear_1.weight [projector merged]
        3.weight = linear_2.weight [d projector]
        """,
    ),
    *_copies(
        "sound",
        f"{_PARAKEET}.subsampling.",
        """
        layers.0.weight = subsampling.layers.0.weight [channels 1 3 3]
        layers.0.bias = subsampling.layers.0.bias [channels]
        linear.weight = subsampling.linear.weight [h flat]
        linear.bias = subsampling.linear.bias [h]
        """,
    ),
    # A depthwise and a pointwise convolution for each further halving of the frames.
    *_copies(
        "sound halving",
        f"{_PARAKEET}.subsampling.",
        """
        layers.{depthwise}.weight = subsampling.layers.{depthwise}.weight [channels 1 3 3]
        layers.{depthwise}.bias = subsampling.layers.{depthwise}.bias [channels]
        layers.{pointwise}.weight = subsampling.layers.{pointwise}.weight [channels channels 1 1]
        layers.{pointwise}.bias = subsampling.layers.{pointwise}.bias [channels]
        """,
    ),
    *_copies(
        "sound layer",
        f"{_PARAKEET}.",
        """
        layers.{n}.feed_forward1.linear1.weight = [ffn h]
        layers.{n}.feed_forward1.linear2.weight = [h ffn]
        layers.{n}.self_attn.q_proj.weight = [h h]
        layers.{n}.self_attn.k_proj.weight = [h h]
        layers.{n}.self_attn.v_proj.weight = [h h]
        layers.{n}.self_attn.o_proj.weight = [h h]
        layers.{n}.self_attn.relative_k_proj.weight = [h h]
        layers.{n}.self_attn.bias_u = [heads head]
        layers.{n}.self_attn.bias_v = [heads head]
        layers.{n}.conv.pointwise_conv1.weight = [2h h 1]
        layers.{n}.conv.depthwise_conv.weight = [h 1 kernel]
        layers.{n}.conv.norm.weight = [h]
        layers.{n}.conv.norm.bias = [h]
        layers.{n}.conv.pointwise_conv2.weight = [h h 1]
        layers.{n}.feed_forward2.linear1.weight = [ffn h]
        layers.{n}.feed_forward2.linear2.weight = [h ffn]
        layers.{n}.norm_feed_forward1.weight = [h]
        layers.{n}.norm_feed_forward1.bias = [h]
        layers.{n}.norm_self_att.weight = [h]
        layers.{n}.norm_self_att.bias = [h]
        layers.{n}.norm_conv.weight = [h]
        layers.{n}.norm_conv.bias = [h]
        layers.{n}.norm_feed_forward2.weight = [h]
        layers.{n}.norm_feed_forward2.bias = [h]
        layers.{n}.norm_out.weight = [h]
        layers.{n}.norm_out.bias = [h]
        """,
    ),
    # Statistics of the batch norm, which no gradient reaches; the number of batches is an integer.
    *_copies(
        "sound layer",
        f"{_PARAKEET}.",
        """
        layers.{n}.conv.norm.running_mean = [h]
        layers.{n}.conv.norm.running_var = [h]
        layers.{n}.conv.norm.num_batches_tracked = []
        """,
        trainable=False,
    ),
    *_copies(
        "sound projector",
        "sound_projection.",
        """
        norm.weight = layer_norm.weight [h]
        linear1.weight = linear_1.weight [projector h]
        linear2.weight = linear_2.weight [d projector]
        """,
    ),
)

#: Part of the model -> parts of the table.
PARTS = {
    "vision encoder": ("vision", "vision layer", "vision norm"),
    "vision projector": ("vision projector",),
    "sound encoder": ("sound", "sound halving", "sound layer"),
    "sound projector": ("sound projector",),
}


def symbol_sizes(config: OmniConfig, part: str) -> dict[str, int]:
    """Return the numbers behind the shape symbols of a part of `PARTS`; none for a part that is absent."""
    vision, sound = config.vision, config.sound
    if part.startswith("vision"):
        patch = 3 * vision.patch_size**2
        return {
            "1": 1,
            "h": vision.hidden_size,
            "3h": 3 * vision.hidden_size,
            "ffn": vision.ffn_hidden_size,
            "patch": patch,
            "video_patch": patch * vision.temporal_patch_size,
            "positions": (vision.max_image_size // vision.patch_size) ** 2,
            "prefix": vision.class_tokens + vision.registers,
            "merged": vision.merged_size,
            "projector": config.vision_projector_size,
            "d": config.language.hidden_size,
        }
    if sound is None:
        return {}
    return {
        "1": 1,
        "3": 3,
        "h": sound.hidden_size,
        "2h": 2 * sound.hidden_size,
        "ffn": sound.ffn_hidden_size,
        "channels": sound.subsampling_channels,
        "flat": sound.subsampling_channels * (sound.mel_bins // sound.subsampling_factor),
        "heads": sound.num_attention_heads,
        "head": sound.hidden_size // sound.num_attention_heads,
        "kernel": sound.conv_kernel_size,
        "projector": config.sound_projector_size,
        "d": config.language.hidden_size,
    }


def rows(config: OmniConfig, part: str) -> Iterator[Row]:
    """Yield the rows of a part of `PARTS`, of every layer, with the layer's numbers in their names."""
    if part.startswith("sound") and config.sound is None:
        return
    for table_part in PARTS[part]:
        layers: list[dict[str, int]] = [{}]
        if table_part == "vision layer":
            layers = [{"n": n} for n in range(config.vision.num_layers)]
        elif table_part == "vision norm" and not config.vision.final_layernorm:
            layers = []
        elif config.sound and table_part == "sound layer":
            layers = [{"n": n} for n in range(config.sound.num_layers)]
        elif config.sound and table_part == "sound halving":
            # Modules of the subsampling: convolution, ReLU, and three modules for each further halving.
            halvings = int(math.log2(config.sound.subsampling_factor)) - 1
            layers = [{"depthwise": 2 + 3 * n, "pointwise": 3 + 3 * n} for n in range(halvings)]
        for numbers in layers:
            for row in ROWS:
                if row.part == table_part:
                    yield _numbered(row, numbers)


def _numbered(row: Row, numbers: dict[str, int]) -> Row:
    def named(tensors: tuple[NamedShape, ...]) -> tuple[NamedShape, ...]:
        return tuple(replace(one, name=one.name.format(**numbers)) for one in tensors)

    spellings = tuple(replace(one, tensors=named(one.tensors)) for one in row.spellings)
    return replace(row, hf=named(row.hf), spellings=spellings)


#: Constants of preprocessing in released checkpoints, and places of RADIO's summary, which nothing reads.
CONSTANTS = (
    "vision_model.summary_idxs",
    "vision_model.radio_model.input_conditioner.norm_mean",
    "vision_model.radio_model.input_conditioner.norm_std",
    f"{_PARAKEET}.feature_extractor.featurizer.fb",
    f"{_PARAKEET}.feature_extractor.featurizer.window",
)


def encoder_tensors(config: OmniConfig, part: str) -> Iterator[StoredTensor]:
    """Yield the tensors of a part of `PARTS` as a Hugging Face folder has them, every layer's."""
    sizes = symbol_sizes(config, part)
    for row in rows(config, part):
        for tensor in row.hf:
            shape = tuple(sizes[symbol] for symbol in tensor.shape)
            yield StoredTensor(tensor.name, shape, trainable=row.trainable)


def tensors_by_part(config: OmniConfig) -> dict[str, int]:
    """Return the number of tensors of each part of a released checkpoint, and of its `CONSTANTS`."""
    parts = {"language model": stored_tensors(config.language)}
    for part in PARTS:
        if tensors := sum(1 for _ in encoder_tensors(config, part)):
            parts[part] = tensors
    # Nano Omni has two of each encoder; Super VL those of vision, and the places of the summary.
    return parts | {"preprocessing": 4 if config.sound else 3}


def released_tensors(config: OmniConfig) -> int:
    """Return the number of tensors of a released checkpoint, `CONSTANTS` included."""
    return sum(tensors_by_part(config).values())


def count_parts(config: OmniConfig) -> dict[str, int]:
    """Return the trainable elements of every part, the language model's without expert biases."""
    parts = {"language model": count(config.language).trainable}
    for part in PARTS:
        if elements := sum(t.elements for t in encoder_tensors(config, part) if t.trainable):
            parts[part] = elements
    return parts
