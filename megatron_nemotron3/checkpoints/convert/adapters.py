"""LoRA adapters in checkpoints: Megatron's tensors, peft's folders, and weights with adapters merged.

Between the two stands one form, a view with A and B of every matrix as Hugging Face cuts the weights:

    backbone.layers.0.mixer.q_proj.lora_A.weight  [r, input]       backbone.…q_proj.lora_B.weight  [output, r]
    backbone.layers.1.mixer.experts.3.up_proj.lora_A.weight        one pair for each expert

Megatron's linear_qkv is one matrix with one A, which q, k and v share; their Bs are rows of its B. So the way
to Hugging Face copies A three times and is exact; the way back needs three equal As.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from megatron_nemotron3.checkpoints.convert.inventory import Tensor, TensorMapping
from megatron_nemotron3.checkpoints.convert.plan import Slices, whole
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource, owned, raw
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.models.tensors import TORCH_DIST, Spelling

A, B = ".lora_A.weight", ".lora_B.weight"
_WEIGHT = ".weight"
_PAIR = re.compile(r"(.+)\.lora_[AB]\.weight")


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in the common form."""

    #: `STEM.lora_A.weight` and `STEM.lora_B.weight` for every weight `STEM.weight`.
    tensors: TensorSource
    #: The scale of a matrix of rank r is alpha / r, with `rank_stabilized` alpha / sqrt(r).
    alpha: float
    rank_stabilized: bool = False

    @property
    def stems(self) -> list[str]:
        """Names of the adapted weights, without ".weight"."""
        return [name.removesuffix(A) for name in self.tensors.tensors if name.endswith(A)]

    def rank(self, stem: str) -> int:
        return self.tensors.tensors[stem + A].shape[0]

    def scale(self, stem: str) -> float:
        """Return the factor of B A."""
        rank = self.rank(stem)
        return self.alpha / (rank**0.5 if self.rank_stabilized else rank)


def megatron_mappings(
    mappings: Iterable[TensorMapping], shapes: Mapping[str, tuple[int, ...]]
) -> list[TensorMapping]:
    """Return how the adapters of a checkpoint convert; `shapes` are those of all its adapter tensors."""
    result, left = [], dict(shapes)
    for mapping in mappings:
        module = _module(mapping)
        if f"{module}.adapter.linear_in.weight" not in left:
            continue
        rank = left[f"{module}.adapter.linear_in.weight"][-2]
        pair = mappings_of_adapter(mapping, rank)
        for tensor in (t for one in pair for t in one.megatron):
            if left.pop(tensor.name, None) is None:
                raise ValueError(
                    f"LoRA adapters: {tensor.name!r} is missing, the other tensors of its pair exist"
                )
        result += pair
    if left:
        raise ValueError(
            f"LoRA adapters: {len(left)} tensors belong to no matrix of the model, first {min(left)!r}"
        )
    return result


def mappings_of_adapter(mapping: TensorMapping, rank: int) -> list[TensorMapping]:
    """Return how A and B of one of Megatron's matrices convert, from how the matrix does."""
    module = _module(mapping)
    stacked = mapping.megatron[0].shape[:-2]  # experts
    width, dtype = mapping.megatron[0].shape[-1], mapping.megatron[0].dtype
    stems = [tensor.name.removesuffix(_WEIGHT) for tensor in mapping.hf]
    a = replace(
        mapping,
        spelling=Spelling(TORCH_DIST, "stack" if stacked else "shared", ()),
        megatron=(Tensor(f"{module}.adapter.linear_in.weight", (*stacked, rank, width), dtype),),
        hf=tuple(Tensor(stem + A, (rank, width), dtype) for stem in stems),
    )
    out = f"{module}.adapter.linear_out"
    b = replace(
        mapping,
        megatron=tuple(
            Tensor(out + t.name.removeprefix(module), (*stacked, t.shape[-2], rank), dtype)
            for t in mapping.megatron
        ),
        hf=tuple(Tensor(stem + B, (t.shape[0], rank), dtype) for stem, t in zip(stems, mapping.hf)),
    )
    return [a, b]


def _module(mapping: TensorMapping) -> str:
    """Return Megatron's linear: "decoder.layers.0.mixer.in_proj" of "….in_proj.weight.z"."""
    return mapping.megatron[0].name.rpartition(_WEIGHT)[0]


def from_megatron(tensors: TensorSource, mappings: Iterable[TensorMapping], alpha: float) -> StoredAdapter:
    """Return the adapter whose tensors a Megatron checkpoint holds."""
    shapes = {name: tensor.shape for name, tensor in tensors.tensors.items()}
    return StoredAdapter(Converted(tensors, megatron_mappings(mappings, shapes), to_hf=True), alpha)


