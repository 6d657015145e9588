"""ragen_jax.plot: the picture has the curves of metrics.jsonl."""

import pytest
from cli_commands import call
from simulated_runs import write_run

from ragen_jax import plot
from ragen_jax.report.runs import read_run
from ragen_jax.storage.metrics_reader import read_metrics

pytestmark = pytest.mark.fast
MI = "collapse/first_turn/own_margin"


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path / f"seed-{seed}", steps=20, seed=seed) for seed in range(2)]


@pytest.mark.medium
@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_command_writes_the_picture(folders, tmp_path, ending, begins):
    out = tmp_path / f"curves.{ending}"
    code, printed, _ = call("ragen_jax.plot", str(folders[0]), f"--out={out}")
    assert code == 0 and printed == f"{out}\n" and out.read_bytes().startswith(begins)


@pytest.mark.parametrize("count", [1, 2])
def test_a_curve_is_of_metrics_jsonl_or_the_mean_of_seeds(folders, monkeypatch, tmp_path, count):
    drawn = []
    monkeypatch.setattr(plot, "_line", lambda axis, *curve, **style: drawn.append((curve, style)))
    runs = [read_run(folder) for folder in folders[:count]]
    plot.draw(runs, plot.select_charts(runs, [MI]), tmp_path / "one.png")
    ((steps, values, halves), _), *others = drawn
    rows = [read_metrics(folder / "metrics.jsonl") for folder in folders[:count]]
    assert not others and steps == list(range(21)) and values[0] is None
    expected = sum(found[7][MI] for found in rows) / count
    assert values[7] == pytest.approx(expected, rel=1e-6)
    apart = abs(rows[0][7][MI] - rows[-1][7][MI])
    # For two values: Student's t with one degree of freedom, 12.706, times half their difference.
    half = 6.0 if count == 1 else 12.7062 * apart / 2
    assert halves[7] == pytest.approx(half, rel=1e-4)


def test_bad_words_are_one_line_and_exit_code_2(folders, tmp_path):
    for words, expected in (
        ([], "name a run folder"),
        ([str(tmp_path)], "it has no config.json"),
        ([str(folders[0]), "--metric=own_margin"], f"did you mean {MI}"),
        ([str(folders[0]), "--metric=rollout/sucess"], "did you mean rollout/success?"),
        ([str(folders[0]), "--out=x.gif"], "must end with one of .png, .svg, .pdf"),
    ):
        code, out, err = call("ragen_jax.plot", *words)
        assert (code, out) == (2, "") and expected in err and err.count("\n") == 1, err
