"""Open every page of the built site in Chromium, as wide as a laptop and as a phone: `make docs-look`.

python -m tests.docs.look build/site                            # what does not fit; exit code 1 if anything
python -m tests.docs.look build/site --pictures build/look      # and a picture of every page at both widths

A page must not scroll sideways. On a laptop no table may, either; on a phone tables and code scroll in boxes
of their own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

#: Width in CSS pixels -> whether tables must fit into it.
WIDTHS = {1366: True, 390: False}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: Seconds in which a browser has to open every page at every width.
PATIENCE = 240

#: Opens each page in a frame of each width, and posts what it measured.
_MEASURE = """<!doctype html><body style="margin:0">
<iframe id="frame" style="border:0;height:900px"></iframe><script>
const {pages, widths} = %s, frame = document.getElementById("frame"), found = [];
const box = table => table.closest(".md-typeset__scrollwrap") || table.parentElement;
(async () => {
  for (const width of widths) for (const page of pages) {
    frame.style.width = width + "px";
    await new Promise(done => { frame.onload = done; frame.src = "/" + page; });
    const page_ = frame.contentDocument, root = page_.scrollingElement;
    await new Promise(done => setTimeout(done, 60));
    found.push({
      page, width, height: root.scrollHeight, scrolls: root.scrollWidth,
      tables: [...page_.querySelectorAll("table")].filter(t => box(t).scrollWidth > box(t).clientWidth + 1)
        .map(t => t.rows[0].innerText.replace(/\\s+/g, " ").slice(0, 60)),
      images: [...page_.images].filter(i => !i.naturalWidth).map(i => i.getAttribute("src")),
    });
  }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""
_ONE = '<!doctype html><body style="margin:0"><iframe src="/%s" style="border:0;width:%dpx;height:%dpx">'


@dataclass(frozen=True)
class Look:
    """One page at one width. Sizes are in CSS pixels."""

    page: str
    width: int
    height: int
    #: Width of what the page contains; more than `width` if it scrolls sideways.
    scrolls: int
    #: Headers of tables that are wider than their box.
    tables: tuple[str, ...]
    #: Images that did not load.
    images: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        """What a reader would complain about."""
        found = [f"image {source} does not load" for source in self.images]
        if self.scrolls > self.width:
            found.append(f"the page is {self.scrolls} wide")
        if WIDTHS.get(self.width):
            found += [f"table '{header}' scrolls" for header in self.tables]
        return [f"{self.page} at {self.width}: {fault}" for fault in found]


def browser() -> str | None:
    """The Chromium of this machine; None if there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def pages_of(site: Path) -> list[str]:
    """Pages of a built site, but for those that show files of the repository."""
    found = (path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    return sorted(page for page in found if not page.startswith("files/") and page != "404.html")


class _Server(SimpleHTTPRequestHandler):
    """The site, pages of our own below /look, and what is posted."""

    def __init__(
        self, *args, own: dict[str, str], posted: list[str], done: threading.Event, **options
    ) -> None:
        self.own, self.posted, self.done = own, posted, done
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        if self.path not in self.own:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.own[self.path].encode())
        return None

    def do_POST(self) -> None:
        self.posted.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()
        self.done.set()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def _served(site: Path, own: dict[str, str]) -> Iterator[tuple[str, list[str], threading.Event]]:
    """Address of a server of the site; what is posted to it, and the event that something was."""
    posted: list[str] = []
    done = threading.Event()
    handler = partial(_Server, directory=str(site), own=own, posted=posted, done=done)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", posted, done
    finally:
        server.shutdown()
        server.server_close()


def _command(program: str, folder: str, *words: str) -> list[str]:
    return [
        *(program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *(f"--user-data-dir={folder}", *words),
    ]


def look(site: Path, program: str, pages: list[str] | None = None) -> list[Look]:
    """Open pages, by default all, at every width.

    Raises:
        TimeoutError: the browser did not open them within `PATIENCE`.
    """
    plan = json.dumps({"pages": pages or pages_of(site), "widths": list(WIDTHS)})
    own = {"/look": _MEASURE % plan}
    with tempfile.TemporaryDirectory() as folder, _served(site, own) as (address, posted, done):
        words = _command(program, folder, "--window-size=1500,1000", "--remote-debugging-port=0")
        running = subprocess.Popen([*words, f"{address}/look"], stderr=subprocess.DEVNULL)
        try:
            if not done.wait(PATIENCE):
                raise TimeoutError(f"{program} did not open {len(pages_of(site))} pages in {PATIENCE} s")
        finally:
            running.terminate()
            running.wait(10)
        return [
            Look(**{**one, "tables": tuple(one["tables"]), "images": tuple(one["images"])})
            for one in json.loads(posted[0])
        ]


def photograph(site: Path, program: str, looks: list[Look], target: Path) -> None:
    """Write a picture of each page at each width, as `target`/page-width.png."""
    target.mkdir(parents=True, exist_ok=True)
    own = {f"/look-{number}": _ONE % (one.page, one.width, one.height) for number, one in enumerate(looks)}
    with tempfile.TemporaryDirectory() as folder, _served(site, own) as (address, _, _):
        for number, one in enumerate(looks):
            name = one.page.removesuffix(".html").replace("/", "_")
            # A window is at least 500 pixels wide.
            size = f"--window-size={max(one.width, 500)},{one.height}"
            words = (size, f"--screenshot={target / f'{name}-{one.width}.png'}", "--virtual-time-budget=3000")
            command = [*_command(program, folder, *words), f"{address}/look-{number}"]
            subprocess.run(command, check=True, capture_output=True, timeout=120)


def main(argv: list[str] | None = None) -> int:
    """Look at a site; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.look", description=__doc__)
    parser.add_argument("site", type=Path, help="what `make docs` built")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write a picture of every page")
    options = parser.parse_args(argv)
    program = browser()
    if program is None or not (options.site / "index.html").exists():
        missing = f"none of {', '.join(BROWSERS)}" if program is None else f"no {options.site}/index.html"
        print(f"tests.docs.look: {missing}", file=sys.stderr)
        return 2
    looks = look(options.site, program)
    if options.pictures:
        photograph(options.site, program, looks, options.pictures)
    faults = [fault for one in looks for fault in one.faults]
    print(
        "\n".join(
            [*faults, f"{len(looks)} looks at {len(pages_of(options.site))} pages: {len(faults)} faults"]
        )
    )
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
