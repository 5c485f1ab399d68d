"""Write a pruned checkpoint: the files of the cut tensors, in the format of the checkpoint that was cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_nemotron3.checkpoints.convert import config_json, from_hf, inventory, to_hf
from megatron_nemotron3.checkpoints.convert.block_configs import KEY, MTP_KEY
from megatron_nemotron3.checkpoints.convert.config_keys import DENSE, FIELDS, LAYERS, MOE, MTP_LAYERS
from megatron_nemotron3.checkpoints.convert.hf_folder import read_config
from megatron_nemotron3.checkpoints.convert.job import Job
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.checkpoints.convert.origin import copied_files
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.checkpoints.folders import TOKENIZER
from megatron_nemotron3.checkpoints.remote import shown
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.post_training.compress.cut import CutTensors
from megatron_nemotron3.post_training.compress.scores import Scores

#: The pruned model, for --model.
MODEL = "model.json"


def cut_job(
    opened: Checkpoint,
    scores: Scores,
    pruned: Nemotron3Config,
    layers: Sequence[int],
    target: Path,
    tokenizer: Path | None = None,
) -> Job:
    """Plan the folder of a pruned model."""
    cut = CutTensors(opened.hf_view(), scores, pruned, layers)
    dtype = cut.tensors[next(iter(cut.tensors))].dtype
    stored = {MODEL: (pruned.to_json() + "\n").encode()}
    about = {"source": shown(opened.folder.absolute()), "source_kind": opened.kind, "model": pruned.name}
    options = {"model": pruned.to_json(), "layers": list(layers), "scores": scores.digest()}
    if opened.kind == "hugging face":
        files = to_hf.files(cut.tensors)
        base = _reference(opened.folder, pruned, dtype)
        copied = copied_files(opened.folder)
        small = to_hf.small_files(pruned, files, copied=copied, base=base, dtype=dtype)
        return Job(target, cut, files, stored | small, origin=about, options=options)
    rows = opened.padded_vocab_size or pruned.vocab_size
    view = Converted(cut, inventory.mappings(pruned, padded_vocab_size=rows), to_hf=False)
    plan = from_hf.plan(view, pruned, padded_vocab_size=rows, dtype=dtype)
    if tokenizer is not None:
        copied = copied_files(tokenizer)
        stored |= {f"{from_hf.RELEASE}/{TOKENIZER}/{name}": data for name, data in copied.items()}
    return Job(target, view, plan.files, stored | plan.small, plan.index, about, options)


def _reference(folder: Path, pruned: Nemotron3Config, dtype: str) -> dict[str, object]:
    """The model's config.json with the sizes of the pruned one; what says nothing of sizes stays."""
    tables = (FIELDS, DENSE, MOE)
    stale = {key for table in tables for keys in table.values() for key in keys}
    stale |= {LAYERS[0], *LAYERS[1], MTP_LAYERS[0], *MTP_LAYERS[1], KEY, MTP_KEY, "quantization_config"}
    there = {key: value for key, value in read_config(folder).items() if key not in stale}
    return there | config_json.write(pruned, dtype=dtype)
