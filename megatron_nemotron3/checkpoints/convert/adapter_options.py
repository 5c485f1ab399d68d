"""What `nemotron3 convert` does with LoRA adapters: --adapter, --merge-adapter, --adapter-only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_nemotron3.checkpoints.convert import peft
from megatron_nemotron3.checkpoints.convert.adapters import StoredAdapter, to_megatron
from megatron_nemotron3.checkpoints.convert.inventory import TensorMapping
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.checkpoints.convert.origin import tokenizer_files
from megatron_nemotron3.checkpoints.convert.peft_config import CONFIG
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.streams import FilePlan
from megatron_nemotron3.common.files import read_outside
from megatron_nemotron3.common.output import say
from megatron_nemotron3.models.lora import LINEARS, LoRASettings
from megatron_nemotron3.models.tensors import hf_root

if TYPE_CHECKING:
    from megatron_nemotron3.checkpoints.convert.job_options import FromHfOptions, ToHfOptions


def with_adapter(opened: Checkpoint, options: ToHfOptions | FromHfOptions) -> Checkpoint:
    """Return the checkpoint with the adapter of --adapter, if it is given."""
    only = getattr(options, "adapter_only", False)
    if options.adapter is not None:
        if opened.adapter is not None:
            raise ValueError(f"--adapter: {opened.folder} has a LoRA adapter of its own")
        adapter = peft.open_peft(
            options.adapter,
            experts=opened.config.num_moe_experts or 0,
            root=hf_root(opened.config),
            weights={t.name: t.shape for mapping in opened.mappings for t in mapping.hf},
        )
        opened = replace(opened, adapter=adapter)
    requested = "--merge-adapter" if options.merge_adapter else "--adapter-only" if only else None
    if opened.adapter is None:
        if requested is not None:
            raise ValueError(f"{requested}: {opened.folder} has no LoRA adapter")
        return opened
    if only and options.merge_adapter:
        raise ValueError("--adapter-only and --merge-adapter: give one of them")
    if opened.kind != "hugging face" and requested is None:
        raise ValueError(
            f"{opened.folder}: it has a LoRA adapter: --merge-adapter adds it to the weights, --adapter-only "
            "writes it alone"
        )
    for name in ("quantize", "dtype", "from_optimizer_master"):
        if only and getattr(options, name):
            raise ValueError(f"--adapter-only: it does not go with --{name.replace('_', '-')}")
    if options.check_logits is not None:
        raise ValueError("--check-logits: it compares weights without adapters: leave it out")
    return opened


def adapter_folder(
    opened: Checkpoint, options: ToHfOptions
) -> tuple[TensorSource, list[FilePlan], dict[str, bytes]]:
    """Plan the folder of --adapter-only, and say what peft will make of it."""
    assert opened.adapter is not None
    names = [t.name for mapping in opened.mappings for t in mapping.hf]
    stems = opened.adapter.stems
    if refused := [stem for stem in stems if stem.endswith(f".{peft.REFUSED}")]:
        _note(
            f"{len(refused):,} adapters are of Mamba's {peft.REFUSED}, which peft refuses "
            "to load for this family: merge the adapter, or train without them"
        )
    if mtp := [stem for stem in stems if stem.startswith("mtp.")]:
        _note(f"{len(mtp):,} adapters are of MTP, which transformers does not have: peft ignores them")
    reference = options.reference
    base = options.base_model or (str(reference) if reference is not None else None)
    view, files, small = peft.folder_plan(opened.adapter, names, base)
    return view, files, {**(tokenizer_files(reference) if reference is not None else {}), **small}


def _note(text: str) -> None:
    say(f"note         {text}", notes=[text])


def megatron_adapter(
    adapter: StoredAdapter, mappings: Sequence[TensorMapping]
) -> tuple[str, list[TensorMapping]]:
    """Return the settings to train on with (`LoRASettings.text`), and the mappings of its tensors."""
    found = to_megatron(adapter, mappings)
    if not found:
        raise ValueError("--adapter: it has no tensors")
    modules = {t.name.partition(".adapter.")[0].rpartition(".")[2] for one in found for t in one.megatron}
    ranks = sorted({adapter.rank(stem) for stem in adapter.stems})
    if len(ranks) > 1:
        raise ValueError(
            f"--adapter: its ranks are {ranks}, one run trains one rank: merge it (--merge-adapter)"
        )
    targets = tuple(sorted(modules, key=LINEARS.index))
    return LoRASettings(targets, dim=ranks[0], alpha=adapter.alpha).text(), found


def adapter_state(folder: Path) -> dict[str, object]:
    """Return what identifies an adapter folder's content, for a job that is continued."""
    found = (folder / peft.WEIGHTS).stat()
    text = read_outside(folder / CONFIG, limit=1 << 20)
    return {
        "folder": str(folder.absolute()),
        "weights": [found.st_size, found.st_mtime_ns],
        "config": hashlib.sha256(text).hexdigest(),
    }
