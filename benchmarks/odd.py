"""Odd inputs: the messages of each command, and its longest silence.

    python -m benchmarks odd [--count=300] [--seed=0] [--out=FILE.json]

Half of the inputs are fields of the config with odd values. The others are flags with odd paths and
words, and damaged files of a run, a model or rollouts. Each command runs in a separate process,
forked from a process that has imported everything. A command that accepts its input may run for
`MAX_SECONDS` seconds. Errors are a traceback, an exit code that is not in docs/recovery.md, and
more than `MAX_SILENCE` seconds without a line.
"""

import argparse
import json
import os
import selectors
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from benchmarks.curves import make_agent
from ragen_jax.configs import sokoban
from ragen_jax.storage.checksums import CHECKSUMS

MAX_SECONDS = 30.0  # seconds
MAX_SILENCE = 10.0  # seconds
LATENESS = 2.0  # seconds by which a line may be late
CODES = (0, 2, 3, 4)  # exit codes of commands that are not stopped by a signal
SMALL_FIELDS = {
    **{"steps": 1, "env.max_turns": 2, "rollout.groups": 2, "rollout.group_size": 2},
    **{"rollout.max_new_tokens": 8, "eval.episodes": 8, "optimizer.micro_batch": 2},
    **{"diagnose.trajectory_samples": 4, "log.trackers": "()", "checkpoint.every": 1},
}
TEXTS = ("", "nonsense", "a\nb", "\u202e\u0301", "x" * 5000, "NULL")
ODD_VALUES = {
    bool: ("maybe", "2", "", "nan"),
    int: ("-1", "0", "1000000000000000000", "99999999999999999999999", "1.5", "nan", "many", ""),
    float: ("nan", "inf", "-inf", "-1", "0", "1e300", "1e-300", "much", ""),
    str: TEXTS,
    tuple: ("()", "(nan,)", "(1,", "((((", "('a', 3)", "-1"),
}
# command: flags that take a path. NUMBERS has other flags, with odd values.
PATHS = {
    "train": ("--workdir", "--config", "--config.model.path"),
    "evaluate": ("--workdir", "--model"),
    "export": ("--workdir",),
    "report": ("", "RUN --out"),
    "plot": ("", "RUN --out"),
    "score": ("--model", "--model=MODEL --rollouts"),
    "check_data": ("--config=metamathqa --config.env.options.path",),
    "warmstart": ("--config",),
    "retriever": ("serve --index",),
    "lab": ("run", "run organism --workdir"),
}
NUMBERS = {
    "evaluate": ("--step", "--samples"),
    "export": ("--step",),
    "score": ("--micro_batch", "--seed"),
    "plot": ("--metric",),
    "check_data": ("--rows",),
    "preflight": ("--topology", "--prompt_tokens"),
}
READERS = (
    "train --workdir=RUN",
    "evaluate --workdir=RUN",
    "report RUN",
    "export --workdir=RUN",
    "plot RUN",
)


def settings(rng: np.random.Generator) -> list[tuple[str, ...]]:
    """Return command lines that set a field to an odd value."""
    config = sokoban.get_config()
    found = []
    for name, value in flat(config).items():
        kind = next((kind for kind in ODD_VALUES if isinstance(value, kind)), str)
        for odd in ODD_VALUES[kind]:
            options = {f"--config.{field}": f"{SMALL_FIELDS[field]}" for field in SMALL_FIELDS}
            options |= {"--config.model.path": "MODEL", f"--config.{name}": odd}
            found.append(("train", "--workdir=NEW", *(f"{k}={v}" for k, v in options.items())))
    return shuffle(rng, found)


def flat(config: ConfigDict, prefix: str = "") -> dict[str, object]:
    """Return {dotted name: value} of all fields."""
    found: dict[str, object] = {}
    for name, value in config.items():
        inner = flat(value, f"{prefix}{name}.") if isinstance(value, ConfigDict) else None
        found |= {f"{prefix}{name}": value} if inner is None else inner
    return found


def words(rng: np.random.Generator) -> list[tuple[str, ...]]:
    """Return command lines with odd paths, numbers and words."""
    paths = ("EMPTY", "FILE", "GONE", "BYTES", "MODEL", "RUN", *TEXTS)
    found = []
    for command, flags in PATHS.items():
        for flag in flags:
            *before, last = flag.split(" ")
            for path in paths:
                options = (f"{last}={path}",) if last.startswith("--") else (last, path)
                found.append((command, *before, *filter(None, options)))
    for command, flags in NUMBERS.items():
        required = {"evaluate": "--workdir=RUN", "export": "--workdir=RUN", "plot": "RUN"}
        for flag in flags:
            for odd in (*ODD_VALUES[int], *ODD_VALUES[float]):
                found.append((command, *filter(None, [required.get(command)]), f"{flag}={odd}"))
        found += [(command, f"--{text}") for text in ("", "=", "nonsense", "config.", "\u202e")]
    return shuffle(rng, found)


