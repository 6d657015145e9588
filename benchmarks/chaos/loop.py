"""Run trials until the time is over, and print the table of survivals."""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.chaos.kinds import KINDS, SETUPS
from benchmarks.chaos.trial import Failure, Setup, Trial


def fill_setup(name: str, root: Path, folder: Path) -> Setup:
    """Return a setup whose fields name files of `root` or of the trial's code."""

    def fill(value: object) -> object:
        if not isinstance(value, str):
            return value
        return value.replace("{root}", str(root)).replace("{code}", str(folder / "code"))

    setup = SETUPS[name]
    return dataclasses.replace(setup, fields={k: fill(v) for k, v in setup.fields.items()})


def run_twin(name: str, root: Path) -> Path:
    """Run a twin, without faults; return its folder, next to the initial cache of trials."""
    folder = root / f"twin_{name.replace(' ', '_')}"
    folder.mkdir()
    if name != "plain":
        shutil.copytree(root / "twin_plain" / "cache", folder / "cache", copy_function=os.link)
    setup = fill_setup(name, root, folder)
    trial = Trial(folder, folder / "run", np.random.default_rng(0), setup)
    for process in trial.start_all():
        trial.expect_end(process, 0)
    return trial.run


def run_twins(kinds: Sequence[str], root: Path) -> dict[str, str]:
    """Run the twins of some kinds; return {setup: error message} of those that failed."""
    setups = {KINDS[kind].setup for kind in kinds} | {"plain"}
    wrong = {}
    for name in SETUPS:  # the plain twin first: the others start with its cache and agent
        if name in setups and "plain" not in wrong:
            try:
                run_twin(name, root)
            except Failure as error:
                wrong[name] = str(error)
    return wrong


def attempt(kind: str, number: int, seed: int, root: Path) -> str:
    """Run a trial; return the reason why it did not survive, or "" if it did."""
    name = KINDS[kind].setup
    twin, folder = root / f"twin_{name.replace(' ', '_')}", root / f"trial_{number}"
    folder.mkdir()
    shutil.copytree(twin / "cache", folder / "cache", copy_function=os.link)
    rng = np.random.default_rng((seed, number))
    trial = Trial(folder, twin / "run", rng, fill_setup(name, root, folder))
    try:
        KINDS[kind].strike(trial)
    except Failure as wrong:
        return str(wrong)
    except Exception:  # an error of the benchmark counts as well
        return traceback.format_exc()
    shutil.rmtree(folder)
    return ""


def run_trials(
    kinds: Sequence[str], seed: int, end: float, at_a_time: int, root: Path
) -> Iterator[dict[str, object]]:
    """Yield finished trials until the time `end`; each kind is tried once before any repeats."""
    order = np.random.default_rng(seed)
    kind_order = (kinds[i] for _ in itertools.count() for i in order.permutation(len(kinds)))

    def run_one(kind: str, number: int) -> dict[str, object]:
        begin = time.monotonic()
        wrong = attempt(kind, number, seed, root)
        seconds = round(time.monotonic() - begin, 1)
        return {"kind": kind, "number": number, "seconds": seconds, "wrong": wrong}

    with concurrent.futures.ThreadPoolExecutor(at_a_time) as threads:
        numbers = itertools.count()
        running = {
            threads.submit(run_one, next(kind_order), next(numbers)) for _ in range(at_a_time)
        }
        while running:
            done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for trial in done:
                if time.monotonic() < end:
                    running.add(threads.submit(run_one, next(kind_order), next(numbers)))
                yield trial.result()


def as_table(trials: Sequence[dict[str, object]]) -> str:
    """Return a table of the numbers of trials and survivals of each kind."""
    trial_counts = Counter(trial["kind"] for trial in trials)
    survival_counts = Counter(trial["kind"] for trial in trials if not trial["wrong"])
    rows = [
        f"| {kind} | {trial_counts[kind]} | {survival_counts[kind]} |"
        for kind in KINDS
        if trial_counts[kind]
    ]
    total = (
        f"| all {len(trial_counts)} kinds | {trial_counts.total()} | {survival_counts.total()} |"
    )
    return "\n".join(["| fault | tried | survived |", "| --- | --- | --- |", *rows, total])


def main(argv: Sequence[str], description: str | None = None) -> None:
    """Run the command; exit with 1 if a trial did not survive, and with 2 for an unknown kind."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks chaos",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["kinds:", *(f"  {kind}" for kind in KINDS)]).replace("%", "%%"),
    )
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--at-a-time", type=int, default=2, help="trials in parallel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="kinds, separated by commas; default: all")
    parser.add_argument("--out", type=Path, help="write every trial to this JSON file")
    options = parser.parse_args(argv)
    kinds = [kind for kind in options.kinds.split(",") if kind] or list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"no such kind: {', '.join(unknown)}; --help lists them")
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"{len(kinds)} kinds, seed {options.seed}, in {root}", flush=True)
    failed_twins = run_twins(kinds, root)
    for name, wrong in failed_twins.items():
        print(f"the twin of the setup {name}: WRONG: {wrong}", flush=True)
    kinds = [kind for kind in kinds if not {KINDS[kind].setup, "plain"} & failed_twins.keys()]
    if not kinds:
        sys.exit(1)
    end, trials = time.monotonic() + 60 * options.minutes, []
    for trial in run_trials(kinds, options.seed, end, options.at_a_time, root):
        trials.append(trial)
        result = f"WRONG: {trial['wrong']}" if trial["wrong"] else "survived"
        print(f"{len(trials)}  {trial['kind']}: {result} ({trial['seconds']:.0f} s)", flush=True)
        if options.out:
            options.out.write_text(json.dumps({"seed": options.seed, "trials": trials}, indent=1))
    print(as_table(trials))
    if failed_twins or any(trial["wrong"] for trial in trials):
        sys.exit(1)
    shutil.rmtree(root)
