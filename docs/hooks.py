"""mkdocs: links that leave docs/ lead to a page of the site that shows the file.

On GitHub `[noxfile.py](../noxfile.py)` opens the file. A site has docs/ alone, so every file of the
repository that a page links to becomes a page below `files/`: no repository address is needed, and nothing is
fetched. A link to a folder, or to nothing, is a warning (an error under --strict).
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)]*)?\)")
FENCE = re.compile(r"^(`{3,}).*?^\1`*$", re.M | re.S)
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".md": "markdown",
}

log = get_plugin_logger("files")


def outside(text: str) -> set[str]:
    """Targets of the links that begin with `../`, outside of code blocks."""
    return {found[1] for found in LINK.finditer(FENCE.sub("", text))}


def address(page: str, target: str) -> str:
    """Path below the repository of a link in docs/`page`."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every file outside docs/ that is linked to."""
    root = Path(config["docs_dir"]).parent
    wanted: dict[str, str] = {}
    for file in files.documentation_pages():
        for target in outside(file.content_string):
            path = address(file.src_uri, target)
            if not path.startswith("docs/"):
                wanted.setdefault(path, file.src_uri)
    for path, linking in sorted(wanted.items()):
        if path.startswith("..") or not (root / path).is_file():
            log.warning("%s links to %s, which is no file of the repository: link to a file", linking, path)
            continue
        page = shown(path, (root / path).read_text(encoding="utf-8"))
        files.append(File.generated(config, f"files/{path}.md", content=page))
    return files


def shown(path: str, text: str) -> str:
    """A file as a Markdown page."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    language = LANGUAGES.get(os.path.splitext(path)[1], "text")
    return f"# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at those pages."""
    if page.file.src_uri.startswith("files/"):
        return markdown
    folder = posixpath.dirname(page.file.src_uri)

    def pointed(found: re.Match[str]) -> str:
        uri = f"files/{address(page.file.src_uri, found[1])}.md"
        return f"]({posixpath.relpath(uri, folder or '.')})" if files.get_file_from_path(uri) else found[0]

    return LINK.sub(pointed, markdown)
