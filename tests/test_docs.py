"""The documentation as a site: it builds without a warning, every page is reachable, tables and lists arrive.

That links lead to files is tests/test_examples.py's; what single pages say is compared in tests/docs and
beside the code.
"""

from __future__ import annotations

import importlib.util
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs-material is not installed: pip install mkdocs-material",
)


def prose(name: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^(`{3,}).*?^\1`*$", "", (DOCS / name).read_text(encoding="utf-8"), flags=re.M | re.S)


def navigation(entry: Any) -> Iterator[str]:
    """Pages of a nav of mkdocs.yml."""
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from navigation(below)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(set(PAGES) - set(listed)) == [], "add to nav in mkdocs.yml"
    assert sorted(set(listed) - set(PAGES)) == [], "in nav of mkdocs.yml, but not in docs/"
    assert len(listed) == len(set(listed))


def test_the_entry_page_lists_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w./]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert sorted(set(PAGES) - linked - {"index.md"}) == [], "add a row to docs/index.md"


def test_the_readme_lists_every_folder_of_the_package() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## The package")[1]
    listed = re.findall(r"^  (\w+)/ ", tree, re.M)
    folders = ROOT.glob("megatron_nemotron3/*/__init__.py")
    assert sorted(listed) == sorted(path.parent.name for path in folders)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_begins_with_its_one_title(name: str) -> None:
    text = prose(name)
    assert re.match(r"# \S", text)
    assert len(re.findall(r"^# ", text, re.M)) == 1


@pytest.mark.parametrize("name", PAGES)
def test_links_and_asterisks(name: str) -> None:
    """A link's text is no file name and not "here"; TP*CP*DP without backslashes would lose its asterisks."""
    text = prose(name)
    for shown, target in re.findall(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", text):
        if re.search(r"\.md(#|$)", target):
            assert ".md" not in shown and shown.lower() not in ("here", "page", "link"), (shown, target)
    assert re.findall(r"\w+\*\w+", re.sub("`[^`]*`", "", text).replace("**", "")) == []


class Texts(HTMLParser):
    """Texts of a page's paragraphs, and what it loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self.loaded: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "p":
            self._inside = True
            self.paragraphs.append("")
        source = dict(attrs).get("href" if tag == "link" else "src") or ""
        if tag in ("link", "script", "img", "iframe") and re.match(r"(https?:)?//", source):
            self.loaded.append(source)

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The site, and what mkdocs said."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0 or "warning" in said, said
    return folder, said


@pytest.fixture
def site(built: tuple[Path, str]) -> Path:
    return built[0]


@needs_mkdocs
def test_it_builds_without_a_warning(built: tuple[Path, str]) -> None:
    assert [line for line in built[1].splitlines() if line and not line.startswith("INFO")] == []


@needs_mkdocs
def test_the_site_has_every_page(site: Path) -> None:
    for name in PAGES:
        assert (site / name).with_suffix(".html").stat().st_size > 1000
    assert not list(site.rglob("*.py")) and not list(site.rglob("*.toml"))


@needs_mkdocs
@pytest.mark.parametrize("name", PAGES)
def test_tables_and_lists_arrive(site: Path, name: str) -> None:
    """Python-Markdown reads some things otherwise than GitHub: a list needs an empty line above it."""
    page = Texts()
    html = (site / name).with_suffix(".html").read_text(encoding="utf-8")
    page.feed(html)
    broken = [text for text in page.paragraphs if re.search(r"\n *([-*] |1\. )|^ *(\||`{3})", text, re.M)]
    assert broken == []
    assert page.loaded == []
    body = re.sub(r"<pre.*?</pre>", "", html.partition("<article")[2].partition("</article>")[0], flags=re.S)
    delimiters = re.findall(r"^\|[ :|-]+\|$", prose(name), re.M)
    assert body.count("<table>") == len(delimiters)
    rows = len(re.findall(r"^\|.*\|$", prose(name), re.M)) - len(delimiters)
    assert body.count("<tr>") == rows


@needs_mkdocs
def test_files_outside_docs_are_shown(site: Path) -> None:
    linked = {
        (name, target)
        for name in PAGES
        for link in re.findall(r"\]\((\.\./[^)#\s]+)\)", prose(name))
        if not (
            target := posixpath.normpath(posixpath.join("docs", posixpath.dirname(name), link))
        ).startswith("docs/")
        if (ROOT / target).is_file()
    }
    assert len(linked) >= 3
    for name, target in linked:
        address = posixpath.relpath(f"files/{target}.html", posixpath.dirname(name) or ".")
        assert f'href="{address}"' in (site / name).with_suffix(".html").read_text(encoding="utf-8")
        shown = (site / "files" / f"{target}.html").read_text(encoding="utf-8")
        assert "<h1 id=" in shown and target in shown


@needs_mkdocs
@pytest.mark.parametrize("target", ["../examples", "../nothing.py", "../../etc/passwd"])
def test_a_link_to_no_file_is_a_warning(target: str, caplog: pytest.LogCaptureFixture) -> None:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = SimpleNamespace(src_uri="a.md", content_string=f"[x]({target})\n\n```\n[y](../README.md)\n```\n")

    class Files(list[Any]):
        def documentation_pages(self) -> list[Any]:
            return [page]

    with caplog.at_level("WARNING"):
        assert hooks.on_files(Files(), {"docs_dir": str(DOCS)}) == []
    assert "a.md links to" in caplog.text and "link to a file" in caplog.text
