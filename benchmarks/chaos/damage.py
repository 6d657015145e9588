"""Faults in files: damaged, cut, removed or foreign files between a kill and the resume."""

import shutil
from collections.abc import Callable

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.chaos.trial import EVERY, STEPS, Failure, Trial
from ragen_jax.storage.metrics_reader import read_metrics

# Process id in the names of left-over files: Linux's upper bound, which no process gets. A smaller
# number may be the id of a running process, whose files are kept.
DEAD = 1 << 22


def damage_checkpoint(how: str) -> Callable[[Trial], None]:
    def strike(trial: Trial) -> None:
        trial.kill_midway()
        newest = trial.newest()
        path = trial.one_of(newest / "default")
        if how == "flipped":
            trial.flip(path)
        elif how == "cut":
            trial.rewrite(path, path.read_bytes()[: int(trial.rng.integers(path.stat().st_size))])
        else:
            path.unlink()
        trial.resume(says=f"the checkpoint of step {newest.name} is damaged")

    return strike


def remove_newest_checkpoint(trial: Trial) -> None:
    trial.kill_midway()
    shutil.rmtree(trial.newest())
    trial.resume()


def damage_all_checkpoints(trial: Trial) -> None:
    trial.kill_midway()
    mends = [trial.flip(trial.one_of(path / "default")) for path in trial.saved()]
    trial.expect_refusal(lambda: [mend() for mend in mends], "every checkpoint in")


def flip_weights(trial: Trial) -> None:
    trial.kill_midway()
    trial.expect_refusal(
        trial.flip(trial.run / "model" / "model.safetensors"), "has changed since it was written"
    )


def write_nonfinite_weights(trial: Trial) -> None:
    trial.kill_midway()
    path, sums = trial.run / "model" / "model.safetensors", trial.run / "model" / "checksums.json"
    kept, checksums = path.read_bytes(), sums.read_bytes()
    arrays = load_file(path)
    name = sorted(arrays)[trial.rng.integers(len(arrays))]
    arrays[name] = arrays[name].copy()
    arrays[name].flat[trial.rng.integers(arrays[name].size)] = trial.rng.choice([np.nan, np.inf])
    save_file(arrays, path, metadata={"format": "pt"})
    sums.unlink()  # a model from another source has no checksums

    def mend() -> None:
        path.write_bytes(kept)
        sums.write_bytes(checksums)

    trial.expect_refusal(mend, name)


def tear_row(trial: Trial) -> None:
    trial.kill_midway()
    tails = [b'{"step": 8, "rollout/succ', b"\0" * 40, b"\xff\xfe", b"{}\n", b"null\n[]\n"]
    with (trial.run / "metrics.jsonl").open("ab") as file:
        file.write(tails[trial.rng.integers(len(tails))])
    trial.resume()


def insert_foreign_row(trial: Trial) -> None:
    trial.kill_midway()
    lines = trial.lines()
    at = int(trial.rng.integers(1, EVERY + 1))
    lines[at] = [b"\0\0\n", b"\xff" + lines[at], lines[at][:9] + b"\n"][trial.rng.integers(3)]
    mend = trial.rewrite(trial.run / "metrics.jsonl", b"".join(lines))
    trial.expect_refusal(mend, f"line {at + 1} does not continue")


def remove_rows(trial: Trial) -> None:
    trial.kill_midway()
    lines = trial.lines()
    del lines[int(trial.rng.integers(1, EVERY + 1))]
    trial.expect_refusal(
        trial.rewrite(trial.run / "metrics.jsonl", b"".join(lines)), "lacks the rows of 1"
    )


def repair_rows(trial: Trial) -> None:
    """Remove a row; with --repair, the run continues without it."""
    trial.kill_midway()
    lines = trial.lines()
    lost = int(trial.rng.integers(1, EVERY + 1))
    lines[lost] = b"\xff" + lines[lost]
    trial.rewrite(trial.run / "metrics.jsonl", b"".join(lines))
    trial.expect_end(trial.start("--repair"), 0)
    found = [row["step"] for row in read_metrics(trial.run / "metrics.jsonl")]
    if found != [step for step in range(STEPS + 1) if step != lost]:
        raise Failure(f"rows of steps {found} after step {lost} was lost")


def remove_metrics(trial: Trial) -> None:
    trial.kill_midway()
    path = trial.run / "metrics.jsonl"
    content = path.read_bytes()
    path.unlink()
    trial.expect_refusal(lambda: path.write_bytes(content), "lacks the rows of")


def damage_config(trial: Trial) -> None:
    trial.kill_midway()
    path = trial.run / "config.json"
    content = path.read_bytes()
    cut = content[: int(trial.rng.integers(len(content) - 2))]
    trial.expect_refusal(trial.rewrite(path, cut), "config.json is damaged")


