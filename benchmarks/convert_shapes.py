"""Time and peak memory of converting whole models of the family, in sparse files.

    python benchmarks/convert_shapes.py [--models super ultra] [--whole] [--workers 2] [--folder DIR]

All names, shapes, headers and lengths are the released models'. Elements are zeros that take no space on the
disk, and the writer leaves holes for zeros (tests/support/sparse_checkpoints.py). Everything else runs as for
real weights: every byte is read, checked, checksummed and passed to the writer.

Without --whole the plans are made only (`--dry-run`): all headers of the source are read, all files of the
target are planned. With --whole both conversions and `convert verify` run to their end: an hour for Ultra.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from common import MIB, ROOT, machine, parser, show
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


def commands(folder: Path, hf: Path, whole: bool, workers: int) -> dict[str, tuple[object, ...]]:
    """What is measured: both plans; or there, back and compared, which must say that all is equal."""
    from tests.support.sparse_checkpoints import write_megatron

    megatron, back, count = folder / "megatron", folder / "back", ("--workers", workers)
    if whole:
        return {
            "from-hf": ("convert", "from-hf", hf, megatron, *count),
            "to-hf": ("convert", "to-hf", megatron, back, *count),
            "verify": ("convert", "verify", megatron, back, *count),
        }
    write_megatron(megatron, hf)
    return {
        "plan from-hf": ("convert", "from-hf", hf, folder / "out", "--dry-run"),
        "plan to-hf": ("convert", "to-hf", megatron, folder / "out", "--dry-run"),
    }


def main() -> None:
    known = [name for name in names() if not name.endswith("-tiny")]
    options = parser(__doc__)
    options.add_argument(
        "--models", nargs="+", choices=known, default=["nano", "lightning", "super", "ultra"]
    )
    options.add_argument("--whole", action="store_true", help="convert, not only plan")
    options.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    options.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    args = options.parse_args()
    from tests.support.sparse_checkpoints import write_hf

    print(machine(), flush=True)
    own, rows = idle(), []
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="shapes-", dir=args.folder) as parent:
            folder, hf = Path(parent), Path(parent) / "hf"
            write_hf(hf, get(name))
            length = sum(path.stat().st_size for path in hf.iterdir())
            for what, words in commands(folder, hf, args.whole, args.workers).items():
                used = nemotron3(*words)
                tensors = re.search(r"([\d,]+) tensors", used.output)
                assert tensors is not None
                rows.append(
                    {
                        "model": name,
                        "GB": f"{length / 1e9:,.1f}",
                        "what": what,
                        "tensors": tensors[1],
                        "s": f"{used.seconds:,.1f}",
                        "MB/s": f"{length / used.seconds / 1e6:,.0f}" if args.whole else None,
                        "RSS MiB": f"{max(0, used.rss - own.rss) / MIB:,.0f}",
                        "anonymous MiB": f"{max(0, used.anonymous - own.anonymous) / MIB:,.0f}",
                    }
                )
                print(f"  {name}, {what}: {used.seconds:,.0f} s", flush=True)
    show(rows)


if __name__ == "__main__":
    main()
