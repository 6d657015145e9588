"""BM25 over a corpus of any size: an index that is written chunk by chunk, and memory-mapped.

It stores, word after word, the documents that contain the word and its weight in their scores. The
scores are those of `retrieve.BM25`. While it is built and searched, only the vocabulary and a few
numbers per document are in memory.
"""

import contextlib
import json
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import numpy as np

from ragen_jax.envs.bm25 import K1, B, best
from ragen_jax.envs.search_qa.passages import Passages
from ragen_jax.envs.search_qa.retrieve import MAX_QUERY, Document, splitter
from ragen_jax.storage.atomic_io import atomic_open, atomic_write, with_retries
from ragen_jax.storage.writers import map_array, save_array

# Files of an index: documents and weights of the postings of all words, where each word's postings
# start, the words in order (one per line), and whether words are stemmed.
DOCUMENTS, WEIGHTS, STARTS = "documents.npy", "weights.npy", "starts.npy"
WORDS, SETTINGS = "words.txt", "bm25.json"


def write_words(folder: Path, chunks: Iterator[list[str]], *, stem: bool) -> None:
    """Write the index of texts that arrive in chunks; `stem` is as in `retrieve.BM25`."""
    split = splitter(stem)
    ids: dict[str, int] = {}
    frequency_W = np.zeros(0, np.int64)  # number of documents that contain a word
    lengths, pieces = [], []
    for chunk in chunks:
        words = split(chunk)
        flat = [ids.setdefault(word, len(ids)) for one in words for word in one]
        length_N = np.array([len(one) for one in words])
        first = sum(map(len, lengths))
        document = np.repeat(np.arange(first, first + len(words)), length_N)
        # Sort by word, then by document; packed into one number each, which sorts fast.
        pairs, counts = np.unique(np.array(flat, np.int64) << 32 | document, return_counts=True)
        word, document = pairs >> 32, pairs & 0xFFFFFFFF
        frequency_W = np.pad(frequency_W, (0, len(ids) - len(frequency_W)))
        frequency_W += np.bincount(word, minlength=len(ids))
        pieces.append(folder / f"{len(pieces)}.piece.npy")
        save_array(pieces[-1], np.stack([word, document, counts]).astype(np.uint32))
        lengths.append(length_N.astype(np.int32))
    length_N = np.concatenate(lengths)
    _join(folder, pieces, frequency_W, length_N)
    with atomic_open(folder / WORDS) as file:
        file.writelines(f"{word}\n" for word in ids)
    atomic_write(folder / SETTINGS, json.dumps({"stem": stem}) + "\n")


def _join(
    folder: Path, pieces: Sequence[Path], frequency_W: np.ndarray, length_N: np.ndarray
) -> None:
    """Merge pieces of (words, documents, counts) into one list of postings; delete the pieces."""
    start_W = np.concatenate([np.zeros(1, np.int64), np.cumsum(frequency_W)])
    save_array(folder / STARTS, start_W)
    idf_W = np.log(1 + (len(length_N) - frequency_W + 0.5) / (frequency_W + 0.5))
    norm_N = K1 * (1 - B + B * length_N / max(length_N.mean(), 1e-9))
    next_W = start_W[:-1].copy()  # position of a word's next posting
    postings = int(start_W[-1])
    with contextlib.ExitStack() as stack:
        documents, weights = (
            stack.enter_context(_mapped(folder / name, dtype, postings))
            for name, dtype in ((DOCUMENTS, np.int32), (WEIGHTS, np.float32))
        )
        for piece in pieces:
            word, document, count = np.load(piece, allow_pickle=False).astype(np.int64)
            starts, runs = np.unique(word, return_index=True, return_counts=True)[1:]
            place = next_W[word] + np.arange(len(word)) - np.repeat(starts, runs)
            documents[place] = document
            weights[place] = idf_W[word] * count / (count + norm_N[document])
            next_W[word[starts]] += runs
            with_retries(piece.unlink, piece)


@contextlib.contextmanager
def _mapped(path: Path, dtype: type, size: int) -> Generator[np.ndarray]:
    """Yield an array in a file that is written in place."""
    if not size:  # an empty file cannot be mapped
        empty = np.zeros(0, dtype)
        save_array(path, empty)
        yield empty
        return
    array = map_array(path, dtype, (size,))
    yield array
    with_retries(array.flush, path)


class Words:
    """`retrieve.BM25` over the index that `write_words` wrote to a folder of texts."""

    def __init__(self, folder: str | Path) -> None:
        """Raise ValueError if a file is missing or malformed."""
        folder = Path(folder).expanduser()
        self._texts = Passages(folder)
        try:
            stem = json.loads((folder / SETTINGS).read_text())["stem"]
            words = (folder / WORDS).read_text(encoding="utf-8").split("\n")[:-1]
            self._start_W = np.load(folder / STARTS, allow_pickle=False)
            self._documents = np.load(folder / DOCUMENTS, mmap_mode="r", allow_pickle=False)
            self._weights = np.load(folder / WEIGHTS, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder} holds no index of words ({error}); make one with python -m "
                "ragen_jax.retriever build --retriever=bm25"
            ) from None
        sizes = {len(self._documents), len(self._weights), int(self._start_W[-1])}
        if len(sizes) > 1 or len(words) != len(self._start_W) - 1:
            raise ValueError(f"{folder}: its files {DOCUMENTS}, {WEIGHTS}, {STARTS} do not agree")
        self._ids = {word: i for i, word in enumerate(words)}
        self._split = splitter(stem)

    def __len__(self) -> int:
        return len(self._texts)

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """As `retrieve.BM25.search`."""
        return [self._search(words, k) for words in self._split([q[:MAX_QUERY] for q in queries])]

    def _search(self, words: list[str], k: int) -> list[Document]:
        known = [self._ids[word] for word in words if word in self._ids]
        if not known:
            return []
        score_N = np.zeros(len(self._texts), np.float32)
        for word in known:
            start, end = self._start_W[word : word + 2]
            score_N[self._documents[start:end]] += self._weights[start:end]
        return [Document(str(i), self._texts[i], float(score_N[i])) for i in best(score_N, k)]
