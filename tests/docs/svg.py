"""A canvas for the pictures of docs/: text that fits, and colours for a light and a dark scheme."""

from __future__ import annotations

from html import escape

#: Width of every picture: a phone shows it at nine tenths of its size, a laptop at one and a half.
WIDTH = 400
#: Upper bound of a character's width in sizes of the font, on average over a text in a sans-serif font.
CHARACTER = 0.53

#: Class -> (fill, line) in the light scheme, and in the dark one.
COLOURS = {
    "M": (("#d3e3fd", "#3b6fc4"), ("#1c3764", "#8ab4f8")),
    "A": (("#fde3c0", "#b36200"), ("#5a3a10", "#f5b461")),
    "E": (("#d2efd8", "#2f7d45"), ("#1d4a2b", "#81c995")),
    "D": (("#e4e4e7", "#63636b"), ("#3c3c43", "#b4b4bd")),
    "P": (("#e6dcf8", "#7047b8"), ("#3e2a66", "#c3a6f5")),
    "R0": (("#cdeef0", "#14808a"), ("#0f454b", "#6fd0d8")),
    "R1": (("#fbd9e6", "#b23a73"), ("#5a1f3b", "#f19ac0")),
    "R2": (("#f6efbd", "#86770a"), ("#49430f", "#dccb5a")),
    "R3": (("#dfe3f0", "#4d5b8c"), ("#2b3452", "#a3b1e0")),
    "plain": (("#ffffff00", "#8a8f98"), ("#ffffff00", "#8a8f98")),
}


def _style() -> str:
    light = "".join(f".{name}{{fill:{fill};stroke:{line}}}" for name, ((fill, line), _) in COLOURS.items())
    dark = "".join(f".{name}{{fill:{fill};stroke:{line}}}" for name, (_, (fill, line)) in COLOURS.items())
    return (
        "text{font-family:system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;fill:#1f2328}"
        ".arrow,.line{fill:none;stroke:#63676e;stroke-width:1.3}.head{fill:#63676e}"
        f"{light}@media(prefers-color-scheme:dark){{text{{fill:#e4e6eb}}"
        f".arrow,.line{{stroke:#a8adb5}}.head{{fill:#a8adb5}}{dark}}}"
    )


class Canvas:
    """An SVG picture that is drawn from top to bottom.

    `title` is its text for those who cannot see it.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.height = 0.0
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        anchor: str = "start",
        bold: bool = False,
        room: float | None = None,
    ) -> None:
        """Write a line of text with its baseline at y.

        Raises:
            ValueError: it is wider than `room`, or than the picture.
        """
        width = len(words) * size * CHARACTER * (1.06 if bold else 1)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        if width > (room or WIDTH) or left < 0 or left + width > WIDTH + 1:
            raise ValueError(f"{words!r} needs {width:.0f} of {room or WIDTH:.0f} at {left:.0f}: shorten it")
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )
        self.height = max(self.height, y + 4)

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, *lines: str, size: float = 12
    ) -> None:
        """Draw a box with lines of text in its middle: the first larger, the others as notes."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'
        )
        sizes = [size, *(size - 1.5,) * (len(lines) - 1)]
        top = y + (height - sum(sizes) * 1.25) / 2
        for words, own in zip(lines, sizes, strict=True):
            self.text(x + width / 2, top + own, words, size=own, anchor="middle", room=width - 4)
            top += own * 1.25
        self.height = max(self.height, y + height + 2)

    def line(self, *points: tuple[float, float], arrow: bool = True) -> None:
        """Draw straight lines from point to point, with a head at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="arrow"/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            along, across = ((x > x0) - (x < x0), (y > y0) - (y < y0)), 3.5
            base = (x - 6 * along[0], y - 6 * along[1])
            corners = [(base[0] + s * across * along[1], base[1] + s * across * along[0]) for s in (1, -1)]
            path = " ".join(f"{a:g},{b:g}" for a, b in [(x, y), *corners])
            self._parts.append(f'<polygon points="{path}" class="head"/>')
        self.height = max(self.height, *(y for _, y in points))

    def __str__(self) -> str:
        height = round(self.height + 6)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="600" '
            f'height="{round(height * 1.5)}" role="img">\n<title>{escape(self.title)}</title>\n'
            f"<style>{_style()}</style>\n" + "\n".join(self._parts) + "\n</svg>\n"
        )
