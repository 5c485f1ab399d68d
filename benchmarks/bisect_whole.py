"""`nemotron3 bisect` on a whole model in its real shapes: time and memory with 247 GB of Super.

    python benchmarks/bisect_whole.py FOLDER [--model super] [--tokens 16 8] [--keep]

Writes a Hugging Face folder of sparse files (tests/support/sparse_checkpoints.py) and random numbers into
all of its tensors but the routed experts, which get them in two layers; those of other layers are zeros, and
read like others. That takes 28 GB of disk. Transformers computes two recordings with hidden states, a layer
at a time: a trainer, and an engine whose routed scaling factor is 1 in one layer. Then the command runs, and
its time and memory are printed. A folder that is there is used again.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from common import MIB, ROOT, machine, parser
from process_tree import watch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face
from megatron_nemotron3.checkpoints.convert.logits.hugging_face import HuggingFace
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models.parameters import prefixes
from megatron_nemotron3.proof.bisect.recording import Recording, Sequence, write
from tests.proof.bisect.systems import moments
from tests.support.sparse_checkpoints import write_hf

#: Numbers that are repeated; their count is prime, so that rows of a weight are not copies.
_POOL = torch.randn(33_554_467, generator=torch.Generator().manual_seed(0))


def fill(folder: Path, expert_layers: set[int]) -> int:
    """Write random numbers into the tensors of a sparse folder. Returns the bytes written."""
    source, written = open_hugging_face(folder).weights, 0
    for name, tensor in source.tensors.items():
        layer = int(name.split(".")[2]) if ".experts." in name else None
        if layer is not None and (name.startswith("mtp.") or layer not in expert_layers):
            continue
        place = tensor.blocks[0].locate()
        mean, std = moments(name, tensor.shape)
        count, at, offset = torch.Size(tensor.shape).numel(), zlib.crc32(name.encode()) % len(_POOL), 0
        with open(place.path, "r+b") as file:
            file.seek(place.offset)
            while offset < count:
                run = _POOL[at : at + count - offset] * std + mean
                offset, at = offset + len(run), 0
                written += file.write(run.to(getattr(torch, tensor.dtype)).view(torch.uint8).numpy().data)
    return written


@torch.no_grad()
def record(folder: Path, config: Nemotron3Config, lengths: list[int], wrong_layer: int) -> None:
    """Write trainer.pt and engine.pt beside the folder's files."""
    model = HuggingFace(open_hugging_face(folder).weights, config)
    damaged: Any = copy.copy(model)
    damaged.config = copy.copy(model.config)
    damaged.config.routed_scaling_factor = 1.0
    generator = torch.Generator().manual_seed(3)
    found: dict[str, list[Sequence]] = {"trainer": [], "engine": []}
    layers = [one for one in prefixes(config) if one.part in "M*-E"][: config.num_layers]
    for length in lengths:
        ids = torch.randint(config.vocab_size, (length,), generator=generator)
        streams = {"trainer": model.embed(ids)[None]}
        hidden: dict[str, dict[int, Tensor]] = {"trainer": {}, "engine": {}}
        for number, layer in enumerate(layers):
            if number == wrong_layer:
                streams["engine"] = streams["trainer"]
            for name, x in streams.items():
                run = damaged if number == wrong_layer and name == "engine" else model
                streams[name] = run.layer(layer, x).stream
            for name in found:
                hidden[name][number] = streams.get(name, streams["trainer"])[0]
            print(f"recorded layer {number} of {length} tokens", flush=True)
        for name, x in streams.items():
            logits = torch.cat([band for *_, band in model.logits(model.final_norm(x))], -1)[0, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            found[name].append(Sequence(ids, 0, logprobs, {}, hidden[name]))
    for name, sequences in found.items():
        write(folder / f"{name}.pt", Recording(f"transformers, as {name}", "float32", sequences))


def main() -> None:
    """Write what is missing, run the command, and print the figures."""
    options = parser(__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--model", default="super")
    options.add_argument("--tokens", type=int, nargs="+", default=[16, 8])
    options.add_argument("--keep", action="store_true", help="do not remove the folder")
    given = options.parse_args()
    folder, config = given.folder, get(given.model)
    layers = [number for number, kind in enumerate(config.pattern) if kind == "E"]
    wrong = layers[len(layers) // 2]
    if not folder.exists():
        write_hf(folder, config)
        print(f"{fill(folder, {layers[0], wrong}) / 1e9:.1f} GB written", flush=True)
    if not (folder / "engine.pt").exists():
        record(folder, config, given.tokens, wrong)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    used = watch(
        [
            *(sys.executable, "-m", "megatron_nemotron3", "bisect", "--checkpoint", str(folder)),
            *("--trainer", str(folder / "trainer.pt"), "--engine", str(folder / "engine.pt")),
        ],
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    print(machine())
    print(used.output)
    print(
        f"{config.name}: {sum(sizes) / 1e9:.1f} GB, wrong layer {wrong}, exit status {used.returncode}, "
        f"{used.seconds:.0f} s, RSS {used.rss / MIB:,.0f} MiB, anonymous {used.anonymous / MIB:,.0f} MiB"
    )
    if not given.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