def damages(rng: np.random.Generator, run: Path, model: Path, rollouts: Path):
    """Return tuples (command line, file that it reads, name of the damage, function of bytes)."""
    contents = {
        "cut": lambda b: b[: len(b) // 2],
        "empty": lambda b: b"",
        "null": lambda b: b"null\n",
        "list": lambda b: b"[1, [2]]\n" * 3,
        "brackets": lambda b: b"[" * 200_000,
        "zeros": lambda b: b"\0" * max(len(b), 8),
        "bytes": lambda b: rng.bytes(max(len(b), 8)),
        "folder": None,
        "gone": None,
        "numbers": lambda b: b.replace(b'"', b"1"),
        "nan": lambda b: b'{"step": NaN, "prompt": 1e999, "response": {}}\n',
    }
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"]
    found = [(line, path, how) for path in files for how in contents for line in READERS]
    commands = (
        "evaluate --config=sokoban:llm --model=MODEL",
        "train --workdir=NEW --config.model.path=MODEL",
    )
    files = [path for path in sorted(model.iterdir()) if path.name != CHECKSUMS]
    found += [(line, path, how) for path in files for how in contents for line in commands] * 4
    found += [("score --model=MODEL --rollouts=ROLLOUTS", rollouts, how) for how in contents] * 8
    return [(*one, contents[one[-1]]) for one in shuffle(rng, found)]


def shuffle(rng: np.random.Generator, found: list) -> list:
    return [found[i] for i in rng.permutation(len(found))]


# ---- running ------------------------------------------------------------------------------------


def call(command: str, *options: str, max_seconds: float = MAX_SECONDS) -> dict[str, object]:
    """Run a command; return {code, output, gap, seconds}, with code None if it still runs."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        run_in_child(command, options, writes)
    os.close(writes)
    start = last = time.monotonic()
    output, gap, ended = b"", 0.0, False
    with selectors.DefaultSelector() as selector:
        selector.register(reads, selectors.EVENT_READ)
        while not ended and time.monotonic() < start + max_seconds:
            if selector.select(0.2):
                piece = os.read(reads, 1 << 16)
                ended = not piece
                gap, last = max(gap, time.monotonic() - last), time.monotonic()
                output += piece
    if not ended:
        gap = max(gap, time.monotonic() - last)
        os.kill(child, signal.SIGKILL)
    os.close(reads)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    text = output.decode(errors="replace")
    return {"code": code, "output": text, "gap": gap, "seconds": time.monotonic() - start}


def run_in_child(command: str, options: tuple[str, ...], output: int) -> None:
    """Run a command in this process, and end the process."""
    from ragen_jax import __main__ as commands

    code = 1
    try:
        os.setsid()
        Path("/proc/self/oom_score_adj").write_text("1000")  # before anything else
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
        sys.argv[:] = [f"ragen_jax.{command}", *options]
        commands.run(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def find_error(found: dict) -> str:
    """Return the error of a command's result; "" if there is none."""
    if "Traceback (most recent call last)" in found["output"]:
        return "a traceback"
    if found["code"] not in (None, *CODES):
        return f"exit code {found['code']}"
    if found["code"] == 2 and not found["output"].strip():
        return "exit code 2 without a message"
    if found["gap"] > MAX_SILENCE + LATENESS:
        return f"{found['gap']:.0f} s of silence"
    return ""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks odd", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write every input to this JSON file")
    options = parser.parse_args(argv)
    import_all()
    root = Path(tempfile.mkdtemp(prefix="odd-"))
    print(f"{options.count} inputs, seed {options.seed}, in {root}", flush=True)
    places = prepare(root)
    rng = np.random.default_rng(options.seed)
    count = options.count
    inputs = [("field", line, None) for line in settings(rng)[: count // 2]]
    inputs += [("word or path", line, None) for line in words(rng)[: count // 4]]
    damaged = damages(rng, places["RUN"], places["MODEL"], places["ROLLOUTS"])
    inputs += [("file", tuple(one[0].split()), one[1:]) for one in damaged[: count - len(inputs)]]
    trials = []
    for kind, line, damage in inputs:
        found = attempt(root, places, line, damage) | {"kind": kind, "line": line[:1] + line[-1:]}
        found["wrong"] = find_error(found)
        trials.append(found)
        if found["wrong"]:
            print(f"{len(trials)}  WRONG, {found['wrong']}: {' '.join(line)} "
                  f"{damage and damage[:2]}\n{found['output'][-1500:]}", flush=True)  # fmt: skip
        if options.out:
            options.out.write_text(json.dumps(trials, indent=1))
    print(as_table(trials))
    shutil.rmtree(root)
    if any(trial["wrong"] for trial in trials):
        sys.exit(1)


def import_all() -> None:
    """Import the modules of all commands before they are forked, without initialising a device."""
    import orbax.checkpoint  # noqa: F401
    import tensorflow_datasets  # noqa: F401
    import transformers  # noqa: F401

    from ragen_jax import check_data, evaluate, export, plot, train  # noqa: F401


def prepare(root: Path) -> dict[str, Path]:
    """Make an agent, a run of it, its rollouts and odd paths; return {placeholder: path}."""
    os.environ |= {"XDG_CACHE_HOME": str(root / "cache"), "JAX_PLATFORMS": "cpu"}
    os.chdir(root)
    places = {name: root / "kept" / name.lower() for name in ("MODEL", "RUN", "ROLLOUTS")}
    child = os.fork()
    if child == 0:  # a child, because this initialises a device
        make_agent(places["MODEL"], 32)
        (places["MODEL"] / CHECKSUMS).unlink()  # a model from another source has no checksums
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("the agent could not be made")
    fields = [f"--config.{name}={value}" for name, value in SMALL_FIELDS.items()]
    fields += ["--config.rollout.save_every=1", f"--config.model.path={places['MODEL']}"]
    result = call("train", f"--workdir={places['RUN']}", *fields, max_seconds=900.0)
    if result["code"] != 0:
        raise RuntimeError(f"the run failed: {result['output']}")
    (rollouts,) = (places["RUN"] / "rollouts").iterdir()
    shutil.copy(rollouts, places["ROLLOUTS"])
    places |= {name: root / name.lower() for name in ("EMPTY", "FILE", "BYTES")}
    places["EMPTY"].mkdir()
    places["FILE"].write_text("hello\n")
    places["BYTES"].write_bytes(bytes(range(256)))
    return places | {"GONE": root / "gone", "NEW": root / "new", "NULL": root / "null"}


def attempt(root: Path, places: dict[str, Path], line: tuple[str, ...], damage) -> dict:
    """Run a command line on a copy of the files that it may damage; return the result of `call`."""
    work = root / "work"
    work.mkdir()
    if os.geteuid() == 0:  # a separate device, since a command might replace it by a file
        os.mknod(places["NULL"], 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    here = dict(places)
    for name in ("RUN", "MODEL", "ROLLOUTS"):
        here[name] = work / name.lower()
    shutil.copytree(root / "kept", work, symlinks=True, dirs_exist_ok=True)
    config = here["RUN"] / "config.json"
    config.write_text(config.read_text().replace(str(places["MODEL"]), str(here["MODEL"])))
    if damage:
        file, how, content = damage
        file = work / file.relative_to(root / "kept")
        before = file.read_bytes()
        file.unlink()
        if how == "folder":
            file.mkdir()
        elif how != "gone":
            file.write_bytes(content(before))
    words_with_paths = [fill(word, here) for word in line]
    os.chdir(work)  # files with relative paths are written here
    try:
        return call(*words_with_paths)
    finally:
        if places["NULL"].is_file():
            raise RuntimeError(f"{words_with_paths} replaced a device by a file")
        os.chdir(root)
        places["NULL"].unlink(missing_ok=True)
        shutil.rmtree(work)
        shutil.rmtree(places["NEW"], ignore_errors=True)


def fill(word: str, places: dict[str, Path]) -> str:
    name, equals, value = word.partition("=")
    if equals:
        return f"{name}={places.get(value, value)}"
    return str(places.get(word, word))


def as_table(trials: list[dict]) -> str:
    """Return a table: numbers refused, used and wrong of each kind, and the longest silence."""
    rows = ["| input | tried | refused (2) | used | wrong | longest silence |", "| --- " * 6 + "|"]
    for kind in [*dict.fromkeys(trial["kind"] for trial in trials), "all"]:
        chosen = [trial for trial in trials if kind in (trial["kind"], "all")]
        codes = Counter("refused" if trial["code"] == 2 else "used" for trial in chosen)
        gap = max(trial["gap"] for trial in chosen)
        bad = sum(bool(trial["wrong"]) for trial in chosen)
        rows.append(f"| {kind} | {len(chosen)} | {codes['refused']} | {codes['used']} | {bad} "
                    f"| {gap:.1f} s |")  # fmt: skip
    return "\n".join(rows)
