"""One search for several threads, for retrievers to which many queries cost the same as one."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragen_jax.envs.search_qa.retrieve import Document, Retriever

MOST = 256  # queries per search


@dataclass(eq=False)
class _Call:
    queries: list[str]
    k: int
    done: bool = False
    found: list[list[Document]] = field(default_factory=list)
    error: Exception | None = None


class Together:
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
        mine = _Call(list(queries), k)
        with self._changed:
            self._waiting.append(mine)
            # First come, first served: a busy thread must not keep others waiting.
            while not mine.done and (self._busy or self._waiting[0] is not mine):
                self._changed.wait()
            if not mine.done:
                self._busy = True
                calls = self._take(mine)
        if mine.done:
            together = True
        else:
            together = len(calls) > 1
            self._search(calls)
        if mine.error is None:
            return mine.found
        if together:
            return self._retriever.search(queries, k)
        raise mine.error

    def _take(self, mine: _Call) -> list[_Call]:
        """Remove and return this thread's call and waiting calls for the same k."""
        calls, size = [mine], len(mine.queries)
        for call in self._waiting:
            if call is not mine and call.k == mine.k and size + len(call.queries) <= MOST:
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
