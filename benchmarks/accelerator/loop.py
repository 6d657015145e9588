"""The loop over pieces: each in a process with a time limit, its result a line of a file."""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks.accelerator import page
from benchmarks.accelerator.pieces import PIECES, TINY, split
from ragen_jax.core.progress import duration
from ragen_jax.storage.atomic_io import atomic_write

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "results"
FILE, PAGE = "accelerator.jsonl", "accelerator.md"
START_LIMIT = 120.0  # seconds in which a process must name its device
GRACE = 5.0  # seconds of a process between being asked to end and being ended
MEMORY_FRACTION = "0.92"  # of a GPU's memory; JAX's default is 0.75


def run_child(given, seconds):
    """Run measures.py in a process on its own.

    Args:
      given: the piece as JSON; "": the process names its device.
      seconds: time limit.

    Returns:
      (rows printed as JSON, "" or why the process failed).
    """
    env = {"XLA_PYTHON_CLIENT_MEM_FRACTION": MEMORY_FRACTION} | os.environ
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.accelerator.measures"],
        cwd=ROOT,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that its own processes end with it
    )
    failure = ""
    try:
        out, err = process.communicate(given, timeout=seconds)
    except subprocess.TimeoutExpired:
        failure = f"ended after {seconds:.0f} s"
        out, err = _end(process)
    except BaseException:
        _end(process)
        raise
    if process.returncode and not failure:
        lines = [line for line in err.splitlines() if line.strip()]
        failure = lines[-1][:500] if lines else f"exit code {process.returncode}"
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], failure


def _end(process):
    """End a process and those that it started; return its output so far."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            pass
        try:
            return process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            continue
    return "", ""


def order(pieces, lines):
    """Return the pieces to run: those without a line, then those whose last line is a failure."""
    last = {line["piece"]: line for line in lines}
    new = [piece for piece in pieces if piece.name not in last]
    return new + [piece for piece in pieces if last.get(piece.name, {}).get("failure")]


def run_pieces(pieces, device, path, *, seconds, clock=time.monotonic):
    """Run pieces in turn and append a line for each to a file.

    Args:
      device: the object that `measures.probe` returns.
      seconds: no piece starts that is not expected to end in this time; None: no limit.

    Returns:
      The pieces that were left out for lack of time.
    """
    start, late = clock(), []
    expected = sum(piece.seconds for piece in pieces)
    bar = tqdm(total=round(expected), unit="s", desc="accelerator", leave=False, disable=None)
    done = 0.0
    for number, whole in enumerate(pieces, start=1):
        left = None if seconds is None else seconds - (clock() - start)
        if left is not None and left < whole.seconds:
            late.append(whole)
            expected -= whole.seconds
            continue
        piece, refused = split(whole, device["memory"])
        began, rows, failure = clock(), [], ""
        if piece.cases:
            bar.write(
                f"{number} of {len(pieces)}: {piece.name}, {done / expected:.0%} done, about "
                f"{duration(expected - done)} left",
                file=sys.stderr,
            )
            limit = piece.limit if left is None else min(piece.limit, left)
            given = json.dumps({"kind": piece.kind, "cases": piece.cases})
            rows, failure = run_child(given, limit)
        took = clock() - began
        line = {
            "piece": piece.name,
            "kind": piece.kind,
            **device,
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "seconds": round(took, 1),
            "failure": failure,
            "rows": rows + refused,
        }
        text = path.read_text() if path.exists() else ""
        atomic_write(path, f"{text}{json.dumps(line)}\n")
        shown = f"failed: {failure}" if failure else f"{len(rows)} rows"
        shown += f", {len(refused)} refused for memory" * bool(refused)
        bar.write(f"  {shown}, {took:.0f} s", file=sys.stderr)
        done += whole.seconds
        bar.update(round(whole.seconds))
    bar.close()
    return late


def main(argv, about):
    parser = argparse.ArgumentParser(prog="python -m benchmarks accelerator", description=about)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, help="stop in this time; rerun to continue")
    parser.add_argument("--only", help="names of pieces, separated by commas")
    parser.add_argument("--out", type=Path, help=f"folder of {FILE} and {PAGE}")
    parser.add_argument("--list", action="store_true", help="list the pieces")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--tiny", action="store_true", help="toy sizes; needs --out")
    options = parser.parse_args(argv)
    pieces = TINY if options.tiny else PIECES
    if options.tiny and options.out is None:
        parser.error("--tiny needs --out: its figures do not belong into the documentation")
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds is {options.seconds:g}; it must be above 0")
    if options.only is not None:
        named, known = options.only.split(","), [piece.name for piece in pieces]
        for name in named:
            if name not in known:
                parser.error(f"--only: no piece {name!r}; the pieces are: {', '.join(known)}")
        pieces = [piece for piece in pieces if piece.name in named]
    if options.list:
        for piece in pieces:
            print(f"{piece.name:<24} {len(piece.cases)} rows, about {piece.seconds:.0f} s")
        print(f"all: about {duration(sum(piece.seconds for piece in pieces))} on an H100")
        return
    out = options.out or OUT
    out.mkdir(parents=True, exist_ok=True)
    path = out / FILE
    if not options.page:
        measure(parser, options, pieces, path)
    atomic_write(out / PAGE, page.write(stored(path)))
    print(f"wrote {out / PAGE}")


def measure(parser, options, pieces, path):
    """Measure the missing pieces, and print those that remain."""
    start = time.monotonic()
    found, failure = run_child("", START_LIMIT)
    if not found:
        parser.error(f"no device: {failure}")
    (device,) = found
    if device["platform"] == "cpu" and not options.tiny:
        parser.error("no GPU or TPU: on a CPU, only --tiny is possible")
    if device["count"] > 1 and not options.tiny:
        parser.error(
            f"{device['count']} devices: the table is of one; set CUDA_VISIBLE_DEVICES=0, or on a "
            "TPU TPU_VISIBLE_CHIPS=0, TPU_PROCESS_BOUNDS=1,1,1, TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1"
        )
    # This process must not hold the device: it only reads shapes.
    jax.config.update("jax_platforms", "cpu")
    mine = [line for line in stored(path) if line["device"] == device["device"]]
    seconds = options.seconds and options.seconds - (time.monotonic() - start)
    late = run_pieces(order(pieces, mine), device, path, seconds=seconds)
    mine = [line for line in stored(path) if line["device"] == device["device"]]
    left = order(pieces, mine)
    print(f"{len(pieces) - len(left)} of {len(pieces)} pieces are measured on {device['device']}")
    if late:
        need = sum(piece.seconds for piece in late)
        print(f"not started: {len(late)}, which need about {duration(need)}; repeat the command")


def stored(path):
    """Return the objects of a file's lines; [] without a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
