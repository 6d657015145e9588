"""links.py: files that a run writes into its folder never end up elsewhere."""

import json
import os
import subprocess
import sys

import pytest
from cli_commands import ROOT, call

from ragen_jax.config.check import check
from ragen_jax.configs import sokoban
from ragen_jax.storage.atomic_io import atomic_write
from ragen_jax.storage.links import refuse_links
from ragen_jax.storage.metrics_reader import read_metrics, repair

FILES = (
    *("report.html", "metrics.jsonl", "events.jsonl", "config.json", ".lock", ".signature"),
    *("metrics.damaged.jsonl", "eval/step_000001.json", "evaluation_step_000001.json"),
)
FOLDERS = ("checkpoints", "eval", "rollouts", "model", ".model", "policy", "trackers", "damaged")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here):
    """A run's folder with one row."""
    atomic_write(here / "run/config.json", json.dumps(sokoban.get_config().to_dict()))
    atomic_write(here / "run/metrics.jsonl", json.dumps({"step": 1, "rollout/return": 0.5}) + "\n")
    return here / "run"


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", FILES + FOLDERS)
def test_a_link_out_of_the_folder_is_refused_before_anything_is_written(here, name):
    outside = here / "outside"
    atomic_write(outside / "step_000001.json", "theirs")
    atomic_write(outside / "1/state", "theirs")
    target = outside if name in FOLDERS else outside / "step_000001.json"
    (here / "run" / name).parent.mkdir(parents=True)
    (here / "run" / name).symlink_to(target)
    before = contents(outside)
    for command in ("train", "evaluate", "export"):
        words = ["--config=sokoban"] if command == "train" else []
        code, out, err = call(f"ragen_jax.{command}", "--workdir=run", *words)
        assert code == 2 and err.count("error: ") == 1, (command, out, err)
        known = name == "config.json" and command != "train"  # there is no config to read
        assert known or f"run/{name} is a link to {target}" in err, err
    assert contents(outside) == before


def test_the_page_of_a_run_is_not_written_through_a_link(run, here):
    page = here / "victim.html"
    (run / "report.html").symlink_to(page)  # the target does not exist yet
    code, _, err = call("ragen_jax.report", "run")
    assert code == 2 and "run/report.html is a link to" in err
    assert not page.exists()
    # the user asked for this path
    assert call("ragen_jax.report", "run", "--out=run/report.html")[0] == 0
    assert page.exists() and (run / "report.html").is_symlink()


def test_links_of_the_user_and_inside_the_folder_are_followed(run, here):
    (here / "link").symlink_to("run")  # as when runs/ is on another disk
    (run / "wandb/run-1").mkdir(parents=True)
    (run / "wandb/latest-run").symlink_to("run-1")
    (run / "wandb/debug.log").symlink_to(run / "wandb/run-1/debug.log")
    refuse_links(here / "link")
    code, _, err = call("ragen_jax.report", "link")
    assert code == 0 and (run / "report.html").is_file(), err


def test_what_is_no_file_and_no_folder_is_refused(here):
    (here / "run").mkdir()
    os.mkfifo(here / "run/.lock")  # opening it would wait for a reader
    code, _, err = call("ragen_jax.train", "--config=sokoban", "--workdir=run")
    assert code == 2 and "run/.lock is neither a file nor a folder" in err
    (here / "run/.lock").unlink()
    (here / "run/.lock").symlink_to(".lock")
    code, _, err = call("ragen_jax.train", "--config=sokoban", "--workdir=run")
    assert code == 2 and err.count("error: ") == 1 and "run/.lock" in err


def test_a_hard_link_is_not_written_through(here, run):
    victim = here / "victim"
    victim.write_text("theirs")
    os.link(victim, run / ".lock")
    code, _, err = call("ragen_jax.train", "--workdir=run")
    assert code == 2 and "run/.lock is a hard link to another file; remove it" in err
    with (run / "metrics.jsonl").open("a") as file:
        file.write('no row\n{"step": 2}\n')
    os.link(victim, run / "metrics.damaged.jsonl")
    repair(run / "metrics.jsonl")
    assert victim.read_text() == "theirs"
    assert (run / "metrics.damaged.jsonl").read_text() == "theirsno row\n"
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("name", ["a/b", "/tmp"])
def test_no_environment_of_a_mixture_names_a_folder_elsewhere(name):
    config = sokoban.get_config()
    with config.unlocked():
        config.also = {name: {"groups": 2, "env": config.env.to_dict()}}
    with pytest.raises(ValueError, match="config.also has .*, which cannot name a folder"):
        check(config)


@pytest.mark.parametrize("out", ["/dev/stdout", "/dev/null"])
def test_devices_as_an_output_path(out):
    """The same holds if standard output is a pipe; then /dev/stdout is a link without a target."""
    program = (
        "import sys; from ragen_jax.storage.atomic_io import atomic_write; "
        "atomic_write(sys.argv[1], 'hi')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, out], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "hi" if out == "/dev/stdout" else ""), done.stderr
