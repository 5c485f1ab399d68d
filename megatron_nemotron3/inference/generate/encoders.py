"""The encoders of an Omni model: media to rows that stand in a prompt. Needs transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_nemotron3.checkpoints.convert.logits.reader import TensorReader
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.inference.generate.engine import EncoderRows
from megatron_nemotron3.models.omni import NANO_OMNI, OmniConfig
from megatron_nemotron3.models.omni_tensors import encoder_tensors, rows, symbol_sizes
from megatron_nemotron3.train.omni.encoders import Projector, SoundEncoder, VisionEncoder, projector_sizes

#: What a folder need not have: transformers computes the first, and only training reads the second.
_COMPUTED = ("summary_idxs", "num_batches_tracked")


#: A tensor of every model with encoders, whose type is that of all.
_PATCHES = next(encoder_tensors(NANO_OMNI, "vision encoder")).name


class Encoders:
    """The encoders and projectors of a checkpoint, on one device; default type: as stored."""

    def __init__(
        self,
        source: TensorSource,
        config: OmniConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
    ) -> None:
        tensors = TensorReader("checkpoint", source)
        if dtype is None:
            dtype = getattr(torch, source.tensors[tensors.find(_PATCHES)].dtype)
        self.device = device
        #: Name of an encoder in a batch -> encoder, projector, and the token that stands for one row.
        self._parts: dict[str, tuple[nn.Module, nn.Module, int]] = {}
        modules: dict[str, nn.Module] = {"vision": VisionEncoder(config.vision)}
        if config.sound is not None:
            modules["sound"] = SoundEncoder(config.sound)
        for name, encoder in modules.items():
            projector = Projector(**projector_sizes(config, name))
            for part, module in ((f"{name} encoder", encoder), (f"{name} projector", projector)):
                _load(module, tensors, config, part)
                module.to(device, dtype).eval()
            token = config.image_token_id if name == "vision" else config.sound_token_id
            assert token is not None
            self._parts[name] = encoder, projector, token

    @torch.inference_mode()
    def rows(
        self, ids: Sequence[int], inputs: Mapping[str, Mapping[str, Mapping[str, Any]]]
    ) -> EncoderRows | None:
        positions: list[int] = []
        values: list[Tensor] = []
        for name, (encoder, projector, token) in self._parts.items():
            found = [at for at, one in enumerate(ids) if one == token]
            media = inputs.get(name, {}).values()
            made = [projector(encoder(**to_device(arguments, self.device))) for arguments in media]
            if len(found) != (count := sum(map(len, made))):
                raise ValueError(
                    f"the prompt has {len(found)} ids {token} for {count} rows of the {name} encoder"
                )
            positions += found
            values += made
        return EncoderRows(positions, torch.cat(values)) if values else None


def to_device(value: Any, device: torch.device | str) -> Any:
    """Arguments of an encoder on the device; the frames of videos are in a list."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: to_device(one, device) for name, one in value.items()}
    return [to_device(one, device) for one in value] if isinstance(value, list) else value


def _load(module: nn.Module, tensors: TensorReader, config: OmniConfig, part: str) -> None:
    sizes = symbol_sizes(config, part)
    state: dict[str, Tensor] = {}
    for row in rows(config, part):
        (stored,), (spelling,) = row.hf, row.spellings
        if stored.name.endswith(_COMPUTED):
            continue
        tensor = tensors.tensor(stored.name, tuple(sizes[s] for s in stored.shape))
        pieces = tensor.split([sizes[one.shape[0]] for one in spelling.tensors])
        state |= {one.name: piece for one, piece in zip(spelling.tensors, pieces)}
    missing, unexpected = module.load_state_dict(state, strict=False)
    left = [name for name in missing if not name.endswith(_COMPUTED)]
    if left or unexpected:
        raise ValueError(f"the {part} has no tensor {(left + unexpected)[0]}")
