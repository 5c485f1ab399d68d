"""Folders of Hugging Face's peft library, as it loads them on transformers' model of the family.

    ADAPTER/adapter_config.json           r, lora_alpha, target_modules, target_parameters
    ADAPTER/adapter_model.safetensors     base_model.model.model.layers.0.mixer.q_proj.lora_A.weight …

transformers stores the experts of a layer as two parameters, up_proj [E, f, l] and down_proj [E, l, f], which
peft adapts as `target_parameters`: one wrapper around another, with the pairs of all experts in two matrices,

    mixer.experts.base_layer.lora_A.weight [E r, l]     up_proj: expert after expert
    mixer.experts.base_layer.lora_B.weight [f, r E]     rank after rank, and within it expert after expert
    mixer.experts.lora_A.weight [E r, f] …              down_proj; without "base_layer" if it is alone

MTP's adapters are in the file, too (`base_model.model.mtp.layers…`); transformers has no MTP, and peft
ignores them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.adapters import A, B, StoredAdapter, check_fits
from megatron_nemotron3.checkpoints.convert.hf_folder import open_files
from megatron_nemotron3.checkpoints.convert.peft_config import CONFIG, read_config, require_same
from megatron_nemotron3.checkpoints.convert.plan import Slices, whole
from megatron_nemotron3.checkpoints.convert.sources import FileSource, SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.convert.streams import FilePlan
from megatron_nemotron3.checkpoints.convert.to_hf import safetensors_plan
from megatron_nemotron3.checkpoints.metadata import CheckpointError

WEIGHTS = "adapter_model.safetensors"
_ROOT = "base_model.model."
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(up_proj|down_proj)")
_PACKED = re.compile(r"(.+\.experts)(\.base_layer)?\.lora_([AB])\.weight")
#: The linear that peft refuses to adapt in models of the family (its `_check_lora_target_modules_mamba`).
REFUSED = "out_proj"


class PackedAdapter(TensorSource):
    """An adapter's tensors under peft's names, experts packed."""

    def __init__(self, adapter: StoredAdapter) -> None:
        source = adapter.tensors
        self.folder, self.files, self._source = source.folder, source.files, source
        self._parts: dict[str, list[str]] = {}
        found = {stem: _EXPERT.fullmatch(stem) for stem in adapter.stems}
        with_down = {match[1] for match in found.values() if match and match[3] == "down_proj"}
        #: Name -> stems that are stored under it; experts in the order of their numbers.
        packings: dict[str, list[str]] = {}
        for stem, match in found.items():
            inner = match is not None and match[3] == "up_proj" and match[1] in with_down
            name = _ROOT + _module_name(match[1] if match else stem) + (".base_layer" if inner else "")
            packings.setdefault(name, []).append(stem)
        tensors: dict[str, SourceTensor] = {}
        for name, stems in packings.items():
            for kind in (A, B):
                one = source.tensors[stems[0] + kind]
                rows, columns = one.shape
                shape = (len(stems) * rows, columns) if kind == A else (rows, columns * len(stems))
                tensors[name + kind] = SourceTensor(one.dtype, shape)
                self._parts[name + kind] = [stem + kind for stem in stems]
        self.tensors = tensors

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        parts = self._parts[name]
        if len(parts) == 1:
            return self._source.read(parts[0], slices)
        rows, columns = whole(self.tensors[name].shape) if slices is None else slices
        height, width = self._source.tensors[parts[0]].shape
        if name.endswith(A):
            some = range(rows[0] // height, -(-rows[1] // height))
            joined = torch.cat([self._source.read(parts[i], ((0, height), columns)) for i in some])
            first = some.start * height
            return joined[rows[0] - first : rows[1] - first]
        stack = torch.stack([self._source.read(part, (rows, (0, width))) for part in parts], -1)
        return stack.flatten(1)[:, columns[0] : columns[1]]


class Unpacked(TensorSource):
    """The tensors of a peft file in the common form (`adapters`)."""

    def __init__(self, source: FileSource, experts: int, parameters: Iterable[str], root: str) -> None:
        self.folder, self.files, self._source = source.folder, source.files, source
        #: Name -> (name in the file, expert or None).
        self._places: dict[str, tuple[str, int | None]] = {}
        self._experts = experts
        last = {name.rpartition(".")[2] for name in parameters}
        tensors: dict[str, SourceTensor] = {}
        for name, tensor in source.tensors.items():
            match = _PACKED.fullmatch(name)
            if match is None:
                tensors[_common_name(name, source.folder, root)] = tensor
                self._places[_common_name(name, source.folder, root)] = (name, None)
                continue
            parent, inner, kind = match[1], match[2], match[3]
            both = f"{parent}.base_layer.lora_A.weight" in source.tensors
            either = min(last & {"up_proj", "down_proj"} or {""})
            projection = "up_proj" if inner else "down_proj" if both else either
            axis = 0 if kind == "A" else 1
            if len(tensor.shape) != 2 or not experts or tensor.shape[axis] % experts or not projection:
                raise CheckpointError(
                    f"{source.folder}: {name} {list(tensor.shape)} does not hold {experts} experts that "
                    f"target_parameters of {CONFIG} name"
                )
            shape = list(tensor.shape)
            shape[axis] //= experts
            for e in range(experts):
                common = _common_name(f"{parent}.{e}.{projection}.lora_{kind}.weight", source.folder, root)
                tensors[common] = SourceTensor(tensor.dtype, tuple(shape))
                self._places[common] = (name, e)
        self.tensors = tensors

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        place, expert = self._places[name]
        if expert is None:
            return self._source.read(place, slices)
        packed, rows = self._source.read(place), self.tensors[name].shape[0]
        if name.endswith(A):
            mine = packed[expert * rows : (expert + 1) * rows]
        else:
            mine = packed[:, expert :: self._experts]
        return mine if slices is None else mine[tuple(slice(*one) for one in slices)]

    def made_of(self, name: str) -> Iterator[tuple[TensorSource, str]]:
        yield self._source, self._places[name][0]


def open_peft(
    folder: Path, *, experts: int, root: str, weights: Mapping[str, tuple[int, ...]]
) -> StoredAdapter:
    """Open an adapter folder; only its configuration and the header of its file are read.

    `weights` are the shapes of the model's. Raises CheckpointError for what is not plain LoRA of them.
    """
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: it has no {CONFIG}: give a folder that peft saved")
    data = read_config(folder)
    if not (folder / WEIGHTS).exists():
        raise CheckpointError(f"{folder}: it has no {WEIGHTS}: save the adapter as safetensors")
    parameters = data.get("target_parameters") or []
    unpacked = Unpacked(open_files(folder, [WEIGHTS]), experts, map(str, parameters), root)
    adapter = StoredAdapter(unpacked, data["lora_alpha"], bool(data.get("use_rslora")))
    check_fits(adapter, weights)
    # peft ignores the adapters of MTP, which transformers does not have.
    ranks = {_place(stem): adapter.rank(stem) for stem in adapter.stems if not stem.startswith("mtp.")}
    matrices = [name.removesuffix(".weight") for name, shape in weights.items() if len(shape) == 2]
    require_same(folder, data, ranks, {_place(one) for one in matrices if not one.startswith("mtp.")})
    return adapter


def folder_plan(
    adapter: StoredAdapter, names: Iterable[str], base: str | None
) -> tuple[TensorSource, list[FilePlan], dict[str, bytes]]:
    """Plan an adapter folder: the view to write from, the file of tensors, and the configuration."""
    view = PackedAdapter(adapter)
    file = safetensors_plan(WEIGHTS, dict(sorted(view.tensors.items())), {"format": "pt"})
    text = json.dumps(config(adapter, names, base), indent=2) + "\n"
    return view, [file], {CONFIG: text.encode()}


def config(adapter: StoredAdapter, names: Iterable[str], base: str | None) -> dict[str, Any]:
    """Return adapter_config.json. Names are short where all modules of a name are adapted."""
    stems = [stem for stem in adapter.stems if not stem.startswith("mtp.")]
    weights = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    weights = [name for name in weights if not name.startswith("mtp.")]
    modules = [stem for stem in stems if _EXPERT.fullmatch(stem) is None]
    ranks = {stem: adapter.rank(stem) for stem in stems}
    rank = max(ranks.values(), key=[*ranks.values()].count) if ranks else 1
    others = {_place(stem): r for stem, r in ranks.items() if r != rank}
    result: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "rank_pattern": others,
        "bias": "none",
        "use_rslora": adapter.rank_stabilized,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "target_modules": _shortened(modules, [w for w in weights if _EXPERT.fullmatch(w) is None]),
    }
    packed = list(dict.fromkeys(_parameter(stem) for stem in stems if _EXPERT.fullmatch(stem)))
    if packed:
        whole_model = {_parameter(w) for w in weights if _EXPERT.fullmatch(w)}
        ends = {name.rpartition(".")[2] for name in packed}
        short = {f"experts.{end}" for end in ends}
        same = {name for name in whole_model if name.rpartition(".")[2] in ends} == set(packed)
        result["target_parameters"] = sorted(short) if same else packed
    return result


def _shortened(modules: list[str], weights: list[str]) -> list[str]:
    result: list[str] = []
    for end in dict.fromkeys(name.rpartition(".")[2] for name in modules):
        mine = [name for name in modules if name.endswith(f".{end}")]
        same = len(mine) == sum(name.endswith(f".{end}") for name in weights)
        result += [end] if same else map(_module_name, mine)
    return result


def _module_name(stem: str) -> str:
    """transformers' name of a module: "model.layers.0…" for "backbone.layers.0…" and for itself."""
    return re.sub(r"^backbone\.", "model.", stem)


def _parameter(stem: str) -> str:
    """transformers' name of the parameter that holds an expert: "model.layers.1.mixer.experts.up_proj"."""
    match = _EXPERT.fullmatch(stem)
    assert match is not None
    return f"{_module_name(match[1])}.{match[3]}"


def _place(stem: str) -> str:
    """transformers' name of the module or parameter that a stem belongs to."""
    return _parameter(stem) if _EXPERT.fullmatch(stem) else _module_name(stem)


def _common_name(name: str, folder: Path, root: str) -> str:
    if not name.startswith(_ROOT):
        raise CheckpointError(f"{folder / WEIGHTS}: {name!r:.120} is not a name of peft's ({_ROOT}…)")
    return re.sub(r"^model\.", f"{root}.", name.removeprefix(_ROOT))
