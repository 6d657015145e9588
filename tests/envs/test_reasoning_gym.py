"""reasoning-gym: contract and options, every accepted task in two processes, hostile answers."""

import contextlib
import dataclasses
import decimal
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

pytest.importorskip("reasoning_gym")

from ragen_jax.config.auto_fields import fill_auto_fields
from ragen_jax.config.build_environment import build_chat, build_environment, environment_settings
from ragen_jax.config.check import check
from ragen_jax.configs import presets, reasoning_gym
from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.reasoning_gym_tasks import Problem, ReasoningGym, package
from ragen_jax.envs.reasoning_gym_tasks import env as tasks_env
from ragen_jax.envs.types import Environment, SolvableEnvironment
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.run.datasets import demonstrations

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
TASKS = sorted(set(package.load().DATASETS) - set(package.REFUSED))
NO_ORACLE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
SUM = Problem(0, "What is 2 + 3?", {"question": "What is 2 + 3?", "answer": "5", "metadata": {}})
CANARY = "canary_31415 + 1"


@functools.cache
def playing(task):
    return ReasoningGym(task=task, split=None)


def problems_digest(task: str) -> str:
    """Digest of three problems: questions, answers, and the rewards of these and other answers."""
    env = playing(task)
    said = []
    for seed in range(3):
        state = env.reset(seed)
        answers = ("0", "A", *(env.solve(state) or ()))
        scores = [env.step(state, answer).reward for answer in answers]
        said.append([state.index, state.question, state.entry["answer"], scores])
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def who_evaluates(factory, tasks) -> list[str]:
    """The tasks whose scorer compiles the answer. The audit hook stays, so use a new process."""
    seen = []
    sys.addaudithook(lambda name, args: name == "compile" and seen.append(str(args[0])))
    found = []
    for task in tasks:
        size = package.items(task) if task in TASKS else 500
        dataset = factory.create_dataset(task, seed=0, size=size)
        seen.clear()
        with contextlib.suppress(Exception):
            dataset.score_answer(CANARY, dataset[0])
        found += [task] * any("canary_31415" in source for source in seen)
    return found


def in_a_fresh_process() -> dict:
    """Output of a separate process: digests of all tasks, last task first, and who evaluates."""
    digests = {task: problems_digest(task) for task in reversed(TASKS)}
    evaluates = package.REFUSED["n_queens"]
    refused = [task for task, reason in package.REFUSED.items() if reason == evaluates]
    evaluated = who_evaluates(package.load(), [*TASKS, *refused])
    return {"digests": digests, "evaluated": evaluated, "refused": refused}


@pytest.fixture(scope="module")
def fresh():
    code = f"import json, runpy; print(json.dumps(runpy.run_path({__file__!r})['{{}}']()))"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code.format("in_a_fresh_process")],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


# ---- contract -----------------------------------------------------------------------------------


