"""The cost curves: measurements of a run, predictions, and no repeated work."""

import dataclasses
import json

import pytest

from benchmarks import __main__ as command
from benchmarks import curves
from benchmarks.curves import Size

PROMPT, OBSERVATION = 50, 54


def a_row(size, *, cpu=1.0, peak_mib=700.0):
    """Return a point's row: prompts like Sokoban's, with the whole history."""
    prompts = [PROMPT + turn * (size.reply + OBSERVATION) for turn in range(size.turns)]
    seconds = dict(cpu=cpu, step=2 * cpu, rollout=cpu / 2, update=cpu / 2)
    return {
        **dataclasses.asdict(size),
        **seconds,
        "steps": 2,
        "prompts": prompts,
        "peak_mib": peak_mib,
    }


def all_rows():
    """Return rows whose seconds are proportional to the episodes and the turns."""
    return [
        a_row(size, cpu=size.episodes * size.turns / 128, peak_mib=600 + size.episodes)
        for size in curves.points()
    ]


@pytest.fixture
def workdir(tmp_path):
    """write(metrics, turns, limit): write the files of a run that are read; return their folder."""

    def write(metrics, turns, limit):
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        lines = [json.dumps({"turns": turns}, ensure_ascii=False)] * 2
        (tmp_path / "rollouts" / "step_000003.jsonl").write_text("\n".join(lines) + "\n")
        lines = [json.dumps(row) for row in metrics]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (tmp_path / "config.json").write_text(json.dumps({"rollout": {"max_new_tokens": limit}}))
        return tmp_path

    return write


def of_step(step, seconds, compiled=0.0):
    return {
        "step": step,
        "time/compile": compiled,
        **{f"time/{name}": seconds for name in ("cpu", "step", "rollout", "update")},
    }


# Sampled text may contain any character that some programs treat as a line end.
TURNS = [
    {"prompt_ids": [1] * 50, "sampled_ids": [2, 3], "text": "a\u2028b\x85c"},
    {"prompt_ids": [1] * 106, "sampled_ids": [4, 5], "text": ""},
]


def test_figures_are_of_the_steps_behind_compilation(workdir):
    metrics = [of_step(1, 9.0, 8.0), of_step(2, 5.0, 1.0), of_step(3, 1.0), of_step(4, 3.0)]
    found = curves.figures(workdir(metrics, TURNS, 2))
    assert found["cpu"] == found["step"] == 2.0 and found["steps"] == 2
    assert found["prompts"] == [50, 106]


def test_a_run_that_is_no_measurement_is_refused(workdir):
    with pytest.raises(RuntimeError, match="every step of .* compiled something"):
        curves.figures(workdir([of_step(1, 1.0), of_step(2, 1.0, 0.5)], TURNS, 2))
    with pytest.raises(RuntimeError, match=r"replies of \[2\] tokens, not all of 3"):
        curves.figures(workdir([of_step(1, 1.0), of_step(2, 1.0)], TURNS, 3))


def test_operations_grow_as_counting_says():
    base = curves.flops(a_row(Size()))
    assert curves.flops(a_row(Size(episodes=1024))) == pytest.approx(16 * base)
    assert curves.flops(a_row(Size(devices=8))) == base
    # One turn of one token: each of the 64 rows has 51 tokens. The update computes 50 of them:
    # three times the layers, with all 50 keys, and four times the head of one. The prompts of the
    # four groups are read once; their last tokens pass through the layers and the head once more.
    D, L, V, F = 64, 2, 281, 192
    one = a_row(Size(turns=1, reply=1))
    matrices = 2 * (D * (D + D) + D * D + 3 * D * F)
    layers = L * (matrices + 4 * D * 50)
    update = 64 * (50 * 3 * layers + 4 * 2 * D * V)
    prefill = 4 * (50 * layers + L * (matrices + 4 * D * 51) + 2 * D * V)
    assert curves.flops(one) == pytest.approx(update + prefill)


def test_bytes_are_of_the_larger_of_rollout_and_update():
    few, many = a_row(Size()), a_row(Size(episodes=1024))
    parameters = 2 * (64 * 192 + 3 * 64 * 192) + 2 * 281 * 64
    # Keys and values: two layers, two key heads of 16, float32, for both caches and the reply.
    cache = 1024 * (50 + 136 + 32) * 2 * 2 * 2 * 16 * 4
    assert curves.peak_bytes(many) == 12 * parameters + cache
    token = 2 * (8 * 64 + 3 * 192) + 2 * 281
    update = 4 * parameters + 4 * 16 * 168 * (token + 2 * 2 * 4 * 168)
    assert curves.peak_bytes(few) == 12 * parameters + update


def test_slopes_and_table():
    found = curves.curve("episodes", all_rows())
    assert found["values"] == [64, 128, 256, 512, 1024]
    assert curves.slope(found["values"], found["cpu"]) == pytest.approx(1)
    assert curves.slope(found["values"], found["predicted cpu"]) == pytest.approx(1)
    assert found["predicted peak"][0] == found["peak"][0]
    text = curves.table(all_rows())
    assert "| episodes a step | 1.00 | 1.00 |" in text
    points = sum(len(values) for values in curves.VARIED_SIZES.values())
    assert len(text.splitlines()) == 2 + len(curves.VARIED_SIZES) + 1 + 2 + points


def test_what_is_measured_is_not_measured_again(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "cost_curves.jsonl"
    there = all_rows()[:-2]
    path.write_text("".join(json.dumps(row) + "\n" for row in there))
    measured = []

    def measure(size):
        measured.append(size)
        assert len(path.read_text().splitlines()) == len(there) + len(measured) - 1
        return a_row(size)

    monkeypatch.setattr(curves, "measure", measure)
    command.main(["curves", f"--out={tmp_path}"])
    assert measured == curves.points()[-2:]
    assert (tmp_path / "cost_curves.png").stat().st_size > 10_000
    assert "episodes a step" in capsys.readouterr().out
    command.main(["curves", f"--out={tmp_path}"])
    assert len(measured) == 2

    path.write_text("")
    with pytest.raises(SystemExit) as error:
        command.main(["curves", f"--out={tmp_path}", "--draw"])
    assert error.value.code == 2 and "has no row of Size(" in capsys.readouterr().err


@pytest.mark.slow
def test_a_point_is_a_real_run():
    size = Size(episodes=32, reply=8, turns=2, width=32, devices=2)
    row = curves.measure(size)
    assert curves.size_of(row) == size and row["steps"] == curves.STEPS - 1
    assert row["cpu"] > 0 and row["peak_mib"] > 100 and len(row["prompts"]) == 2
    assert row["prompts"][1] > row["prompts"][0] + 8
