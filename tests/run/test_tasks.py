"""Several environments in one run: their parts of a step, a config and the figures."""

import json
import os
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import optax
import pytest
from cli_commands import ROOT, call
from ml_collections import ConfigDict

from ragen_jax import train
from ragen_jax.config.build_environment import tiny_words
from ragen_jax.config.build_learner import build_learner
from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.check import check
from ragen_jax.config.per_task import (
    per_task_configs,
    per_task_groups,
    row_tokens,
    step_groups,
    step_rows,
)
from ragen_jax.configs import base, frozen_lake, mixture, sokoban
from ragen_jax.core.sharding import make_mesh
from ragen_jax.core.task_shares import combine_metrics, label_metrics, measure_each, metrics_of_each
from ragen_jax.core.types import SUCCESS_UNDEFINED
from ragen_jax.diagnostics.regimes import init_regimes
from ragen_jax.diagnostics.stopping import init_stopping
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.types import Step
from ragen_jax.model import hf
from ragen_jax.run import start
from ragen_jax.run import tasks as run_tasks
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.load import for_sampling, restore_run
from ragen_jax.run.run_files import read_outcomes
from ragen_jax.run.stages import watch
from ragen_jax.run.tasks import build_tasks
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.update.learner import Outcomes, select
from ragen_jax.update.policy import init_state


def parts(*groups):
    """Return stand-ins for tasks with these numbers of groups."""
    names = ["first", "second", "third"] if len(groups) > 1 else [""]
    return [types.SimpleNamespace(label=n, groups=g) for n, g in zip(names, groups, strict=False)]


def test_figures_of_each_task_by_hand():
    def measure(x, y):
        return {"a/sum": sum(x), "a/b/rows": len(y)}

    # Four groups, with two entries per group in x and one in y.
    found = measure_each(parts(2, 1, 1), measure, [1, 2, 4, 8, 16, 32, 64, 128], np.zeros((4, 5)))
    assert found == {
        "a/first/sum": 15,
        "a/first/b/rows": 2,
        "a/second/sum": 48,
        "a/second/b/rows": 1,
        "a/third/sum": 192,
        "a/third/b/rows": 1,
    }
    assert measure_each(parts(3), measure, range(6), range(3)) == {}


def test_the_plain_name_is_the_mean_over_the_tasks_that_have_it():
    found = combine_metrics(
        parts(1, 2, 1), [{"a/x": 1.0, "a/x_ci95": 3.0}, {"a/x": 4.0, "a/y": 2.0, "a/x_ci95": 4}, {}]
    )
    assert found == {
        "a/x": 2.5,
        "a/x_ci95": 2.5,
        "a/first/x_ci95": 3.0,
        "a/second/x_ci95": 4,
        "a/y": 2.0,
        "a/first/x": 1.0,
        "a/second/x": 4.0,
        "a/second/y": 2.0,
    }
    # If a part's figure has no interval, the mean over the parts has none.
    without = combine_metrics(parts(1, 1), [{"a/x": 1.0, "a/x_ci95": 3.0}, {"a/x": 4.0}])
    assert without == {"a/x": 2.5, "a/first/x": 1.0, "a/second/x": 4.0, "a/first/x_ci95": 3.0}
    assert combine_metrics(parts(2), [{"a/x": 3.0, "a/p_p": 0.5}]) == {"a/x": 3.0, "a/p_p": 0.5}
    assert "a/p_p" not in combine_metrics(parts(1, 1), [{"a/p_p": 0.5}, {"a/p_p": 0.1}])


def test_rows_of_each_task_are_what_was_put_under_its_label():
    tasks = parts(1, 1)
    found = [{"a/x": 1.0, "a/second/y": 2.0}, {"a/x": 3.0, "b/z/w": 4.0}]
    together = {"a/x": 2.0, "time/step": 1.0} | label_metrics(tasks, found)
    assert metrics_of_each(tasks, together) == found
    assert metrics_of_each(parts(3), together) == [together]