def test_contract_and_registry():
    env = make_env("reasoning_gym", task="leg_counting", split="eval")
    assert isinstance(env, Environment) and isinstance(env, SolvableEnvironment)
    assert env.actions == ()
    assert ENVS["reasoning_gym"] is ReasoningGym
    assert env.render(env.reset(0)) == env.reset(0).question
    assert "<" not in env.instructions and "{" not in env.instructions
    assert "tries" not in env.instructions
    assert "You have 3 tries" in ReasoningGym(attempts=3).instructions
    with pytest.raises(ValueError, match=r"'tasks'.*accepted: task, level, settings, attempts"):
        make_env("reasoning_gym", tasks="gcd")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"task": "chain_sums"}, "got 'chain_sums'; near: chain_sum, decimal_chain_sum"),
        ({"task": "wxyz"}, r"got 'wxyz'; docs/reasoning_gym.md lists them"),
        ({"task": None}, "task must be one of reasoning-gym's, got None"),
        ({"task": ["gcd"]}, r"got \['gcd'\]"),
        ({"task": "countdown"}, "'countdown' is refused: its scorer evaluates the answer"),
        ({"task": "composite"}, "'composite' is refused: it combines other tasks"),
        ({"level": -1}, "level must be .*at least 0, got -1"),
        ({"level": 99}, r"level must be .*at most 11, got 99 \(task 'chain_sum' has 11 levels\)"),
        ({"level": 1.0}, "level must be .*got 1.0"),
        ({"task": "acre", "level": 1}, "at most 0, got 1 .*'acre' has no levels"),
        ({"settings": 3}, "settings must be a mapping or None, got 3"),
        ({"settings": {"terms": 3}}, "has 'terms'; accepted: min_terms, max_terms, min_digits"),
        ({"settings": {"seed": 3}}, "has 'seed'; accepted: min_terms"),
        ({"settings": {"min_terms": 0}}, "does not take .*min_terms must be positive"),
        ({"settings": {"min_terms": float("nan")}}, "does not take .*'min_terms': nan"),
        ({"settings": {"min_terms": "3"}}, "does not take .*TypeError"),
        ({"settings": {"min_digits": 1.5}}, "makes no problem with .*'min_digits': 1.5"),
        ({"attempts": 0}, "attempts must be .*at least 1, got 0"),
        ({"attempts": 21}, "attempts must be .*at most 20, got 21"),
        ({"split": "test"}, "split must be one of 'imitation', 'train', 'eval', None, got 'test'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        ReasoningGym(**options)
    assert "\n" not in str(raised.value)


def test_a_missing_package_and_another_version_are_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"installed: none\): pip install 'ragen_jax\[gym\]'"):
        ReasoningGym()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2")
    with pytest.raises(ValueError, match=r"needs reasoning-gym 0.1.25 \(installed: 0.2\)"):
        ReasoningGym()
    assert f'"reasoning-gym=={package.VERSION}"' in (ROOT / "setup.py").read_text()


@pytest.mark.long
def test_the_package_is_imported_when_the_environment_is_built():
    code = "import sys, ragen_jax.envs; print('reasoning_gym' in sys.modules)"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def test_bad_seeds_are_refused():
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="seed"):
            ReasoningGym().reset(seed)
    ReasoningGym().reset(np.int64(2**63 - 1))


