"""Build an index of a corpus, and serve searches in it.

    python -m ragen_jax.retriever build --corpus=wiki-18.jsonl.gz --index=DIR [--stem]
    python -m ragen_jax.retriever build --retriever=dense --encoder=intfloat/e5-base-v2
                                        --corpus=wiki-18.jsonl.gz --index=DIR
                                        [--vectors=e5_Flat.index] [--dtype=bfloat16]
    python -m ragen_jax.retriever serve --index=DIR [--host=127.0.0.1] [--port=8000] [--documents=5]

A corpus is a file of JSON lines with the field `contents`. Existing vectors (--vectors: a .npy file
or a flat faiss index) are not copied. The server supports the protocols of RAGEN and Search-R1.
Dense vectors are split over all devices of this machine.
"""

import signal
import time
from collections.abc import Sequence

from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.search_qa import dense
from ragen_jax.envs.search_qa.protocols import MAX_DOCUMENTS
from ragen_jax.retriever.build import build_texts, build_vectors, build_words
from ragen_jax.retriever.serve import Server, open_index
from ragen_jax.storage.compilation_cache import refuse_shared_cache
from ragen_jax.storage.console import console

COMMANDS = ("build", "serve")
RETRIEVERS = ("bm25", "dense")


def parse(argv: Sequence[str]) -> list[str]:
    """Return the words of the command line; an error in it prints one line."""
    with command.bad_input(flags.Error):
        words = command.words_of(argv)
        if len(words) != 1 or words[0] not in COMMANDS:
            raise ValueError(f"expected {' or '.join(COMMANDS)}, got {' '.join(words)!r}")
        if RETRIEVER.value not in RETRIEVERS:
            accepted = ", ".join(RETRIEVERS)
            raise ValueError(f"--retriever is {RETRIEVER.value!r}; accepted: {accepted}")
        needed = {"--index": INDEX.value}
        if words[0] == "build":
            needed["--corpus"] = CORPUS.value
            if RETRIEVER.value == "dense":
                needed["--encoder"] = ENCODER.value
        for name, value in needed.items():
            if not value:
                raise ValueError(f"{words[0]} needs {name}")
        if DTYPE.value not in dense.DTYPES:
            raise ValueError(f"--dtype is {DTYPE.value!r}; accepted: {', '.join(dense.DTYPES)}")
        if not 1 <= DOCUMENTS.value <= MAX_DOCUMENTS:
            raise ValueError(
                f"--documents is {DOCUMENTS.value}; it must be from 1 to {MAX_DOCUMENTS}"
            )
        return words


def main(words: Sequence[str]) -> None:
    refuse_shared_cache()
    with command.bad_input():
        if words[0] == "build":
            build()
            return
        retriever = open_index(INDEX.value)
        server = Server(retriever, host=HOST.value, port=PORT.value, documents=DOCUMENTS.value)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    console(f"serving {INDEX.value} ({len(retriever)} documents) at {server.url}")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def build() -> None:
    start, corpus, index = time.monotonic(), CORPUS.value, INDEX.value
    if RETRIEVER.value == "bm25":
        count = build_words(corpus, index, stem=STEM.value)
    else:
        kept = {"encoder": ENCODER.value, "dtype": DTYPE.value}
        if VECTORS.value:
            count = build_texts(corpus, index, vectors=VECTORS.value, **kept)
        else:
            mesh = make_mesh(data=-1, fsdp=1, tensor=1)
            count = build_vectors(corpus, index, **kept, mesh=mesh)
    console(f"{index}: {count} texts, {RETRIEVER.value}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    RETRIEVER = flags.DEFINE_string("retriever", "bm25", f"One of {', '.join(RETRIEVERS)}.")
    CORPUS = flags.DEFINE_string("corpus", "", "A .jsonl or .jsonl.gz file with `contents`.")
    INDEX = flags.DEFINE_string("index", "", "Folder of the index.")
    STEM = flags.DEFINE_bool("stem", False, "bm25: strip English word endings.")
    ENCODER = flags.DEFINE_string("encoder", "", "dense: directory or hub id of E5.")
    VECTORS = flags.DEFINE_string(
        "vectors", "", "dense: an existing .npy or .index file of vectors."
    )
    DTYPE = flags.DEFINE_string("dtype", "float32", "dense: dtype of the vectors on the devices.")
    HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to serve at.")
    PORT = flags.DEFINE_integer("port", 8000, "Port to serve at; 0: any free port.", 0, 65535)
    DOCUMENTS = flags.DEFINE_integer(
        "documents", 5, "Documents returned if a request does not say."
    )
    command.run_parsed(main, parse)
