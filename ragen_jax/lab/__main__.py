"""The laboratory: run an experiment of many small runs, and report its results.

    python -m ragen_jax.lab list
    python -m ragen_jax.lab pages [--report=docs/lab]
    python -m ragen_jax.lab run referee [--quick] [--workers=N] [--report=docs/lab]
    python -m ragen_jax.lab run NAME [--quick] [--workers=N] [--workdir=runs/lab]
                                     [--report=docs/lab] [--reuse] [--config.FIELD=VALUE ...]

Runs every arm of an experiment of configs/experiments, by default one per core at a time, and
writes NAME.md, NAME.png and, in NAME.jsonl, the rows from which both are made. If the command is
repeated after a stop, it resumes unfinished arms and reads finished arms. A full run also writes
claims.md and referee.md: the verdicts on the claims of RAGEN-2, and on those of other papers, from
all experiments that have rows in that folder.

`run referee` runs all experiments on the tiny agent of referee.md (--quick: short forms of two),
each as `run NAME` with the same flags. `pages` rewrites all pages, figures, claims.md and
referee.md from the stored rows and runs nothing. Some experiments read the rows of another:
`run NAME` then writes the page without runs.

With --reuse, arms in NAME.jsonl are read from there, and only the other arms are run: for example,
your treatment next to those of docs/lab. The stored arms are from another machine; its runs differ
from runs on this machine as much as runs with different seeds do.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.config import help
from ragen_jax.config.fields import warning
from ragen_jax.configs.experiments import EXPERIMENTS, REFEREE, REFEREE_QUICK
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.suggest import did_you_mean
from ragen_jax.lab.arms import arms, list_fixed_fields, run_arms, set_dates, shorten
from ragen_jax.lab.claims import write_claims
from ragen_jax.lab.interim_analyses import analysis_seed_counts, certain
from ragen_jax.lab.pages import PRIMARY, figures, write_page
from ragen_jax.lab.recorded import read_runs, stored_runs, trim_rows, write_runs
from ragen_jax.lab.referee import write_referee
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.console import console
from ragen_jax.storage.console_streams import set_up_console
from ragen_jax.storage.metrics_reader import read_metrics

EVERY = "referee"  # the name that runs all experiments of REFEREE


def main(argv: list[str]) -> None:
    name = argv[2]
    if name == EVERY:
        run_every()
        return
    enable_compilation_cache()
    with command.bad_input():
        require_matplotlib()
        experiment = EXPERIMENTS[name]
        if experiment.rows:
            write_from_rows(name, Path(REPORT.value))
            return
        experiment = shorten(experiment) if QUICK.value else experiment
        plan = arms(experiment, CONFIG.value)
        if WORKERS.value < 0:
            raise ValueError(f"--workers is {WORKERS.value}; it must be at least 0")
    given, fixed = command.overrides(), list_fixed_fields(name, experiment)
    line = warning({field: why for field, why in fixed.items() if field in given})
    if line:
        console(line)
    shorter = "_quick" if QUICK.value else ""
    root = Path(WORKDIR.value) / f"{experiment.runs or name}{shorter}"
    on_cpu = jax.devices()[0].platform == "cpu"
    workers = WORKERS.value or (on_cpu and os.cpu_count() or 1)
    page = Path(REPORT.value) / f"{name}{shorter}.md"
    written = read_runs(page.with_suffix(".jsonl"), plan) if REUSE.value else {}
    if REUSE.value:
        console(f"{len(written)} of {len(plan)} arms are read from {page.with_suffix('.jsonl')}")
    rows, counts = {}, analysis_seed_counts(experiment)
    for count in counts:
        seeds = experiment.seeds[:count]
        part = [arm for arm in plan if arm.seed in seeds]
        with command.bad_input():
            missing = [arm for arm in part if arm.key not in written]
            missing = set_dates(missing, root, command.today())
            code = run_arms(missing, root, workers=workers, minutes=experiment.minutes)
        if code:
            sys.exit(code)
        rows = {
            arm.key: written.get(arm.key)
            or trim_rows(read_metrics(root / arm.folder / "metrics.jsonl"), figures(name))
            for arm in part
        }
        if count < counts[-1] and certain(PRIMARY[name](rows), experiment):
            console(
                f"stopping: the verdict is certain after {count} of {len(experiment.seeds)} seeds"
            )
            break
    words = f"run {name}" + (" --quick" if QUICK.value else "")
    print(write_page(name, page, words, experiment, rows))
    write_runs(page.with_suffix(".jsonl"), plan, rows)
    if not QUICK.value:
        write_claims(page.parent)
        write_referee(page.parent)
    console(f"done: {page}")


def run_every() -> None:
    """Run the experiments of referee.md one after another, each in a process, and write the page.

    Raises:
      SystemExit: an experiment failed; the code is its exit code.
    """
    for name in REFEREE_QUICK if QUICK.value else REFEREE:
        console(f"run {name}")
        enter_phase("")  # the other process reports its progress
        done = subprocess.run([sys.executable, "-m", "ragen_jax.lab", "run", name, *sys.argv[3:]])
        if done.returncode:
            sys.exit(done.returncode)
    suffix = "_quick" if QUICK.value else ""
    print(write_referee(Path(REPORT.value), suffix))
    console(f"done: {Path(REPORT.value) / f'{EVERY}{suffix}.md'}")


def write_from_rows(name: str, report: Path) -> None:
    """Write the page of an experiment from the rows of another experiment.

    Raises:
      ValueError: --quick was given, or the folder holds no rows of the other experiment.
    """
    experiment = EXPERIMENTS[name]
    if QUICK.value:
        raise ValueError("--quick: this experiment has no shorter form; omit --quick")
    runs = stored_runs(report, name, experiment)
    if not runs:
        raise ValueError(
            f"--report={report} holds no rows of {experiment.rows}, from which this page is made; "
            f"run {experiment.rows} first"
        )
    print(write_page(name, report / f"{name}.md", f"run {name}", experiment, runs))
    write_claims(report)
    write_referee(report)
    console(f"done: {report / f'{name}.md'}")


def require_matplotlib() -> None:
    """Raise ValueError if the pages' figures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("matplotlib draws the figures of a page: pip install ragen_jax[lab]")


