"""One search for several threads, for retrievers to which many queries cost the same as one."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragen_jax.envs.search_qa.retrieve import Document, Retriever

MAX_QUERIES = 256  # queries per search


@dataclass(eq=False)
class _Call:
    queries: list[str]
    k: int
    done: bool = False
    found: list[list[Document]] = field(default_factory=list)
    error: Exception | None = None


class BatchingRetriever:
    """A retriever that batches queries: those that arrive during a search form the next search.

    No query waits for others to arrive: the first is searched for at once.
    """

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._changed = threading.Condition()
        self._waiting: list[_Call] = []
        self._busy = False

    def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """Return the retriever's documents.

        If it raises for the queries of several threads, each thread searches for its own queries,
        so that none suffers from another's.
        """
        own = _Call(list(queries), k)
        with self._changed:
            self._waiting.append(own)
            # First come, first served: a busy thread must not keep others waiting.
            while not own.done and (self._busy or self._waiting[0] is not own):
                self._changed.wait()
            if not own.done:
                self._busy = True
                calls = self._take_calls(own)
        if own.done:
            is_shared = True
        else:
            is_shared = len(calls) > 1
            self._search(calls)
        if own.error is None:
            return own.found
        if is_shared:
            return self._retriever.search(queries, k)
        raise own.error

    def _take_calls(self, own: _Call) -> list[_Call]:
        """Remove and return this thread's call and waiting calls for the same k."""
        calls, size = [own], len(own.queries)
        for call in self._waiting:
            if call is not own and call.k == own.k and size + len(call.queries) <= MAX_QUERIES:
                calls.append(call)
                size += len(call.queries)
        self._waiting = [call for call in self._waiting if call not in calls]
        return calls

    def _search(self, calls: list[_Call]) -> None:
        """Store the documents found, or the exception, in the calls."""
        try:
            queries = [query for call in calls for query in call.queries]
            found = iter(self._retriever.search(queries, calls[0].k))
            for call in calls:
                call.found = [next(found) for _ in call.queries]
        except Exception as error:  # raised again in the threads that asked
            for call in calls:
                call.error = error
        finally:
            with self._changed:
                for call in calls:
                    call.done = True
                self._busy = False
                self._changed.notify_all()