def test_the_collapse_of_one_environment_of_three_is_seen():
    """The training loop's `watch` sees it in rows of a run with three environments."""
    config = base.Config()
    settings = dict(stopping=config.stopping, regimes=config.regimes)
    run = types.SimpleNamespace(tasks=parts(1, 1, 1), **settings)
    mesh = make_mesh(data=1, fsdp=1, tensor=1)
    parts_of_state = dict(stopping=init_stopping(3), regimes=init_regimes(3))
    state = init_state({}, optax.sgd(1.0), mesh, **parts_of_state)
    rng, fired = np.random.default_rng(0), []
    for step in range(60):
        mi = {"first": 1.0, "second": 40.0, "third": 0.5 if step < 30 else 0.2}
        mean = np.mean(list(mi.values()))
        row = {"filter/kept_ratio": 1.0, "collapse/first_turn/own_margin": mean}
        for label, value in mi.items():
            row[f"collapse/{label}/first_turn/own_margin"] = value * (1 + 0.1 * rng.normal())
            row[f"collapse/{label}/first_turn/own_margin_ci95"] = 0.2 * value
        returns = [np.array([[0.0, 1.0]])] * 3
        state, alarms, found = watch(run, state, row, returns)
        fired += [(step, alarm.reason) for alarm in alarms]
    ((step, reason),) = fired
    assert step in range(31, 46) and reason.startswith(
        "third: signs of collapse: own-prompt margin"
    )
    assert found["regime/alarm"] == found["regime/third/alarm"] == 1
    assert found["regime/first/alarm"] == found["regime/second/alarm"] == 0


@pytest.fixture
def config(agent):
    """Two environments, three and two groups, played by the agent of the first."""
    config = agent.config.copy_and_resolve_references()
    config.model.path = str(agent.directory)
    config.steps = 2
    config.env.update(max_turns=3, max_actions=6)
    config.rollout.update(groups=3, group_size=4, save_every=2)
    lake = frozen_lake.get_config().env
    lake.update(format_penalty=-0.5, max_turns=2, pool=4)
    config.also.frozen_lake = ConfigDict(dict(groups=2, env=lake))
    config.optimizer.update(minibatches=2, micro_batch=8, learning_rate=1e-3, warmup_updates=0)
    config.diagnose.update(first_turn_samples=8, trajectory_samples=8)
    config.eval.update(episodes=8, every=2)
    config.checkpoint.every = 1
    return config


def test_a_config_of_several_is_one_of_each(config):
    given, config = config, check(config)
    alone = per_task_configs(config)
    assert list(alone) == ["sokoban", "frozen_lake"]
    first, second = alone.values()
    assert (first.env.name, first.rollout.groups, len(first.also)) == ("sokoban", 3, 0)
    assert (second.env.name, second.rollout.groups, second.env.max_turns) == ("frozen_lake", 2, 2)
    assert second.optimizer.learning_rate == config.optimizer.learning_rate
    assert per_task_groups(config) == (3, 2) and step_groups(config) == 5
    assert step_rows(config) == 4 * (3 * 3 + 2 * 2)  # single turn: one row per turn
    given.also.frozen_lake.env.context = "full"
    longer = check(given)
    assert step_rows(longer) == 4 * (3 * 3 + 2)
    assert row_tokens(longer) == 2 * config.rollout.max_new_tokens
    one = check(sokoban.get_config())
    assert list(per_task_configs(one).values()) == [one]
    assert config.also["frozen_lake"].env.name == "frozen_lake"  # the config did not change
    assert config.rollout.groups == 3


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda c: c.also.frozen_lake.env.update(context="none"),
            "frozen_lake.env.context is",
        ),
        (lambda c: c.also.frozen_lake.env.update(max_turns=0), "frozen_lake.env.max_turns is"),
        (
            lambda c: c.also.frozen_lake.env.update(format_penalty=1.0),
            "also.frozen_lake.env.format_penalty is 1.0; it must be a number from -1000000 to 0",
        ),
        (
            lambda c: c.also.frozen_lake.env.update(pool=1),
            "also.frozen_lake.env.pool is 1; it must be at least also.frozen_lake.groups = 2",
        ),
        (lambda c: c.also.frozen_lake.update(groups=0), "also.frozen_lake.groups is 0"),
        (lambda c: c.also.update(sokoban=c.also.frozen_lake), "has the same name as config.env"),
        (lambda c: c.also.update(other=ConfigDict(dict(groups=1))), "other must have groups and"),
        (lambda c: c.also.frozen_lake.env.__delattr__("window"), "only one of them has window"),
    ],
)
def test_what_no_run_could_use_is_refused(config, change, message):
    with config.unlocked():
        change(config)
    with pytest.raises(ValueError, match=message):
        check(config)


