"""Every tensor of an Omni model on both sides.

Megatron's names are those of its MIMO model, with transformers' encoders inside; Hugging Face's are the
released ones, which transformers saves, too:

    language_model.…                                        language_model.…
    modality_submodules.vision.encoders.radio.…             vision_model.radio_model.…  q, k, v are one tensor
    …final_layernorm, where the language model has MTP      vision_projector.vision_final_layernorm
    modality_submodules.vision.input_projections.0.…        mlp1.…
    modality_submodules.sound.encoders.parakeet.…           sound_encoder.encoder.…
    modality_submodules.sound.input_projections.0.…         sound_projection.…

Two kinds of tensors are in some Hugging Face folders only. The release has constants of preprocessing
(`omni_tensors.CONSTANTS`), which no model holds: Megatron's folder keeps them under names of their own.
transformers saves scales of RADIO's layers, which are 1, and the places of its summary tokens, which nothing
reads: they are compared when they are read, and made when they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from megatron_nemotron3.checkpoints.convert import inventory
from megatron_nemotron3.checkpoints.convert.inventory import Tensor, TensorMapping
from megatron_nemotron3.checkpoints.convert.plan import Shape
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.convert.views import Joined, Selected
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import OmniConfig
from megatron_nemotron3.models.omni_tensors import CONSTANTS, MODULES, rows, symbol_sizes
from megatron_nemotron3.models.parameters import Prefix
from megatron_nemotron3.models.tensors import NamedShape, Row, Spelling

#: What the names of the language model's tensors begin with, on both sides; and Megatron's of all others.
LANGUAGE, ENCODERS = "language_model.", "modality_submodules."
#: Part of `PARTS` -> beginning of Megatron's names.
_MODULE = {
    "vision encoder": f"{ENCODERS}vision.encoders.radio.",
    "vision projector": f"{ENCODERS}vision.input_projections.0.",
    "sound encoder": f"{ENCODERS}sound.encoders.parakeet.",
    "sound projector": f"{ENCODERS}sound.input_projections.0.",
}
#: Constant -> Megatron's name. No module has it, so a load leaves it alone.
_CONSTANTS = {
    name: _MODULE[f"{'vision' if name.startswith('vision') else 'sound'} encoder"]
    + name.removeprefix("vision_model.").removeprefix("radio_model.").removeprefix("sound_encoder.encoder.")
    for name in CONSTANTS
}
#: The only tensor of integers.
_COUNTED, INTEGER = ".num_batches_tracked", "int64"
_SUMMARY, _SUMMARY_VALUES = "vision_model.radio_model.summary_idxs", (0, 1)


def in_omni(mappings: Iterable[TensorMapping]) -> Iterator[TensorMapping]:
    """Yield the mappings of a language model under its names in an Omni model."""
    for one in mappings:
        yield replace(
            one,
            megatron=tuple(t._replace(name=LANGUAGE + t.name) for t in one.megatron),
            hf=tuple(t._replace(name=LANGUAGE + t.name) for t in one.hf),
        )


def encoder_mappings(config: OmniConfig, *, constants: Mapping[str, SourceTensor]) -> Iterator[TensorMapping]:
    """Yield every mapping of the encoders and projectors, in the order of the layers."""
    for part, module in _MODULE.items():
        at, sizes = Prefix(part, module, "", config.language), symbol_sizes(config, part)
        for row in rows(config, part):
            kind = INTEGER if row.hf[0].name.endswith(_COUNTED) else inventory.BF16
            yield inventory.joined(at, row, row.spelling(MODULES), sizes, kind)
    at = Prefix("constant", "", "", config.language)
    for name, constant in constants.items():
        side = [(Tensor(one, constant.shape, constant.dtype),) for one in (_CONSTANTS[name], name)]
        # Its type is its own, whatever that of the weights is.
        row = Row("constant", (NamedShape(name, ()),), (), float32=True, trainable=False)
        yield TensorMapping(row, at, Spelling(MODULES, "copy", ()), *side)


def mappings(
    config: Nemotron3Config,
    omni: OmniConfig | None,
    tensors: Mapping[str, SourceTensor],
    padded_vocab_size: int | None = None,
) -> list[TensorMapping]:
    """Return every mapping of a model; `tensors` are a checkpoint's, which may have constants."""
    language = inventory.mappings(config, padded_vocab_size=padded_vocab_size)
    if omni is None:
        return list(language)
    return [*in_omni(language), *encoder_mappings(omni, constants=constants_of(tensors))]


def constants_of(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
    """Return the constants among the tensors of a checkpoint of either kind, under Hugging Face's names."""
    names = {hf: hf if hf in tensors else own for hf, own in _CONSTANTS.items()}
    return {hf: tensors[name] for hf, name in names.items() if name in tensors}


def language_of(source: TensorSource) -> TensorSource:
    """The language model's tensors under its own names; any tensors of a model without encoders."""
    inside = [name for name in source.tensors if name.startswith(LANGUAGE)]
    return Selected(source, {name.removeprefix(LANGUAGE): name for name in inside or source.tensors})


def with_language(language: TensorSource, whole: TensorSource) -> TensorSource:
    """The tensors of a model with encoders, with another language model inside."""
    rest = {name: name for name in whole.tensors if not name.startswith(LANGUAGE)}
    renamed = Selected(language, {LANGUAGE + name: name for name in language.tensors})
    return Joined(renamed, Selected(whole, rest))


def check(config: OmniConfig, expected: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> None:
    """Check that a checkpoint contains exactly the expected tensors."""
    hint = ""
    missing = [name for name in expected if name not in shapes]
    if missing and len(missing) == sum(not name.startswith(LANGUAGE) for name in expected):
        hint = ": it has no encoder at all, though its configuration states them: is it a language model?"
    if missing and all(name.startswith(f"{LANGUAGE}mtp.") for name in missing):
        hint = ": all are of MTP, which transformers never saves: --mtp-from DIR takes it from the original"
    inventory.check_shapes(config.name, expected, shapes, hint)


def made(config: OmniConfig, dtype: str) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers saves and the release has not, by name."""
    ones = torch.ones(config.vision.hidden_size, dtype=getattr(torch, dtype))
    block = "vision_model.radio_model.model.blocks"
    scales = [f"{block}.{n}.layer_scale{i}.lambda1" for n in range(config.vision.num_layers) for i in (1, 2)]
    return {**dict.fromkeys(scales, ones), _SUMMARY: torch.tensor(_SUMMARY_VALUES)}


def without_made(config: OmniConfig, source: TensorSource) -> list[str]:
    """Return the names of a Hugging Face folder's tensors without those that can be made again."""
    for name in (names := made(config, inventory.BF16)):
        if name not in source.tensors:
            continue
        stored = source.tensors[name]
        known = stored.dtype if stored.dtype in inventory.WEIGHT_TYPES else inventory.BF16
        expected, found = made(config, known)[name], source.read(name)
        if found.dtype != expected.dtype or not found.equal(expected):
            values = list(_SUMMARY_VALUES) if name == _SUMMARY else "1 everywhere"
            raise ValueError(
                f"{source.folder}: {name} is not {values}, and Megatron's model has no such tensor: "
                "--allow-unused leaves it out"
            )
    return [name for name in source.tensors if name not in names]
