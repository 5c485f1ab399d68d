"""The readers to fuzz: valid folders to start from, and the function that reads a folder."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron_nemotron3.checkpoints.check import describe
from megatron_nemotron3.checkpoints.convert import conversion, from_hf, to_hf, verify
from megatron_nemotron3.checkpoints.convert.checkpoints import open_hugging_face, open_megatron
from megatron_nemotron3.checkpoints.convert.hf_folder import read_safetensors_header, safetensors_header
from megatron_nemotron3.checkpoints.convert.inventory import mappings
from megatron_nemotron3.checkpoints.convert.job import JOURNAL, run
from megatron_nemotron3.checkpoints.convert.origin import copied_files
from megatron_nemotron3.checkpoints.convert.peft import open_peft
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, OutputFile, write_parts
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.checkpoints.folders import MANIFEST
from megatron_nemotron3.checkpoints.metadata import explained, read_metadata
from megatron_nemotron3.checkpoints.read import MappedFile, chunk_layout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.proof.bisect import recording
from megatron_nemotron3.proof.certify import certificate
from tests.checkpoints.convert.test_dialects import config as golden
from tests.fuzz import texts
from tests.support import sparse_checkpoints as sparse
from tests.support.convert_models import random_config
from tests.support.counted_job import counted, digest
from tests.support.peft_model import FOLDER as PEFT
from tests.support.peft_model import MODEL

#: Relative path -> bytes.
Folder = dict[str, bytes]
ARCHIVES = Path(__file__).parents[1] / "golden" / "checkpoints"


@dataclass(frozen=True)
class Target:
    """A reader."""

    #: Valid folders by name.
    samples: Callable[[], dict[str, Folder]]
    #: TensorSource a folder, made from the sample of that name: returns or raises ValueError.
    read: Callable[[Path, str], Any]
    #: Which files are changed; the others are there unchanged.
    changed: Callable[[str], bool]


# -- what is done with a folder --------------------------------------------------------------------------


def read_all(files: list[FilePlan], source: TensorSource) -> None:
    """What a conversion would write."""
    for plan in files:
        with OutputFile(io.BytesIO()) as out:
            assert write_parts(plan, source, out, finite=False)["bytes"] == plan.length


def read_hf(folder: Path, sample: str) -> None:
    """Open, and convert to Megatron and to another Hugging Face folder."""
    opened = open_hugging_face(folder)
    rows = from_hf.pad_vocab_size(opened.config.vocab_size, 128)
    view = Converted(opened.weights, mappings(opened.config, padded_vocab_size=rows), to_hf=False)
    read_all(from_hf.plan(view, opened.config, padded_vocab_size=rows, dtype="bfloat16").files, view)
    copied = copied_files(folder)
    to_hf.small_files(opened.config, to_hf.files(opened.weights.tensors), copied=copied, base=opened.stated)


def read_packed(folder: Path, sample: str) -> None:
    """Open a folder of NVFP4 and FP8 weights, and read all of it as BF16."""
    opened = open_hugging_face(folder, dequantize=True)
    read_all(to_hf.files(opened.weights.tensors), opened.weights)


def read_megatron(folder: Path, sample: str) -> None:
    """Open, and convert to Hugging Face."""
    # Released versions' archives have no whole arguments; megatron-core 0.16 knows no MTP in hybrid models.
    opened = open_megatron(folder, model=None if sample == "ours" else golden(not sample.startswith("0.16")))
    view = opened.hf_view()
    plans = to_hf.files(view.tensors)
    to_hf.small_files(opened.config, plans)
    read_all(plans, view)


def read_index(folder: Path, sample: str) -> None:
    """Read the index, and locate every chunk."""
    index = read_metadata(folder)
    describe(index)
    for tensor in index.tensors.values():
        for chunk in tensor.chunks:
            with explained(folder / chunk.file):
                chunk_layout(MappedFile(folder / chunk.file), chunk, tensor.dtype)


def read_adapter(folder: Path, sample: str) -> None:
    """Open an adapter, and read every pair."""
    shapes = {t.name: t.shape for mapping in mappings(MODEL) for t in mapping.hf}
    found = open_peft(folder, experts=MODEL.num_moe_experts or 0, root="backbone", weights=shapes)
    for name in found.tensors.tensors:
        found.tensors.read(name)


def read_certificate(folder: Path, sample: str) -> None:
    """As `certify --check` does."""
    data = certificate.read(folder / "c.json")
    certificate.differences(data["command"], {"--x": ["1"]})
    data["versions"].get("torch", "none")


def go_on(folder: Path, sample: str) -> None:
    """Continue an interrupted job; its files must equal those of an uninterrupted one."""
    job = counted(folder / "out")
    run(job)
    data = {name: digest(folder / "out")[name] for name in ("sub/file0", "sub/file2", "sub/file4")}
    assert data == _finished(), "the continued job has other files"


@cache
def _finished() -> Folder:
    with tempfile.TemporaryDirectory() as name:
        run(counted(Path(name) / "out"))
        found = digest(Path(name) / "out")
        return {name: data for name, data in found.items() if name.startswith("sub/file")}


# -- valid folders ---------------------------------------------------------------------------------------


def hf_folders() -> dict[str, Folder]:
    """Small models with all kinds of layers, in one file and in several."""
    configs = {"distinct": random_config(0), "moe": random_config(3), "dense": random_config(4)}
    configs = {name: c.but(pattern="ME*-", vocab_size=40) for name, c in configs.items()}
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for i, (key, config) in enumerate(configs.items()):
            sparse.write_hf(Path(name) / key, config, limit=1 << 40 if i == 0 else 60_000)
            found[key] = digest(Path(name) / key)
    return found


def packed_folders() -> dict[str, Folder]:
    """What `convert to-hf --quantize` writes."""
    config = tiny(get("super")).but(vocab_size=40, num_moe_experts=2, moe_router_topk=1)
    with tempfile.TemporaryDirectory() as name:
        hf, megatron = Path(name) / "hf", Path(name) / "megatron"
        sparse.write_hf(hf, config)
        sparse.write_megatron(megatron, hf)
        with contextlib.redirect_stdout(io.StringIO()):
            conversion.convert_to_hf(
                megatron, Path(name) / "packed", conversion.ToHfOptions(quantize="super-nvfp4", workers=1)
            )
        return {"packed": digest(Path(name) / "packed")}


def megatron_folders(*kinds: str) -> dict[str, Folder]:
    """Those of released versions, and what the converter writes."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for path in sorted(ARCHIVES.glob("*.tar.xz")):
            key = path.name.removesuffix(".tar.xz")
            if any(kind in key for kind in kinds):
                with tarfile.open(path) as archive:
                    archive.extractall(name, filter="data")
                found[key] = digest(Path(name) / key)
        if "ours" in kinds:
            sparse.write_hf(Path(name) / "hf", random_config(0).but(pattern="ME*", vocab_size=40))
            sparse.write_megatron(Path(name) / "ours", Path(name) / "hf")
            found["ours"] = digest(Path(name) / "ours")
    return found


