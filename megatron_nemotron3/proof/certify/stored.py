"""What a checkpoint of the script holds, by our own reader, and its way to Hugging Face and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.checkpoints.convert.conversion import (
    FromHfOptions,
    ToHfOptions,
    convert_from_hf,
    convert_to_hf,
)
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.torch_dist import open_torch_dist
from megatron_nemotron3.proof.certify.finding import Finding, PropertyState, failed
from megatron_nemotron3.proof.certify.tensors import Tensors, unmatched

_EXPORT = "Hugging Face export"
#: Weights with a row for each token.
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def read(folder: Path) -> Tensors:
    """Read all tensors of a torch_dist checkpoint, by checkpoint key, the optimizer's among them."""
    return _tensors(open_torch_dist(folder)[0])


def _tensors(source: TensorSource) -> Tensors:
    return {name: source.read(name).clone() for name in source.tensors}


def round_trip(
    checkpoint: Path, padded_vocab_size: int, folder: Path, vocab_size: int | None = None
) -> Iterator[Finding]:
    """Yield whether a checkpoint comes back from Hugging Face's form as it was.

    The names and shapes of both sides are those of the inventory, or the conversion refuses.
    """
    exported, back = folder / "hf", folder / "megatron"
    folder.mkdir()
    try:
        with (folder / "log").open("w") as log, redirect_stdout(log):
            convert_to_hf(checkpoint, exported, ToHfOptions(workers=1))
            options = FromHfOptions(make_vocab_size_divisible_by=padded_vocab_size, workers=1)
            convert_from_hf(exported, back, options)
            before, after = (_tensors(open_checkpoint(one).weights) for one in (checkpoint, back))
    except (ValueError, OSError) as problem:
        yield failed(_EXPORT, detail=str(problem).splitlines()[0])
        return
    for tensors in (before, after):
        tensors |= {key: tensors[key][:vocab_size] for key in _VOCABULARY if key in tensors}
    yield equal(_EXPORT, before, after, detail=f"{len(before)} tensors, to the bit")


def equal(
    what: str, expected: Tensors, found: Tensors, where: str = "", detail: str = "to the bit"
) -> Finding:
    """Return a finding of tensors that must be equal to the bit."""
    if odd := unmatched(expected, found):
        return failed(what, where, odd)
    for key, value in expected.items():
        other = found[key]
        if value.shape != other.shape:
            return failed(what, where, f"{key}: {list(value.shape)} became {list(other.shape)}")
        if not value.equal(other):
            worst = float((value.double() - other.double()).abs().max())
            return Finding(what, PropertyState.FAIL, where, worst, 0.0, key)
    return Finding(what, PropertyState.PASS, where, 0.0, 0.0, detail)
