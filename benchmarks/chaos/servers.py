"""Faults of a retriever: a server that drips, hangs, closes, or answers with garbage."""

import contextlib
import dataclasses
import functools
import http.server
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator

from benchmarks.chaos.trial import LEARNER, STEPS, Failure, Setup, Trial
from ragen_jax.envs.search_qa import protocols
from ragen_jax.envs.search_qa.retrievers import open_bm25
from ragen_jax.storage.metrics_reader import read_metrics

# The tiny agent has never searched: its first answer becomes a search, and the next is final.
SEARCHING = '''
"""SearchQA that searches for its question and whatever the agent says first."""

import random
import zlib

from ragen_jax.envs.search_qa import SearchQA


class Searching(SearchQA):
    @property
    def words(self):
        return ("Up", "Down", "Left", "Right")  # which the agent's tokenizer has

    @words.setter
    def words(self, value):
        pass

    def render(self, state):
        """A room of Sokoban, which the agent answers, drawn from what would be shown."""
        cells = list("PXO" + "_" * 13)
        random.Random(zlib.crc32(super().render(state).encode())).shuffle(cells)
        rows = ("".join(cells[i : i + 4]) for i in range(0, 16, 4))
        return "\\n".join(["######", *(f"#{row}#" for row in rows), "######"])

    def step(self, state, action, rng):
        if state.query is None:
            action = f"search[{state.question.text} {action}]"
        return super().step(state, action, rng)
'''
NAMES = ("Ada", "Berta", "Carla", "Dora", "Emma", "Frida", "Greta", "Hanna", "Ida", "Jutta")
QUESTIONS = "".join(
    json.dumps({"question": f"Where does {name} {number} live?", "answer": f"Town {number}"}) + "\n"
    for number in range(10, 60)
    for name in NAMES
)
CORPUS = json.dumps([f"{name} {n} lives in Town {n}." for n in range(10, 60) for name in NAMES])
SETUP = Setup(
    LEARNER
    | {
        "env.name": "chaos_searching:Searching",
        "env.options.path": "{code}/questions.jsonl",
        "env.options.corpus": "{code}/corpus.json",
        "env.options.documents": 2,
        "rollout.max_new_tokens": 22,
    },
    {"chaos_searching.py": SEARCHING, "questions.jsonl": QUESTIONS, "corpus.json": CORPUS},
    config="search_qa",
)


class Server:
    """A retriever over the corpus; a trial can spoil its answers."""

    def __init__(self, trial: Trial, spoil: Callable[[bytes, int], str]) -> None:
        """Open the index of the corpus.

        Args:
          spoil: (request, number of earlier requests with the same body) -> fault of the answer, or
            "" for a correct answer.
        """
        self.spoil = spoil
        self.asked: Counter[bytes] = Counter()
        self.answers: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._bm25 = open_bm25(str(trial.code / "corpus.json"))

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """Answer a request, or spoil the answer."""
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        with self._lock:
            wrong = self.spoil(body, self.asked[body])
            self.asked[body] += 1
            self.answers[wrong] += 1
            request = protocols.read_request(body, 2)
            answer = protocols.answer_body(request, self._bm25.search(request.queries, request.k))
        if wrong == "closes":
            return
        if wrong == "hangs":
            time.sleep(40)
            return
        if wrong == "busy":
            handler.send_error(503)
            return
        if wrong == "garbage":
            answer = b'\xff\x00{"results": [' + answer[:20]
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(answer)))
        handler.end_headers()
        if wrong == "half":
            answer = answer[: len(answer) // 2]
        if wrong == "drips":
            for byte in answer[:200]:
                handler.wfile.write(bytes([byte]))
                handler.wfile.flush()
                time.sleep(0.2)
            return
        handler.wfile.write(answer)


@contextlib.contextmanager
def serve(trial: Trial, spoil: Callable[[bytes, int], str]) -> Generator[Server]:
    """Serve the trial's run for the duration of the body."""
    ours = Server(trial, spoil)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with contextlib.suppress(ConnectionError):  # the run has closed the connection
                ours.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fields = {k: v for k, v in trial.setup.fields.items() if k != "env.options.corpus"}
    trial.setup = dataclasses.replace(trial.setup, fields=fields)
    trial.fields["env.options.retriever"] = "ragen"
    trial.fields["env.options.url"] = f"http://127.0.0.1:{server.server_port}"
    try:
        yield ours
    finally:
        server.shutdown()
        server.server_close()


QUICK_FAILURES = ("closes", "busy", "garbage", "half")


def fail_now_and_then(trial: Trial) -> None:
    """Let each request fail once or twice before it is answered: no figure changes."""

    def spoil(body: bytes, before: int) -> str:
        drawn = zlib.crc32(body + bytes([before]))
        return QUICK_FAILURES[drawn % len(QUICK_FAILURES)] if before < 1 + drawn % 2 else ""

    with serve(trial, spoil) as server:
        trial.expect_end(trial.start(), 0)
        if sum(server.answers[wrong] for wrong in QUICK_FAILURES) < 10:
            raise Failure(f"the server got few requests: {server.answers}")
        trial.compare()


def fail_for_a_while(trial: Trial, *, how: str) -> None:
    """Let the server fail from a step on and recover some steps later.

    The run continues to its end. It counts the episodes that broke meanwhile; none breaks later.
    """
    first = int(trial.rng.integers(1, 3))
    trial.fields |= {"env.time_limit": 2.0, "env.workers": 16, "eval.every": 0}
    dead = threading.Event()
    with serve(trial, lambda body, before: how if dead.is_set() else "") as server:
        process = trial.start()
        trial.wait_for_step(process, first)
        dead.set()
        trial.wait_for_step(process, first + 2)
        dead.clear()
        recovered = max((row["step"] for row in trial.rows()), default=0) + 2
        trial.expect_end(process, 0)
    rows = read_metrics(trial.run / "metrics.jsonl")
    if [row["step"] for row in rows if row["step"]] != list(range(1, STEPS + 1)):
        raise Failure(f"rows of steps {[row['step'] for row in rows]}")
    broken = {row["step"]: row.get("rollout/errors", 0) for row in rows if row["step"]}
    if not server.answers[how] or not any(broken[step] for step in (first + 1, first + 2)):
        raise Failure(f"broken episodes are not counted: {broken}, answers {server.answers}")
    if any(broken[step] for step in range(recovered, STEPS + 1)):
        raise Failure(f"episodes broke after the server had recovered: {broken}")


SERVERS: dict[str, Callable[[Trial], None]] = {
    "a retriever fails now and then": fail_now_and_then,
    **{
        f"a retriever {how} for a while": functools.partial(fail_for_a_while, how=how)
        for how in ("drips", "hangs", "closes", "busy", "garbage")
    },
}
SERVERS["a retriever is busy for a while"] = SERVERS.pop("a retriever busy for a while")
SERVERS["a retriever sends garbage for a while"] = SERVERS.pop("a retriever garbage for a while")
