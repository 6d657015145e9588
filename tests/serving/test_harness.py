"""Training through the endpoint: the same episodes as the built-in ones, faults, programs."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from chat_families import TOOL_TEMPLATE
from cli_commands import ROOT, call
from harness_agents import TURNS, program, write_problems
from harness_plays import Played

import ragen_jax
from ragen_jax.algorithm.batch import make_batch
from ragen_jax.configs import sokoban
from ragen_jax.diagnostics.rollouts import request_metrics
from ragen_jax.envs.harness.env import TAG
from ragen_jax.envs.problems import Draws
from ragen_jax.model import hf
from ragen_jax.run.stages import errors
from ragen_jax.serving.sessions import Session

pytestmark = pytest.mark.medium
ROWS = 4096
COMMON = {
    **{"steps": 2, "rollout.groups": 4, "rollout.group_size": 2, "rollout.max_new_tokens": 24},
    **{"eval.every": 0, "report.every": 0, "filter.strategy": "none", "optimizer.minibatches": 1},
    **{"optimizer.micro_batch": 4, "rollout.save_every": 1, "diagnose.every": 1},
    **{"env.max_context": 1024, "env.max_turns": TURNS, "model.dtype": "float32"},
}


def episodes(run, step):
    path = run.workdir / "rollouts" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_agent_with_the_openai_package_gets_the_episodes_of_the_environment(agent, tmp_path):
    """Token for token, over several turns and two updates."""
    fields = {
        **COMMON,
        **{"model.path": str(agent.directory), "env.prompt": "terse", "env.context": "full"},
        **{"env.actions_per_turn": 1, "env.max_actions": TURNS, "env.strict_format": True},
        **{"rollout.stop": (), "env.format_penalty": 0.0},
    }
    config = sokoban.get_config("llm")
    config.model.path = str(agent.directory)
    ours = ragen_jax.train(config, workdir=tmp_path / "ours", overrides=fields)
    seeds = list(dict.fromkeys(e["seed"] for step in (1, 2) for e in episodes(ours, step)))
    places = [Draws(seed, 0, TAG).below(ROWS) for seed in seeds]
    assert len(set(places)) == len(seeds)
    rows = [{"row": row, "split": "train", "seed": 0} for row in range(ROWS)]
    for place, seed in zip(places, seeds, strict=True):
        rows[place]["seed"] = seed
    rows.append({"row": ROWS, "split": "eval", "seed": 0})
    options = {
        "problems": str(write_problems(tmp_path / "problems.jsonl", rows)),
        **{"function": "harness_agents:sokoban", "thinks": True, "split_field": "split"},
    }
    fields = {
        **COMMON,
        **{"model.path": str(agent.directory), "env.format_penalty": 0.0, "rollout.stop": ()},
        **{f"env.options.{name}": value for name, value in options.items()},
    }
    theirs = ragen_jax.train("harness", workdir=tmp_path / "theirs", overrides=fields)
    for step in (1, 2):
        for a, b in zip(episodes(ours, step), episodes(theirs, step), strict=True):
            assert (a["seed"], a["member"], a["success"]) == (b["seed"], b["member"], b["success"])
            for mine, other in zip(a["turns"], b["turns"], strict=True):
                assert mine["prompt_ids"] == other["prompt_ids"]
                assert mine["sampled_ids"] == other["sampled_ids"]
                np.testing.assert_allclose(mine["logps"], other["logps"], atol=2e-4)
                assert mine["reward"] == pytest.approx(other["reward"]), (mine, other)
    for name in ("update/policy_loss", "update/grad_norm", "rollout/return"):
        np.testing.assert_allclose(ours.metrics[name], theirs.metrics[name], rtol=1e-5)
    assert theirs.metrics["rollout/prefix_reuse"].tolist() == [1.0, 1.0]


ASKS = [{"ask": f"problem {i}"} for i in range(40)]


def harness_fields(model, problems, **options):
    fields = {f"env.options.{name}": value for name, value in options.items()}
    fields |= {"model.path": str(model), "env.options.problems": str(problems)}
    return {**COMMON, **fields}


@pytest.fixture(scope="module")
def run(language_model, tmp_path_factory):
    """A run of one step of an agent with one request, on a model with random weights."""
    folder = tmp_path_factory.mktemp("harness")
    problems = write_problems(folder / "problems.jsonl", ASKS)
    fields = harness_fields(language_model, problems, function="harness_agents:letters")
    fields |= {"steps": 1, "eval.every": 1, "eval.episodes": 2}
    return ragen_jax.train("harness", workdir=folder / "run", overrides=fields)


def test_a_run_is_recorded_evaluated_and_reported(run):
    for episode in episodes(run, 1):
        (turn,) = episode["turns"]
        asked, said = turn["messages"]
        assert asked["content"].startswith("problem ") and turn["prompt_exact"]
        text = said["content"]
        assert turn["reward"] == pytest.approx(text.count("e") / max(len(text), 1))
    assert np.isfinite(run.metrics["eval/return"]).all()
    assert "problem " in (run.workdir / "report.html").read_text()


@pytest.fixture(scope="module")
def policy(run):
    return run.policy()


FAULTS = {  # kind -> (number of turns, last line of the error)
    "silent": (1, "PromptError: the harness sent no request that could be answered"),
    "crash first": (1, "RuntimeError: it broke"),
    "crash": (1, "RuntimeError: it broke"),
    "hang": (1, "TimeoutError: a step took longer than 8 s"),
    # Its requests are the same until its budget is spent: the agent fails, not the environment.
    "greedy": (1, ""),
    "long": (1, ""),
    "stubborn": (1, "RuntimeError: it broke later"),
    "text": (1, "TypeError: harness_agents:faulty must return a number or a dict with `reward`"),
    "nothing": (1, "TypeError: harness_agents:faulty gave no reward"),
    "nan": (1, "ValueError: Step.reward must be a number"),
    "sound": (1, ""),
}


def test_a_fault_ends_its_own_episode(policy, tmp_path):
    rows = [{"kind": kind} for kind in FAULTS]
    start = time.monotonic()
    played = Played(policy, tmp_path, rows, time_limit=8.0, function="harness_agents:faulty")
    assert time.monotonic() - start < 45
    for kind, episode, error, reward in zip(
        FAULTS, played.episodes, played.errors, played.rewards, strict=True
    ):
        turns, expected = FAULTS[kind]
        assert len(episode.turns) == turns, kind
        assert error.startswith(expected) and bool(error) == bool(expected), (kind, error)
        assert reward == (1.0 if kind == "sound" else 0.0), kind
        for turn in episode.turns:
            assert len(turn.sampled) == len(turn.logp) == 1


def test_an_episode_sends_no_requests_after_its_end(policy, tmp_path, monkeypatch):
    """One that has exceeded its time limit is over, though others are still played."""
    order = []
    add = Session.add

    def noted(session, call):
        if not session.ended:
            order.append(session.draw[0])
        add(session, call)

    monkeypatch.setattr(Session, "add", noted)
    rows = [{"kind": "late"}, {"kind": "slow"}, {"kind": "slow"}]
    options = dict(function="harness_agents:faulty", time_limit=8.0, workers=1, max_turns=1000)
    played = Played(policy, tmp_path, rows, **options)
    assert [bool(error) for error in played.errors] == [True, False, False]
    # The second begins when the first is given up.
    assert len(order) > 4 and order == sorted(order)


def test_an_episode_does_not_depend_on_the_others(policy, tmp_path):
    """Same draws, whichever episodes run beside it, and whatever becomes of them."""
    rows = [{"kind": kind} for kind in ("sound", "crash", "hang", "sound")]
    together = Played(policy, tmp_path, rows, time_limit=8.0, function="harness_agents:faulty")
    alone = Played(policy, tmp_path, rows[:1], function="harness_agents:faulty")
    (turn,), (other,) = alone.episodes[0].turns, together.episodes[0].turns
    np.testing.assert_array_equal(turn.sampled, other.sampled)
    np.testing.assert_allclose(turn.logp, other.logp, atol=1e-5)


def test_an_asynchronous_function_may_send_requests_beside_each_other(policy, tmp_path):
    played = Played(policy, tmp_path, ASKS[:2], function="harness_agents:letters_async")
    assert played.errors == ["", ""] and played.rewards == [2.0, 2.0]
    assert all(episode.success for episode in played.episodes)
    # Both requests have the same prompt and nothing continues them: one is a retry of the other.
    assert [len(episode.turns) for episode in played.episodes] == [1, 1]
    assert all(episode.left_out > 0 for episode in played.episodes)


def test_64_requests_at_once_are_answered_and_each_token_is_trained_once_or_counted(
    policy, tmp_path
):
    played = Played(
        *(policy, tmp_path, ASKS[:3]), cut=True, max_turns=64, function="harness_agents:flood"
    )
    assert played.errors == [""] * 3
    for episode in played.episodes:
        facts = episode.turns[-1].info
        assert facts["answered"] == 64
        prompts = {turn.prompt.tobytes() for turn in episode.turns}
        assert len(episode.turns) == len(prompts) == 48  # the others are repeated prompts
        trained = sum(len(turn.sampled) for turn in episode.turns)
        assert trained + episode.left_out == facts["sampled"] and episode.left_out > 16
        assert make_batch([episode]).mask_BT.sum() == trained
    left_out = np.mean([episode.left_out for episode in played.episodes])
    assert request_metrics(played.episodes)["rollout/untrained_tokens"] == pytest.approx(left_out)


def test_a_client_that_streams_gets_the_same_episodes(policy, tmp_path, monkeypatch):
    sampled, add = [], Session.add

    def noted(session, call):
        sampled.append(len(call.sampled))
        add(session, call)

    monkeypatch.setattr(Session, "add", noted)
    whole, streams, leaves = (
        Played(
            *(policy, tmp_path, [{**row, "mode": mode} for row in ASKS[:4]]),
            **dict(cut=True, max_turns=6, function="harness_agents:talk"),
        )
        for mode in ("whole", "streams", "leaves")
    )
    assert whole.errors == streams.errors == leaves.errors == [""] * 4
    assert whole.rewards == streams.rewards
    for a, b, left in zip(whole.episodes, streams.episodes, leaves.episodes, strict=True):
        assert len(a.turns) == len(left.turns) == 3 and a.left_out == b.left_out == 0
        for mine, other in zip(a.turns, b.turns, strict=True):
            np.testing.assert_array_equal(mine.prompt, other.prompt)
            np.testing.assert_array_equal(mine.sampled, other.sampled)
            np.testing.assert_allclose(mine.logp, other.logp, atol=1e-5)
            assert mine.messages == other.messages
        # A reply that a client has left is not trained.
        assert len({turn.prompt.tobytes() for turn in left.turns}) == 3 and left.left_out >= 3
    played = [each for part in (whole, streams, leaves) for each in part.episodes]
    trained = sum(len(turn.sampled) for each in played for turn in each.turns)
    assert trained + sum(each.left_out for each in played) == sum(sampled)


def test_a_failure_after_a_reply_that_was_cut_off_is_the_agents(policy, tmp_path):
    """Some clients treat such a reply as an error."""
    rows = [{"kind": kind} for kind in ("crash", "hang", "crash first")]
    options = dict(function="harness_agents:faulty", time_limit=8.0)
    played = Played(policy, tmp_path, rows, cut=True, **options)
    assert played.errors == [
        *("", "TimeoutError: a step took longer than 8 s", "RuntimeError: it broke")
    ]
    (turn,) = played.episodes[0].turns
    assert turn.info == {"limit": "max_new_tokens: RuntimeError: it broke", "success": False}
    (fired,) = errors(policy.tasks[0], played.episodes[:1])
    assert fired.action == "warn" and "1 of 1 episodes of harness failed at a limit" in fired.reason


PROGRAMS = {  # name -> (what it does after its request, reward, last line of the error)
    "prints": ("print('thinking'); print(json.dumps({'reward': 0.5}))", 0.5, ""),
    "posts": ("post('reward', 0.25); print('not JSON')", 0.25, ""),
    "fails": ("print(1.0); sys.exit('no luck')", 0.0, "ended with status 1: no luck"),
    "silent": ("", 0.0, "gave no reward"),
    "loud": ("sys.stdout.write('x' * 10**8); print(); print(0.75)", 0.75, ""),
    "forks": ("os.fork() or __import__('time').sleep(99); print(0.5)", 0.5, ""),
    "hangs": ("__import__('time').sleep(99)", 0.0, "TimeoutError: a step took longer than 10 s"),
    "is killed": ("os.kill(os.getpid(), 9)", 0.0, "ended with status -9"),
    "secret": ("print(float('HIDDEN' in os.environ or 'PATH' not in os.environ))", 0.0, ""),
    "problem": ("print(problem['row'])", 9.0, ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_plays(policy, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HIDDEN", "x")
    rest, reward, error = PROGRAMS[name]
    file = tmp_path / "agent.py"
    file.write_text(program(rest))
    rows = [{"name": name}] * 10
    rows = rows if name == "problem" else rows[:1]
    played = Played(policy, tmp_path, rows, time_limit=10.0, command=f"{sys.executable} {file}")
    assert played.rewards[-1] == reward
    assert error in played.errors[-1] and bool(error) == bool(played.errors[-1])
    assert not left_behind(str(file))


def left_behind(file):
    """Processes that still run a file."""
    found = subprocess.run(["pgrep", "-f", file], capture_output=True, text=True)
    return found.stdout.split()


PAGE = ROOT / "docs/environments/harness.md"


def test_the_example_of_the_page(language_model, tmp_path, monkeypatch):
    """Its agent and its problems, through the command of the page."""
    text = dict(re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.S))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_agent.py").write_text(text["python"])
    asked = [{"question": f"What is {i} + 2?", "answer": i + 2, "row": i} for i in range(30)]
    write_problems(
        tmp_path / "problems.jsonl", [*map(json.loads, text["json"].split("\n")[:-1]), *asked]
    )
    # A model whose template shows tools.
    model, params, tokenizer = hf.load(language_model)
    tokenizer.chat_template = TOOL_TEMPLATE
    hf.save(tmp_path / "model", model, params, tokenizer)
    command = (
        text["bash"].replace("\\\n", " ").replace("DIR_OR_HUB_ID", "model").split("python -m")[1]
    )
    short = [f"--config.{name}={value}" for name, value in COMMON.items() if name != "steps"]
    words = [*shlex.split(command), "--config.steps=1", "--workdir=run", *short]
    code, out, err = call(*words)
    assert code == 0, err
    lines = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    (turn, *_) = json.loads(lines[0])["turns"]
    assert turn["tools"][0]["function"]["name"] == "add" and turn["prompt_exact"]


class Killed(Exception):
    pass


def test_a_run_that_ends_between_steps_resumes_with_the_same_figures(language_model, tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", ASKS)
    fields = harness_fields(language_model, problems, function="harness_agents:letters")
    fields |= {"checkpoint.every": 1}
    whole = ragen_jax.train("harness", workdir=tmp_path / "whole", overrides=fields)

    def stop(row):
        if row["step"] == 1:
            raise Killed

    with pytest.raises(Killed):
        ragen_jax.train("harness", workdir=tmp_path / "cut", overrides=fields, on_step=stop)
    resumed = ragen_jax.train(workdir=tmp_path / "cut")
    for name in ("rollout/return", "update/policy_loss", "rollout/untrained_tokens"):
        np.testing.assert_array_equal(whole.metrics[name], resumed.metrics[name])
    for a, b in zip(episodes(whole, 2), episodes(resumed, 2), strict=True):
        assert [t["sampled_ids"] for t in a["turns"]] == [t["sampled_ids"] for t in b["turns"]]


@pytest.mark.long
def test_a_run_that_is_killed_in_a_rollout_resumes_with_the_same_figures(language_model, tmp_path):
    """By SIGKILL, in the middle of an episode of step 2."""
    problems = write_problems(tmp_path / "problems.jsonl", ASKS)
    fields = harness_fields(language_model, problems, function="harness_agents:mortal")
    fields |= {"checkpoint.every": 1}
    whole = ragen_jax.train("harness", workdir=tmp_path / "whole", overrides=fields)

    words = ["--config=harness", f"--workdir={tmp_path / 'cut'}"]
    words += [f"--config.{name}={value}" for name, value in fields.items()]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    saved = str(tmp_path / "cut/checkpoints/1")
    killed = subprocess.run(
        [sys.executable, "-m", "ragen_jax.train", *words],
        env={**os.environ, "PYTHONPATH": paths, "KILLED_IN": "11", "KILLED_AFTER": saved},
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "step 1/2" in killed.stdout and "step 2/2" not in killed.stdout
    assert not (tmp_path / "cut/rollouts/step_000002.jsonl").exists()

    resumed = ragen_jax.train(workdir=tmp_path / "cut")
    for a, b in zip(whole.rows, resumed.rows, strict=True):
        differ = {
            name: (a.get(name), b.get(name)) for name in {*a, *b} if a.get(name) != b.get(name)
        }
        assert all(name.startswith(MEASURED) for name in differ), differ
    for step in (1, 2):
        for a, b in zip(episodes(whole, step), episodes(resumed, step), strict=True):
            assert len(a["turns"]) == 2
            assert [t["sampled_ids"] for t in a["turns"]] == [t["sampled_ids"] for t in b["turns"]]


MEASURED = ("time/", "throughput/")


def test_check_data_does_not_run_the_program(tmp_path):
    problems = write_problems(tmp_path / "problems.jsonl", ASKS)
    code, out, err = call(
        *("ragen_jax.check_data", "--config=harness", f"--config.env.options.problems={problems}"),
        "--config.env.options.function=harness_agents:faulty",
    )
    assert (code, err) == (0, "")
    assert "the problems are played by a program, which is not run here" in out
    assert '{"ask": "problem ' in out
