"""Build an index of a corpus in bounded memory: its texts, and their words or vectors."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from ragen_jax.envs.search_qa.dense import check_fit
from ragen_jax.envs.search_qa.dense_index import VECTORS, Settings
from ragen_jax.envs.search_qa.e5 import E5, PASSAGE, read_shape
from ragen_jax.envs.search_qa.passages import CHUNK, Passages, read_corpus, write_passages
from ragen_jax.envs.search_qa.vectors import open_vectors
from ragen_jax.envs.search_qa.words import write_words
from ragen_jax.model import hf
from ragen_jax.model.hf import replacement
from ragen_jax.storage.atomic_io import with_retries
from ragen_jax.storage.console import console
from ragen_jax.storage.writers import map_array

LINE_EVERY = 1_000_000  # texts between two lines of progress


def build_words(corpus: str, index: str, *, stem: bool) -> int:
    """Write the index of `envs/search_qa/words.py`; return the number of texts.

    All functions here write to a temporary folder next to `index` and rename it when it is
    complete.

    Raises:
      ValueError: the corpus cannot be read, or the folder has other files.
    """
    with replacement(index) as fresh:
        write_words(fresh, _report_progress(write_passages(fresh, read_corpus(corpus))), stem=stem)
        return len(Passages(fresh))


def build_vectors(corpus: str, index: str, *, encoder: str, dtype: str, mesh: Mesh) -> int:
    """Write the texts and their E5 vectors in float16; return the number of texts.

    Args:
      dtype: dtype of the vectors on the devices when the index is opened.

    Raises:
      ValueError: as in `build_words`, or the encoder cannot be read.
    """
    encode = E5(encoder, mesh, prefix=PASSAGE)
    with replacement(index) as fresh:
        for _ in write_passages(fresh, read_corpus(corpus)):
            pass
        texts = Passages(fresh)
        shape = (len(texts), encode.width)
        vectors = map_array(fresh / VECTORS, np.float16, shape)
        starts = range(0, len(texts), CHUNK)
        for start, chunk in zip(
            starts, _report_progress(texts[start : start + CHUNK] for start in starts), strict=True
        ):
            vectors[start : start + len(chunk)] = encode(chunk)
        with_retries(vectors.flush, fresh / VECTORS)
        Settings("", _absolute_path(encoder), dtype).write(fresh)
        return len(texts)


def build_texts(corpus: str, index: str, *, vectors: str, encoder: str, dtype: str) -> int:
    """Write the texts of existing vectors; return the number of texts.

    Raises:
      ValueError: as in `build_vectors`, or the vectors cannot be read, come from another encoder,
        or differ in number from the texts.
    """
    found = open_vectors(vectors)
    width = read_shape(hf.resolve(encoder)).hidden_size
    with replacement(index) as fresh:
        for _ in _report_progress(write_passages(fresh, read_corpus(corpus))):
            pass
        texts = Passages(fresh)
        check_fit(found, width, texts)
        Settings(_absolute_path(vectors), _absolute_path(encoder), dtype).write(fresh)
        return len(texts)


def _absolute_path(path: str) -> str:
    """Return the absolute path of a file; return a hub id unchanged."""
    place = Path(path).expanduser()
    return str(place.resolve()) if place.exists() else path


def _report_progress(chunks: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the chunks, and print a line every LINE_EVERY texts."""
    count = 0
    for chunk in chunks:
        yield chunk
        before, count = count, count + len(chunk)
        if before // LINE_EVERY < count // LINE_EVERY:
            console(f"{count} texts")
