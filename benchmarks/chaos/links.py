"""Faults of trust: links out of the run's folder, and a cache that other users may write."""

import os
import shutil
from collections.abc import Callable

from benchmarks.chaos.trial import Failure, Trial


def replace_by_link(name: str) -> Callable[[Trial], None]:
    """Return a fault: a file of the run is a link to another file.

    The run is refused, with the name of the link, and the other file stays unchanged.
    """

    def strike(trial: Trial) -> None:
        trial.kill_midway()
        path, elsewhere = trial.run / name, trial.folder / f"elsewhere_{name}"
        dangling = bool(trial.rng.integers(2)) and name != "metrics.jsonl"
        content = b"what somebody else has written\n"
        if path.exists() and name == "metrics.jsonl":
            content = path.read_bytes()
        if not dangling:
            elsewhere.write_bytes(content)
        path.unlink(missing_ok=True)
        path.symlink_to(elsewhere)
        trial.expect_end(trial.start(), 2, says=name)
        if dangling and elsewhere.exists():
            raise Failure(f"the link {name} was followed: a file was created elsewhere")
        if not dangling and (not elsewhere.exists() or elsewhere.read_bytes() != content):
            raise Failure(f"the link {name} was followed: a file elsewhere was changed")
        path.unlink()
        if name == "metrics.jsonl":
            path.write_bytes(content)
        trial.resume()

    return strike


def share_program_cache(trial: Trial) -> None:
    """Use a folder of compiled programs that others may write: nothing is loaded or stored."""
    folder = trial.cache / "compiled"
    how = trial.rng.integers(3)
    if how == 0:
        folder.chmod(0o777)
    elif how == 1:
        os.chown(folder, 65534, 65534)
    else:
        trial.cache.chmod(0o777)
    before = sorted(path.name for path in folder.iterdir())
    process = trial.start()
    trial.expect_end(process, 0, 2, says=str(folder))
    if sorted(path.name for path in folder.iterdir()) != before:
        raise Failure("programs were stored in a folder that others may write")
    if process.returncode == 0:
        trial.compare()
    else:
        shutil.rmtree(folder)
        trial.cache.chmod(0o700)
        trial.resume()


def remove_tokenizer(trial: Trial) -> None:
    """Remove tokenizer.json from the model directory."""
    trial.kill_midway()
    path = trial.run / "model" / "tokenizer.json"
    content = path.read_bytes()
    path.unlink()
    trial.expect_refusal(lambda: path.write_bytes(content), "tokenizer.json")


LINKS: dict[str, Callable[[Trial], None]] = {
    "report.html is a link": replace_by_link("report.html"),
    ".lock is a link": replace_by_link(".lock"),
    "metrics.jsonl is a link": replace_by_link("metrics.jsonl"),
    "events.jsonl is a link": replace_by_link("events.jsonl"),
    "a cache of programs that others may write": share_program_cache,
    "a model without tokenizer.json": remove_tokenizer,
}