def remove_config(trial: Trial) -> None:
    trial.kill_midway()
    path = trial.run / "config.json"
    content = path.read_bytes()
    path.unlink()
    trial.expect_refusal(lambda: path.write_bytes(content), "has checkpoints but no config.json")


def change_settings(trial: Trial) -> None:
    trial.kill_midway()
    before = trial.contents()
    trial.expect_end(trial.start("--config.rollout.groups=5"), 2, says="config.rollout.groups=4")
    if trial.contents() != before:
        raise Failure("a refused start changed files")
    trial.resume()


def leave_files(trial: Trial) -> None:
    trial.kill_midway()
    (trial.run / "eval" / f".step_000004.json.writing-{DEAD}").write_text("[[1,")
    (trial.run / f".config.json.writing-{DEAD}").write_text("{")
    shutil.copytree(trial.newest(), trial.run / "checkpoints" / "99.orbax-checkpoint-tmp")
    trial.resume()
    if any(trial.run.rglob(".*.writing-*")) or any(trial.run.rglob("*orbax-checkpoint-tmp")):
        raise Failure("the left-over file of a killed writer was not removed")


def damage_events(trial: Trial) -> None:
    trial.kill_midway()
    (trial.run / "events.jsonl").write_bytes(b'{"step": 1, "rule"\n\xff\n')
    trial.resume()


def damage_stored_files(trial: Trial) -> None:
    """Damage a file that the report reads: the run ends as usual, and the page names the file."""
    trial.kill_midway()
    folder = trial.run / ("rollouts", "diagnostics")[trial.rng.integers(2)]
    path = trial.one_of(folder, "step_*")
    trial.rewrite(path, path.read_bytes()[: path.stat().st_size // 2])
    rewritten = int(path.stem[5:]) > int(trial.newest().name)  # by the repeated steps
    trial.resume(says="" if rewritten else f"{path} is damaged")


def damage_dataset(trial: Trial) -> None:
    trial.kill_midway()
    folder = next(p for p in (trial.cache / "datasets").glob("heldout_*") if p.is_dir())
    trial.flip(trial.one_of(folder, "*examples*"))
    trial.resume(says="generating it again")


def damage_program(trial: Trial) -> None:
    trial.kill_midway()
    for _ in range(5):
        trial.flip(trial.one_of(trial.cache / "compiled", "*-cache"))
    trial.resume()


def remove_cache(trial: Trial) -> None:
    trial.kill_midway()
    shutil.rmtree(trial.folder / "cache")
    trial.resume()


def leave_files_in_cache(trial: Trial) -> None:
    """Leave files of killed writers in the cache: they are not read and stop no other writer."""
    trial.kill_midway()
    for folder in [trial.cache, *(path for path in trial.cache.iterdir() if path.is_dir())]:
        (folder / f".model.safetensors.writing-{DEAD}").write_bytes(b"half")
    for folder in list((trial.cache / "datasets").iterdir()):
        if folder.is_dir():
            shutil.copytree(folder, folder.with_name(f"{folder.name}.incomplete_ABC123"))
            (folder / f".checksums.json.writing-{DEAD}").write_text("{")
    for folder in list((trial.cache / "models").iterdir()):
        if folder.is_dir():
            (folder.with_name(f".{folder.name}.saving-{DEAD}")).mkdir()
            (folder / f".config.json.writing-{DEAD}").write_text("{")
    trial.resume()


DAMAGE: dict[str, Callable[[Trial], None]] = {
    "a checkpoint's bit flipped": damage_checkpoint("flipped"),
    "a checkpoint's file cut": damage_checkpoint("cut"),
    "a checkpoint's file gone": damage_checkpoint("gone"),
    "newest checkpoint removed": remove_newest_checkpoint,
    "all checkpoints damaged": damage_all_checkpoints,
    "a bit of the weights flipped": flip_weights,
    "NaN or infinity in the weights": write_nonfinite_weights,
    "a torn or foreign end of the rows": tear_row,
    "a foreign row in the middle": insert_foreign_row,
    "a row lost": remove_rows,
    "--repair": repair_rows,
    "metrics.jsonl removed": remove_metrics,
    "half a config.json": damage_config,
    "config.json removed": remove_config,
    "other settings": change_settings,
    "left-overs of killed writers in the run": leave_files,
    "left-overs of killed writers in the cache": leave_files_in_cache,
    "events damaged": damage_events,
    "rollouts or scores damaged": damage_stored_files,
    "cached problems: a bit flipped": damage_dataset,
    "kept programs: bits flipped": damage_program,
    "cache removed": remove_cache,
}
