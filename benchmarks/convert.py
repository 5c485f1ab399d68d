"""Converting a checkpoint each way, beside `cp` of the same bytes and transformers' `save_pretrained`.

    python benchmarks/convert.py [--gigabytes 8] [--folder DIR] [--rounds 3] [--quick]

The checkpoint has the widths of Nemotron 3 Super, the layers MEMEME*, as many experts as make the size, and
a vocabulary in proportion; its bits are random normal numbers. It has no MTP block: transformers drops those,
and every side shall move the same bytes.

Every side is a command of its own and ends when its files are on the disk: the converter syncs what it
writes, `cp` and `save_pretrained` are followed by `sync` of theirs. `save_pretrained` writes a model that
`from_pretrained` has loaded before its clock starts. Sides take turns, in reverse order in every second
round. Cold: the page cache is dropped before a side starts, which takes root; warm: the source has just
been read. The ratio to `cp` is the median over the rounds of ratios within a round.

Memory is that of the process and all its children, less an idle interpreter: see process_tree.py. The last
side converts back; the two ends must be the same bits, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from common import MIB, ROOT, machine, print_table, timed
from process_tree import Usage, idle, watch

from megatron_nemotron3.checkpoints.convert import inventory, to_hf
from megatron_nemotron3.checkpoints.convert.job import MANIFEST, Job, run
from megatron_nemotron3.checkpoints.convert.plan import Slices, extent, whole
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.models import Nemotron3Config, get

PATTERN = "MEMEME*"
#: Bytes of random numbers; tensors begin anywhere in them.
BLOCK = 64 * MIB
#: What --quick divides widths and gigabytes by.
QUICK = 8


def checkpoint(gigabytes: float, *, narrow: int = 1) -> Nemotron3Config:
    """Super with few layers, and as many experts as make the size.

    Args:
        narrow: what widths are divided by.

    Raises:
        ValueError: too small for two experts a layer.
    """
    whole = get("super")
    config = whole.but(
        name="super-shaped",
        pattern=PATTERN,
        mtp_pattern=None,
        mtp_num_layers=0,
        vocab_size=-(-int(gigabytes / 247 * whole.vocab_size / narrow) // 128) * 128,
        num_moe_experts=whole.moe_router_topk,
        **{name: getattr(whole, name) // narrow for name in _WIDTHS},
    )
    expert = (
        2 * 2 * config.moe_latent_size * config.moe_ffn_hidden_size * PATTERN.count("E")
    )  # BF16, two matrices
    rest = size(config) - expert * config.num_moe_experts
    experts = round((gigabytes * 1e9 - rest) / expert)
    if experts < 2:
        raise ValueError(f"{gigabytes:g} GB: the layers without experts need {rest / 1e9:.2f} GB: give more")
    return config.but(num_moe_experts=experts, moe_router_topk=min(whole.moe_router_topk, experts))


_WIDTHS = ("hidden_size", "mamba_num_heads", "num_attention_heads", "moe_latent_size") + (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)


def size(config: Nemotron3Config) -> int:
    """Bytes of the tensors in BF16."""
    return sum(t.elements * (4 if t.dtype == "float32" else 2) for t in inventory.hf_tensors(config))


class Random(TensorSource):
    """The tensors of a model, filled with random normal numbers."""

    def __init__(self, config: Nemotron3Config) -> None:
        self.folder, self.files = Path("/"), {}
        self.tensors = {t.name: SourceTensor(t.dtype, t.shape) for t in inventory.hf_tensors(config)}
        made = torch.Generator().manual_seed(0)
        self._pool = torch.randn(BLOCK // 4, generator=made) * 0.02

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        slices = whole(tensor.shape) if slices is None else slices
        start = zlib.crc32(f"{name} {slices}".encode()) % (len(self._pool) // 2)
        shape = extent(slices)
        some = self._pool[start : start + prod(shape)].to(tensor.torch_dtype)
        return some.repeat(-(-prod(shape) // max(1, len(some))))[: prod(shape)].reshape(shape)


def make(folder: Path, config: Nemotron3Config) -> None:
    """Write the checkpoint as a Hugging Face folder."""
    source = Random(config)
    files = to_hf.files(source.tensors)
    run(Job(folder, source, files, to_hf.small_files(config, files)))


def save_pretrained(source: Path, target: Path) -> None:
    """Load with transformers, then time what it writes; the seconds are printed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")

    def save() -> None:
        model.save_pretrained(target, max_shard_size="5GB")
        sync(target)

    print(json.dumps({"seconds": timed(save), "parameters": sum(p.numel() for p in model.parameters())}))


def sync(folder: Path) -> None:
    """Have every file of a folder on the disk."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@dataclass
class Side:
    """A command that makes `target` of `source`."""

    name: str
    command: Sequence[str]
    source: Path
    target: Path
    #: `cp` of the same source; None: it is one.
    beside: str | None = None
    #: Seconds by cache state.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    rss: int = 0
    anonymous: int = 0

    def run(self, cache: str) -> None:
        """One time; the target is left where it is.

        Raises:
            SystemExit: it failed.
        """
        shutil.rmtree(self.target, ignore_errors=True)
        CACHES[cache](self.source)
        used: Usage = watch(self.command, environment={**os.environ, "PYTHONPATH": str(ROOT)})
        if used.returncode:
            raise SystemExit(f"{self.name}: {used.output[-2000:]}")
        seconds = used.seconds
        if self.name == SAVE:
            seconds = json.loads(used.output.splitlines()[-1])["seconds"]
        self.seconds.setdefault(cache, []).append(seconds)
        self.rss, self.anonymous = max(self.rss, used.rss), max(self.anonymous, used.anonymous)


SAVE = "save_pretrained"


def drop(source: Path) -> None:
    """Forget every clean page of the page cache."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def warm(source: Path) -> None:
    """Have a folder in the page cache, and nothing left to be written."""
    os.sync()
    block = bytearray(8 * MIB)
    for path in source.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(block):
                    pass