def test_state_is_frozen_and_hashable():
    state = ReasoningGym().reset(0)
    again = ReasoningGym().reset(0)
    assert state == again and len({state, again}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.attempt = 3


def test_levels_and_settings_reach_the_task():
    digits = {"min_digits": 3, "max_digits": 3, "max_terms": 2}
    assert len(ReasoningGym(settings=digits).reset(0).question.split(": ")[1]) == len("123 + 456 =")
    easy, hard = (ReasoningGym(level=level) for level in (1, 11))
    lengths = [[len(env.reset(seed).question) for seed in range(20)] for env in (easy, hard)]
    assert max(lengths[0]) < min(lengths[1])
    longer = ReasoningGym(level=1, settings={"min_terms": 30, "max_terms": 30})
    assert longer.reset(0).question.count(" + ") + longer.reset(0).question.count(" - ") == 29


# ---- answers ------------------------------------------------------------------------------------


def test_attempts_halve_and_an_episode_earns_its_best_answer():
    env = ReasoningGym(task="leg_counting", attempts=3)
    start = env.reset(1)
    (right,) = env.solve(start)
    first = env.step(start, right)
    assert first.reward == 1 and first.done and first.info["success"]
    wrong = env.step(start, "none")
    assert wrong.reward == 0 and not wrong.done and not wrong.info["success"]
    assert env.render(wrong.state) == (
        f"{start.question}\nYour last answer was not right. This is try 2 of 3."
    )
    assert env.identity(wrong.state) == env.identity(start) and env.solve(wrong.state) == (right,)
    second = env.step(wrong.state, right)
    assert second.reward == 0.5 and second.done
    third = env.step(env.step(wrong.state, "none").state, right)
    assert third.reward == 0.25 and third.done
    last = env.step(env.step(wrong.state, "none").state, "none")
    assert last.reward == 0 and last.done and not last.info["success"]
    assert env.step(start, right) == first  # states do not change
    # An answer that contains the right answer earns a part of its score, which is not paid twice.
    near = f"it is {right}"
    part = env.step(start, near)
    assert 0 < part.reward == len(right) / len(near) < 0.5 and part.info["score"] == part.reward
    more = env.step(part.state, right)
    assert part.reward + more.reward == 0.5 and more.info["success"]
    assert env.step(part.state, near).reward == 0
    assert ReasoningGym(task="leg_counting").step(start, "none").done


def score_with(monkeypatch, scorer):
    env = ReasoningGym()
    monkeypatch.setattr(env, "_dataset", type("Task", (), {"score_answer": scorer})())
    return env.step(SUM, "5")


def test_what_a_scorer_may_do(monkeypatch):
    """Raise, exhaust the stack, return nonsense, change the item, or change the decimal context."""

    def raises(self, answer, entry):
        raise KeyError(answer)

    def recurses(self, answer, entry):
        return recurses(self, answer, entry)

    nothing = {"success": False, "score": 0.0, "unreadable": True}
    for scorer in (raises, recurses, lambda *_: float("nan"), lambda *_: None):
        step = score_with(monkeypatch, scorer)
        assert step.reward == 0 and step.done and step.info == nothing
    for score, reward in ((-1, 0.0), (7, 1.0), (0.4, 0.4), (True, 1.0)):
        step = score_with(monkeypatch, lambda *_, score=score: score)
        assert step.reward == reward and type(step.reward) is float
        assert step.info == {"success": reward == 1, "score": reward, "unreadable": False}

    def meddles(self, answer, entry):
        entry["metadata"]["seen"] = True
        decimal.getcontext().prec = 2
        return 1.0

    assert score_with(monkeypatch, meddles).reward == 1
    assert SUM.entry["metadata"] == {} and decimal.getcontext().prec == 28


def test_making_problems_changes_nothing_outside():
    """decimal_arithmetic sets the precision of all decimals."""
    decimal.getcontext().prec = 30
    before = np.random.get_state()[1].tolist()
    env = ReasoningGym(task="decimal_arithmetic", split=None)
    problem = env.reset(0)
    env.step(problem, "1.5")
    assert decimal.getcontext().prec == 30 and np.random.get_state()[1].tolist() == before
    decimal.getcontext().prec = 28


def test_the_package_prints_nothing(capfd):
    env = playing("bf")
    for seed in range(5):
        env.reset(seed)
    assert capfd.readouterr() == ("", "")


def test_answers_that_a_scorer_would_pay_for():
    env = playing("number_sorting")
    for seed in range(5):
        state = env.reset(seed)
        count = len(state.entry["metadata"]["sorted_numbers"])
        for nan in ("NaN", '"nan"', "'NAN'"):
            assert env.step(state, f"[{', '.join([nan] * count)}]").info["unreadable"]
    for answer in ("nan", "NaN", "nan + 3i"):
        env = playing("complex_arithmetic")
        assert env.step(env.reset(0), answer).info["unreadable"]
    env = playing("coin_flip")
    for answer in ("1e99999999", "1E-99999999"):
        assert env.step(env.reset(0), answer).info["unreadable"]


HOSTILE = (
    *("", "x" * 100_000, "é\u0661\U0001f600\u202e", "\ud800", "\x00", "9**9**9**9"),
    *("__import__('os')", "nan", "-inf", "1e99999999", "1e-99999999", "1/0", "(" * 10_000),
    *("[" * 10_000, "9" * 10_000, "{}", "[[null]]", '{"a": 1}', "UDLR" * 2500, "R " * 5000),
    *("1," * 5000, "\n" * 5000, "~" * 5000 + "A"),
)


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_hostile_answers_are_harmless_and_fast(task):
    env = playing(task)
    state = env.reset(0)
    if state.entry["answer"] in ("0", "1"):
        state = env.reset(1)
    for answer in HOSTILE:
        start = time.process_time()
        step = env.step(state, answer)
        assert time.process_time() - start < 2, answer[:20]
        assert step.done and 0 <= step.reward < 1 and not step.info["success"], answer[:20]


# ---- every task ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_problems_are_the_same_in_a_fresh_process(task, fresh):
    assert problems_digest(task) == fresh["digests"][task]


@pytest.mark.long
def test_no_accepted_scorer_compiles_the_answer(fresh):
    assert len(fresh["refused"]) == 9
    assert sorted(fresh["evaluated"]) == sorted(fresh["refused"])


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_own_answer_is_right(task):
    env = playing(task)
    for seed in range(3):
        state = env.reset(seed)
        env.render(state).encode()
        plan = env.solve(state)
        if task in NO_ORACLE:
            assert plan is None and not hasattr(env, "words")
        else:
            step = env.step(state, *plan)
            assert step.reward == 1 and step.info == {
                **{"success": True, "score": 1.0, "unreadable": False}
            }
            assert env.explain(state, plan).endswith(f" so {plan[0]}")


def test_splits_share_no_question():
    found = {}
    for split in SPLITS:
        env = ReasoningGym(level=1, split=split)  # few enough problems that many repeat
        found[split] = {env.identity(env.reset(seed)) for seed in range(200)}
        assert len(found[split]) > 20
    for a, b in itertools.combinations(SPLITS, 2):
        assert not found[a] & found[b]
    env = ReasoningGym()
    spaced = Problem(0, " What  is\n2 + 3?", {})
    assert env.identity(spaced) == env.identity(SUM) == "What is 2 + 3?"


def test_too_few_questions_are_named(monkeypatch):
    monkeypatch.setattr(tasks_env, "MAX_DRAWS", 20)
    same = {"min_n": 5, "max_n": 5}
    errors = []
    for split in SPLITS:
        try:
            ReasoningGym(task="count_bits", settings=same, split=split).reset(4)
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) == 2  # its only question belongs to one split
    assert all("no problem found in 20 draws for seed=4, task='count_bits'" in e for e in errors)
    env, drawn = ReasoningGym(), []

    class Empty(dict):
        def __missing__(self, index):
            drawn.append(index)
            raise KeyError(index)

    monkeypatch.setattr(env, "_dataset", Empty())
    with pytest.raises(ValueError, match="the last item that was not made: KeyError"):
        env.reset(0)
    assert len(drawn) == 20


