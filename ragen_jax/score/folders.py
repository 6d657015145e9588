"""Find the files of rollouts: files that are named, and those in the folders that trainers write.

A folder stands for the files of ENDINGS directly in it. Without such files, it stands for those of
the first of LAYOUTS below it.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ragen_jax.score.harbor import AGENT, TRAJECTORY
from ragen_jax.score.values import MOST

ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")  # endings of the files that are read in a folder
# The step's number in the name of a file (step_000010.jsonl, 10.jsonl, completions_00010.parquet,
# train_data_step10.jsonl) or of a folder above it (step_10/train/all/traces.jsonl,
# global_step_10_evals/NAME.jsonl, train_step_10_epoch_0/episode_NAME.json).
_FILE_STEP = re.compile(r"(?:step_|completions_|train_data_step|^)(\d+)$")
_FOLDER_STEP = re.compile(r"^(?:global_|train_|val_)?step_(\d+)(?:_evals|_epoch_\d+)?$")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a trainer puts its rollouts below a folder, as patterns of paths below it."""

    rollouts: re.Pattern[str]
    others: re.Pattern[str]  # files that are named as left out: evaluations, repetitions, summaries
    file_an_episode: bool = False  # all files of the folder then count as one in their order


LAYOUTS = (  # the first of which a folder has files
    # prime-rl: `all` includes `effective`.
    Layout(
        re.compile(r"(^|/)train/all/traces\.jsonl(\.gz)?$"),
        re.compile(r"(^|/)traces\.jsonl(\.gz)?$"),
    ),
    # Harbor
    Layout(
        re.compile(rf"^(.*/)?{AGENT}/{re.escape(TRAJECTORY)}$|^{re.escape(TRAJECTORY)}$"),
        re.compile(r"$^"),
        file_an_episode=True,
    ),
    # rLLM
    Layout(
        re.compile(r"^(?!(.*/)?val_step_)(.*/)?episode_[^/]*\.json(\.gz)?$"),
        re.compile(r"(^|/)(episode_[^/]*|batch_summary)\.json(\.gz)?$"),
        file_an_episode=True,
    ),
    # prime-rl's token exports
    Layout(re.compile(r"(^|/)step_\d+/rank_\d+\.jsonl(\.gz)?$"), re.compile(r"$^")),
    # SkyRL
    Layout(
        re.compile(
            r"(^|/)(global_step_\d+_evals|eval_only)/(?!aggregated_results\.)[^/]+\.jsonl(\.gz)?$"
        ),
        re.compile(r"(^|/)aggregated_results\.jsonl(\.gz)?$"),
    ),
)
# Files next to rollouts that hold none: their names, and the name that the rollouts then have.
_NEXT_TO_ROLLOUTS = (
    (re.compile(r"^(.+)_failures(\.jsonl(\.gz)?)$"), r"\1\2"),  # NeMo-Gym's failed attempts
    (re.compile(r"^(.+)_materialized_inputs(\.jsonl(\.gz)?)$"), r"\1\2"),  # NeMo-Gym's requests
    (re.compile(r"^val_data_step(\d+\.jsonl(\.gz)?)$"), r"train_data_step\1"),  # NeMo-RL
    (re.compile(r"^aggregated_results\.jsonl$"), ""),  # SkyRL's metrics
)


@dataclasses.dataclass(frozen=True)
class Source:
    """Files that have one place in the order of files."""

    paths: tuple[Path, ...]


