"""Report pages written during a run: training never waits for them or fails because of them."""

import os
import subprocess
import sys
import time

import pytest
from simulated_runs import write_run

from ragen_jax.report.page import write_report
from ragen_jax.run import reports as background
from ragen_jax.run.reports import NICENESS, Reports

pytestmark = pytest.mark.fast


@pytest.fixture
def begun(monkeypatch):
    """Processes started in place of the report: [(words, settings)]; they run `begun.script`."""

    class Begun(list):
        script = "import time; time.sleep(60)"

    found, begin = Begun(), subprocess.Popen

    def seen(words, **settings):
        found.append((words, settings))
        return begin([sys.executable, "-c", found.script], **settings)

    monkeypatch.setattr(background.subprocess, "Popen", seen)
    return found


def ended(reports):
    """Wait for the running process."""
    reports.process.wait(timeout=30)


def test_a_page_is_due_every_so_many_steps_and_never_two_at_a_time(begun, tmp_path):
    reports = Reports(tmp_path, every=10, write_page=write_report)
    start = time.monotonic()
    for step in range(1, 31):
        reports.write_if_due(step)
    assert time.monotonic() - start < 5 and len(begun) == 1  # the first process is still running
    (words, settings), process = begun[0], reports.process
    assert words[1:] == ["-m", "ragen_jax.report", str(tmp_path)]
    assert settings["env"]["JAX_PLATFORMS"] == "cpu"  # the accelerator belongs to the run
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == NICENESS
    process.kill()
    ended(reports)
    begun.script = ""
    reports.write_if_due(40)
    assert len(begun) == 2
    ended(reports)
    Reports(tmp_path, every=0, write_page=write_report).write_if_due(10)
    assert len(begun) == 2


def test_what_goes_wrong_is_said_once(begun, tmp_path, capsys):
    begun.script = "import sys; sys.exit('error: the disk is full')"
    reports = Reports(tmp_path, every=1, write_page=write_report)
    for step in (1, 2, 3):
        reports.write_if_due(step)
        ended(reports)
    reports.write_last()  # the folder holds no run
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"warning: {tmp_path / 'report.html'} was not written: error: the disk is full"


def test_a_process_that_cannot_begin_is_a_warning(monkeypatch, tmp_path, capsys):
    def refuse(*args, **settings):
        raise OSError("out of processes")

    monkeypatch.setattr(background.subprocess, "Popen", refuse)
    Reports(tmp_path, every=1, write_page=write_report).write_if_due(1)
    assert "out of processes" in capsys.readouterr().out


def test_the_last_page_is_written_by_the_run_and_ends_one_at_work(begun, tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=20)
    reports = Reports(folder, every=10, write_page=write_report)
    reports.write_if_due(10)
    process = reports.process
    start = time.monotonic()
    reports.write_last()
    assert time.monotonic() - start < 30  # the process would have taken a minute
    assert process.poll() is not None  # it was killed, which does not count as a failure
    assert capsys.readouterr().out == f"report: {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.medium
def test_a_process_writes_the_page(tmp_path):
    folder = write_run(tmp_path / "run", steps=20)
    reports = Reports(folder, every=10, write_page=write_report)
    reports.write_if_due(10)
    reports.process.wait(timeout=60)
    assert reports.process.returncode == 0, reports.process.stderr.read()
    assert (folder / "report.html").stat().st_size > 100_000