# ---- configs and the tiny agent -----------------------------------------------------------------


@pytest.mark.medium
@pytest.mark.parametrize("task", reasoning_gym.SHORT)
def test_short_tasks_are_within_the_tiny_agents_reach(task, tmp_path):
    config = reasoning_gym.get_config()
    config.env.options.task = task
    config.env.options.settings = ConfigDict(reasoning_gym.SHORT[task])
    check(config)
    environment = build_environment(config.env, "imitation")
    tokenizer = build_tokenizer(environment.words)
    assert len(environment.words) < 400
    chat = build_chat(config, tokenizer, environment)
    shown = demonstrations(
        environment,
        rooms=60,
        plan_moves=1,
        actions_per_turn=1,
        max_turns=1,
        max_actions=1,
        settings=environment_settings(config.env),
        directory=tmp_path,
    )
    for seed, turn in enumerate(shown, 1 << 61):
        ids = tokenizer.encode(turn["reply"], add_special_tokens=False)
        assert len(ids) < config.rollout.max_new_tokens  # leaves room for the stop token
        assert len(tokenizer.encode(turn["observation"])) < 60
        (answer,) = chat.read([*ids, chat.close_id]).actions
        assert environment.step(environment.reset(seed), answer).info["success"]
    heldout = build_environment(config.env, "eval")
    assert len({heldout.identity(heldout.reset(seed)) for seed in range(200)}) > 170


@pytest.mark.medium
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_preset_is_accepted(preset, language_model):
    config = reasoning_gym.get_config(preset)
    if preset == "llm":
        config.model.path = str(language_model)
    fill_auto_fields(config, jax.devices())
    check(config)
    assert build_environment(config.env, "train").reset(0).attempt == 1