def headers() -> dict[str, Folder]:
    """Headers of safetensors files and no more data than they want."""
    some = [("a", "bfloat16", (2, 3)), ("b.c", "float32", ()), ("none", "int64", (0, 5)), ("d", "bool", (4,))]
    whole = safetensors_header(some, {"format": "pt"})
    return {
        "small": {"x.safetensors": whole + bytes(12 + 4 + 0 + 4)},
        "empty": {"x.safetensors": safetensors_header([], {})},
    }


def adapters() -> dict[str, Folder]:
    """What the peft library wrote, with a pattern and a layer."""
    plain = digest(PEFT)
    config = json.loads(plain["adapter_config.json"])
    config |= {"rank_pattern": {"q_proj": config["r"]}, "exclude_modules": ["x"], "layers_to_transform": None}
    return {"peft": plain, "fields": {**plain, "adapter_config.json": json.dumps(config).encode()}}


def certificates() -> dict[str, Folder]:
    """One of a recipe."""
    path = next((Path(__file__).parents[2] / "recipes").glob("*/*certificate*.json"))
    return {"recipe": {"c.json": path.read_bytes()}}


def recordings() -> dict[str, Folder]:
    """A recording with every field."""
    one = recording.Sequence(
        torch.arange(6), 2, -torch.ones(4), {1: torch.zeros(6, 2).int()}, {0: torch.ones(6, 4)}
    )
    with tempfile.TemporaryDirectory() as name:
        recording.write(Path(name) / "r.pt", recording.Recording("m", "float32", [one]))
        return {"whole": digest(Path(name))}


def interrupted() -> dict[str, Folder]:
    """A job with one file finished, one half."""
    with tempfile.TemporaryDirectory() as name:
        job = counted(Path(name) / "out")
        manifest = run(job)
        done = digest(Path(name) / "out")
        lines = [{"plan": job.fingerprint()}, {"file": "sub/file0", **manifest["files"]["sub/file0"]}]
    journal = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    partial = {JOURNAL: journal, "sub/file0": done["sub/file0"], "sub/.file2.part": done["sub/file2"][:9]}
    return {"half": {f"out.partial/{key}": data for key, data in partial.items()}}


def finished() -> dict[str, Folder]:
    """A job that has ended, with its manifest."""
    with tempfile.TemporaryDirectory() as name:
        run(counted(Path(name) / "out"))
        return {"finished": digest(Path(name) / "out")}


def _is(*endings: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(endings)


TARGETS = {
    "adapter": Target(adapters, read_adapter, _is(".json", "adapter_model.safetensors")),
    "certificate": Target(certificates, read_certificate, _is(".json")),
    "recording": Target(recordings, lambda folder, sample: recording.read(folder / "r.pt"), _is(".pt")),
    "header": Target(
        headers, lambda folder, sample: read_safetensors_header(folder / "x.safetensors"), _is(".safetensors")
    ),
    "hf": Target(hf_folders, read_hf, _is(".json", ".safetensors")),
    "packed": Target(packed_folders, read_packed, _is(".json", ".safetensors")),
    "index": Target(lambda: megatron_folders("_te", "_fsdp"), read_index, _is(".metadata")),
    "chunks": Target(lambda: megatron_folders("0.18.2_te", "_fsdp"), read_index, _is(".distcp")),
    "torch_dist": Target(
        lambda: megatron_folders("_te", "_local", "_singleton", "_fsdp"), read_megatron, lambda name: True
    ),
    "ours": Target(lambda: megatron_folders("ours"), read_megatron, lambda name: True),
    "common": Target(
        lambda: megatron_folders("0.16.1_te", "0.17.1_singleton"), read_megatron, _is("common.pt")
    ),
    "journal": Target(interrupted, go_on, _is(JOURNAL)),
    "launch": Target(texts.launches, texts.read_launch, _is(".txt")),
    "rows": Target(texts.rows, texts.read_rows, _is(".json")),
    "template": Target(texts.templates, texts.read_template, _is(".jinja")),
    "tokenizer": Target(texts.tokenizers, texts.read_tokenizer, _is(".json")),
    "media": Target(texts.media, texts.read_medium, _is("medium")),
    "manifest": Target(finished, lambda folder, sample: verify.verify_manifest(folder, 1), _is(MANIFEST)),
}