CACHES: dict[str, Callable[[Path], None]] = {"cold": drop, "warm": warm}


def sides(folder: Path, workers: int) -> list[Side]:
    """Everything that is compared."""
    hf, dist = folder / "hf", folder / "megatron"
    ours = [sys.executable, "-m", "megatron_nemotron3", "convert"]
    result = []
    for source in (hf, dist):
        target = folder / f"{source.name}-cp"
        copy = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'
        result.append(Side(f"cp {source.name}", ["sh", "-c", copy, str(source), str(target)], source, target))
    for count in dict.fromkeys((1, workers)):
        for way, source, target in (("from-hf", hf, dist), ("to-hf", dist, folder / "hf-back")):
            name = f"{way}, {count} worker{'s' * (count > 1)}"
            command = [*ours, way, str(source), str(target), "--workers", str(count)]
            result.append(Side(name, command, source, target, f"cp {source.name}"))
    saved = folder / "hf-saved"
    command = [sys.executable, __file__, "--save-pretrained", str(hf), str(saved)]
    result.append(Side(SAVE, command, hf, saved, "cp hf"))
    return result


def measure(folder: Path, every: list[Side], rounds: int, caches: Sequence[str]) -> None:
    """Let the sides take turns; what a side leaves is removed unless another one reads it."""
    read = {side.source for side in every}
    for number in range(rounds):
        for cache in caches:
            order = every if number % 2 == 0 else every[::-1]
            # A source that is there no more is a target of the side before: keep one copy of it.
            for side in order:
                keep = folder / "kept"
                if side.target in read and side.target.exists():
                    os.replace(side.target, keep)
                side.run(cache)
                if keep.exists():
                    shutil.rmtree(side.target)
                    os.replace(keep, side.target)
                elif side.target not in read:
                    _check_back(side)
                    shutil.rmtree(side.target)


def _check_back(side: Side) -> None:
    """What came back from Megatron must be what went there; transformers must have written as much."""
    if side.name == SAVE:
        one, other = (_length(folder) for folder in (side.source, side.target))
        if abs(one - other) > 0.01 * one:
            raise SystemExit(f"{side.name}: it wrote {other:,} bytes, the source has {one:,}")
    if side.target.name != "hf-back":
        return
    one, other = (_checksums(side.target.with_name(name)) for name in ("hf", "hf-back"))
    if one != other:
        raise SystemExit(f"{side.name}: the files differ from those they came from: {one} and {other}")


def _length(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _checksums(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_text())["files"]


def table(
    every: Sequence[Side], caches: Sequence[str], length: int, idle_rss: int, idle_anonymous: int
) -> None:
    """Print it."""
    by_name = {side.name: side for side in every}
    header = [
        "side",
        *(f"{c} {what}" for c in caches for what in ("s", "MB/s", "of cp")),
        "RSS MiB",
        "anonymous MiB",
    ]
    rows = []
    for side in every:
        row = [side.name]
        for cache in caches:
            seconds = side.seconds[cache]
            base = by_name[side.beside or side.name].seconds[cache]
            ratio = statistics.median(b / s for b, s in zip(base, seconds, strict=True))
            median = statistics.median(seconds)
            row += [f"{median:.2f}", f"{length / median / 1e6:,.0f}", f"{ratio:.2f}"]
        above = (max(0, side.rss - idle_rss), max(0, side.anonymous - idle_anonymous))
        rows.append(row + [f"{n / MIB:,.0f}" for n in above])
    print_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of the widths, 0.1 GB, one warm round"
    )
    parser.add_argument("--gigabytes", type=float, default=None, help="of the checkpoint (default 8)")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to work; default: the temporary folder"
    )
    parser.add_argument("--rounds", type=int, default=None, help="default 3")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--without-transformers", action="store_true", help="leave save_pretrained out")
    parser.add_argument("--save-pretrained", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.save_pretrained:
        save_pretrained(*args.save_pretrained)
        return
    print(machine(), flush=True)
    config = checkpoint(args.gigabytes or (0.1 if args.quick else 8.0), narrow=QUICK if args.quick else 1)
    length = size(config)
    caches = ["warm"] if args.quick else list(CACHES)
    if "cold" in caches and not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        print("not root: the page cache stays, so there is no cold run")
        caches = ["warm"]
    print(
        f"layers {config.pattern}, hidden size {config.hidden_size}, {config.num_moe_experts} experts, "
        "vocabulary "
        f"{config.vocab_size:,}: {length / 1e9:.2f} GB in {len(inventory.hf_tensors(config)):,} tensors",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="convert-", dir=args.folder) as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free
        if free < 3.3 * length:
            raise SystemExit(
                f"{folder}: {3.3 * length:,.0f} bytes are needed, {free:,} are free: give --folder"
            )
        make(folder / "hf", config)
        every = sides(folder, args.workers)
        if args.without_transformers:
            every = [side for side in every if side.name != SAVE]
        first = next(side for side in every if side.target == folder / "megatron")
        first.run("warm")  # so that the Megatron folder is there; it does not count
        first.seconds.clear()
        measure(folder, every, args.rounds or (1 if args.quick else 3), caches)
    nothing = idle()
    table(every, caches, length, nothing.rss, nothing.anonymous)


if __name__ == "__main__":
    main()
