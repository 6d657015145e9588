"""The page of each experiment, written beside its figure."""

from pathlib import Path

from ragen_jax.lab import collapse, organism
from ragen_jax.lab.curves import Runs

# experiment -> (text of the page, figure)
PAGES = {
    "collapse": (collapse.markdown, collapse.draw),
    "organism": (organism.markdown, organism.draw),
}


def write_page(name: str, path: Path, words: str, question: str, runs: Runs) -> str:
    """Writes an experiment's page to `path` and its figure beside it; returns the text.

    Args:
      words: what `python -m ragen_jax.lab` was given.
    """
    markdown, draw = PAGES[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = path.with_suffix(".png")
    draw(runs, picture)
    text = markdown(words, question, runs, picture.name)
    path.write_text(text)
    return text
