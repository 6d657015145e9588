"""The figures of a dump are those of the run, whichever trainer's writer wrote it."""

import json

import numpy as np
import pytest
import trainer_formats
from cli_commands import call
from tiny_episodes import FORM, episodes_of

from ragen_jax.configs.base import Regimes
from ragen_jax.diagnostics.anatomy import anatomy_metrics
from ragen_jax.diagnostics.scopes import ScopeKey, ScopeSizes, collapse_metrics
from ragen_jax.model import hf
from ragen_jax.rollout.chat import make_chat
from ragen_jax.run.log import write_rollouts
from ragen_jax.score.figures import add_alarm

GROUPS, MEMBERS = 5, 4


@pytest.fixture(scope="module")
def model(agent, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model"
    hf.save(path, agent.model, agent.params, agent.tokenizer)
    return path


@pytest.fixture(scope="module")
def chat(agent):
    return make_chat(agent.tokenizer, agent.environment, FORM)


def figures(agent, episodes, trajectory):
    return_GK = np.reshape(
        [sum(turn.reward for turn in episode.turns) for episode in episodes], (GROUPS, MEMBERS)
    )
    return collapse_metrics(
        agent.model,
        agent.params,
        episodes,
        ScopeSizes(first_turn_samples=12, trajectory_samples=trajectory, micro_batch=64),
        ScopeKey(seed=3, step=1),
        flow=True,
    ) | anatomy_metrics(episodes, return_GK)


def score(model, path, *words):
    out = path.with_suffix(".json")
    code, printed, errors = call(
        "ragen_jax.score", f"--model={model}", f"--rollouts={path}", f"--out={out}", *words
    )
    assert code == 0, errors
    return json.loads(out.read_text()), printed, errors


@pytest.fixture(scope="module")
def written(agent, model, chat, tmp_path_factory):
    """{turns: (the run's figures, the records that it wrote, their folder)}."""
    found = {}
    for turns in (1, 2):
        episodes = episodes_of(chat, agent.environment, turns, GROUPS, MEMBERS)
        folder = tmp_path_factory.mktemp(f"turns{turns}")
        write_rollouts(
            folder / "step_000001.jsonl", episodes, chat, lambda turn: turn.reward, set()
        )
        expected = figures(agent, episodes, 1 if turns == 1 else 10)
        found[turns] = expected, trainer_formats.read(folder / "step_000001.jsonl"), folder
    return found


SAMPLED = ("--first_turn_samples=12", "--trajectory_samples=10", "--seed=3")
USUAL = ((1, "verl"), (2, "ours"), (2, "verifiers"))
CASES = [(1, name) for name in ("ours", *trainer_formats.SINGLE, *trainer_formats.SEVERAL)]
CASES += [(2, name) for name in ("ours", *trainer_formats.SEVERAL)]
CASES = [case if case in USUAL else pytest.param(*case, marks=pytest.mark.long) for case in CASES]


@pytest.mark.parametrize("turns,name", CASES)
def test_a_dump_has_the_figures_of_the_run(written, model, agent, turns, name):
    expected, records, folder = written[turns]
    path = folder / "step_000001.jsonl"
    if name != "ours":
        writer = (trainer_formats.SINGLE | trainer_formats.SEVERAL)[name]
        path = trainer_formats.write(
            folder / f"{name}_step_1.jsonl", writer(records, agent.tokenizer)
        )
    found, _, errors = score(model, path, *SAMPLED)
    (step,) = found["steps"]
    assert step["step"] == 1 and step["groups"] == GROUPS and not errors
    assert expected["collapse/first_turn/mi"] != 0 and "flow/first_turn/za_swap" in expected
    assert turns == 1 or "collapse/trajectory_within_depth/mi" in expected
    for key, value in expected.items():
        assert step[key] == pytest.approx(value, abs=1e-4), key


@pytest.mark.long
def test_parquet(written, model, agent, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    expected, records, _ = written[1]
    path = tmp_path / "completions_00001.parquet"
    rows = list(trainer_formats.trl(records, agent.tokenizer))
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found, _, _ = score(model, path, *SAMPLED)
    key = "collapse/first_turn/mi"
    assert found["steps"][0][key] == pytest.approx(expected[key], abs=1e-4)


def page_of(path):
    """(data, full HTML) of the page next to a score's JSON file."""
    html = path.with_suffix(".html").read_text()
    return json.loads(html.split('id="data">')[1].split("</script>")[0]), html


def test_a_page_shows_the_figures_scores_and_rows(written, model, agent, tmp_path):
    _, records, _ = written[1]
    rows = list(trainer_formats.verl(records, agent.tokenizer))
    for row in rows[:3]:
        row["output"] = row["output"].replace("</think>", "<b>&</think>", 1)
    paths = [
        trainer_formats.write(tmp_path / f"{n}.jsonl", [r | {"step": n} for r in rows])
        for n in (0, 20)
    ]
    more = [f"--rollouts={path}" for path in paths[1:]]
    found, printed, _ = score(model, paths[0], *SAMPLED, *more)
    data, html = page_of(paths[0])
    assert f"report: {paths[0].with_suffix('.html')}" in printed
    assert data["steps"] == [0, 20] and f"scored under {model}" in html
    (run,) = data["runs"]
    for key in ("collapse/first_turn/mi", "collapse/first_turn/retrieval_acc", "rollout/return"):
        expected = [step[key] for step in found["steps"]]
        assert run["figures"][key] == pytest.approx(expected, rel=1e-6), key
    first = found["steps"][-1]
    assert f"p = {first['collapse/first_turn/retrieval_p']:.3f}" in html
    for line in ("of it is most likely under its own prompt", "2 steps are too few to judge"):
        assert line in printed and line in html
    assert [matrix["step"] for matrix in data["matrices"]] == [0, 20]
    assert np.shape(data["matrices"][0]["values"]) == (12, GROUPS)
    assert data["saved"] == len(data["episodes"]) == 2 * len(rows)
    episode = data["episodes"][0]
    assert episode["return"] == rows[0]["score"]
    assert episode["success"] == rows[0]["acc"]
    assert episode["kept"] is episode["seed"] is None  # verl does not record them
    closed = next(e for e in data["episodes"] if e["turns"][0]["tags"][1] > 0)
    (turn,) = closed["turns"]
    end, answer = turn["tags"]
    assert "".join(turn["reply"][end:]).startswith("</think>")
    assert "".join(turn["reply"][answer:]).endswith("</answer>") and turn["valid"] is None
    assert any("".join(turn["reply"]) in row["output"] for row in rows)
    torn = next(e for e in data["episodes"] if e["turns"][0]["tags"][0] < 0)
    assert "</think>" not in "".join(torn["turns"][0]["reply"])
    assert "max_solution" not in html  # a setting that only our runs have


def test_broken_rows_are_named_and_the_rest_is_scored(written, model, agent, tmp_path):
    _, records, _ = written[1]
    lines = [json.dumps(row) for row in trainer_formats.verl(records, agent.tokenizer)]
    path = tmp_path / "1.jsonl"
    broken = ['{"input": "torn', "[1]", '{"text": "x"}', '{"input": 3, "output": "x"}']
    broken += [lines[0].replace('"score": ', '"score": "high", "was": '), *["x"] * 3]
    path.write_text("\n".join([lines[0], *broken[:5], *lines[1:], *broken[5:]]) + "\n")
    found, printed, errors = score(model, path, *SAMPLED)
    assert found["rows"] == len(lines) and len(found["broken"]) == 8
    said = errors.splitlines()
    assert [line.split()[1] for line in said[:5]] == [f"{path}:{n}" for n in range(2, 7)]
    assert "is not JSON" in said[0] and "'high'" in said[4]
    assert said[5] == "warning: 3 more rows cannot be used" and len(said) == 6
    assert printed.count("fields that are not read: gts") == 1
    path.write_text("\n".join(lines) + "\n")
    whole, _, _ = score(model, path, *SAMPLED)
    assert whole["steps"] == found["steps"]


@pytest.mark.long
def test_groups_of_different_sizes(written, model, agent, tmp_path):
    """Without one row, its group has one member less."""
    _, records, _ = written[1]
    rows = list(trainer_formats.verl(records, agent.tokenizer))[1:]
    found, _, _ = score(model, trainer_formats.write(tmp_path / "1.jsonl", rows), *SAMPLED)
    (step,) = found["steps"]
    assert step["episodes"] == GROUPS * MEMBERS - 1 and step["groups"] == GROUPS
    counts = [step[f"anatomy/{name}_count"] for name in ("mixed", "solved", "failed", "tied")]
    assert sum(counts) == GROUPS
    mixed = sum(
        len({r["score"] for r in rows if r["input"] == prompt}) > 1
        for prompt in {r["input"] for r in rows}
    )
    assert step["anatomy/mixed"] == mixed / GROUPS
    for row in rows:
        del row["acc"]
    found, _, _ = score(model, trainer_formats.write(tmp_path / "1.jsonl", rows), *SAMPLED)
    names = [name for name in found["steps"][0] if name.startswith("anatomy/")]
    assert names == ["anatomy/mixed", "anatomy/mixed_count"]  # the other figures need success


def test_an_alarm_where_information_falls():
    key = "collapse/first_turn/own_margin"
    rows = [{key: 14.0 if step <= 12 else 2.0, f"{key}_ci95": 0.5} for step in range(1, 25)]
    found, fired = add_alarm(rows, Regimes())
    alarms = [step for step, row in enumerate(found, start=1) if row["regime/alarm"]]
    assert alarms and 12 < alarms[0] <= 17
    ((index, first),) = fired  # "warn" fires once
    assert index + 1 == alarms[0] and "own-prompt margin" in first.reason


@pytest.mark.long
def test_a_timeline(written, model, agent, tmp_path):
    """Reasonings that name their room; from step 13 the same reasoning in all rooms."""
    _, records, _ = written[1]
    for step in range(1, 25):
        rows = list(trainer_formats.verl(records, agent.tokenizer, step))
        if step > 12:
            for row in rows:
                row["output"] = "player 11 plan Left</think><answer>Left</answer>"
        trainer_formats.write(tmp_path / f"{step}.jsonl", rows)
    out = tmp_path / "score.json"
    words = f"--model={model}", f"--rollouts={tmp_path}", f"--out={out}"
    code, printed, _ = call("ragen_jax.score", *words, *SAMPLED)
    steps = json.loads(out.read_text())["steps"]
    assert code == 0 and [row["step"] for row in steps] == list(range(1, 25))
    assert printed.count("information") == 24 and all("regime/alarm" in row for row in steps)
    assert steps[-1]["collapse/first_turn/mi_seq"] == pytest.approx(
        steps[12]["collapse/first_turn/mi_seq"], abs=1e-6
    )
