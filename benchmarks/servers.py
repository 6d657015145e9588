"""The endpoint against the server of transformers: the same requests of 64 sessions of five turns.

    python -m benchmarks servers --model=DIR [--transformers=PYTHON] [--repeats=1] [--json]

DIR is a Hugging Face directory whose replies end by themselves. PYTHON has torch,
transformers[serving] and openai. Both servers are processes on the same cores, in float32, and
sample at temperature 1, at most 64 tokens a reply. The sessions run at once, in threads with a
client of the `openai` package each; a request repeats its session's history. Replies differ, since
the draws do, so that the figure is new tokens per second. A first session warms each server up, and
one round of all sessions, which compiles, is not counted. The server of transformers runs with
--continuous-batching; without it, it answers requests one after the other.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import openai

SESSIONS, TURNS, MOST = 64, 5, 64
START = 600.0  # seconds in which a server must start
QUESTION = (
    "Numbers: {a}, {b}, {c}\nTarget: {target}\nUse every number once, with + and -. "
    "Reply as <think>reasoning</think><answer>expression</answer>."
)
AGAIN = "That is not right. Try again."
KINDS = ("ours", "transformers")


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


def _command(kind, python, model, port):
    if kind == "ours":
        return [
            *(sys.executable, "-m", "ragen_jax.serve", f"--model={model}", f"--port={port}"),
            *(f"--slots={SESSIONS}", f"--config.rollout.max_new_tokens={MOST}"),
            *("--config.model.dtype=float32", "--config.eval.temperature=1.0"),
        ]
    return [
        *(python, "-m", "transformers.cli.transformers", "serve", str(model)),
        # By default the cache takes nearly all memory of the machine, on a CPU too.
        *("--continuous-batching", "--cb-max-memory-percent=0.2"),
        *("--device=cpu", "--dtype=float32", f"--port={port}", "--host=127.0.0.1"),
    ]


@contextlib.contextmanager
def _server(kind, python, model):
    """Yield (base URL, API key) of a server that answers."""
    port = _free_port()
    with tempfile.TemporaryFile("w+") as log:
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            _command(kind, python, model, port),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            yield f"http://127.0.0.1:{port}/v1", _wait(process, log, port, kind == "ours")
        finally:
            process.terminate()
            process.wait()


def _wait(process, log, port, prints_key):
    """Return the API key that a server prints, once it listens."""
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        log.seek(0)
        lines = log.read().splitlines()
        keys = [line.partition("=")[2] for line in lines if line.startswith("OPENAI_API_KEY=")]
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            if keys or not prints_key:
                return (keys or ["none"])[0]
        time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"the server did not start:\n{log.read()[-2000:]}")


def _session(url, key, model, number):
    """Play a session; return its new tokens and the seconds of its requests."""
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=3600.0)
    a, b, c = 1 + number % 30, 1 + number * 7 % 30, 1 + number * 11 % 30
    messages = [{"role": "user", "content": QUESTION.format(a=a, b=b, c=c, target=a + b - c)}]
    tokens, waits = 0, []
    for _ in range(TURNS):
        start = time.perf_counter()
        answer = client.chat.completions.create(
            model=str(model), messages=messages, max_tokens=MOST, temperature=1.0
        )
        waits.append(time.perf_counter() - start)
        tokens += answer.usage.completion_tokens
        said = answer.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": AGAIN}]
    return tokens, waits


def _round(url, key, model):
    """Play all sessions at once; return (seconds, new tokens, median seconds of a request)."""
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(SESSIONS) as threads:
        found = list(threads.map(lambda n: _session(url, key, model, n), range(SESSIONS)))
    seconds = time.perf_counter() - start
    return seconds, sum(t for t, _ in found), statistics.median(w for _, ws in found for w in ws)


def measure(kind, python, model, rounds):
    """Return [(seconds, new tokens, median seconds of a request)] of a fresh server."""
    with _server(kind, python, model) as (url, key):
        _session(url, key, model, 0)
        return [_round(url, key, model) for _ in range(rounds + 1)][1:]


def main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks servers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--transformers", metavar="PYTHON")
    parser.add_argument("--repeats", type=int, default=1, help="rounds of each server")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    kinds = KINDS if options.transformers else KINDS[:1]
    lines = []
    for kind in kinds:
        found = measure(kind, options.transformers, options.model.resolve(), options.repeats)
        rate = statistics.median(tokens / seconds for seconds, tokens, _ in found)
        lines.append(
            {
                "server": kind,
                "new_tokens_per_s": round(rate, 1),
                "seconds": [round(seconds, 1) for seconds, _, _ in found],
                "request_s": round(statistics.median(wait for _, _, wait in found), 2),
            }
        )
        lines[-1]["ratio"] = round(lines[0]["new_tokens_per_s"] / rate, 2)
        if not options.json:
            print(lines[-1], flush=True)
    if options.json:
        print(json.dumps(lines))
