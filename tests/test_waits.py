"""What a user sees while a command works: how far it is, in a terminal and in a pipe."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
from cli_commands import ROOT, call

from ragen_jax.storage import heartbeat

# Phases without a count: they take seconds at most, or end before anything can be counted.
SHORT = {
    "starting",
    "building the environments",
    "building the learner",
    "batch",
    "diagnose",
    "inform",
    "select",
    "credit",
    "saving step 1",
    "writing the policy",
    "writing the report",
}
SIGN = re.compile(r"(?P<phase>[a-z][^:\n]*?)(: (?P<done>\d+) of (?P<all>\d+)\b.*|: \d+ s so far)?")
EAGER = (  # a heartbeat at every opportunity
    "import runpy, sys; from ragen_jax.storage import heartbeat; "
    "heartbeat.EVERY = heartbeat.TICK = 0.02; sys.argv[:1] = []; "
    "runpy.run_module(sys.argv[0], run_name='__main__')"
)


def words_of(agent, tmp_path):
    return (
        *("ragen_jax.train", f"--config.model.path={agent.directory}", "--config.steps=1"),
        *(f"--workdir={tmp_path / 'run'}", "--config.eval.episodes=256"),
        "--config.log.trackers=()",
    )


@pytest.mark.long
def test_the_waits_of_a_run_show_how_far_they_are(agent, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that programs are compiled
    for name in ("EVERY", "TICK"):
        monkeypatch.setattr(heartbeat, name, 0.01)
    code, _, err = call(*words_of(agent, tmp_path))
    assert code == 0, err
    signs = [match for line in err.splitlines() if (match := SIGN.fullmatch(line))]
    counted = {match["phase"] for match in signs if match["done"]}
    assert {"compiling", "evaluating", "rollout", "update"} <= counted, counted
    uncounted = {match["phase"] for match in signs} - counted
    # "generating": until the environment is asked, or another process has done it
    unnamed = {x for x in uncounted if not x.startswith(("loading ", "generating heldout_"))}
    assert unnamed <= SHORT, unnamed - SHORT
    for match in signs:
        assert not match["done"] or int(match["done"]) <= int(match["all"]), match[0]


@pytest.mark.long
@pytest.mark.parametrize("terminal", [False, True])
def test_a_pipe_gets_lines_and_a_terminal_a_bar(agent, tmp_path, terminal):
    command = [sys.executable, "-c", EAGER, *words_of(agent, tmp_path)]
    environment = os.environ | {"XDG_CACHE_HOME": str(agent.home), "TERM": "xterm"}
    if not terminal:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=-1, stderr=subprocess.STDOUT, check=True
        )
        assert b"\r" not in ended.stdout
        assert re.search(rb"^evaluating: \d+ of 256 episodes", ended.stdout, re.M)
        return
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:  # the process has closed the terminal
            break
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    assert re.search(rb"\r.*\| 0/1 ", shown)  # the bar of steps
    assert re.search(rb"evaluating: \d+ of 256 episodes", shown)