def rewrite(report: Path) -> None:
    """Write the page and figure of every experiment with stored rows, claims.md and referee.md.

    Raises:
      ValueError: the folder holds no stored rows.
    """
    found = 0
    for name, experiment in EXPERIMENTS.items():
        page = report / f"{name}.md"
        runs = stored_runs(report, name, experiment)
        if runs:
            write_page(name, page, f"run {name}", experiment, runs)
            console(f"written: {page}")
            found += 1
    if not found:
        raise ValueError(
            f"--report={report} holds no rows of any experiment (NAME.jsonl); "
            "give a folder that `run NAME` has written"
        )
    write_claims(report)
    console(f"written: {report / 'claims.md'}")
    write_referee(report)
    console(f"written: {report / 'referee.md'}")


def listed() -> str:
    """Return the text that `list` prints."""
    lines = []
    for name, experiment in EXPERIMENTS.items():
        count = len(experiment.seeds) * len(experiment.settings) * len(experiment.treatments)
        quick = ", --quick" if experiment.quick else ""
        runs = f"{count} arms of about {experiment.minutes:g} min{quick}"
        lines.append(f"{name} ({f'rows of {experiment.rows}' if experiment.rows else runs})")
        lines.append(f"    {experiment.question}")
    lines.append(f"{EVERY} ({', '.join(REFEREE)}; --quick: {', '.join(REFEREE_QUICK)})")
    lines.append("    What do these experiments say about the claims of other papers than RAGEN-2?")
    return "\n".join(lines)


def experiment_name(argv: list[str]) -> str | None:
    """Return the name of the experiment to run, or None for `list`; exit with code 2 otherwise."""
    with command.bad_input():
        if argv[1:] == ["list"]:
            return None
        if argv[1:2] != ["run"] or not argv[2:] or argv[2].startswith("-"):
            raise ValueError("give `list`, `pages`, or `run NAME` with a name from `list`")
        if argv[2] not in EXPERIMENTS and argv[2] != EVERY:
            raise ValueError(
                f"unknown experiment {argv[2]!r}; known: {', '.join(EXPERIMENTS)}"
                f"{did_you_mean(argv[2], EXPERIMENTS)}"
            )
    return argv[2]


if __name__ == "__main__":
    CONFIG = command.define_config("that of the experiment")
    QUICK = flags.DEFINE_bool("quick", False, "Run a short form of the experiment.")
    WORKERS = flags.DEFINE_integer(
        "workers", 0, "Arms to run in parallel; 0: one per core on a CPU, else 1."
    )
    WORKDIR = flags.DEFINE_string("workdir", "runs/lab", "Folder for the runs.")
    REUSE = flags.DEFINE_bool(
        "reuse", False, "Read arms from the rows in the report's folder; run only the missing arms."
    )
    REPORT = flags.DEFINE_string("report", "docs/lab", "Folder for the page and its figure.")
    set_up_console()
    if sys.argv[1:2] == ["pages"] and not help.is_asked(sys.argv):
        with command.disk_errors(), command.bad_input(flags.Error, OSError):
            unexpected = command.words_of(sys.argv)[1:]
            if unexpected:
                raise ValueError(f"unexpected argument {unexpected[0]!r} after `pages`")
            require_matplotlib()
            rewrite(Path(REPORT.value))
        sys.exit(0)
    if not help.is_asked(sys.argv):
        NAME = experiment_name(sys.argv)
        if NAME is None:
            print(listed())
            sys.exit(0)
        if not command.config_given() and NAME != EVERY:
            sys.argv.insert(3, f"--config={EXPERIMENTS[NAME].config}")  # before its overrides
    command.run_command(main, words=2)
