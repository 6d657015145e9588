"""Retrieval from a server over HTTP, which may be slow, drop requests or send partial answers.

A request is retried until a complete answer in the protocol's form has arrived in time. An answer
in another form is never shown. Each try is a separate exchange (ragen_jax/core/http_json.py): a
late answer cannot be mistaken for the answer to another query.
"""

import concurrent.futures
import random
import threading
import time
from collections.abc import Sequence

from ragen_jax.core import http_json
from ragen_jax.core.clean_text import one_line
from ragen_jax.envs.search_qa import protocols
from ragen_jax.envs.search_qa.retrieve import MAX_QUERY, Document

MAX_PARALLEL = 16  # requests in parallel, if each holds one query
QUERIES = 256  # per request of search_r1
FIRST_PAUSE = 0.1  # seconds after the first try; doubled each time, with jitter from 0.5 to 1
LONGEST_PAUSE = 10.0  # seconds

# The limit on an answer, in bytes: a constant plus a part for each document, at most MAX_BYTES. A
# document is shown with at most 50,000 characters, which are up to 200,000 bytes of UTF-8.
BYTES_OF_ANSWER, BYTES_OF_DOCUMENT, MAX_BYTES = 1 << 20, 1 << 18, 32 << 20


class RemoteRetriever:
    """A retriever that asks a server."""

    def __init__(
        self, url: str, *, protocol: str, time_limit: float, tries: int, seed: int
    ) -> None:
        """
        Args:
          url: address of the server, such as http://127.0.0.1:8000, with or without /retrieve.
          protocol: one of `protocols.PROTOCOLS`.
          time_limit: seconds per try, from connecting to the answer's last byte.
          tries: maximum number of tries per request, at least 1.
          seed: seed of the jitter of pauses between tries.

        Raises:
          ValueError: an argument is invalid.
        """
        http_json.parse_url(url)
        if protocol not in protocols.PROTOCOLS:
            accepted = ", ".join(protocols.PROTOCOLS)
            raise ValueError(f"protocol must be one of {accepted}, got {protocol!r}")
        if not 0 < time_limit < float("inf"):
            raise ValueError(f"time_limit must be a positive number of seconds, got {time_limit!r}")
        if not isinstance(tries, int) or tries < 1:
            raise ValueError(f"tries must be a whole number of at least 1, got {tries!r}")
        self.url = url.partition("?")[0].partition("#")[0].rstrip("/").removesuffix(protocols.PATH)
        self._protocol, self._time_limit, self._tries = protocol, time_limit, tries
        self._random, self._lock = random.Random(seed), threading.Lock()

    def check(self) -> None:
        """Raise ValueError if the server cannot be reached or does not speak the protocol."""
        try:
            self.search(["Who wrote Hamlet?"], 1)
        except ConnectionError as error:
            raise ValueError(f"{error} (protocol {self._protocol})") from None

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """Return the server's documents, in its order.

        search_r1 sends up to QUERIES queries per request, ragen one.

        Raises:
          ConnectionError: no usable answer came in any try, or the server refuses the request.
        """
        most = QUERIES if self._protocol == "search_r1" else 1
        parts = list(
            protocols.split_queries(
                [query[:MAX_QUERY] for query in queries],
                most=most,
                letters=protocols.MAX_LETTERS,
            )
        )
        if len(parts) <= 1:
            return [found for part in parts for found in self._ask(part, k)]
        with concurrent.futures.ThreadPoolExecutor(min(MAX_PARALLEL, len(parts))) as threads:
            answers = threads.map(lambda part: self._ask(part, k), parts)
            return [found for answer in answers for found in answer]

    def _ask(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """Send one request, up to `tries` times.

        Raises:
          ConnectionError: as `search`.
        """
        pause, reason = FIRST_PAUSE, ""
        for number in range(self._tries):
            if number:
                with self._lock:
                    jitter = self._random.uniform(0.5, 1.0)
                time.sleep(jitter * pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            try:
                return self._exchange(queries, k)
            except http_json.ExchangeError as error:
                reason = str(error)
                if not error.retry:
                    raise ConnectionError(f"retriever {self.url} refuses: {reason}") from None
            except ValueError as error:  # the answer violates the protocol
                reason = one_line(f"ValueError: {error}")
        raise ConnectionError(
            f"retriever {self.url} gave no usable answer in {self._tries} tries; the last: {reason}"
        )

    def _exchange(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        answer = http_json.post_json(
            self.url + protocols.PATH,
            protocols.request_fields(self._protocol, queries, k),
            timeout_s=self._time_limit,
            max_bytes=min(MAX_BYTES, BYTES_OF_ANSWER + len(queries) * k * BYTES_OF_DOCUMENT),
        )
        return protocols.read_answer(self._protocol, answer, len(queries), k)
