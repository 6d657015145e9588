"""The introductions of pages in docs/ that benchmarks write."""

from pathlib import Path


def read_introduction(name: str) -> str:
    """Return the text of benchmarks/NAME, with links as a page in docs/ has them."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return text.replace("](../docs/", "](")
