"""Open a checkpoint of any kind: its weights by their plain names, the model, and what else is there."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoint.metadata import CheckpointError
from megatron_nemotron3.checkpoint.read import common_state
from megatron_nemotron3.checkpoint.structure import CONFIG as METADATA
from megatron_nemotron3.checkpoint.structure import check_structure
from megatron_nemotron3.checkpoint.unpickle import Inert
from megatron_nemotron3.convert import config_json, inventory, mp_rank
from megatron_nemotron3.convert.dcp_folder import dcp_state, in_order
from megatron_nemotron3.convert.dist_folder import locate, open_dist
from megatron_nemotron3.convert.hf_folder import is_hf, open_hf, read_config
from megatron_nemotron3.convert.inventory import Link
from megatron_nemotron3.convert.masters import masters
from megatron_nemotron3.convert.megatron_args import config_of
from megatron_nemotron3.convert.places import plain, what_else
from megatron_nemotron3.convert.quantized_config import plain_config
from megatron_nemotron3.convert.quantized_import import Dequantized
from megatron_nemotron3.convert.stored import Reads, Source
from megatron_nemotron3.convert.views import Converted, Selected
from megatron_nemotron3.models import Nemotron3Config

QUANTIZATION = "quantization_config"
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint."""

    #: "torch_dist", "fsdp_dtensor", "mp_rank" or "hugging face".
    kind: str
    folder: Path
    config: Nemotron3Config
    #: The weights alone; Megatron's under their names without prefixes.
    weights: Reads
    links: tuple[Link, ...]
    #: What is left out, and how many of it.
    left_out: Counter[str] = field(default_factory=Counter)
    iteration: int | None = None
    #: The vocabulary is taken to be as long as its padded tables: nothing says how long it is.
    vocabulary_guessed: bool = False

    @property
    def padded_vocab_size(self) -> int | None:
        """Rows of Megatron's embedding."""
        return self.weights.tensors[_EMBEDDING].shape[0] if self.kind != "hugging face" else None

    def padded_links(self, padded_vocab_size: int) -> Iterator[Link]:
        """The links to a Megatron checkpoint with that many rows in its embedding."""
        return inventory.links(self.config, padded_vocab_size=padded_vocab_size)

    def hf_view(self) -> Reads:
        """The weights under their Hugging Face names."""
        return (
            self.weights if self.kind == "hugging face" else Converted(self.weights, self.links, to_hf=True)
        )


def open_checkpoint(folder: Path, **options: Any) -> Checkpoint:
    """A checkpoint of either kind; options as for the two functions below.

    Raises:
        ValueError: as they do.
    """
    if is_hf(folder):
        options = {k: v for k, v in options.items() if k in ("model", "allow_unused", "dequantize")}
        return open_hugging_face(folder, **options)
    options.pop("dequantize", None)
    return open_megatron(folder, **options)


def open_megatron(
    folder: Path,
    *,
    model: Nemotron3Config | None = None,
    iteration: int | None = None,
    vocab_size: int | None = None,
    from_masters: bool = False,
    allow_unused: Sequence[str] = (),
) -> Checkpoint:
    """A Megatron checkpoint: the folder with the tracker, or of one iteration.

    Args:
        model: what it is; default: what the arguments stored in it say.
        vocab_size: rows of the embedding that are tokens; default: the model's or stored one.
        from_masters: the optimizer's FP32 masters instead of the weights.
        allow_unused: patterns of keys that may be left out.

    Raises:
        ValueError: there is no checkpoint, it is damaged, or it is not this model, tensor by tensor.
    """
    place = locate(folder, iteration)
    verdict = check_structure(place)
    source: Source
    if verdict.state == "legacy":
        kind, state = "mp_rank", mp_rank.common_state(place)
        config, guessed = _megatron_config(place, state, model, vocab_size)
        source = mp_rank.open_mp_rank(place, config, allow_unused=allow_unused)
    else:
        source, index = open_dist(place, verdict)
        fsdp = not (place / METADATA).exists()
        kind, state = "fsdp_dtensor" if fsdp else "torch_dist", {}
        try:
            state = dcp_state(index) if fsdp else common_state(index)
        except CheckpointError:
            if model is None:
                raise
        config, guessed = _megatron_config(place, state, model, vocab_size)
        source = in_order(source, config, state) if fsdp else source
    keys, left_out = _weights(source.tensors, allow_unused)
    if from_masters:
        found = masters(source.tensors)
        # The expert bias is no parameter: it has no master, and is FP32 itself.
        keys = {name: found.get(name, key) for name, key in keys.items()}
        left_out["optimizer"] -= sum(name in found for name in keys)
    padded = source.tensors[keys[_EMBEDDING]].shape[0] if _EMBEDDING in keys else None
    links = tuple(inventory.links_of(config, keys, padded_vocab_size=padded))
    iteration = state.get("iteration") if type(state.get("iteration")) is int else None
    return Checkpoint(kind, place, config, Selected(source, keys), links, +left_out, iteration, guessed)


def open_hugging_face(
    folder: Path,
    *,
    model: Nemotron3Config | None = None,
    allow_unused: Sequence[str] = (),
    dequantize: bool = False,
) -> Checkpoint:
    """A Hugging Face checkpoint.

    Args:
        model: what it is said to be; gives what config.json does not, how MTP is trained.
        allow_unused: patterns of tensors that may be left out.
        dequantize: read packed NVFP4 and FP8 weights as BF16.

    Raises:
        ValueError: there is none, it is damaged, or its tensors are not those config.json describes.
    """
    source: Reads = open_hf(folder)
    data = read_config(folder)
    left_out: Counter[str] = Counter()
    if QUANTIZATION in data:
        if not dequantize:
            raise ValueError(f"{folder}: its weights are quantized: --dequantize reads them as BF16")
        packed = Dequantized(source)
        packed.check(data[QUANTIZATION])
        source, data = packed, plain_config(data)
        left_out["activation scale"] = len(packed.left_behind)
    elif dequantize:
        raise ValueError(f"{folder}: --dequantize: config.json has no {QUANTIZATION}: its weights are plain")
    config = config_json.read(data, name=model.name if model else folder.resolve().name, base=model)
    kept = {name: name for name in source.tensors if not _matches(name, allow_unused)}
    inventory.check_hf(config, {name: source.tensors[name].shape for name in kept})
    left_out["unused"] = len(source.tensors) - len(kept)
    links = tuple(inventory.links(config))
    return Checkpoint("hugging face", folder, config, Selected(source, kept), links, +left_out)


def _weights(tensors: Iterable[str], allow_unused: Sequence[str]) -> tuple[dict[str, str], Counter[str]]:
    """Plain name -> key of what should be weights, and how many keys are something else."""
    keys: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for key in tensors:
        other = "unused" if _matches(key, allow_unused) else what_else(key)
        if other is not None:
            left_out[other] += 1
        elif plain(key) in keys:
            raise ValueError(f"{keys[plain(key)]!r} and {key!r} are the same tensor")
        else:
            keys[plain(key)] = key
    return keys, left_out


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _megatron_config(
    folder: Path, state: dict[str, Any], model: Nemotron3Config | None, vocab_size: int | None
) -> tuple[Nemotron3Config, bool]:
    """The model, and whether its vocabulary is a guess: a tokenizer's is not among stored arguments."""
    if model is not None:
        return dataclasses.replace(model, vocab_size=vocab_size) if vocab_size else model, False
    arguments = state.get("args")
    if not isinstance(arguments, (Inert, Namespace)):
        raise ValueError(
            f"{folder}: the checkpoint stores no arguments, so its model is unknown: give --model"
        )
    values = arguments.state if isinstance(arguments, Inert) else vars(arguments)
    padded = values.get("padded_vocab_size") if isinstance(values, dict) else None
    guess = vocab_size is None and values.get("vocab_size") is None and type(padded) is int
    return config_of(arguments, name=folder.name, vocab_size=padded if guess else vocab_size), guess
