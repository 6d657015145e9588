"""A small SVG: boxes, arrows, texts and lines in seven colours that follow light and dark."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

# Of the card, its text, what is beside the point, and four kinds of things: light, dark.
COLOURS = {
    "card": ("#ffffff", "#16181d"),
    "ink": ("#1c2128", "#e6e8eb"),
    "pale": ("#59626e", "#a4adb8"),
    "line": ("#c4cad2", "#3d444e"),
    "blue": ("#cfe3fb", "#1d3f66"),
    "green": ("#cfeed8", "#1c4a2e"),
    "amber": ("#fbe6b8", "#5a4310"),
    "red": ("#f9d2d2", "#6b2427"),
    "strong": ("#1f6fc4", "#6db3f8"),
    "alarm": ("#c03136", "#f57f83"),
}


class Picture:
    """What is drawn, in order. Lengths are pixels of a card that is `width` x `height`."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str, label: str = "") -> None:
        """A rectangle of a colour's name; lines of the label are parted by |, the first bold."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" class="{fill} edge"/>'
        )
        lines = label.split("|") if label else []
        for index, line in enumerate(lines):
            down = y + h / 2 + 4.5 + 16 * (index - (len(lines) - 1) / 2)
            self.text(x + w / 2, down, line, bold=index == 0, middle=True)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        bold: bool = False,
        middle: bool = False,
        colour: str = "ink",
        small: bool = False,
    ) -> None:
        """A line of text at its baseline's left end, or its middle."""
        classes = " ".join([colour, *["bold"] * bold, *["middle"] * middle, *["small"] * small])
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{classes}">{escape(words)}</text>')

    def arrow(self, *points: tuple[float, float], colour: str = "pale") -> None:
        """A line through points that ends in an arrow."""
        self.curve(points, colour, end=f' marker-end="url(#{colour})"')

    def curve(self, points: Sequence[tuple[float, float]], colour: str, end: str = "") -> None:
        """A line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="stroke s-{colour}"{end}/>')

    def svg(self) -> str:
        """The file."""

        def rules(which: int) -> str:
            found = []
            for name, colours in COLOURS.items():
                found += [f".{name}{{fill:{colours[which]}}}"]
                found += [f".s-{name}{{stroke:{colours[which]}}}"]
            return "".join([*found, f".edge{{stroke:{COLOURS['line'][which]}}}"])

        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" class="{name}"/></marker>'
            for name in ("pale", "strong", "alarm")
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            "<style>text{font:13px system-ui,sans-serif}.bold{font-weight:600}"
            ".middle{text-anchor:middle}.small{font-size:11.5px}"
            f".stroke{{fill:none;stroke-width:1.8}}{rules(0)}"
            f"@media (prefers-color-scheme: dark){{{rules(1)}}}</style>\n"
            f"<defs>{heads}</defs>\n"
            f'<rect width="{self.width}" height="{self.height}" rx="8" class="card"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )
