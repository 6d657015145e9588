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

As in training, an episode whose environment raises is broken: it is counted and left out of the
fractions and means, and a line on standard error reports the number and the first error. A problem
that cannot begin is one broken episode.
"""

import argparse
import importlib
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.pages import read_introduction
from ragen_jax.core.clean_text import last_line
from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.reasoning_gym_tasks import ReasoningGym, package
from ragen_jax.rollout.env_calls import EnvFailure, attempt

PROBLEMS = 200  # number of problems of each split
SPLITS = ("train", "eval")
SECONDS = 30.0  # CPU time per task; slow tasks are measured on fewer problems
FREQUENT = 5  # number of frequent right answers that are tried on all problems
MAX_ACTIONS = 12  # maximum number of action words that are tried one by one
# Environments without their own problems: these are the user's, or those of tasks.
FOREIGN = ("dataset", "gymnasium", "reasoning_gym", "textarena")

CONSTANTS = (
    *("", ".", "-", ",", "the", "a", "x", "I", "0", "1", "-1", "2", "3", "4", "5", "10", "100"),
    *("0.0", "0.5", "1/2", "1.0", "True", "False", "true", "Yes", "No", "yes", "None", "null"),
    *("[]", "[0]", "[[]]", "[[0]]", "{}", "()", '""', "nan", "inf", "answer", "I do not know"),
    *("0 0", "0,0", "0\n0", "A", "B", "U", "UP", "north", "impossible", "Monday", "10 days"),
    *("12:00", "12:00:00", "1 days, 12:00", "search[]", "finish[]", "search[the]", "_"),
)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_WORD = re.compile(r"\w+")


def _last(parts: list[str]) -> str:
    return parts[-1] if parts else ""


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
    episodes: number of episodes, the broken ones included
    errors: traceback of each broken episode
    """

    name: str
    problems: int
    success: tuple[str, float]
    score: tuple[str, float]
    unearned: tuple[str, float] = ("", 0.0)
    episodes: int = 0
    errors: tuple[str, ...] = ()


class _Tally:
    """The results of each answer over its sound episodes, and the errors of the broken ones."""

    def __init__(self) -> None:
        self.sound: Counter[str] = Counter()  # answer -> number of episodes that did not break
        self.successes: Counter[str] = Counter()
        self.returns: dict[str, float] = defaultdict(float)
        self.unearned: dict[str, float] = defaultdict(float)
        self.errors: list[str] = []

    def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of `call`; None, and the error is kept, if the environment raises."""
        result = attempt(call)
        if isinstance(result, EnvFailure):
            self.errors.append(result.traceback)
            return None
        return result

    def add(self, label: str, result: tuple[bool, float] | None, *, is_right: bool = False) -> None:
        """Add the (success, return) of an episode; None: it broke.

        is_right: whether the answer is the problem's right answer, so that it has earned its reward
        """
        if result is None:
            return
        success, total = result
        self.sound[label] += 1
        self.successes[label] += success
        self.returns[label] += total
        self.unearned[label] += 0.0 if is_right else max(total, float(success))

    def best(self, values: Mapping[str, float]) -> tuple[str, float]:
        """Return the answer with the highest mean over its sound episodes, and that mean."""
        means = {label: values[label] / count for label, count in self.sound.items()}
        return max(means.items(), key=lambda item: item[1], default=("", 0.0))

    def floor(self, name: str, played: int, *, unearned: bool) -> Floor:
        return Floor(
            name,
            played,
            self.best(self.successes),
            self.best(self.returns),
            self.best(self.unearned) if unearned else ("", 0.0),
            self.sound.total() + len(self.errors),
            tuple(self.errors),
        )


def measure_answers(name: str, envs: list[Any], problems: int, seconds: float) -> Floor:
    """Return the floor of environments whose actions are texts.

    Args:
      envs: environments of the same task, one per split; their problems are played in turn.
      problems: number of problems of each environment.
      seconds: CPU time after which no further problem is played.
    """
    start, drawn, tally = time.process_time(), [], _Tally()
    for seed in range(problems):
        for env in envs:
            problem = tally.run(lambda env=env, seed=seed: _begin(env, seed))
            if problem is not None:
                drawn.append(problem)
        if time.process_time() - start > seconds / 2:
            break
    frequent = Counter(right for *_, right in drawn if right is not None).most_common(FREQUENT)
    answers = {ascii(text): lambda q, text=text: text for text in CONSTANTS}
    answers |= COPIES | {ascii(text): lambda q, text=text: text for text, _ in frequent}
    for count in (2, FREQUENT):
        hedge = " ".join(text for text, _ in frequent[:count])
        answers[f"the {count} most frequent answers"] = lambda q, hedge=hedge: hedge
    start, played = time.process_time(), 0
    for env, state, question, right in drawn:
        for label, answer in answers.items():
            plan = [answer(question).strip()]
            result = tally.run(lambda env=env, state=state, plan=plan: _play(env, state, plan, 0))
            tally.add(label, result, is_right=_is_same(plan[0], right))
        played += 1
        if time.process_time() - start > seconds:
            break
    return tally.floor(name, played, unearned=True)


def measure_actions(
    name: str, envs: list[Any], problems: int, seconds: float, budget: int
) -> Floor:
    """Return the floor of environments with action words.

    Args:
      envs, problems, seconds: as in `measure_answers`.
      budget: maximum number of actions of an episode.
    """
    words = envs[0].actions
    policies = {f"always {word}": [word] * budget for word in words[:MAX_ACTIONS]}
    policies["all in turn"] = [words[i % len(words)] for i in range(budget)]
    policies["random"] = []
    start, played, tally = time.process_time(), 0, _Tally()
    for seed in range(problems):
        for env in envs:
            rng = np.random.default_rng(seed)
            for label, plan in policies.items():
                plan = plan or [words[i] for i in rng.integers(len(words), size=budget)]

                def play(env=env, plan=plan, seed=seed):
                    return _play(env, env.reset(seed), plan, seed)

                tally.add(label, tally.run(play))
            played += 1
        if time.process_time() - start > seconds:
            break
    return tally.floor(name, played, unearned=False)


def measure_task(task: str, problems: int = PROBLEMS, seconds: float = SECONDS) -> Floor:
    """Return the floor of a task of reasoning-gym with its defaults."""
    envs = [ReasoningGym(task=task, split=split) for split in SPLITS]
    return measure_answers(task, envs, problems, seconds)


def measure_environment(name: str, problems: int = PROBLEMS, seconds: float = SECONDS) -> Floor:
    """Return the floor of an environment with the options and the budget of its tiny preset."""
    config = importlib.import_module(f"ragen_jax.configs.{name}").get_config()
    options = config.env.options.to_dict()
    envs = [make_env(name, split=split, **options) for split in SPLITS]
    if envs[0].actions:
        return measure_actions(name, envs, problems, seconds, config.env.max_actions)
    return measure_answers(name, envs, problems, seconds)


def _begin(env: Any, seed: int) -> tuple[Any, Any, str, str | None]:
    """Return (environment, state, question, right answer) of a problem."""
    state = env.reset(seed)
    return env, state, str(env.render(state)), _right(env, state)


def _play(env: Any, state: Any, plan: list[str], seed: int) -> tuple[bool, float]:
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


def _is_same(text: str, right: str | None) -> bool:
    """Return whether two answers are the same text or number, ignoring brackets and quotes."""
    if right is None:
        return False
    one, other = (" ".join(text.lower().split()).strip("[](){}\"'") for text in (text, right))
    if one == other:
        return True
    try:
        return float(one.replace(",", "")) == float(other.replace(",", ""))
    except ValueError:
        return False


def describe_errors(floor: Floor) -> str:
    """Return the line that reports a floor's broken episodes; "" if there are none."""
    if not floor.errors:
        return ""
    count = f"{len(floor.errors)} of {floor.episodes} episodes of {floor.name} failed"
    return f"{count}; the first: {last_line(floor.errors[0])}"


def row(floor: Floor) -> str:
    """Return the line of a task or environment in the table."""
    (one, success), (other, score), (worst, unearned) = floor.success, floor.score, floor.unearned
    names = [_cell(label) if value > 0 else "" for label, value in ((one, success), (other, score))]
    return (
        f"| `{floor.name}` | {floor.problems} | {success:.3f} | {names[0]} | {score:.3f} | "
        f"{names[1]} | {unearned:.3f} | {_cell(worst) if unearned > 0 else ''} |"
    )


def _cell(label: str) -> str:
    text = label if len(label) <= 32 else label[:30] + "..."
    return text.replace("|", "\\|").replace("`", "")


def main(argv: list[str] | None = None) -> None:
    """Print the page, or the rows of the names given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tasks of reasoning-gym, or environments")
    names = parser.parse_args(argv).names
    tasks = sorted(set(package.load().DATASETS) - set(package.REFUSED))
    environments = [name for name in sorted(ENVS) if name not in FOREIGN]
    if not names:
        print(read_introduction("floors.md"))
    for title, accepted, measure in (
        ("Environments", environments, measure_environment),
        ("Tasks of reasoning-gym", tasks, measure_task),
    ):
        chosen = [name for name in accepted if not names or name in names]
        if not chosen:
            continue
        print(f"## {title}\n")
        print("| name | problems | success | by | mean return | by | unearned | by |")
        print("| --- | ---: | ---: | --- | ---: | --- | ---: | --- |")
        for name in chosen:
            floor = measure(name)
            print(row(floor), flush=True)
            if floor.errors:
                print(describe_errors(floor), file=sys.stderr, flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
