"""The success and reward of answers that need no reading, for every environment and task.

    python -m benchmarks.floors > docs/floors.md
    python -m benchmarks.floors coin_flip frozen_lake      a table of these names only

Each task of reasoning-gym and each environment whose problems need no file is played on PROBLEMS
problems of each of the splits train and eval:

    text      with constants, pieces of the question, enumerations that hedge, and the most frequent
              right answers
    actions   with each action repeated, with all of them in turn, and with random ones

A constant that is right by chance (the majority of yes and no) is the floor of the task. A constant
that earns more than the fraction of problems for which it is right shows a fault of the grader
(`Floor.unearned`).
"""

import argparse
import importlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.reasoning_gym_tasks import ReasoningGym, package

PROBLEMS = 200  # number of problems of each split
SPLITS = ("train", "eval")
SECONDS = 30.0  # CPU time per task; slow tasks are measured on fewer problems
FREQUENT = 5  # number of frequent right answers that are tried on all problems
MAX_ACTIONS = 12  # maximum number of action words that are tried one by one
# Environments without their own problems: these are the user's, or those of tasks.
FOREIGN = ("dataset", "gymnasium", "reasoning_gym", "textarena")
INTRODUCTION = resources.files(__package__).joinpath("floors.md")

CONSTANTS = (
    *("", ".", "-", ",", "the", "a", "x", "I", "0", "1", "-1", "2", "3", "4", "5", "10", "100"),
    *("0.0", "0.5", "1/2", "1.0", "True", "False", "true", "Yes", "No", "yes", "None", "null"),
    *("[]", "[0]", "[[]]", "[[0]]", "{}", "()", '""', "nan", "inf", "answer", "I do not know"),
    *("0 0", "0,0", "0\n0", "A", "B", "U", "UP", "north", "impossible", "Monday", "10 days"),
    *("12:00", "12:00:00", "1 days, 12:00", "search[]", "finish[]", "search[the]", "_"),
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_WORD = re.compile(r"\w+")


def _last(found: list[str]) -> str:
    return found[-1] if found else ""


def _paragraph(question: str) -> str:
    return _last([part for part in question.split("\n\n") if part.strip()])


# name: question -> answer, computed from the question's text alone
COPIES: dict[str, Callable[[str], str]] = {
    "the question": lambda q: q,
    "the question twice": lambda q: f"{q}\n{q}",
    "its first half": lambda q: q[: len(q) // 2],
    "its second half": lambda q: q[len(q) // 2 :],
    "its first 20 characters": lambda q: q[:20],
    "its first line": lambda q: q.split("\n")[0],
    "its last line": lambda q: _last([line for line in q.splitlines() if line.strip()]),
    "its last paragraph": _paragraph,
    "its last paragraph, blanks as 1": lambda q: re.sub(r"[_*.?]", "1", _paragraph(q)),
    "its last paragraph, digits as 0": lambda q: re.sub(r"\d", "0", _paragraph(q)),
    "what follows its last colon": lambda q: q.rpartition(":")[2],
    "its first word": lambda q: _WORD.findall(q + " x")[0],
    "its last word": lambda q: _last(_WORD.findall(q)),
    "its first number": lambda q: (_NUMBER.findall(q) or [""])[0],
    "its last number": lambda q: _last(_NUMBER.findall(q)),
    "its numbers": lambda q: " ".join(_NUMBER.findall(q)),
    "its words": lambda q: " ".join(_WORD.findall(q)),
    "its last quotation": lambda q: _last(re.findall(r"[\"'`]([^\"'`\n]+)[\"'`]", q)),
    "its last list": lambda q: _last(re.findall(r"\[[^\[\]]*\]", q)),
    "0 to 9": lambda q: " ".join(map(str, range(10))),
    "0 to 999": lambda q: " ".join(map(str, range(1000))),
    "A to Z": lambda q: " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "Yes No True False": lambda q: "Yes No True False",
    "0 or 1": lambda q: "0 or 1",
}


@dataclass(frozen=True)
class Floor:
    """The success and reward of the best answers that need no reading.

    problems: number of problems played
    success: (name, fraction of solved problems) of the answer with the highest success
    score: (name, mean return of an episode) of the answer with the highest return
    unearned: (name, fraction of the problems that it solves without being their right answer, plus
        its mean reward for other problems) of the answer with the highest such value; ("", 0.0) if
        the right answers are unknown
    """

    name: str
    problems: int
    success: tuple[str, float]
    score: tuple[str, float]
    unearned: tuple[str, float] = ("", 0.0)


def of_answers(name: str, envs: list[Any], problems: int, seconds: float) -> Floor:
    """Return the floor of environments whose actions are texts.

    Args:
      envs: environments of the same task, one per split; their problems are played in turn.
      problems: number of problems of each environment.
      seconds: CPU time after which no further problem is played.
    """
    start, drawn = time.process_time(), []
    for seed in range(problems):
        drawn += [(env, env.reset(seed)) for env in envs]
        if time.process_time() - start > seconds / 2:
            break
    shown = [str(env.render(state)) for env, state in drawn]
    right = [_right(env, state) for env, state in drawn]
    frequent = Counter(text for text in right if text is not None).most_common(FREQUENT)
    answers = {ascii(text): lambda q, text=text: text for text in CONSTANTS}
    answers |= COPIES | {ascii(text): lambda q, text=text: text for text, _ in frequent}
    for count in (2, FREQUENT):
        hedge = " ".join(text for text, _ in frequent[:count])
        answers[f"the {count} most frequent answers"] = lambda q, hedge=hedge: hedge
    won, earned, unearned = Counter(), Counter(), Counter()
    start, played = time.process_time(), 0
    for (env, state), question, known in zip(drawn, shown, right, strict=True):
        for label, answer in answers.items():
            said = answer(question).strip()
            step = env.step(state, said, np.random.default_rng(0))
            success = bool(step.info["success"])
            won[label] += success
            earned[label] += step.reward
            unearned[label] += 0.0 if _same(said, known) else max(step.reward, float(success))
        played += 1
        if time.process_time() - start > seconds:
            break
    return Floor(name, played, *(_best(count, played) for count in (won, earned, unearned)))


def of_actions(name: str, envs: list[Any], problems: int, seconds: float, budget: int) -> Floor:
    """Return the floor of environments with action words.

    Args:
      envs, problems, seconds: as in `of_answers`.
      budget: maximum number of actions of an episode.
    """
    words = envs[0].actions
    policies = {f"always {word}": [word] * budget for word in words[:MAX_ACTIONS]}
    policies["all in turn"] = [words[i % len(words)] for i in range(budget)]
    policies["random"] = []
    won, earned, played = Counter(), Counter(), 0
    start = time.process_time()
    for seed in range(problems):
        for env in envs:
            rng = np.random.default_rng(seed)
            for label, plan in policies.items():
                plan = plan or [words[i] for i in rng.integers(len(words), size=budget)]
                success, total = _episode(env, env.reset(seed), plan, seed)
                won[label] += success
                earned[label] += total
            played += 1
        if time.process_time() - start > seconds:
            break
    return Floor(name, played, _best(won, played), _best(earned, played))


def of_task(task: str, problems: int = PROBLEMS, seconds: float = SECONDS) -> Floor:
    """Return the floor of a task of reasoning-gym with its defaults."""
    envs = [ReasoningGym(task=task, split=split) for split in SPLITS]
    return of_answers(task, envs, problems, seconds)


def of_environment(name: str, problems: int = PROBLEMS, seconds: float = SECONDS) -> Floor:
    """Return the floor of an environment with the options and the budget of its tiny preset."""
    config = importlib.import_module(f"ragen_jax.configs.{name}").get_config()
    options = config.env.options.to_dict()
    envs = [make_env(name, split=split, **options) for split in SPLITS]
    if envs[0].actions:
        return of_actions(name, envs, problems, seconds, config.env.max_actions)
    return of_answers(name, envs, problems, seconds)


def _episode(env: Any, state: Any, plan: list[str], seed: int) -> tuple[bool, float]:
    """Play a plan to its end; return (whether an action solved the problem, sum of rewards)."""
    rng, success, total = np.random.default_rng(seed), False, 0.0
    for action in plan:
        step = env.step(state, action, rng)
        state, total = step.state, total + step.reward
        success = success or bool(step.info["success"])
        if step.done:
            break
    return success, total


def _right(env: Any, state: Any) -> str | None:
    """Return the right answer of a problem, if the environment knows it and it is one text."""
    if isinstance(env, ReasoningGym):
        return state.entry["answer"]
    plan = env.solve(state)
    return plan[0] if plan and len(plan) == 1 else None


def _same(said: str, right: str | None) -> bool:
    """Return whether two answers are the same text or number, ignoring brackets and quotes."""
    if right is None:
        return False
    one, other = (" ".join(text.lower().split()).strip("[](){}\"'") for text in (said, right))
    if one == other:
        return True
    try:
        return float(one.replace(",", "")) == float(other.replace(",", ""))
    except ValueError:
        return False


def _best(count: Counter[str], played: int) -> tuple[str, float]:
    label = max(count, key=lambda label: count[label])
    return label, count[label] / played


def row(floor: Floor) -> str:
    """Return the line of a task or environment in the table."""
    (one, success), (other, score), (worst, unearned) = floor.success, floor.score, floor.unearned
    names = [_cell(label) if value > 0 else "" for label, value in ((one, success), (other, score))]
    return (
        f"| `{floor.name}` | {floor.problems} | {success:.3f} | {names[0]} | {score:.3f} | "
        f"{names[1]} | {unearned:.3f} | {_cell(worst) if unearned > 0 else ''} |"
    )


def _cell(label: str) -> str:
    short = label if len(label) <= 32 else label[:30] + "..."
    return short.replace("|", "\\|").replace("`", "")


def main(argv: list[str] | None = None) -> None:
    """Print the page, or the rows of the names given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tasks of reasoning-gym, or environments")
    names = parser.parse_args(argv).names
    tasks = sorted(set(package.load().DATASETS) - set(package.REFUSED))
    environments = [name for name in sorted(ENVS) if name not in FOREIGN]
    if not names:
        print(INTRODUCTION.read_text(encoding="utf-8"))
    for title, known, measure in (
        ("Environments", environments, of_environment),
        ("Tasks of reasoning-gym", tasks, of_task),
    ):
        chosen = [name for name in known if not names or name in names]
        if not chosen:
            continue
        print(f"## {title}\n")
        print("| name | problems | success | by | mean return | by | unearned | by |")
        print("| --- | ---: | ---: | --- | ---: | --- | ---: | --- |")
        for name in chosen:
            print(row(measure(name)), flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
