"""Programs that one process compiles and the next process loads."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ragen_jax.storage.compilation_cache import delete_oldest
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.storage.ownership import exposure

ROOT = Path(__file__).parents[2]
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from ragen_jax.storage.compilation_cache import enable_compilation_cache

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rsplit("/")[-1]))
enable_compilation_cache()
x = np.array([[1.0, 2.0], [3.0, 4.5]], np.float32)
print(jax.jit(lambda x: jnp.sin(x @ x.T).sum())(x))
print(events.count("cache_hits"), events.count("cache_misses"))
"""


def started(home, *words, **variables):
    """Start a process as a user whose cache directory is `home`, and return its result."""
    ours = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN", "XDG_CACHE_HOME")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, *words],
        env=env | {"XDG_CACHE_HOME": str(home)} | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_has_compiled_even_if_damaged(tmp_path):
    first = started(tmp_path, "-c", PROGRAM)
    value, counts = first.stdout.splitlines()
    assert counts == "0 1" and not first.stderr
    folder = tmp_path / "ragen_jax" / "compiled"
    (entry,) = folder.glob("*-cache")
    # only the owner has access, because the files in it are executed
    assert folder.stat().st_mode & 0o077 == 0
    second = started(tmp_path, "-c", PROGRAM)
    assert second.stdout.splitlines() == [value, "1 0"] and not second.stderr

    entry.write_bytes(entry.read_bytes()[:100])
    third = started(tmp_path, "-c", PROGRAM)
    assert third.returncode == 0 and third.stdout.splitlines()[0] == value
    assert "Error reading persistent compilation cache entry for 'jit__lambda'" in third.stderr


@pytest.mark.slow
def test_a_cache_that_was_copied_is_read(tmp_path):
    first = started(tmp_path / "here", "-c", PROGRAM)
    assert first.stdout.splitlines()[1] == "0 1"
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert started(tmp_path / "there", "-c", PROGRAM).stdout.splitlines()[1] == "1 0"


@pytest.mark.slow
def test_a_folder_of_the_users_own_is_used_and_an_unusable_one_stops_nothing(tmp_path):
    own = tmp_path / "own"
    settings = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    found = started(tmp_path, "-c", PROGRAM, JAX_COMPILATION_CACHE_DIR=str(own), **settings)
    assert found.stdout.splitlines()[1] == "0 1"
    assert any(own.iterdir()) and not (tmp_path / "ragen_jax").exists()

    (tmp_path / "ragen_jax").write_text("a file where the folder should be")
    found = started(tmp_path, "-c", PROGRAM)
    warning, _, counts = found.stdout.splitlines()
    assert (
        warning.startswith("warning: compiled programs are not cached: ") and "ragen_jax" in warning
    )
    assert counts == "0 0" and found.returncode == 0


def test_programs_that_others_could_have_put_there_are_not_loaded(tmp_path):
    """Folders that other users can write to or own, and folders inside them."""
    first = started(tmp_path, "-c", PROGRAM)
    assert first.stdout.splitlines()[1] == "0 1"
    folder = tmp_path / "ragen_jax" / "compiled"
    folder.chmod(0o777)
    found = started(tmp_path, "-c", PROGRAM)
    warning, _, counts = found.stdout.splitlines()
    assert counts == "0 0" and found.returncode == 0 and not found.stderr
    assert warning.startswith(
        f"warning: compiled programs in {folder} are neither loaded nor cached: "
    )
    assert "other users can write" in warning and "mode 0777" in warning

    own = tmp_path / "own"  # a folder that the user names
    own.mkdir(mode=0o700)
    own.chmod(0o777)
    found = started(tmp_path, "-c", PROGRAM, JAX_COMPILATION_CACHE_DIR=str(own))
    assert found.stdout.splitlines()[2] == "0 0" and not [*own.iterdir()]
    assert f"compiled programs in {own} are neither loaded nor cached" in found.stdout


def test_who_could_put_files_at_a_path(tmp_path):
    folder = tmp_path / "cache" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    assert exposure(folder) is None
    folder.parent.chmod(0o777)  # others may put another folder in its place
    assert f"other users can write {folder.parent} (mode 0777)" in exposure(folder)
    folder.parent.chmod(0o1777)  # as /tmp: others may not rename it
    assert exposure(folder) is None
    folder.chmod(0o1777)
    assert f"other users can write {folder} (mode 1777)" in exposure(folder)
    folder.chmod(0o755)

    link = tmp_path / "link"  # as when ~/.cache is on another disk
    link.symlink_to("cache")
    assert exposure(link / "compiled") is None
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    (open_folder / "hop").symlink_to(tmp_path / "cache")
    link.unlink()
    link.symlink_to(open_folder / "hop")  # others may change where this link leads
    assert f"other users can write {open_folder}" in exposure(link / "compiled")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        exposure(tmp_path / "loop")
    with pytest.raises(FileNotFoundError):
        exposure(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
def test_a_folder_of_another_user_or_group_is_not_ones_own(tmp_path):
    folder = tmp_path / "cache" / "compiled"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        os.chown(path, 12345, -1)
        assert f"{path} belongs to user 12345, not to you (0)" in exposure(folder)
        os.chown(path, 0, -1)
    folder.chmod(0o770)
    assert exposure(folder) is None  # its group has only this user
    os.chown(folder, -1, 12345)
    assert "other users can write" in exposure(folder)


def test_what_was_used_longest_ago_goes_first(tmp_path):
    for name, used in (("old", 1000), ("new", 3000), ("middle", 2000)):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (used, 500))  # read at `used`, written before that
    delete_oldest(tmp_path, 300)
    assert len(list(tmp_path.iterdir())) == 3
    delete_oldest(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "new"]
    delete_oldest(tmp_path, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_of_loaded_programs_gives_the_same_numbers(agent, tmp_path):
    words = ["--config.steps=2", "--config.eval.every=2", "--config.eval.episodes=8"]
    words += ["--config.rollout.groups=4", "--config.rollout.group_size=4"]
    words += ["--config.optimizer.minibatches=2", "--config.optimizer.micro_batch=8"]
    words += ["--config.diagnose.flow_every=1", "--config.checkpoint.export=False"]
    words += [f"--config.model.path={agent.directory}", "--config.env.max_turns=3"]
    runs = []
    for name in ("compiled", "loaded"):
        workdir = tmp_path / name
        found = started(
            tmp_path / "home",
            *("-m", "ragen_jax.train", f"--workdir={workdir}", *words),
            JAX_DISABLE_MOST_OPTIMIZATIONS="0",
        )
        assert found.returncode == 0, found.stderr
        assert "persistent compilation cache" not in found.stderr
        rows = read_metrics(workdir / "metrics.jsonl")
        timed = ("time/", "throughput/")
        runs.append([{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows])
        kept = sum(1 for _ in (tmp_path / "home" / "ragen_jax" / "compiled").iterdir())
        assert kept > 10
    assert runs[0] == runs[1] and len(runs[0]) == 3
