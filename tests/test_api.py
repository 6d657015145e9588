"""The commands as functions: the same files and figures, in every order of import."""

import json
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from cli_commands import call

import ragen_jax
from ragen_jax.storage.metrics_reader import read_metrics

FEW = {
    **{"steps": 2, "rollout.groups": 2, "rollout.group_size": 2, "env.max_turns": 2},
    **{"eval.every": 0, "diagnose.probe_every": 0, "report.every": 0, "rollout.save_every": 1},
    **{"checkpoint.export": True, "filter.strategy": "none", "optimizer.minibatches": 1},
    **{"regimes.action": "off", "eval.episodes": 4, "optimizer.micro_batch": 8},
}


def timeless(rows):
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/", "memory/"))}
        for row in rows
    ]


@pytest.fixture(scope="module")
def settings(agent):
    return FEW | {"model.path": str(agent.directory)}


@pytest.fixture(scope="module")
def trained(settings, tmp_path_factory):
    """(run of two steps, the rows that its callback received)."""
    seen = []
    folder = tmp_path_factory.mktemp("door") / "run"
    run = ragen_jax.train("sokoban", workdir=folder, overrides=settings, on_step=seen.append)
    return run, seen


@pytest.mark.medium
def test_training_writes_what_the_command_writes(trained, settings, tmp_path):
    run, seen = trained
    assert run.exit_code == 0 and seen == run.rows and [row["step"] for row in seen] == [1, 2]
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    code, _, errors = call("ragen_jax.train", f"--workdir={tmp_path / 'run'}", *flags)
    assert code == 0, errors
    assert timeless(read_metrics(tmp_path / "run/metrics.jsonl")) == timeless(run.rows)
    ours, theirs = (
        {path.relative_to(folder).parts[0] for path in folder.rglob("*")}
        for folder in (run.workdir, tmp_path / "run")
    )
    assert ours == theirs


@pytest.mark.medium
def test_a_run_has_metrics_plots_and_its_policy(trained):
    run, _ = trained
    np.testing.assert_array_equal(run.metrics["step"], [1, 2])
    assert run.metrics["rollout/return"].dtype == np.float64
    figure = run.plot("rollout/return")
    (axis,) = figure.axes
    np.testing.assert_allclose(axis.lines[0].get_ydata(), run.metrics["rollout/return"], rtol=1e-6)
    with pytest.raises(ValueError, match="'no/such'"):
        run.plot("no/such")
    policy = run.policy()
    assert policy.model.config.vocab_size == len(policy.tokenizer)
    assert ragen_jax.Run(run.workdir).rows == run.rows


@pytest.mark.medium
def test_evaluation_and_report(trained, tmp_path):
    run, _ = trained
    metrics = ragen_jax.evaluate(run, samples=2)
    assert {"eval/success", "eval/pass_at_2", "collapse/first_turn/own_margin"} <= metrics.keys()
    assert ragen_jax.evaluate(run.workdir, samples=2) == metrics
    page = ragen_jax.report(run, out=tmp_path / "page.html")
    assert page == tmp_path / "page.html" and "<!doctype html>" in page.read_text()[:40].lower()
    with pytest.raises(ValueError, match="samples is 0"):
        ragen_jax.evaluate(run, samples=0)
    with pytest.raises(ValueError, match="at least one run"):
        ragen_jax.report()


@pytest.mark.medium
def test_rows_are_scored_like_a_file(trained, tmp_path):
    run, _ = trained
    rows = [
        {"prompt": f"room {i} ", "response": f"<think>room {i}</think><answer>Up</answer>"}
        for i in (0, 1, 2, 3)
        for _ in range(2)
    ]
    (found,) = ragen_jax.score(rows, model=run, out=tmp_path / "score.json")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ragen_jax.score(file, model=run.workdir / "policy") == [found]
    written = json.loads((tmp_path / "score.json").read_text())["steps"][0]
    assert written["collapse/first_turn/own_margin"] == found["collapse/first_turn/own_margin"]
    assert (tmp_path / "score.html").exists() and "collapse/first_turn/retrieval_acc" in found


@pytest.mark.medium
def test_a_folder_that_holds_a_run_is_enough_to_resume_it(trained, tmp_path):
    folder = shutil.copytree(trained[0].workdir, tmp_path / "run")
    run = ragen_jax.train(workdir=folder, overrides={"steps": 3})
    assert run.exit_code == 0 and [row["step"] for row in run.rows] == [1, 2, 3]


@pytest.mark.medium
def test_unusable_input_raises_and_leaves_the_process_as_it_was(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    for config, overrides, message in (
        ("no_such", {}, "no_such"),
        ("sokoban:huge", {}, "no preset 'huge'"),
        ("sokoban", {"steps": -1}, "config.steps is -1"),
        ("sokoban", {"env.name": "nothing"}, "nothing"),
        # As on the command line.
        ("sokoban", {"config.steps": -1}, "config.steps is -1"),
        ("sokoban", {"optimizer.learning_rate": "x"}, "learning_rate is 'x'; it must be a number"),
        (
            "sokoban",
            {"optimizer.lr": 1.0},
            "optimizer.lr is unknown; here it is called --config.opt",
        ),
        (
            "sokoban",
            {"trainer.total_epochs": 1},
            "no field 'trainer.total_epochs'; here it is call",
        ),
        ({"steps": 3}, {}, "must be a name .* got dict; values of single fields are overrides="),
    ):
        with pytest.raises(ValueError, match=message):
            ragen_jax.train(config, workdir=tmp_path / "run", overrides=overrides)
    with pytest.raises(ValueError, match="holds no run|not a run folder"):
        ragen_jax.evaluate(tmp_path)
    with pytest.raises(ValueError, match="^nope is not a run folder: it has no config.json$"):
        ragen_jax.Run("nope")
    with pytest.raises(ValueError, match="nothing"):
        ragen_jax.score([{"prompt": "a", "response": "b"}], model=tmp_path / "nothing")
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.medium
def test_another_thread_may_train(settings, tmp_path):
    found = []

    def work():
        found.append(ragen_jax.train("sokoban", workdir=tmp_path / "run", overrides=settings))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0].exit_code == 0


@pytest.mark.medium
@pytest.mark.parametrize(
    "order",
    [
        "import ragen_jax; f = ragen_jax.train",
        "import ragen_jax.train; f = ragen_jax.train",
        "from ragen_jax.train import main; import ragen_jax; f = ragen_jax.train",
        "from ragen_jax import train as f",
        "import ragen_jax.evaluate, ragen_jax; f = ragen_jax.train",
    ],
)
def test_every_order_of_imports_gives_a_module_that_is_callable(order):
    code = (
        f"{order}\nimport types\nassert isinstance(f, types.ModuleType) and callable(f)\n"
        "try: f('no_such_config')\nexcept ValueError as error: print('refused', error)\n"
        "assert f.main and f.learn\n"
        "import ragen_jax.score.texts, ragen_jax.report\n"
        "assert callable(ragen_jax.score) and callable(ragen_jax.report)\n"
        "assert ragen_jax.score.texts and 'train' in dir(ragen_jax)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "refused" in done.stdout, done.stderr[-2000:]
