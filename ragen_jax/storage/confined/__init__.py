"""Check untrusted files in a child process with limits on memory and time.

This is for formats whose files do not state how much memory they need. A file that would exhaust
this process ends the child instead, and an error reports it in one line. The child returns only
whether the file passes.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragen_jax.core.active_time import INTERVAL, ActiveTime

CHILD = Path(__file__).with_name("child.py")
MEMORY = 4 << 30  # limit on the memory of a child, in bytes
SECONDS = 60  # limit on the processor time of a child for a small file
BYTES_PER_SECOND = 20 << 20  # a large file gets another second per this number of bytes
OUT_OF_MEMORY = 77  # exit code of a child
# Time limit for the imports of a child, which take about one second on an idle machine.
START_SECONDS = 120
BATCH_ROWS = 1000  # rows of a Parquet file that are in memory at a time, by default
MAX_BATCH_BYTES = 1 << 30  # limit on the decoded size of these rows

# Limit of a chat template's output in characters: a constant plus a multiple of its messages' size.
MAX_RENDERED, RENDERED_PER_CHARACTER = 1 << 20, 16
MAX_TOKENS_PER_BYTE = 16  # limit on a tokenizer's tokens per byte of UTF-8


def check_parquet(*paths: str | Path, rows: int = BATCH_ROWS, most: int | None = None) -> None:
    """Refuse Parquet files of which one takes too much memory or time to decode.

    One child checks them all, because starting it takes longer than decoding a small file. A file
    that is not Parquet passes; its reader reports it.

    Args:
      rows: number of rows that are in memory at a time.
      most: largest decoded size of a file in bytes; None: any size, as a file is read batch by
        batch.

    Raises:
      ValueError: `rows` rows of a file decode to more than MAX_BATCH_BYTES, all its rows decode to
        more than `most`, or decoding takes more than MEMORY or more than the time allowed for the
        size of the files. The message names the file.
    """
    request = {
        "task": "scan_parquet",
        "paths": list(map(str, paths)),
        "rows": rows,
        "most_of_rows": MAX_BATCH_BYTES,
        "most": most,
    }
    size = sum(map(os.path.getsize, paths))
    _confine("Parquet", request, SECONDS + size // BYTES_PER_SECOND)


def check_gguf(*paths: str | Path) -> None:
    """Refuse GGUF files whose header takes too much memory or time to read.

    A file that cannot be read passes; its reader reports it.

    Raises:
      ValueError: a file's header exceeds a limit. The message names the file.
    """
    request = {"task": "read_gguf", "paths": list(map(str, paths))}
    _confine("GGUF", request, SECONDS, mapped=sum(map(os.path.getsize, paths)))


def check_tokenizer(directory: Path, files: Sequence[Path]) -> None:
    """Refuse a tokenizer if it or its chat template takes too much memory or time.

    The child loads it, encodes texts and renders conversations. A tokenizer that cannot be read
    passes; its reader reports it. This process does not check a tokenizer again while its files
    are unchanged.

    Args:
      files: files of the directory from which the tokenizer is read.

    Raises:
      ValueError: the tokenizer or template exceeds a limit.
    """
    stats = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns, f.stat().st_ino) for f in files)
    _check_tokenizer(str(directory), stats, MEMORY, SECONDS)


@functools.lru_cache(maxsize=64)
def _check_tokenizer(directory: str, *_: Any) -> None:
    request = {
        "task": "probe_tokenizer",
        "path": directory,
        "rendered": MAX_RENDERED,
        "rendered_per_character": RENDERED_PER_CHARACTER,
        "tokens_per_byte": MAX_TOKENS_PER_BYTE,
    }
    _confine(directory, request, SECONDS)


def _confine(what: str, request: dict[str, Any], seconds: int, mapped: int = 0) -> None:
    """Run a task of child.py.

    Args:
      what: the file, for messages; lines of the child with a `path` name another.
      seconds: limit on the child's processor time.
      mapped: bytes of files that the child maps into memory, which do not count as its memory.

    Raises:
      ValueError: the task refuses the file, or exceeds a limit.
      RuntimeError: the child does not start, which no file can cause.
    """
    command = (sys.executable, "-P", str(CHILD), str(MEMORY + mapped), str(seconds))
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, errors = _talk(child, json.dumps(request).encode(), START_SECONDS + 2 * seconds)
    finally:
        child.kill()
        child.wait()
    lines = [json.loads(line) for line in output.splitlines() if line.endswith(b"}")]
    if not lines:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"{' '.join(command)} does not start: {reason or 'no reason given'}")
    last = lines[-1]
    what = next((line["path"] for line in reversed(lines) if "path" in line), what)
    if "refused" in last:
        raise ValueError(f"{what}: {last['refused']}")
    if child.returncode not in (0, OUT_OF_MEMORY) and child.returncode > 0:
        raise RuntimeError(f"{what}: {errors.decode(errors='replace').strip()}")
    if "done" not in last:
        raise ValueError(
            f"{what}: {last['stage']} takes more than {seconds} s or {MEMORY / 2**30:g} GiB "
            "of memory; use another file"
        )


def _talk(child: "subprocess.Popen[bytes]", request: bytes, seconds: float) -> tuple[bytes, bytes]:
    """Send a child its request; return its output and errors. After `seconds`, it is killed."""
    clock = ActiveTime()
    end = clock.seconds() + seconds
    question: bytes | None = request  # it is sent once
    while clock.seconds() < end:
        try:
            return child.communicate(question, timeout=INTERVAL)
        except subprocess.TimeoutExpired:
            question = None
    child.kill()
    return child.communicate()
