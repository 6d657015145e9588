"""metrics_reader.py: damaged lines of metrics.jsonl are named by number and never read as rows."""

import json

import numpy as np
import pytest
from cli_commands import call

from ragen_jax import train
from ragen_jax.storage.metrics_reader import SET_ASIDE, lost_steps, read_metrics, repair

fast = pytest.mark.fast


def line(step, value=0.5):
    return json.dumps({"step": step, "rollout/success": value})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{line(step)}\n" for step in range(10)))
    return path


def steps(path):
    return [row["step"] for row in read_metrics(path)]


def spoil(path, number, text):
    """Replace a line by bytes."""
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = text
    path.write_bytes(b"\n".join(lines))


BAD = [
    b'{"step": 3, "roll',
    b"\x00" * 30,
    b'{"step": 3, "rollout/success": 0.\xff}',
    b'{"step": 3, "rollout/success": NaN}',
    b'{"step": 3, "rollout/success": "0.5"}',
    b'{"step": 3, "rollout/success": true}',
    b'{"step": 3.5}',
    b'{"step": -3}',
    b'{"rollout/success": 0.5}',
    b"[3]",
    b"[" * 100_000,
    b'{"step": 99}',
    b'{"step": 2}',
]


@fast
@pytest.mark.parametrize("text", BAD, ids=lambda text: repr(text[:24]))
def test_a_line_in_the_middle_is_refused_by_its_number_and_repaired(path, text):
    spoil(path, 4, text)
    with pytest.raises(ValueError) as error:
        read_metrics(path)
    # either line of the pair may be named
    assert "line 3 does" in str(error.value) or "line 4 does" in str(error.value)
    assert "--repair" in str(error.value) and len(str(error.value)) < 600
    (message,) = repair(path)
    assert "moved damaged line" in message
    assert steps(path) in ([0, 1, 2, 4, 5, 6, 7, 8, 9], [0, 1, 3, 4, 5, 6, 7, 8, 9])
    kept = (path.with_name(SET_ASIDE)).read_bytes()
    assert text.rstrip() in kept or b'"step": 2' in kept
    assert repair(path) == []


@fast
@pytest.mark.parametrize("text", BAD[:-2], ids=lambda text: repr(text[:24]))
def test_what_is_no_row_at_the_end_is_left_out(path, text):
    with path.open("ab") as file:
        file.write(text + b"\n" + text)
    assert steps(path) == list(range(10))
    assert repair(path) == []


@fast
def test_one_wrong_step_does_not_make_those_behind_it_wrong(path):
    spoil(path, 3, line(70).encode())
    with pytest.raises(ValueError, match="line 3 does not continue"):
        read_metrics(path)
    repair(path)
    assert steps(path) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert lost_steps(read_metrics(path), 9) == [2]


@fast
def test_lines_that_were_set_aside_before_stay(path):
    spoil(path, 2, b"one")
    repair(path)
    spoil(path, 5, b"two")
    repair(path)
    assert path.with_name(SET_ASIDE).read_text() == "one\ntwo\n"


@fast
def test_lost_steps():
    rows = [{"step": step} for step in (0, 1, 4, 5)]
    assert lost_steps(rows, 5) == [2, 3]
    assert lost_steps(rows, 8) == [2, 3, 6, 7, 8]
    assert lost_steps([], 2) == [1, 2]
    assert lost_steps([], 0) == []
    assert lost_steps(rows[1:2], 1) == []  # no evaluation at step 0


@pytest.mark.slow
def test_a_run_goes_on_with_damaged_rows_only_where_it_is_told_to(agent, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(agent.directory)
    config.steps, config.eval.every, config.checkpoint.every = 3, 0, 1
    config.rollout.update(groups=2, group_size=4)
    config.optimizer.update(minibatches=1, micro_batch=8)
    config.diagnose.update(first_turn_samples=4, trajectory_samples=4)
    run = tmp_path / "run"
    assert train.train(config, run) == 0
    path = run / "metrics.jsonl"
    before = read_metrics(path)
    spoil(path, 2, b"\x00\xff")
    words = "ragen_jax.train", f"--workdir={run}"
    for command in (words, ("ragen_jax.report", str(run))):
        code, _, err = call(*command)
        assert code == 2 and err.count("\n") == 1 and "line 2 does not" in err, err
    code, out, err = call(*words, "--repair")
    assert code == 0, err
    assert "moved damaged line(s) 2" in out and "lacks the rows of 1 steps (2)" in out
    assert read_metrics(path) == [before[0], before[2]]
    assert call(*words)[0] == 0  # the next start needs no --repair
    path.write_text(f"{json.dumps(before[0])}\n")
    path.with_name(SET_ASIDE).unlink()
    code, _, err = call(*words)
    assert code == 2 and "lacks the rows of 2 steps (2, 3)" in err, err
    assert np.isfinite(read_metrics(path)[0]["rollout/success"])
