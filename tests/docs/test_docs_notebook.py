"""The notebooks of docs/tutorials run to the end, with the results that their text states."""

import re

import pytest
from cli_commands import ROOT

TUTORIALS = ROOT / "docs/tutorials"


@pytest.fixture
def run_notebook(agent, tmp_path, monkeypatch):
    """run_notebook(name): the output of each code cell, run with the tests' agent.

    run_notebook(name, parameters): without the cell tagged "install", and with the text
    `parameters` after the lines of the cell tagged "parameters".
    """
    nbformat = pytest.importorskip("nbformat", reason="pip install ragen_jax[docs]")
    nbclient = pytest.importorskip("nbclient", reason="pip install ragen_jax[docs]")
    cache = tmp_path / "cache/ragen_jax/models"
    cache.mkdir(parents=True)
    (cache / agent.directory.name).symlink_to(agent.directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(name, parameters=""):
        notebook = nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)
        tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
        if parameters:
            notebook.cells[tags.index(["parameters"])].source += "\n" + parameters
            del notebook.cells[tags.index(["install"])]
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert not any(cell.outputs for cell in cells), "stored outputs go stale: clear them"
        resources = {"metadata": {"path": str(tmp_path)}}
        client = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources=resources
        )
        client.execute()
        return ["".join(x["text"] for x in c.outputs if x.get("name") == "stdout") for c in cells]

    return run


def test_every_notebook_is_run():
    names = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
    assert names == sorted(re.findall(r'run_notebook\(\s*"(\w+)"', open(__file__).read()))


@pytest.mark.long
def test_first_run(run_notebook):
    built, _, trained, figures, episode, resumed = run_notebook("1_first_run")
    assert "warm start" not in built and trained.endswith("exit code 0\n")
    assert [line.split()[0] for line in figures.splitlines()] == ["0", "1", "2"]
    assert figures.count("collapse/first_turn/mi_seq") == 2
    assert "assistant: <think>" in episode and "reward" in episode
    assert "[0, 1, 2, 3]\nTrue\n" in resumed


@pytest.mark.long
def test_own_task(run_notebook):
    _, by_hand, splits, trained, figures = run_notebook("2_own_task")
    assert by_hand.endswith("[1.0, 0.0]\n") and splits.endswith(" 0 in both\n")
    assert "warm start" in trained and trained.endswith("exit code 0\n")
    assert len(re.findall(r" \d\.\d+$", figures, re.M)) == 3


@pytest.mark.slow
def test_own_model(run_notebook):
    listed, size, logps, trained, written = run_notebook("3_own_model")
    assert "config.json" in listed and "2 layers" in size and "0.0" in logps
    assert trained.endswith("exit code 0\n")
    assert "'adapter'" in written and "'policy'" in written
    changed, total = re.search(r"(\d+) of (\d+) arrays changed", written).groups()
    assert 0 < int(changed) < int(total)


@pytest.mark.slow
def test_own_diagnostic(run_notebook):
    _, planted, _, trained, figures = run_notebook("4_own_diagnostic")
    assert planted == "0.25 1.0\n" and trained.endswith("exit code 0\n")
    fractions = [float(line.split()[1]) for line in figures.splitlines()]
    assert len(fractions) == 2 and all(0 < fraction <= 1 for fraction in fractions)


@pytest.mark.long
def test_score_another_trainer(run_notebook):
    built, room, looking, template, dealt, arrays = run_notebook("5_score_another_trainer")
    assert "warm start" not in built and "#" in room
    figures = [dict(re.findall(r"(\w+) +(\S+)", text)) for text in (looking, template, dealt)]
    informed, constant, wrong = ({k: float(v) for k, v in row.items()} for row in figures)
    assert informed["mi_seq"] > 1.5 and informed["retrieval_acc"] >= 0.875
    assert informed["retrieval_p"] < 0.05 < min(constant["retrieval_p"], wrong["retrieval_p"])
    assert constant["mi_seq"] < 0.05 and constant["retrieval_acc"] == 0.125
    assert wrong["mi_seq"] < 0 and wrong["retrieval_acc"] == 0
    assert "[ True False  True False]" in arrays


@pytest.mark.slow
def test_python(run_notebook):
    built, trained, looked, evaluated, scored, policy = run_notebook("6_python")
    assert "warm start" not in built and trained.endswith("exit code 0\n")
    assert [int(step) for step in re.findall(r"^step (\d): return", trained, re.M)] == [0, 1, 2]
    assert looked.startswith("[0. 1. 2.] [")  # the steps, then success
    assert "'eval/pass_at_2'" in evaluated and evaluated.endswith("run/report.html\n")
    assert re.search(r"retrieval \d\.\d\d\n$", scored)
    assert re.search(r"^Qwen \d+ \['sokoban'\]\n", policy, re.M)


@pytest.mark.long
def test_language_model(run_notebook, language_model):
    """With a small random model, which cannot solve anything, and few steps."""
    changes = {
        **{"model.path": str(language_model), "model.dtype": "float32", "steps": 2},
        **{"warmstart.rooms": 12, "warmstart.batch": 4, "warmstart.max_updates": 1},
        **{"warmstart.check_episodes": 1, "rollout.groups": 2, "rollout.group_size": 2},
        **{"rollout.max_new_tokens": 24, "eval.every": 2, "eval.episodes": 4},
        **{"diagnose.every": 1, "optimizer.micro_batch": 2},
    }
    _, trained, information, replies, page = run_notebook(
        "7_language_model", f"changes = {changes}"
    )
    assert "warm start: fine-tuning" in trained and trained.endswith("exit code 0\n")
    assert re.findall(r"^step (\d): success on new problems 0.00$", trained, re.M) == ["0", "2"]
    rows = information.splitlines()
    assert rows and {row.split()[0] for row in rows} <= {"1", "2"}  # of steps with reasoning
    assert all("'mi_seq': " in row and "'retrieval_chance': 0.5" in row for row in rows)
    steps = re.findall(r"^step_(\d+)\nNumbers: .*\nTarget: \d+\n<think>", replies, re.M)
    assert steps == ["000000", "000002"]
    assert page == "runs/smollm2/report.html\n"


@pytest.mark.slow
def test_own_agent(run_notebook):
    """The agent plays in training and with the served policy."""
    outputs = run_notebook("8_own_agent")
    built, written, _, trained, ids, counts, reported, _, played, scored = outputs
    assert "warm start" not in built and written == "Writing my_agent.py\n"
    assert re.findall(r"^step (\d): reward [+-]\d\.\d\d$", trained, re.M) == ["1", "2"]
    assert trained.endswith("exit code 0\n")
    assert re.match(r"\d+ ids again: True\n", ids) and "False" not in ids
    assert "<think>" in ids and "<answer>" in ids
    found = dict(re.findall(r"^(\w+) +(\d\.\d\d)$", counts, re.M))
    assert found["prefix_reuse"] == "1.00" and found["errors"] == "0.00", counts
    assert reported.startswith("run/report.html\n") and "'retrieval_chance'" in reported
    assert len(re.findall(r"^\{'room': \d\} \{'reward': ", played, re.M)) == 8
    assert re.search(r"^retrieval_chance +0\.\d\d$", scored, re.M)
