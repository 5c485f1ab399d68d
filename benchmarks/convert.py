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

Memory is that of the process and all its children, less an idle interpreter: see process_tree.py. The files
that come back must be those that went there, to the bit, or the script fails.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from common import MIB, ROOT, machine, parser, seconds, show
from process_tree import idle, watch

from megatron_nemotron3.checkpoints.convert import inventory, to_hf
from megatron_nemotron3.checkpoints.convert.job import Job, run
from megatron_nemotron3.checkpoints.convert.plan import Slices, extent, whole
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.folders import MANIFEST
from megatron_nemotron3.models import Nemotron3Config, get

PATTERN = "MEMEME*"
#: What --quick divides widths by.
QUICK = 8
WIDTHS = ("hidden_size", "mamba_num_heads", "num_attention_heads", "moe_latent_size") + (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)
SAVE = "save_pretrained"


def checkpoint(gigabytes: float, narrow: int) -> Nemotron3Config:
    """Super with few layers, widths divided by `narrow`, and as many experts as make the size.

    Raises:
        SystemExit: too small for two experts a layer.
    """
    model = get("super")
    config = model.but(
        name="super-shaped",
        pattern=PATTERN,
        mtp_pattern=None,
        mtp_num_layers=0,
        vocab_size=-(-int(gigabytes / 247 * model.vocab_size / narrow) // 128) * 128,
        num_moe_experts=model.moe_router_topk,
        **{name: getattr(model, name) // narrow for name in WIDTHS},
    )
    # BF16, two matrices
    expert = 2 * 2 * config.moe_latent_size * config.moe_ffn_hidden_size * PATTERN.count("E")
    rest = size(config) - expert * config.num_moe_experts
    experts = round((gigabytes * 1e9 - rest) / expert)
    if experts < 2:
        raise SystemExit(f"the layers without experts need {rest / 1e9:.2f} GB: give more --gigabytes")
    return config.but(num_moe_experts=experts, moe_router_topk=min(model.moe_router_topk, experts))


def size(config: Nemotron3Config) -> int:
    """Bytes of the tensors in BF16."""
    return sum(t.elements * (4 if t.dtype == "float32" else 2) for t in inventory.hf_tensors(config))


class Random(TensorSource):
    """The tensors of a model, filled with random normal numbers."""

    def __init__(self, config: Nemotron3Config) -> None:
        self.folder, self.files = Path("/"), {}
        self.tensors = {t.name: SourceTensor(t.dtype, t.shape) for t in inventory.hf_tensors(config)}
        self._pool = torch.randn(16 * MIB, generator=torch.Generator().manual_seed(0)) * 0.02

    def read(self, name: str, slices: Slices | None = None) -> torch.Tensor:
        tensor = self.tensors[name]
        slices = whole(tensor.shape) if slices is None else slices
        start = zlib.crc32(f"{name} {slices}".encode()) % (len(self._pool) // 2)
        shape = extent(slices)
        some = self._pool[start : start + prod(shape)].to(tensor.torch_dtype)
        return some.repeat(-(-prod(shape) // max(1, len(some))))[: prod(shape)].reshape(shape)


def save_pretrained(source: Path, target: Path) -> None:
    """Load with transformers, then time what it writes; the seconds are printed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")

    def save() -> None:
        model.save_pretrained(target, max_shard_size="5GB")
        for path in (*target.rglob("*"), target):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    print(seconds(save))


@dataclass
class Side:
    """A command that makes `target` of `source`; `base` is `cp` of the same source, or its own name."""

    name: str
    base: str
    command: Sequence[str]
    source: Path
    target: Path
    #: Seconds by cache state.
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"cold": [], "warm": []})
    rss: int = 0
    anonymous: int = 0

    def run(self, cache: str) -> None:
        """One time; what it makes replaces what is there.

        Raises:
            SystemExit: it failed, or what it made differs from what it should be.
        """
        shutil.rmtree(self.target, ignore_errors=True)
        os.sync()
        if cache == "cold":
            Path("/proc/sys/vm/drop_caches").write_text("3")
        else:
            block = bytearray(8 * MIB)
            for path in filter(Path.is_file, self.source.rglob("*")):
                with open(path, "rb", buffering=0) as file:
                    while file.readinto(block):
                        pass
        used = watch(self.command, environment={**os.environ, "PYTHONPATH": str(ROOT)})
        if used.returncode:
            raise SystemExit(f"{self.name}: {used.output[-2000:]}")
        took = float(used.output.split()[-1]) if self.name == SAVE else used.seconds
        self.seconds[cache].append(took)
        self.rss, self.anonymous = max(self.rss, used.rss), max(self.anonymous, used.anonymous)
        if self.name == SAVE:
            one, other = (weights_bytes(folder) for folder in (self.source, self.target))
            if abs(one - other) > 0.01 * one:
                raise SystemExit(f"{self.name}: it wrote {other:,} bytes, the source has {one:,}")
        if self.target.name == "hf-back":
            checksums = [(self.target.with_name(name) / MANIFEST).read_text() for name in ("hf", "hf-back")]
            one, other = (json.loads(text)["files"] for text in checksums)
            if one != other:
                raise SystemExit(f"{self.name}: the files differ from those they came from: {one}, {other}")


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def sides(folder: Path, workers: int, with_transformers: bool) -> list[Side]:
    """Everything that is compared. What comes back is made of a Megatron folder that is not made anew."""
    hf, dist = folder / "hf", folder / "megatron"
    copy = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'
    result = []
    for source in (hf, dist):
        name, target = f"cp {source.name}", folder / f"{source.name}-cp"
        result.append(Side(name, name, ["sh", "-c", copy, str(source), str(target)], source, target))
    for count in dict.fromkeys((1, workers)):
        for way, source, target in (("from-hf", hf, folder / "new"), ("to-hf", dist, folder / "hf-back")):
            name = f"{way}, {count} worker{'s' * (count > 1)}"
            command = [sys.executable, "-m", "megatron_nemotron3", "convert", way, str(source), str(target)]
            command += ["--workers", str(count)]
            result.append(Side(name, f"cp {source.name}", command, source, target))
    saved = folder / "hf-saved"
    command = [sys.executable, __file__, "--save-pretrained", str(hf), str(saved)]
    return result + ([Side(SAVE, "cp hf", command, hf, saved)] if with_transformers else [])


def table(every: Sequence[Side], caches: Sequence[str], length: int) -> None:
    """Print it."""
    by_name, nothing, rows = {side.name: side for side in every}, idle(), []
    for side in every:
        row = {"side": side.name}
        for cache in caches:
            base, own = by_name[side.base].seconds[cache], side.seconds[cache]
            ratio = statistics.median(b / s for b, s in zip(base, own, strict=True))
            median = statistics.median(own)
            row |= {f"{cache} s": f"{median:.2f}", f"{cache} MB/s": f"{length / median / 1e6:,.0f}"}
            row[f"{cache} of cp"] = f"{ratio:.2f}"
        row["RSS MiB"] = f"{max(0, side.rss - nothing.rss) / MIB:,.0f}"
        row["anonymous MiB"] = f"{max(0, side.anonymous - nothing.anonymous) / MIB:,.0f}"
        rows.append(row)
    show(rows)


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--quick", action="store_true", help="an eighth of the widths, 0.1 GB, one warm round"
    )
    options.add_argument("--gigabytes", type=float, default=None, help="of the checkpoint (default 8)")
    options.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    options.add_argument("--rounds", type=int, default=None, help="default 3")
    options.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    options.add_argument("--without-transformers", action="store_true", help="leave save_pretrained out")
    options.add_argument("--save-pretrained", type=Path, nargs=2, help="FROM TO: that side alone")
    args = options.parse_args()
    if args.save_pretrained:
        save_pretrained(*args.save_pretrained)
        return
    print(machine(), flush=True)
    config = checkpoint(args.gigabytes or (0.1 if args.quick else 8.0), QUICK if args.quick else 1)
    length = size(config)
    root = os.access("/proc/sys/vm/drop_caches", os.W_OK)
    caches = ["cold", "warm"] if root and not args.quick else ["warm"]
    print(
        f"layers {config.pattern}, hidden size {config.hidden_size}, {config.num_moe_experts} experts, "
        f"vocabulary {config.vocab_size:,}: {length / 1e9:.2f} GB in "
        f"{len(inventory.hf_tensors(config)):,} tensors",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="convert-", dir=args.folder) as name:
        folder, source = Path(name), Random(config)
        free = shutil.disk_usage(folder).free
        if free < 3.3 * length:
            raise SystemExit(f"{folder}: {3.3 * length:,.0f} bytes are needed, {free:,} free: give --folder")
        files = to_hf.files(source.tensors)
        run(Job(folder / "hf", source, files, to_hf.small_files(config, files)))
        every = sides(folder, args.workers, not args.without_transformers)
        first = next(side for side in every if side.target.name == "new")
        first.run("warm")  # so that the Megatron folder is there; it does not count
        first.seconds["warm"].clear()
        first.target.rename(folder / "megatron")
        for number in range(args.rounds or (1 if args.quick else 3)):
            for cache in caches:
                for side in every if number % 2 == 0 else every[::-1]:
                    side.run(cache)
                    shutil.rmtree(side.target)
    table(every, caches, length)


if __name__ == "__main__":
    main()