def test_each_environment_is_filtered_by_itself(config, agent):
    config = check(config)
    mesh, _ = build_meshes(config)
    model, params, _ = hf.load(agent.directory, mesh=mesh)
    learner, state = build_learner(config, model, params, mesh)
    np.testing.assert_array_equal(learner.environment_G, [0, 0, 0, 1, 1])
    assert set(state.seed_cursor) == {"sokoban", "frozen_lake"}
    assert {name: len(streak) for name, streak in state.streak_P.items()} == {"frozen_lake": 4}
    # The first environment has nearly all variance; ranked together, only its groups would be kept.
    return_GK = np.array([[9, 0, 9, 0], [9, 0, 9, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])
    length_GK = np.ones((5, 4), int)
    outcomes = Outcomes(return_GK.astype(np.float32), length_GK, return_GK > 0)
    selection, metrics = select(learner, state, None, outcomes)
    assert selection.keep_GK[:, 0].tolist() == [True, True, False, True, False]


@pytest.fixture
def no_eval_split(agent, monkeypatch):
    """Make building an environment of the evaluation split fail, as with data without it."""
    build = run_tasks.build_environment
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))

    def of_split(env, split):
        if split == "eval":
            raise ValueError("no row of split 'eval'")
        return build(env, split)

    monkeypatch.setattr(run_tasks, "build_environment", of_split)


@pytest.mark.parametrize(
    ("fields", "built"),
    [
        ({}, False),
        ({"diagnose.gradients_every": 5}, False),  # computed on the step's groups
        ({"diagnose.gradients_every": 5, "diagnose.gradients_groups": 4}, True),
        ({"diagnose.probe_every": 5}, True),
        ({"eval.every": 5}, True),
    ],
)
def test_held_out_problems_are_built_only_where_something_plays_them(
    fields, built, agent, no_eval_split
):
    config = agent.config.copy_and_resolve_references()
    config.eval.update(every=0, episodes=10**5)
    config.diagnose.update(probe_every=0, gradients_every=0, gradients_groups=0)
    config.update_from_flattened_dict(fields)
    assert run_tasks.plays_heldout(config) == built
    if built:
        with pytest.raises(ValueError, match="no row of split 'eval'"):
            build_tasks(config, agent.tokenizer, ())
        return
    (task,) = build_tasks(config, agent.tokenizer, ())
    assert task.heldout is None and task.heldout_environment is None
    # Rollout shapes are then derived from training problems.
    seeds = [play.seed for play in task.first_plays]
    assert seeds == [(config.seed << 32) + i for i in range(16)]
    assert all(length > 0 for length in task.first_prompts)
    with pytest.raises(ValueError, match="eval.every above 0"):
        evaluate(None, None, (task,))
    # The evaluation command needs them under any schedule.
    with pytest.raises(ValueError, match="no row of split 'eval'"):
        build_tasks(config, agent.tokenizer, (), heldout=True)


@pytest.mark.long
def test_a_run_without_evaluation_needs_no_evaluation_split(agent, no_eval_split, tmp_path):
    config = agent.config.copy_and_resolve_references()
    config.model.path, config.steps = str(agent.directory), 1
    config.rollout.update(groups=2, group_size=2, save_every=0)
    config.optimizer.update(minibatches=1, micro_batch=4)
    config.diagnose.every = config.eval.every = config.report.every = 0
    config.checkpoint.update(every=0, export=False)
    config.log.trackers = ()
    assert train.train(config, tmp_path / "run") == 0
    assert not (tmp_path / "run" / "eval").exists()


ROOMS = '''
import numpy as np

from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.types import IMAGE, Observation

LONG = set()  # states that are shown as SHOWN: at more length than env.max_context, or otherwise


class Rooms(Sokoban):
    """Rooms of which some raise, and some are too long, by their number and split."""

    def reset(self, seed):
        number = seed % 2**32
        if RAISES:
            raise KeyError(f"room {{number}}")
        state = super().reset(seed)
        if IS_LONG:
            LONG.add(state)
        return state

    def render(self, state):
        return SHOWN if state in LONG else super().render(state)
'''


FEW_ROOMS = """
from ragen_jax.envs.sokoban import Sokoban

class Rooms(Sokoban):
    def reset(self, seed):
        self.split = "train"
        return super().reset(seed % 10)
"""


