"""Every page of the site fits, in a browser. Opt-in by having Chromium; test_site.py needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import look

ROOT = Path(__file__).parents[2]
PROGRAM = look.browser()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(PROGRAM is None, reason=f"no browser: {', '.join(look.BROWSERS)}"),
]


def test_every_page_fits(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=120)
    looks = look.look(tmp_path, PROGRAM or "")
    assert len(looks) == len(look.WIDTHS) * len(list((ROOT / "docs").rglob("*.md")))
    assert [fault for one in looks for fault in one.faults] == []


def test_what_does_not_fit_is_found(tmp_path: Path) -> None:
    cells = "<td>elements</td>" * 12
    (tmp_path / "index.html").write_text(
        "<!doctype html><body style='margin:0'><img src='gone.svg'>"
        f"<div style='overflow:auto;width:380px'><table><tr>{cells}</tr></table></div>"
        "<div style='width:700px'>wide</div>"
    )
    wide, narrow = look.look(tmp_path, PROGRAM or "")
    assert [fault.partition(": ")[2].partition(" ")[0] for fault in wide.faults] == ["image", "table"]
    assert [fault.partition(": ")[2] for fault in narrow.faults][1:] == ["the page is 700 wide"]
    look.photograph(tmp_path, PROGRAM or "", [narrow], tmp_path / "pictures")
    assert (tmp_path / "pictures" / "index-390.png").read_bytes().startswith(b"\x89PNG")
