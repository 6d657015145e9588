"""Totals of a run over all its starts: sampled tokens, episodes and seconds."""

import time
from collections.abc import Iterable

from ragen_jax.core.types import Metrics


class Counters:
    """Counters and a clock that continue from the rows of metrics.jsonl."""

    def __init__(self, rows: Iterable[Metrics]) -> None:
        """Start the clock.

        Args:
          rows: the run's rows of metrics.jsonl. For older rows without time/total, the sum of
            time/step and time/eval is used.
        """
        self.tokens = self.episodes = 0
        self._before, self._start = 0.0, time.perf_counter()
        for row in rows:
            replies = row.get("rollout/replies", 0.0)
            self.tokens += round(replies * row.get("rollout/response_length", 0.0))
            # rollout/replies and rollout/turns do not include the episodes that broke.
            self.episodes += round(replies / (row.get("rollout/turns") or 1.0))
            self.episodes += round(row.get("rollout/errors", 0.0))
            step = row.get("time/step", 0.0) + row.get("time/eval", 0.0)
            self._before = row.get("time/total", self._before + step)

    def add(self, *, tokens: int, episodes: int) -> Metrics:
        """Add a step's counts; return throughput/tokens_total and rollout/episodes_total."""
        self.tokens += tokens
        self.episodes += episodes
        return {
            "throughput/tokens_total": self.tokens,
            "rollout/episodes_total": self.episodes,
        }

    def clock(self) -> Metrics:
        """Return time/total: the run's seconds over all starts, without the time between them."""
        return {"time/total": self._before + time.perf_counter() - self._start}