def to_megatron(adapter: StoredAdapter, mappings: Iterable[TensorMapping]) -> list[TensorMapping]:
    """Return the mappings that make Megatron's adapter tensors of an adapter."""
    if adapter.rank_stabilized:
        raise ValueError(
            "use_rslora: the scale alpha / sqrt(r) is not that of Megatron's LoRA: merge the adapter"
        )
    result = []
    for mapping in mappings:
        stems = [tensor.name.removesuffix(_WEIGHT) for tensor in mapping.hf]
        found = [stem for stem in stems if stem + A in adapter.tensors.tensors]
        if not found:
            continue
        if lacking := [stem for stem in stems if stem not in found]:
            raise ValueError(
                f"{found[0]} has an adapter, {lacking[0]} has none, and in Megatron they are one matrix: "
                "merge the adapter (--merge-adapter)"
            )
        ranks = sorted({adapter.rank(stem) for stem in stems})
        if len(ranks) > 1:
            raise ValueError(
                f"adapters of {stems[0]} and others have ranks {ranks}: merge them (--merge-adapter)"
            )
        if not mapping.row.routed:
            _check_one_a(adapter, stems)
        result += mappings_of_adapter(mapping, ranks[0])
    return result


def _check_one_a(adapter: StoredAdapter, stems: list[str]) -> None:
    parts = [raw(adapter.tensors.read(stem + A)) for stem in stems]
    for stem, part in zip(stems[1:], parts[1:]):
        if not part.equal(parts[0]):
            raise ValueError(
                f"lora_A of {stems[0]} and {stem} differ, and in Megatron they are one matrix with one A: "
                "merge the adapter (--merge-adapter), or train q, k and v with one A"
            )


class Merged(TensorSource):
    """Weights under Hugging Face's names, W + scale * B A where there is an adapter.

    Computed in FP32 (FP64 for FP64 weights) and rounded once to the type of the weight.
    """

    def __init__(self, weights: TensorSource, adapter: StoredAdapter) -> None:
        self.folder, self.files = weights.folder, weights.files
        self.tensors, self._weights, self._adapter = weights.tensors, weights, adapter
        check_fits(adapter, {name: tensor.shape for name, tensor in weights.tensors.items()})
        self._adapted = {stem + _WEIGHT: stem for stem in adapter.stems}

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        weight = self._weights.read(name, slices)
        stem = self._adapted.get(name)
        if stem is None:
            return weight
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        rows, columns = whole(self.tensors[name].shape) if slices is None else slices
        rank = (0, self._adapter.rank(stem))
        a = owned(self._adapter.tensors.read(stem + A, (rank, columns)), wide)
        b = owned(self._adapter.tensors.read(stem + B, (rows, rank)), wide)
        return (weight.to(wide) + b @ a * self._adapter.scale(stem)).to(weight.dtype)

    def made_of(self, name: str) -> Iterator[tuple[TensorSource, str]]:
        yield from self._weights.made_of(name)
        for end in (A, B) if name in self._adapted else ():
            yield from self._adapter.tensors.made_of(self._adapted[name] + end)


def check_fits(adapter: StoredAdapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every pair has the shape of its weight."""
    tensors: Mapping[str, SourceTensor] = adapter.tensors.tensors
    for name in tensors:
        match = _PAIR.fullmatch(name)
        stem = match[1] if match else name
        if stem + _WEIGHT not in shapes:
            raise ValueError(f"{adapter.tensors.folder}: {name!r:.120} belongs to no weight of the model")
        a, b = tensors.get(stem + A), tensors.get(stem + B)
        if a is None or b is None:
            raise ValueError(f"{adapter.tensors.folder}: {stem} has only one of lora_A and lora_B")
        if odd := {a.dtype, b.dtype} - {"float64", "float32", "float16", "bfloat16"}:
            raise ValueError(f"{adapter.tensors.folder}: the pair of {stem} is {min(odd)}, no floats")
        if 0 in a.shape[:1]:
            raise ValueError(f"{adapter.tensors.folder}: lora_A {list(a.shape)} of {stem} has rank 0")
        weight = shapes[stem + _WEIGHT]
        if len(a.shape) != 2 or b.shape != (weight[0], a.shape[0]) or (b.shape[0], a.shape[1]) != weight:
            raise ValueError(
                f"{adapter.tensors.folder}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {stem} do "
                f"not make its weight {list(weight)}"
            )
