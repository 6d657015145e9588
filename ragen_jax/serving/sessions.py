"""Sessions: who may call, what was said, and what is left of each budget."""

import dataclasses
import json
import secrets
from collections.abc import Callable
from typing import Any

from ragen_jax.serving.protocol import RequestError
from ragen_jax.serving.recording import Call, as_records

BUDGET_SPENT = "budget_spent"  # codes of errors
CONTEXT_EXCEEDED = "context_length_exceeded"


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a session may use; 0: no limit."""

    calls: int = 0
    tokens: int = 0  # sampled
    seconds: float = 0.0  # after its first call


@dataclasses.dataclass
class Session:
    """A session: its number, the calls that have been answered, and the calls that were begun.

    draw: (seed, member), which key its random draws
    budget: what it may use
    shared: whether its calls are those of several agents or episodes, so that none is a retry or a
        side call of another
    refused: code of the last request that was refused because of a limit (budget_spent or
        context_length_exceeded), after which nothing was answered; "": none
    posted: what was posted as its reward, JSON-like; None: nothing
    """

    number: int
    draw: tuple[int, int]
    budget: Budget = Budget()
    shared: bool = False
    refused: str = ""
    posted: Any = None
    calls: list[Call] = dataclasses.field(default_factory=list)
    begun: int = 0
    since: float = 0.0  # when its first call began
    ended: bool = False

    def begin(self, now: float) -> int:
        """Count a call and return its number within the session.

        Args:
          now: seconds, of a clock that does not jump.

        Raises:
          RequestError: the session's budget is spent.
        """
        self.since = self.since if self.begun else now
        used = {
            "calls": self.begun,
            "tokens": sum(len(call.sampled) for call in self.calls),
            "seconds": now - self.since,
        }
        for name, spent in used.items():
            most = getattr(self.budget, name)
            if most and spent >= most:
                self.refused = BUDGET_SPENT
                raise RequestError(f"the session has used its {most:g} {name}", code=BUDGET_SPENT)
        self.begun += 1
        return self.begun - 1

    def add(self, call: Call) -> None:
        """Add a call that is answered; one that is answered after the end is not part of it."""
        if not self.ended:
            self.calls.append(call)
            self.refused = ""


class Sessions:
    """The sessions of a server, each known by a secret key.

    Args:
      budget: of each session that is opened without one.
      write: called with the record of a session that ends, a line of JSON for each conversation;
        None: nothing is recorded.
    """

    def __init__(self, budget: Budget, write: Callable[[str], None] | None) -> None:
        self.budget, self._write = budget, write
        self._by_key: dict[str, Session] = {}
        self._number = 0

    def open(
        self,
        *,
        shared: bool = False,
        draw: tuple[int, int] | None = None,
        budget: Budget | None = None,
    ) -> str:
        """Open a session and return its key.

        Args:
          shared, draw, budget: as in `Session`. Without `draw`: the session's number and 0.
        """
        key = secrets.token_urlsafe(24)
        place = draw or (self._number, 0)
        self._by_key[key] = Session(self._number, place, budget or self.budget, shared)
        self._number += 1
        return key

    def find(self, key: str) -> Session:
        """Return the session of a key.

        Raises:
          RequestError: there is none (status 401).
        """
        session = self._by_key.get(key)
        if session is None:
            raise RequestError("the API key is not that of an open session", 401, "invalid_api_key")
        return session

    def end(self, key: str) -> Session:
        """End a session, write its record and return it.

        Raises:
          RequestError: there is none (status 401).
        """
        session = self.find(key)
        if self._write is not None and session.calls:
            records = as_records(session.calls, session.number, shared=session.shared)
            self._write("".join(json.dumps(record) + "\n" for record in records))
        session.ended = True
        del self._by_key[key]  # after its record is written, so that a full disk loses nothing
        return session

    def end_all(self) -> None:
        """End every session."""
        for key in list(self._by_key):
            self.end(key)
