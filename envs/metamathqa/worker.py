"""The process in which math-verify compares answers: `compare.Judge` starts it as a script.

A line of JSON comes in for each comparison, another goes out. It imports nothing of ragen_jax,
ends with its input, and ends by itself where a comparison takes too long or too much memory.
"""

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
import time
from typing import Any

MEMORY = 2 << 30  # bytes of address space

# A number among words, as "5 dollars" or "the answer is 1,000": math-verify would take the letters
# for factors. Words have two letters or more, since "5 x" is a product.
_WORDED = re.compile(
    r"(?:[a-z]{2,}:? +)*\\?\$?([-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?) ?(\\?%)?"
    r"(?: +(?!pi\b)[a-z]{2,})*\.?",
    re.IGNORECASE,
)
_DELIMITED = ("$", "\\(", "\\[", "\\boxed")  # what math-verify finds mathematics by


def expressions(text: str) -> list[Any]:
    """What math-verify reads in an answer; [] for nothing."""
    from math_verify import parse

    text = text.strip()
    worded = _WORDED.fullmatch(text)
    if worded:
        text = worded[1] + (worded[2] or "")
    if not any(mark in text for mark in _DELIMITED):
        text = f"${text}$"
    return parse(text, fallback_mode="no_fallback", parsing_timeout=0)


def compare(right: str, said: str) -> dict[str, Any]:
    """Whether `said` is mathematics ("readable") and means what `right` does ("equal")."""
    from math_verify import verify

    theirs = expressions(said)
    equal = bool(theirs) and verify(expressions(right), theirs, timeout_seconds=0)
    return {"equal": equal, "readable": bool(theirs)}


def limit(seconds: int) -> None:
    """Has the system end this process after so many more seconds of its own time."""
    set_limit(resource.RLIMIT_CPU, int(time.process_time()) + seconds + 1)


def set_limit(kind: int, most: int) -> None:
    """Sets a limit of this process, where the system knows it and allows as much."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def main() -> None:
    """Answers lines until there are no more; the first one says that it can."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for the run
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    seconds = int(sys.argv[1])
    compare("1", "1")  # imports what is needed
    logging.disable()
    set_limit(resource.RLIMIT_AS, MEMORY)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        limit(seconds)
        try:
            answer = compare(*json.loads(line))
        except Exception as error:  # whatever an answer makes SymPy raise
            answer = {"error": type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