@pytest.fixture
def rooms(agent, tmp_path, monkeypatch):
    """rooms(raises, is_long) -> a config of two steps of two groups, played in such `ROOMS`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def write(raises="False", is_long="False", shown="'#' * 300"):
        text = ROOMS.format().replace("RAISES", raises).replace("IS_LONG", is_long)
        text = text.replace("return SHOWN", f"return {shown}")
        (tmp_path / "own_rooms.py").write_text(text)
        config = agent.config.copy_and_resolve_references()
        config.model.path, config.steps = str(agent.directory), 2
        config.env.update(name="own_rooms:Rooms", max_turns=1, max_actions=2, max_error_share=1.0)
        config.env.max_context = 200
        config.rollout.update(groups=2, group_size=4, save_every=0)
        config.filter.strategy = "none"
        config.optimizer.update(minibatches=1, micro_batch=4)
        config.eval.update(episodes=4, every=1)
        config.diagnose.every = config.report.every = 0
        config.checkpoint.update(every=0, export=False)
        config.log.trackers = ()
        return config

    yield write
    sys.modules.pop("own_rooms", None)
    sys.modules.pop("few_rooms", None)


def test_held_out_problems_that_are_training_problems_are_named(rooms, agent, tmp_path, capsys):
    """A small environment that ignores `split` has the same problems in both splits."""
    config = rooms()
    build_tasks(config, agent.tokenizer, ())
    assert "held-out problems" not in capsys.readouterr().out
    (tmp_path / "few_rooms.py").write_text(FEW_ROOMS)
    config.env.name = "few_rooms:Rooms"
    build_tasks(config, agent.tokenizer, ())
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "held-out problems" in x]
    assert line.startswith("warning: 4 of 4 held-out problems of few_rooms:Rooms are among the")


@pytest.mark.long
def test_a_step_in_which_no_prompt_can_be_used_is_skipped(rooms, tmp_path, capsys):
    config = rooms(is_long="self.split == 'train' and number < 2")
    assert train.train(config, tmp_path / "run") == 0
    first, second = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    assert (first["rollout/errors"], first["filter/kept_ratio"]) == (8, 0)
    assert first["update/count"] == 0 and first["eval/errors"] == 0
    assert (second["rollout/errors"], second["update/count"]) == (0, 1)
    output = capsys.readouterr().out
    line = (
        "warning: all 8 episodes of own_rooms:Rooms were left out, so there is nothing to learn "
        "from; the first:"
    )
    assert output.count(line) == 1
    assert "PromptError: environment seed " in output and "raise env.max_context" in output


@pytest.mark.long
def test_a_problem_whose_image_cannot_be_shown_is_left_out(rooms, tmp_path, capsys):
    picture = "Observation(IMAGE, (np.zeros((8, 8, 3), np.uint8),))"
    config = rooms(is_long="number == 0", shown=picture)  # the first problem of each split
    assert train.train(config, tmp_path / "run") == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("rollout/errors") for row in rows] == [None, 4, 0]
    assert [row["eval/errors"] for row in rows] == [1, 1, 1]
    assert "but the model at config.model.path has no vision tower" in capsys.readouterr().out


ENDLESS = "an episode that does not end says nothing"


@pytest.mark.parametrize(
    "says, fields, message",
    [
        ("never", {"algorithm.zvp_coef": 0.1}, "error: config.algorithm.zvp_coef is 0.1, but env"),
        ("never", {}, "warning: config.stopping.success.action is 'stop', but environment 'goes:G"),
        ("never", {"stopping.success.action": "off"}, None),
        ("at the end", {"algorithm.zvp_coef": 0.1}, None),
        (ENDLESS, {"algorithm.zvp_coef": 0.1}, None),
    ],
)
def test_what_reads_success_is_refused_where_an_environment_defines_none(
    agent, tmp_path, monkeypatch, says, fields, message
):
    class Goes(Sokoban):
        """Sokoban whose episodes have four steps, and may end without a verdict."""

        def reset(self, seed):
            return super().reset(seed), 0

        def render(self, state):
            return super().render(state[0])

        def identity(self, state):
            return super().identity(state[0])

        def step(self, state, action, rng=None):
            room, count = state
            step = super().step(room, action, rng)
            done = count == 3 and says != ENDLESS
            unsaid = {} if says == "at the end" and done else {SUCCESS_UNDEFINED: True}
            return Step((step.state, count + 1), step.reward, done, {"success": False, **unsaid})

    def stop(*_):
        raise ValueError("nothing was refused")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "goes", types.SimpleNamespace(Goes=Goes))
    monkeypatch.setattr(start, "find_damage", stop)  # called after all checks
    fields = {
        **{"model.path": agent.directory, "env.name": "goes:Goes", "env.prompt": "terse"},
        **{"eval.episodes": 4, "filter.strategy": "none", "log.trackers": "()"},
        **fields,
    }
    options = [f"--config.{name}={value}" for name, value in fields.items()]
    code, out, err = call(
        "ragen_jax.train", "--config=sokoban", f"--workdir={tmp_path}/x", *options
    )
    assert code == 2 and err.count("\n") == 1
    if message and message.startswith("error"):
        assert err.startswith(message)
        assert "ironment 'goes:Goes' does not define success; accepted: 0" in err
    else:
        assert err == "error: nothing was refused\n"
        assert (message in out) if message else "does not define success" not in out


MESSAGES = '''
import os
import pathlib
import signal

from ragen_jax.envs.dataset import Dataset
from ragen_jax.envs.sokoban import Sokoban


class Shown(Dataset):
    """Rows whose prompts are rooms, which the tiny agent can read."""

    words = Sokoban.words


def score(prompt, reply, row):
    return float(len(reply) % 3)


SAVED = pathlib.Path("parts/checkpoints/1")
heard = 0


def go_on(messages, row):
    global heard
    reply = messages[-1]["content"]
    if pathlib.Path("kill").exists() and SAVED.exists():
        heard += 1
        if heard == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    return "#" * 4000 if len(reply) % 2 else row["prompt"]
'''


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 3])
def test_a_message_that_is_too_long_ends_its_episode_and_a_killed_run_resumes_exactly(
    agent, tmp_path, monkeypatch, slots
):
    """A function that answers replies sometimes returns more text than the model can read. The
    process is killed in the middle of a step's rollout."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_messages.py").write_text(MESSAGES)
    shown = {
        split: [environment.render(environment.reset(seed)) for seed in range(6)]
        for split in ("train", "eval")
        for environment in [Sokoban(split=split)]
    }
    shown["train"][1] = "#" * 4000  # the first prompt is already too long
    rows = [dict(prompt=prompt, split=split) for split in shown for prompt in shown[split]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "model"
    shutil.copytree(agent.directory, model)
    (model / "checksums.json").unlink()  # the files change on purpose
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 512}))

    fields = {
        **{"model.path": str(model), "model.dtype": "float32", "steps": 3},
        **{"env.name": "own_messages:Shown", "env.prompt": "terse"},
        **{"env.max_turns": 2, "env.max_actions": 2},
        **{"env.options.path": "rows.jsonl", "env.options.split_field": "split"},
        **{"env.options.reward": "own_messages:score", "env.options.step": "own_messages:go_on"},
        **{"rollout.groups": 3, "rollout.group_size": 4, "rollout.max_new_tokens": 24},
        **{"rollout.slots": slots, "rollout.save_every": 0, "filter.strategy": "none"},
        **{"optimizer.minibatches": 1, "optimizer.micro_batch": 4},
        **{"eval.episodes": 4, "eval.every": 1, "diagnose.every": 0, "report.every": 0},
        **{"checkpoint.every": 1, "checkpoint.export": False, "log.trackers": "()"},
    }
    options = [f"--config.{name}={value}" for name, value in fields.items()]

    def command(name):
        words = ("-m", "ragen_jax.train", "--config=dataset:llm", f"--workdir={name}")
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
        return subprocess.run(
            [sys.executable, *words, *options], env=environ, capture_output=True, text=True
        )

    def run(name):
        """Return (rows of the command, its output)."""
        done = command(name)
        assert done.returncode == 0, done.stderr
        rows = [
            {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))}
            for row in read_metrics(tmp_path / name / "metrics.jsonl")
        ]
        return rows, done.stdout

    whole, output = run("whole")
    # The process is killed by the third step, which begins when the first step is saved.
    (tmp_path / "kill").touch()
    killed = command("parts")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (tmp_path / "kill").unlink()
    assert 2 <= len(read_metrics(tmp_path / "parts" / "metrics.jsonl")) < len(whole)
    rows, resumed = run("parts")
    assert rows == whole
    assert "resuming parts after step " in resumed
    errors = [row["rollout/errors"] for row in whole[1:]]
    assert any(0 < count < 12 for count in errors)
    assert all(row["update/count"] for row in whole[1:])
    assert "the prompt of turn 2 has" in output and "the model has 512 positions" in output


