"""Replies to the requests of all sessions, in rows of one cache.

A thread decodes a chunk of every running reply, then gives free rows to waiting requests. A request
takes the free row that shares most with its prompt, so that the earlier turns of a session are
found in the cache. Random draws are keyed by the request, so a reply does not depend on which
requests are served together.

A chunk costs nearly the same for one row as for all of them. Sessions whose replies have just ended
usually ask again soon, so the thread waits for them before the next chunk, as long as this costs
the running replies less than the absence of those sessions would cost (`_Patience`).
"""

import collections
import concurrent.futures
import dataclasses
import threading
import time
from typing import NamedTuple

import jax
import numpy as np

from ragen_jax.core.types import Params
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.vision.image_table import NO_IMAGES
from ragen_jax.rollout.episode import Sampling
from ragen_jax.rollout.pages import Cache, cache_sizes
from ragen_jax.rollout.rows import Endings, Row, begin_replies, common, decode_rows
from ragen_jax.rollout.sample import episode_keys

FIRST_PROMPT = 512  # tokens
FIRST_WAIT = 1.0  # seconds for which the first request waits for others


class Ticket(NamedTuple):
    """A request to the engine.

    prompt: int32 ids
    most: maximum tokens of the reply, >= 1; prompt and reply fit into the model's positions
    draw: (seed, member, call), which key the random draws
    """

    prompt: np.ndarray
    most: int
    draw: tuple[int, int, int]


class Sampled(NamedTuple):
    """A sampled reply: int32 ids, with the token that ended it, and their float32 log-probs."""

    ids: np.ndarray
    logp: np.ndarray


@dataclasses.dataclass
class _Served(Row):
    """A row of the cache, and the request that it serves."""

    ticket: Ticket | None = None  # None: the row is free
    future: "concurrent.futures.Future[Sampled] | None" = None


@dataclasses.dataclass(frozen=True)
class _Patience:
    """How long to wait for the sessions that are expected to ask again.

    Without the `expected` sessions the next chunk wastes their part of its seconds; a wait costs
    every running reply its time. Waiting for at most that part never costs more than a chunk that
    leaves too early. Meanwhile the prompts of those that have come are read, some at a time.
    """

    expected: int  # sessions whose reply has ended in the last chunk
    seconds: float  # longest wait
    at_a_time: int  # requests whose prompts are read together

    @classmethod
    def after_chunk(cls, seconds: float, ended: int, running: int, at_a_time: int) -> "_Patience":
        return cls(ended, seconds * ended / max(ended + running, 1), at_a_time)