def find_sources(names: Sequence[str]) -> tuple[list[Source], list[str]]:
    """Return (sources to read, a line for each folder or file that is not read completely).

    Args:
      names: files, or folders.

    Raises:
      ValueError: a file is missing or is a pickle, or a folder has no rollouts.
    """
    sources: list[Source] = []
    lines = []
    before: set[Path] = set()
    for name in names:
        path = Path(name)
        if path.is_dir():
            new, left = _folder_sources(path)
            if not new:
                raise ValueError(
                    f"--rollouts={name} is a folder without {' or '.join(ENDINGS)}, and without "
                    "the folders that Harbor, rLLM, prime-rl or SkyRL write"
                )
            lines += left
        elif not path.exists():
            raise ValueError(f"--rollouts={name} does not exist")
        elif path.suffix in (".pkl", ".pt"):
            script = {
                ".pkl": "RAGEN's scripts/convert_to_jsonl.py",
                ".pt": "ragen_jax's examples/slime_to_jsonl.py, if it is slime's",
            }[path.suffix]
            raise ValueError(
                f"--rollouts={name} is a pickle; convert it to JSON lines with {script}"
            )
        else:
            new = [Source((path,))]
        for source in new:
            twice = [p for p in source.paths if p.resolve() in before]
            lines += [f"{p}, which is given twice and read once" for p in twice]
            kept = tuple(p for p in source.paths if p not in twice)
            before |= {p.resolve() for p in kept}
            sources += [Source(kept)] if kept else []
    return sources, lines


def step_of(path: Path) -> int | None:
    """Return the step in a file's name or in the name of a folder above it; None without one."""
    found = _FILE_STEP.search(path.name.removesuffix(".gz").rpartition(".")[0])
    for folder in path.parents:
        found = found or _FOLDER_STEP.search(folder.name)
    return int(found[1]) if found and int(found[1]) <= MOST else None


def _folder_sources(folder: Path) -> tuple[list[Source], list[str]]:
    every = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    inside = [p for p in every if p.name.endswith(ENDINGS) and p.is_file()]
    names = {p.name for p in inside}
    inside = [p for p in inside if not _is_next_to_rollouts(p.name, names)]
    left = [p.name for p in every if p not in inside]
    if inside:
        return [Source((path,)) for path in inside], _left_lines(folder, left)
    below = _files_below(folder)
    for layout in LAYOUTS:
        found = [name for name in below if layout.rollouts.search(name)]
        if not found:
            continue
        paths = sorted((folder / name for name in found), key=lambda p: (step_of(p) or 0, p))
        others = [n for n in below if n not in set(found) and layout.others.search(n)]
        lines = _left_lines(folder, others + _other_layouts(layout, below))
        lines += _trials_without_trajectory(folder, below) if layout.file_an_episode else []
        if layout.file_an_episode:
            return [Source(tuple(paths))], lines
        return [Source((path,)) for path in paths], lines
    return [], []


def _other_layouts(layout: Layout, below: Sequence[str]) -> list[str]:
    """Return the files of further layouts, which may hold the same rollouts again."""
    others = [each for each in LAYOUTS if each is not layout]
    return [name for name in below if any(each.rollouts.search(name) for each in others)]


def _is_next_to_rollouts(name: str, names: set[str]) -> bool:
    for pattern, rollouts in _NEXT_TO_ROLLOUTS:
        found = pattern.match(name)
        if found and (not rollouts or found.expand(rollouts) in names):
            return True
    return False


def _files_below(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it, in order."""
    found = []
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        base = Path(where).relative_to(folder)
        found += [(base / name).as_posix() for name in sorted(files) if not name.startswith(".")]
    return found


def _trials_without_trajectory(folder: Path, below: Sequence[str]) -> list[str]:
    """Return a line for the trials of Harbor whose agents wrote no trajectory."""
    tried = {name.rpartition("/result.json")[0] for name in below if name.endswith("/result.json")}
    tried &= {name.split("/verifier/")[0] for name in below if "/verifier/" in name} | {
        name.split(f"/{AGENT}/")[0] for name in below if f"/{AGENT}/" in name
    }
    ended = f"/{AGENT}/{TRAJECTORY}"
    without = sorted(tried - {n.removesuffix(ended) for n in below if n.endswith(ended)})
    if not without:
        return []
    return [f"{_listed(without)} in the folder {folder}: trials without {AGENT}/{TRAJECTORY}"]


def _left_lines(folder: Path, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = ", ..." if len(names) > 3 else ""
    return [f"{len(names)} in the folder {folder} ({', '.join(names[:3])}{more})"]


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