@pytest.mark.long
def test_problems_that_raise_are_left_out_of_a_run(rooms, tmp_path, capsys):
    config = rooms(raises="number in (0, 3)")
    assert train.train(config, tmp_path / "run") == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row.get("rollout/errors") for row in rows] == [None, 4, 4]  # rooms 0 and 3
    assert [row["eval/errors"] for row in rows] == [0, 0, 0]
    line = "warning: 2 held-out problems cannot be built and are left out; first error: KeyError"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            dict(is_long="self.split == 'train'"),
            "error: none of the 256 first training problems of own_rooms:Rooms can be played; "
            "first error: PromptError: environment seed 0: the prompt of turn 1 has ",
        ),
        (
            dict(raises="self.split == 'train'"),
            "error: none of the 256 first training problems of own_rooms:Rooms can be played; "
            "first error: KeyError: 'room 0'",
        ),
        (
            dict(is_long="self.split == 'eval'"),
            "error: none of the 4 held-out problems of own_rooms:Rooms can be played; first error: "
            "PromptError: environment seed ",
        ),
        (
            dict(raises="self.split == 'eval'"),
            "error: the environment raises for all of the first 32 held-out problems; first error: "
            "KeyError: 'room 0'",
        ),
    ],
)
def test_a_run_none_of_whose_problems_can_be_played_is_refused(
    rooms, tmp_path, capsys, changes, line
):
    with pytest.raises(SystemExit) as exit_:
        train.train(rooms(**changes), tmp_path / "run")
    assert exit_.value.code == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert last_line.startswith(line)
    assert "PromptError" not in line or "raise env.max_context" in last_line