class Engine:
    """Serves requests from any thread until it is closed.

    Args:
      model, params: the policy, whose parameters are on `mesh`.
      slots: number of rows, the requests that are served at a time.
      longest_reply: tokens of the longest expected reply, for the length of chunks.
      first_prompt: tokens that the first page of the cache has room for.
      key: typed key of the random draws.
    """

    def __init__(
        self,
        model: Qwen,
        params: Params,
        *,
        mesh: jax.sharding.Mesh,
        slots: int,
        longest_reply: int,
        first_prompt: int = FIRST_PROMPT,
        sampling: Sampling,
        endings: Endings,
        key: jax.Array,
    ) -> None:
        self._model, self._params, self._mesh = model, params, mesh
        self._sampling, self._endings, self._key = sampling, endings, key
        self._slots, self._longest_reply = slots, longest_reply
        self._first_prompt = first_prompt
        self._waiting: collections.deque[tuple[Ticket, concurrent.futures.Future[Sampled]]]
        self._waiting = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self.failure: BaseException | None = None  # why the engine has ended by itself
        self.idle_seconds = 0.0  # in which no reply was running and no request waited
        # Members of a group have the same first prompt, which is read once for those that wait.
        self._patience = _Patience(slots, FIRST_WAIT, at_a_time=slots)
        # Seconds of a chunk, which at most double from one chunk to the next: a program that is
        # compiled, or a computer that sleeps, makes one chunk long, but not the next.
        self._usual = FIRST_WAIT
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> "concurrent.futures.Future[Sampled]":
        """Return the future reply to a request. A request that is cancelled while it waits is
        dropped. The future raises RuntimeError if the engine ends before the reply.

        Raises:
          RuntimeError: the engine is closed, or has failed.
        """
        future: concurrent.futures.Future[Sampled] = concurrent.futures.Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine has ended")
            self._waiting.append((ticket, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """End the thread; requests that have no reply yet get a RuntimeError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        rows: list[_Served] = []
        reason = "the engine was closed"
        try:
            with jax.set_mesh(self._mesh):
                sizes = cache_sizes(
                    slots=self._slots,
                    chunk=0,
                    episodes=self._slots,
                    prompt=self._first_prompt,
                    max_new_tokens=self._longest_reply,
                    compact=False,
                )
                cache = Cache(self._model, self._params, sizes)
                rows += [_Served() for _ in range(cache.shards * cache.rows)]
                while self._take(rows, cache):
                    self._decode(rows, cache)
        except BaseException as error:
            reason = f"the engine has failed: {type(error).__name__}: {error}"
            self.failure = error
            raise
        finally:
            with self._changed:
                self._closed = True
                waiting = [future for _, future in self._waiting]
                self._waiting.clear()
            running = [row.future for row in rows if row.future is not None]
            for future in [*filter(_claim, waiting), *running]:
                future.set_exception(RuntimeError(reason))

    def _take(self, rows: list[_Served], cache: Cache) -> bool:
        """Give free rows to waiting requests; wait if there is nothing to do. False: closed."""
        with self._changed:
            start = time.perf_counter()
            while not self._closed and not self._waiting and not any(r.ticket for r in rows):
                self._changed.wait()
            self.idle_seconds += time.perf_counter() - start
        expected = min(sum(row.ticket is None for row in rows), self._patience.expected)
        end = time.perf_counter() + self._patience.seconds
        while True:
            with self._changed:
                self._gather(min(expected, self._patience.at_a_time), end)
                if self._closed:
                    return False
                taken = self._give_rows(rows)
            cache.read(begin_replies(taken, cache, NO_IMAGES))
            expected -= len(taken)
            if expected <= 0 or time.perf_counter() >= end:
                return True

    def _give_rows(self, rows: list[_Served]) -> list[tuple[int, Row, np.ndarray, int]]:
        """Give free rows to waiting requests; return the arguments of `begin_replies`."""
        taken: list[tuple[int, Row, np.ndarray, int]] = []
        free = [index for index, row in enumerate(rows) if row.ticket is None]
        while free and self._waiting:
            ticket, future = self._waiting.popleft()
            if not _claim(future):
                continue
            index = max(free, key=lambda i: common(rows[i].cached_ids, ticket.prompt))
            free.remove(index)
            rows[index].ticket, rows[index].future = ticket, future
            taken.append((index, rows[index], ticket.prompt, ticket.most))
        return taken

    def _gather(self, expected: int, end: float) -> None:
        """Wait until the expected number of requests waits, or until `end` (perf_counter)."""
        while not self._closed and len(self._waiting) < expected:
            left = end - time.perf_counter()
            if left <= 0:
                return
            self._changed.wait(left)

    def _decode(self, rows: list[_Served], cache: Cache) -> None:
        """Decode a chunk of every running reply, and hand out those that have ended."""
        draws = [row.ticket.draw if row.ticket else (0, 0, 0) for row in rows]
        seeds, members, calls = zip(*draws, strict=True)
        keys_B = episode_keys(self._key, seeds, members, calls)  # calls are like turns
        start = time.perf_counter()
        ended = decode_rows(cache, rows, keys_B, self._sampling, self._endings)
        self._usual = min(time.perf_counter() - start, 2 * self._usual)
        for row in ended:
            assert row.future is not None
            row.future.set_result(Sampled(row.sampled, row.logp))
            row.ticket = row.future = None
        running = sum(row.ticket is not None for row in rows)
        self._patience = _Patience.after_chunk(
            self._usual, len(ended), running, cache.sizes.at_a_time
        )


def _claim(future: "concurrent.futures.Future[Sampled]") -> bool:
    """Whether a waiting request has not been cancelled; from now on it cannot be."""
    return future.set_running_or_notify_cancel()
