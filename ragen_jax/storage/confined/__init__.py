"""Reads of untrusted files in a child process with limits of memory and time.

For formats whose files do not say how much memory they take: what could exhaust this process then
ends the child, which is told in one line. Nothing but a verdict comes back.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("child.py")
MEMORY = 4 << 30  # bytes that a child may take for a file
SECONDS = 60  # of a processor that a child may take for a small file
BYTES_PER_SECOND = 20 << 20  # of a large file: a further second for each of these
OUT_OF_MEMORY = 77  # exit code of a child
START_SECONDS = 120  # until a child has imported what it needs; about one where nothing else runs
BATCH_ROWS = 1000  # of a Parquet file that are in memory at a time, where nothing else is said
MAX_BATCH_BYTES = 1 << 30  # of these, decoded

# Limits of a chat template's output: characters, and of these for each that its messages have.
MAX_RENDERED, RENDERED_PER_CHARACTER = 1 << 20, 16
MAX_TOKENS_PER_BYTE = 16  # of a text's UTF-8


def check_parquet(path: str | Path, *, rows: int = BATCH_ROWS, most: int | None = None) -> None:
    """Refuses a Parquet file that takes too much memory or time to decode.

    Args:
      rows: that are in memory at a time.
      most: bytes of all of it, decoded; None: any number, as it is read batch by batch.

    Raises:
      ValueError: `rows` rows of it decode to more than MAX_BATCH_BYTES, all to more than
        `most`, or decoding takes more than MEMORY or the time that a file of its size may take. A
        file that is no Parquet is left to whoever reads it.
    """
    request = {
        "task": "scan_parquet",
        "path": str(path),
        "rows": rows,
        "most_of_rows": MAX_BATCH_BYTES,
        "most": most,
    }
    _confine(str(path), request, SECONDS + os.path.getsize(path) // BYTES_PER_SECOND)


def check_tokenizer(directory: Path, files: Sequence[Path]) -> None:
    """Refuses a tokenizer, or its chat template, that takes too much memory or time.

    The child loads it, encodes texts and renders conversations. What has passed is not tried again
    by this process while the files stay.

    Args:
      files: of the directory, that the tokenizer is read from.

    Raises:
      ValueError: that. A tokenizer that cannot be read is left to whoever reads it.
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


def _confine(what: str, request: dict[str, Any], seconds: int) -> None:
    """Runs a task of child.py.

    Raises:
      ValueError: the task refuses the file, or exceeds a limit.
      RuntimeError: the child does not start, which no file can bring about.
    """
    command = (sys.executable, "-P", str(CHILD), str(MEMORY), str(seconds))
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    hangs = False
    try:
        output, errors = child.communicate(
            json.dumps(request).encode(), timeout=START_SECONDS + 2 * seconds
        )
    except subprocess.TimeoutExpired:
        hangs = True
        child.kill()
        output, errors = child.communicate()
    finally:
        child.kill()
        child.wait()
    lines = [json.loads(line) for line in output.splitlines() if line.endswith(b"}")]
    if not lines:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(f"{' '.join(command)} does not start: {reason or 'no reason given'}")
    last = lines[-1]
    if "refused" in last:
        raise ValueError(f"{what}: {last['refused']}")
    if child.returncode not in (0, OUT_OF_MEMORY) and child.returncode > 0:
        raise RuntimeError(f"{what}: {errors.decode(errors='replace').strip()}")
    if "done" not in last or hangs:
        raise ValueError(
            f"{what}: {last['stage']} takes more than {seconds} s or {MEMORY / 2**30:g} GiB "
            "of memory; use another file"
        )
