"""Faults at random moments of runs, which go on behind them and are compared with a twin.

    python -m benchmarks chaos [--minutes=90] [--seed=0] [--kinds=NAME,...] [--out=FILE.json]

A kind is drawn, a run begins in a folder and a cache of its own, the fault strikes at a moment that
is drawn, and the same command is given again. What survives has the rows and evaluations of a run
that nothing happened to, number by number, or ends with the exit code and the line that
docs/recovery.md promises, leaves every file as it was, and goes on once the fault is mended. Two
trials run at a time (--at-a-time).
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from ragen_jax.run.rows import read_metrics
from ragen_jax.run.stored import read_outcomes

STEPS, EVERY = 8, 2  # of a run; between two checkpoints
FIELDS = {
    **{"steps": STEPS, "checkpoint.every": EVERY, "checkpoint.keep": 3, "report.every": 0},
    **{"warmstart.success": 0.05, "warmstart.rooms": 1024, "warmstart.check_every": 100},
    **{"rollout.groups": 4, "rollout.group_size": 4, "rollout.save_every": 2},
    **{"eval.every": 4, "eval.episodes": 32, "diagnose.scores_every": 4, "env.max_turns": 3},
    "optimizer.micro_batch": 4,
}
OF_THE_CLOCK = ("time/", "throughput/", "memory/")
PATIENCE = 300.0  # seconds for a process to do what it should


class Wrong(Exception):
    """What was not as promised."""


@dataclasses.dataclass
class Trial:
    """A run that something happens to."""

    folder: Path  # of the run and its cache
    twin: Path
    rng: np.random.Generator
    fields: dict[str, object] = dataclasses.field(default_factory=dict)
    processes: int = 1

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def cache(self) -> Path:
        return self.folder / "cache" / "ragen_jax"

    # -------------------------------------------------------------------------- its processes

    def begin(self, *flags: str, number: int = 0, port: int = 0) -> subprocess.Popen:
        """Process `number` of the run's command, whose output goes to a file."""
        fields = FIELDS | self.fields
        words = [f"--workdir={self.run}", *flags]
        if not (self.run / "config.json").exists():
            words += [f"--config.{name}={value}" for name, value in fields.items()]
        environment = os.environ | {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "JAX_PLATFORMS": "cpu",
        }
        if self.processes > 1:
            words.append("--distributed")
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(self.processes),
                "JAX_PROCESS_ID": str(number),
                "NPROC": "32",
            }
        with (self.folder / f"output{number}").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "ragen_jax.train", *words],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def begin_all(self, *flags: str) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [self.begin(*flags, number=n, port=port) for n in range(self.processes)]

    def output(self, number: int = 0) -> str:
        return (self.folder / f"output{number}").read_text(errors="replace")

    def ends(self, process: subprocess.Popen, *codes: int, says: str = "") -> None:
        """Waits for a process, which should end with one of the codes and say something."""
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Wrong(f"did not end within {PATIENCE:g} s") from None
        if code not in codes:
            raise Wrong(f"exit code {code}, not {codes}: {self.output()[-600:]}")
        if says not in self.output():
            raise Wrong(f"did not say {says!r}: {self.output()[-600:]}")
        if code in (2, 4) and "Traceback" in self.output():
            raise Wrong(f"a traceback: {self.output()[-600:]}")

    def until(self, process: subprocess.Popen, ready: Callable[[], bool]) -> None:
        """Waits until something is so, or the process has ended."""
        end = time.monotonic() + PATIENCE
        while process.poll() is None and not ready() and time.monotonic() < end:
            time.sleep(0.005)

    def at_step(self, process: subprocess.Popen, step: int) -> None:
        """Waits for the row of a step, then for part of the next one."""
        path = self.run / "metrics.jsonl"
        mark = f'{{"step": {step},'
        self.until(process, lambda: path.exists() and mark in path.read_text())
        time.sleep(self.rng.uniform(0, 0.4))

    def killed(self) -> None:
        """Runs it until some time behind its second checkpoint."""
        process = self.begin()
        self.at_step(process, int(self.rng.integers(2 * EVERY + 1, STEPS)))
        process.kill()
        process.wait()

    def goes_on(self, *flags: str, says: str = "") -> None:
        """The same command ends well, with the figures of the twin."""
        for process in self.begin_all(*flags):
            self.ends(process, 0, says=says)
        self.compare()

    def compare(self) -> None:
        def rows(folder):
            return [
                {k: v for k, v in row.items() if not k.startswith(OF_THE_CLOCK)}
                for row in read_metrics(folder / "metrics.jsonl")
            ]

        found, expected = rows(self.run), rows(self.twin)
        if found != expected:
            differing = [a.get("step") for a, b in zip(found, expected, strict=False) if a != b]
            raise Wrong(f"rows of steps {differing} of {len(found)} differ from the twin's")
        if read_outcomes(self.run / "eval") != read_outcomes(self.twin / "eval"):
            raise Wrong("evaluations differ from the twin's")

    def refused(self, mend: Callable[[], None], says: str, code: int = 2) -> None:
        """The same command ends with a line and changes nothing; mended, it goes on."""
        before = self.contents()
        self.ends(self.begin(), code, says=says)
        if self.contents() != before:
            raise Wrong("files were changed by a start that was refused")
        mend()
        self.goes_on()

    def contents(self) -> dict[str, str]:
        files = [path for path in self.run.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    # -------------------------------------------------------------------------- damage

    def saved(self) -> list[Path]:
        """The finished checkpoints, the newest last."""
        found = [path for path in (self.run / "checkpoints").iterdir() if path.name.isdigit()]
        return sorted(found, key=lambda path: int(path.name))

    def newest(self) -> Path:
        return self.saved()[-1]

    def one_of(self, folder: Path, pattern: str = "*") -> Path:
        """A file, the larger the likelier."""
        files = sorted(path for path in folder.rglob(pattern) if path.stat().st_size)
        files = [path for path in files if path.is_file() and not path.name.endswith(".lock")]
        sizes = np.array([path.stat().st_size for path in files], float)
        return files[self.rng.choice(len(files), p=sizes / sizes.sum())]

    def rewrite(self, path: Path, content: bytes) -> Callable[[], None]:
        """Another file in the place of one, which is linked to others' caches; undoes it."""
        before = path.read_bytes()

        def write(data: bytes) -> None:
            path.unlink(missing_ok=True)
            path.write_bytes(data)

        write(content)
        return lambda: write(before)

    def flip(self, path: Path) -> Callable[[], None]:
        content = bytearray(path.read_bytes())
        content[self.rng.integers(len(content))] ^= 1 << int(self.rng.integers(8))
        return self.rewrite(path, bytes(content))

    def lines(self) -> list[bytes]:
        return (self.run / "metrics.jsonl").read_bytes().splitlines(True)


# ---- kinds of faults ----------------------------------------------------------------------------


def signalled(number: int, code: int) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        process = trial.begin()
        trial.at_step(process, int(trial.rng.integers(0, STEPS)))
        process.send_signal(number)
        trial.ends(process, code, 0)  # 0: it was done before
        trial.goes_on()

    return strike


def killed_while(pattern: str) -> Callable[[Trial], None]:
    """Killed as soon as a file or folder is there."""

    def strike(trial: Trial) -> None:
        process = trial.begin()
        trial.until(process, lambda: any(trial.run.glob(pattern)))
        time.sleep(trial.rng.uniform(0, 0.03))
        process.kill()
        process.wait()
        trial.goes_on()

    return strike


def killed_at_start(trial: Trial) -> None:
    process = trial.begin()
    time.sleep(trial.rng.uniform(0.5, 12))
    process.kill()
    process.wait()
    trial.goes_on()


def stopped_at_start(trial: Trial) -> None:
    process = trial.begin()
    trial.until(process, lambda: "compiled" in trial.output() or "compiling" in trial.output())
    process.terminate()
    trial.ends(process, 143, 0)
    trial.goes_on()


def stopped_then_killed(trial: Trial) -> None:
    process = trial.begin()
    trial.at_step(process, int(trial.rng.integers(0, STEPS)))
    process.terminate()
    time.sleep(trial.rng.uniform(0, 0.6))
    process.kill()
    process.wait()
    trial.goes_on()


def killed_again_and_again(trial: Trial) -> None:
    for _ in range(3):
        process = trial.begin()
        trial.at_step(process, int(trial.rng.integers(0, STEPS)))
        process.kill()
        process.wait()
    trial.goes_on()


def frozen(trial: Trial) -> None:
    process = trial.begin()
    trial.at_step(process, int(trial.rng.integers(0, STEPS)))
    process.send_signal(signal.SIGSTOP)
    time.sleep(trial.rng.uniform(1, 5))
    process.send_signal(signal.SIGCONT)
    trial.ends(process, 0)
    trial.compare()


def second_run(trial: Trial) -> None:
    process = trial.begin()
    trial.at_step(process, int(trial.rng.integers(0, 3)))
    second = trial.begin(number=1)
    code = second.wait(PATIENCE)
    if process.poll() is None and (code != 2 or "a run is under way" not in trial.output(1)):
        raise Wrong(f"a second run was not refused: exit code {code}, {trial.output(1)[-600:]}")
    trial.ends(process, 0)
    trial.compare()


def damaged_checkpoint(how: str) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        trial.killed()
        newest = trial.newest()
        path = trial.one_of(newest / "default")
        if how == "flipped":
            trial.flip(path)
        elif how == "cut":
            trial.rewrite(path, path.read_bytes()[: int(trial.rng.integers(path.stat().st_size))])
        else:
            path.unlink()
        trial.goes_on(says=f"the checkpoint of step {newest.name} is damaged")

    return strike


def newest_checkpoint_removed(trial: Trial) -> None:
    trial.killed()
    shutil.rmtree(trial.newest())
    trial.goes_on()


def all_checkpoints_damaged(trial: Trial) -> None:
    trial.killed()
    mends = [trial.flip(trial.one_of(path / "default")) for path in trial.saved()]
    trial.refused(lambda: [mend() for mend in mends], "every checkpoint in")


def weights_flipped(trial: Trial) -> None:
    trial.killed()
    trial.refused(trial.flip(trial.run / "model" / "model.safetensors"), "is not what was written")


def weights_not_finite(trial: Trial) -> None:
    trial.killed()
    path, sums = trial.run / "model" / "model.safetensors", trial.run / "model" / "checksums.json"
    kept, checksums = path.read_bytes(), sums.read_bytes()
    arrays = load_file(path)
    name = sorted(arrays)[trial.rng.integers(len(arrays))]
    arrays[name] = arrays[name].copy()
    arrays[name].flat[trial.rng.integers(arrays[name].size)] = trial.rng.choice([np.nan, np.inf])
    save_file(arrays, path, metadata={"format": "pt"})
    sums.unlink()  # as of a model that somebody else wrote

    def mend() -> None:
        path.write_bytes(kept)
        sums.write_bytes(checksums)

    trial.refused(mend, name)


def torn_row(trial: Trial) -> None:
    trial.killed()
    tails = [b'{"step": 8, "rollout/succ', b"\0" * 40, b"\xff\xfe", b"{}\n", b"null\n[]\n"]
    with (trial.run / "metrics.jsonl").open("ab") as file:
        file.write(tails[trial.rng.integers(len(tails))])
    trial.goes_on()


def foreign_row(trial: Trial) -> None:
    trial.killed()
    lines = trial.lines()
    at = int(trial.rng.integers(1, EVERY + 1))
    lines[at] = [b"\0\0\n", b"\xff" + lines[at], lines[at][:9] + b"\n"][trial.rng.integers(3)]
    mend = trial.rewrite(trial.run / "metrics.jsonl", b"".join(lines))
    trial.refused(mend, f"line {at + 1} is not the row")


def lost_rows(trial: Trial) -> None:
    trial.killed()
    lines = trial.lines()
    del lines[int(trial.rng.integers(1, EVERY + 1))]
    trial.refused(
        trial.rewrite(trial.run / "metrics.jsonl", b"".join(lines)), "lacks the rows of 1"
    )


def repaired(trial: Trial) -> None:
    """With --repair it goes on without the row that is lost."""
    trial.killed()
    lines = trial.lines()
    lost = int(trial.rng.integers(1, EVERY + 1))
    lines[lost] = b"\xff" + lines[lost]
    trial.rewrite(trial.run / "metrics.jsonl", b"".join(lines))
    trial.ends(trial.begin("--repair"), 0)
    found = [row["step"] for row in read_metrics(trial.run / "metrics.jsonl")]
    if found != [step for step in range(STEPS + 1) if step != lost]:
        raise Wrong(f"rows of steps {found}, without that of {lost}")


def metrics_removed(trial: Trial) -> None:
    trial.killed()
    path = trial.run / "metrics.jsonl"
    content = path.read_bytes()
    path.unlink()
    trial.refused(lambda: path.write_bytes(content), "lacks the rows of")


def config_damaged(trial: Trial) -> None:
    trial.killed()
    path = trial.run / "config.json"
    content = path.read_bytes()
    cut = content[: int(trial.rng.integers(len(content) - 2))]
    trial.refused(trial.rewrite(path, cut), "config.json is damaged")


def config_removed(trial: Trial) -> None:
    trial.killed()
    path = trial.run / "config.json"
    content = path.read_bytes()
    path.unlink()
    trial.refused(lambda: path.write_bytes(content), "has checkpoints but no config.json")


def other_settings(trial: Trial) -> None:
    trial.killed()
    before = trial.contents()
    trial.ends(trial.begin("--config.rollout.groups=5"), 2, says="config.rollout.groups=4")
    if trial.contents() != before:
        raise Wrong("files were changed by a start that was refused")
    trial.goes_on()


def left_over(trial: Trial) -> None:
    trial.killed()
    (trial.run / "eval" / ".step_000004.json.writing-7").write_text("[[1,")
    (trial.run / ".config.json.writing-7").write_text("{")
    shutil.copytree(trial.newest(), trial.run / "checkpoints" / "99.orbax-checkpoint-tmp")
    trial.goes_on()
    if any(trial.run.rglob(".*.writing-*")) or any(trial.run.rglob("*orbax-checkpoint-tmp")):
        raise Wrong("what a killed writer has left was not removed")


def events_damaged(trial: Trial) -> None:
    trial.killed()
    (trial.run / "events.jsonl").write_bytes(b'{"step": 1, "rule"\n\xff\n')
    trial.goes_on()


def stored_damaged(trial: Trial) -> None:
    """A file that the page is made of: the run ends as ever, and the page names it."""
    trial.killed()
    folder = trial.run / ("rollouts", "diagnostics")[trial.rng.integers(2)]
    path = trial.one_of(folder, "step_*")
    trial.rewrite(path, path.read_bytes()[: path.stat().st_size // 2])
    rewritten = int(path.stem[5:]) > int(trial.newest().name)  # by the steps that are done again
    trial.goes_on(says="" if rewritten else f"{path} is damaged")


def dataset_damaged(trial: Trial) -> None:
    trial.killed()
    folder = next(p for p in (trial.cache / "datasets").glob("heldout_*") if p.is_dir())
    trial.flip(trial.one_of(folder, "*examples*"))
    trial.goes_on(says="generating it anew")


def program_damaged(trial: Trial) -> None:
    trial.killed()
    for _ in range(5):
        trial.flip(trial.one_of(trial.cache / "compiled", "*-cache"))
    trial.goes_on()


def cache_removed(trial: Trial) -> None:
    trial.killed()
    shutil.rmtree(trial.folder / "cache")
    trial.goes_on()


def on_small_disk(trial: Trial, *, freed: bool) -> None:
    trial.run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(trial.run)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        trial.fields["checkpoint.patience"] = PATIENCE if freed else 1.0
        process = trial.begin()
        trial.at_step(process, int(trial.rng.integers(0, STEPS - 1)))
        filler = trial.run / "filler"
        left = int(trial.rng.choice([0, 4096, 500_000]))
        free = shutil.disk_usage(trial.run).free - left
        try:
            with filler.open("wb", buffering=0) as file:
                while free > 0:
                    free -= file.write(b"x" * min(free, 1 << 16))
        except OSError:
            pass  # it is full
        if freed:
            trial.until(process, lambda: "trying again" in trial.output())
            time.sleep(trial.rng.uniform(0, 3))
            filler.unlink()
        else:
            trial.ends(process, 4, 0, says="cannot be written")
            filler.unlink()
            process = trial.begin()
        trial.ends(process, 0)
        trial.compare()
    finally:
        subprocess.run(["umount", "-l", str(trial.run)], check=True)


def full_disk_freed(trial: Trial) -> None:
    on_small_disk(trial, freed=True)


def full_disk(trial: Trial) -> None:
    on_small_disk(trial, freed=False)


def one_of_two(number: int, code: int) -> Callable[[Trial], None]:
    """Of two processes one is signalled: both end, and go on together."""

    def strike(trial: Trial) -> None:
        processes = trial.begin_all()
        trial.at_step(processes[0], int(trial.rng.integers(0, STEPS)))
        struck = int(trial.rng.integers(2))
        processes[struck].send_signal(number)
        for process in processes:
            try:
                found = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                for each in processes:
                    each.kill()
                raise Wrong("the other process did not end") from None
            if number == signal.SIGTERM and found not in (0, code):
                raise Wrong(f"exit code {found}, not {code}")
        trial.goes_on()

    return strike


KINDS: dict[str, Callable[[Trial], None]] = {
    "kill -9 at a step": signalled(signal.SIGKILL, -9),
    "kill -9 in a start": killed_at_start,
    "kill -9 in a save": killed_while("checkpoints/*orbax-checkpoint-tmp"),
    "kill -9 in an evaluation's write": killed_while("eval/.*writing*"),
    "kill -9 in the export": killed_while(".policy.saving-*"),
    "kill -9 three times": killed_again_and_again,
    "SIGTERM": signalled(signal.SIGTERM, 143),
    "SIGINT": signalled(signal.SIGINT, 130),
    "SIGHUP": signalled(signal.SIGHUP, 129),
    "SIGTERM in a start": stopped_at_start,
    "SIGTERM, then kill -9": stopped_then_killed,
    "frozen for seconds": frozen,
    "a second run in the folder": second_run,
    "a checkpoint's bit flipped": damaged_checkpoint("flipped"),
    "a checkpoint's file cut": damaged_checkpoint("cut"),
    "a checkpoint's file gone": damaged_checkpoint("gone"),
    "newest checkpoint removed": newest_checkpoint_removed,
    "all checkpoints damaged": all_checkpoints_damaged,
    "a bit of the weights flipped": weights_flipped,
    "NaN or infinity in the weights": weights_not_finite,
    "a torn or foreign end of the rows": torn_row,
    "a foreign row in the middle": foreign_row,
    "a row lost": lost_rows,
    "--repair": repaired,
    "metrics.jsonl removed": metrics_removed,
    "config.json cut": config_damaged,
    "config.json removed": config_removed,
    "other settings": other_settings,
    "left-overs of killed writers": left_over,
    "events damaged": events_damaged,
    "rollouts or scores damaged": stored_damaged,
    "cached problems: a bit flipped": dataset_damaged,
    "kept programs: bits flipped": program_damaged,
    "cache removed": cache_removed,
    "disk full, then freed": full_disk_freed,
    "disk full": full_disk,
    "kill -9 of one of two processes": one_of_two(signal.SIGKILL, -9),
    "SIGTERM to one of two processes": one_of_two(signal.SIGTERM, 143),
}
OF_TWO = {name for name in KINDS if "two processes" in name}


def undisturbed(folder: Path, processes: int, cache: Path | None = None) -> Path:
    """The folder of a run that nothing happens to, beside the cache that trials begin with."""
    trial = Trial(folder, folder / "run", np.random.default_rng(0), processes=processes)
    folder.mkdir()
    if cache:
        shutil.copytree(cache, folder / "cache", copy_function=os.link)
    for process in trial.begin_all():
        trial.ends(process, 0)
    return trial.run


def attempt(kind: str, number: int, seed: int, root: Path, twins: dict[int, Path]) -> str:
    """What was wrong with a trial; "": it survived."""
    processes = 2 if kind in OF_TWO else 1
    folder = root / f"trial_{number}"
    folder.mkdir()
    shutil.copytree(root / "twin_1" / "cache", folder / "cache", copy_function=os.link)
    rng = np.random.default_rng((seed, number))
    trial = Trial(folder, twins[processes], rng, processes=processes)
    try:
        KINDS[kind](trial)
    except Wrong as wrong:
        return str(wrong)
    except Exception:  # of the benchmark itself: as bad
        return traceback.format_exc()
    shutil.rmtree(folder)
    return ""


def _tried(
    kinds: Sequence[str],
    seed: int,
    end: float,
    at_a_time: int,
    root: Path,
    twins: dict[int, Path],
) -> Iterator[dict]:
    """Trials as they are done: each kind once before one comes again, until `end`."""
    order = np.random.default_rng(seed)
    drawn = (kinds[i] for _ in itertools.count() for i in order.permutation(len(kinds)))

    def one(kind: str, number: int) -> dict:
        begin = time.monotonic()
        wrong = attempt(kind, number, seed, root, twins)
        seconds = round(time.monotonic() - begin, 1)
        return {"kind": kind, "number": number, "seconds": seconds, "wrong": wrong}

    with concurrent.futures.ThreadPoolExecutor(at_a_time) as threads:
        numbers = itertools.count()
        running = {threads.submit(one, next(drawn), next(numbers)) for _ in range(at_a_time)}
        while running:
            done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for trial in done:
                if time.monotonic() < end:
                    running.add(threads.submit(one, next(drawn), next(numbers)))
                yield trial.result()


def as_table(trials: list[dict]) -> str:
    """Kind by kind: tried, survived."""
    tried = Counter(trial["kind"] for trial in trials)
    survived = Counter(trial["kind"] for trial in trials if not trial["wrong"])
    rows = [f"| {kind} | {tried[kind]} | {survived[kind]} |" for kind in KINDS if tried[kind]]
    total = f"| all {len(tried)} kinds | {tried.total()} | {survived.total()} |"
    return "\n".join(["| fault | tried | survived |", "| --- | --- | --- |", *rows, total])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--at-a-time", type=int, default=2, help="trials side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="", help="default: all, in turn")
    parser.add_argument("--out", type=Path, help="every trial as JSON")
    given = parser.parse_args(argv)
    kinds = [kind for kind in given.kinds.split(",") if kind] or list(KINDS)
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"{len(kinds)} kinds, seed {given.seed}, in {root}", flush=True)
    twins = {1: undisturbed(root / "twin_1", 1)}
    if OF_TWO & set(kinds):
        twins[2] = undisturbed(root / "twin_2", 2, root / "twin_1" / "cache")
    end, trials = time.monotonic() + 60 * given.minutes, []
    for trial in _tried(kinds, given.seed, end, given.at_a_time, root, twins):
        trials.append(trial)
        told = f"WRONG: {trial['wrong']}" if trial["wrong"] else "survived"
        print(f"{len(trials)}  {trial['kind']}: {told} ({trial['seconds']:.0f} s)", flush=True)
        if given.out:
            given.out.write_text(json.dumps({"seed": given.seed, "trials": trials}, indent=1))
    print(as_table(trials))
    if any(trial["wrong"] for trial in trials):
        sys.exit(1)
    shutil.rmtree(root)
