"""What a run has done so far, over all its starts."""

import time
from collections.abc import Iterable

from ragen_jax.core.types import Metrics


class Counters:
    """Counts and a clock that go on where the rows of metrics.jsonl end."""

    def __init__(self, rows: Iterable[Metrics]) -> None:
        """Starts the clock.

        Args:
          rows: those that the run has kept. Of older ones, which have no time/total, their
            time/step and time/eval count.
        """
        self.tokens = self.episodes = 0
        self._before, self._start = 0.0, time.perf_counter()
        for row in rows:
            replies = row.get("rollout/replies", 0.0)
            self.tokens += round(replies * row.get("rollout/response_length", 0.0))
            # Replies are those of the episodes that did not break.
            self.episodes += round(replies / (row.get("rollout/turns") or 1.0))
            self.episodes += round(row.get("rollout/errors", 0.0))
            step = row.get("time/step", 0.0) + row.get("time/eval", 0.0)
            self._before = row.get("time/total", self._before + step)

    def add(self, *, tokens: int, episodes: int) -> Metrics:
        """Counts what a step has sampled; throughput/tokens_total and rollout/episodes_total."""
        self.tokens += tokens
        self.episodes += episodes
        return {
            "throughput/tokens_total": self.tokens,
            "rollout/episodes_total": self.episodes,
        }

    def clock(self) -> Metrics:
        """time/total: seconds that the run has run, times between two starts apart."""
        return {"time/total": self._before + time.perf_counter() - self._start}
