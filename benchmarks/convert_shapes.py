"""Time and peak memory of converting whole models of the family, in sparse files.

    python benchmarks/convert_shapes.py [--models super ultra] [--whole] [--workers 2] [--folder DIR]

All names, shapes, headers and lengths are the released models'. Elements are zeros that take no space on the
disk, and the writer leaves holes for zeros (tests/support/sparse_checkpoints.py). Everything else runs as for
real weights: every byte is read, checked, checksummed and passed to the writer.

Without --whole the plans are made only (`--dry-run`): all headers of the source are read, all files of the
target are planned. With --whole both conversions and `verify` run to their end: an hour for Ultra.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

from common import MIB, ROOT, machine, print_table
from process_tree import Usage, idle, watch

from megatron_nemotron3.models import get, names


def nemotron3(*words: object) -> Usage:
    """The command line, with the writer that leaves holes."""
    used = watch(
        [sys.executable, "-m", "tests.support.sparse_checkpoints", *map(str, words)],
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    if used.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}: {used.output[-2000:]}")
    return used


def plans(hf: Path, megatron: Path) -> list[tuple[str, Usage]]:
    """Both plans; the Megatron folder is made of the other one's."""
    from tests.support.sparse_checkpoints import write_megatron

    write_megatron(megatron, hf)
    target = hf.parent / "out"
    return [
        ("plan from-hf", nemotron3("convert", "from-hf", hf, target, "--dry-run")),
        ("plan to-hf", nemotron3("convert", "to-hf", megatron, target, "--dry-run")),
    ]


def conversions(hf: Path, megatron: Path, workers: int) -> list[tuple[str, Usage]]:
    """There, back and compared; what `verify` says must be that all is equal."""
    back, count = hf.parent / "back", ("--workers", workers)
    result = []
    for what, words in (
        ("from-hf", ("convert", "from-hf", hf, megatron)),
        ("to-hf", ("convert", "to-hf", megatron, back)),
        ("verify", ("verify", megatron, back)),
    ):
        result.append((what, nemotron3(*words, *count)))
        print(f"  {what}: {result[-1][1].seconds:,.0f} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [name for name in names() if not name.endswith("-tiny")]
    parser.add_argument("--models", nargs="+", choices=known, default=["nano", "lightning", "super", "ultra"])
    parser.add_argument("--whole", action="store_true", help="convert, not only plan")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to work; default: the temporary folder"
    )
    args = parser.parse_args()
    from tests.support.sparse_checkpoints import write_hf

    print(machine(), flush=True)
    own = idle()
    rows = []
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="shapes-", dir=args.folder) as parent:
            hf, megatron = Path(parent) / "hf", Path(parent) / "megatron"
            write_hf(hf, get(name))
            length = sum(path.stat().st_size for path in hf.iterdir())
            done = conversions(hf, megatron, args.workers) if args.whole else plans(hf, megatron)
            for what, used in done:
                tensors = re.search(r"([\d,]+) tensors", used.output)
                assert tensors is not None
                rate = f"{length / used.seconds / 1e6:,.0f}" if args.whole else ""
                memory = [
                    f"{max(0, n) / MIB:,.0f}" for n in (used.rss - own.rss, used.anonymous - own.anonymous)
                ]
                rows.append(
                    [name, f"{length / 1e9:,.1f}", what, tensors[1], f"{used.seconds:,.1f}", rate, *memory]
                )
    print_table(["model", "GB", "what", "tensors", "s", "MB/s", "RSS MiB", "anonymous MiB"], rows)


if __name__ == "__main__":
    main()