@pytest.mark.long
def test_two_environments_train_resume_and_evaluate(config, agent, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(agent.home))
    config.steps = 1
    assert train.train(config, tmp_path / "resumed") == 0
    config.steps = 2
    assert train.train(config, tmp_path / "resumed") == 0
    assert train.train(config, tmp_path / "whole") == 0
    whole, resumed = (
        [
            {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))}
            for row in read_metrics(tmp_path / name / "metrics.jsonl")
        ]
        for name in ("whole", "resumed")
    )
    last = whole[-1]
    assert resumed[-1] == last
    assert last["rollout/success"] == pytest.approx(
        (3 * last["rollout/sokoban/success"] + 2 * last["rollout/frozen_lake/success"]) / 5
    )
    for name in ("eval/success", "eval/return", "collect/groups"):
        family, rest = name.split("/", 1)
        its = [last[f"{family}/{env}/{rest}"] for env in ("sokoban", "frozen_lake")]
        assert last[name] == pytest.approx(np.mean(its))
    # This agent rarely closes a reasoning on the lake, so there may be nothing to score.
    names = [f"collapse/{env}/first_turn/mi" for env in ("sokoban", "frozen_lake")]
    assert last["collapse/first_turn/mi"] == pytest.approx(
        np.mean([last[name] for name in names if name in last])
    )
    # each environment has its own
    assert all(name + "_zscore_ema" in last for name in names if name in last)
    for env in ("sokoban", "frozen_lake"):
        assert 0 <= last[f"filter/{env}/kept_ratio"] <= 1
        assert set(read_outcomes(tmp_path / "whole" / "eval" / env)) == {0, 2}
        assert (tmp_path / "whole" / "rollouts" / env / "step_000002.jsonl").exists()
    assert last["rollout/frozen_lake/turns"] <= 2
    for name in ("regime/alarm", "regime/signs"):
        its = [last[name.replace("/", f"/{env}/")] for env in ("sokoban", "frozen_lake")]
        assert last[name] == max(its)

    # An environment's first step is the same as in a run of that environment alone.
    alone = config.copy_and_resolve_references()
    with alone.unlocked():
        alone.also = ConfigDict()
    alone.steps = 1
    assert train.train(alone, tmp_path / "alone") == 0
    before, first = read_metrics(tmp_path / "alone" / "metrics.jsonl")[:2]
    assert before["eval/success"] == whole[0]["eval/sokoban/success"]
    for name in ("rollout/return", "rollout/response_length", "filter/score_mean"):
        assert first[name] == whole[1][name.replace("/", "/sokoban/", 1)]

    policy = for_sampling(restore_run(tmp_path / "whole"))
    metrics, played = evaluate(policy.model, policy.params, policy.tasks)
    assert metrics["eval/success"] == last["eval/success"]
    assert [len(episodes) for episodes in played] == [8, 8]


def test_the_mixture_config_is_valid():
    config = check(mixture.get_config())
    assert set(per_task_configs(config)) == {"sokoban", "frozen_lake", "countdown"}
    assert len(tiny_words(config)) == len(set(tiny_words(config)))
    for preset in ("qwen2.5-0.5b", "tiny+ppo+no_filter"):
        check(mixture.get_config(preset))
