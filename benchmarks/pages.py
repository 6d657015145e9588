"""The introductions of pages in docs/ that benchmarks write: floors.md and gym_tasks.md."""

from pathlib import Path


def read_introduction(name: str) -> str:
    """Return the text of benchmarks/NAME, with links as a page in docs/ has them."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return text.replace("](../docs/", "](")
