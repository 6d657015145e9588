"""The report of a config's environment: its problems, how they play, and what the model reads."""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

from ragen_jax.check_data.contract import (
    Faults,
    Problem,
    check_members,
    check_problems,
    raised_at,
)
from ragen_jax.check_data.plays import Plays, play
from ragen_jax.check_data.prompts import describe_prompts, make_reader
from ragen_jax.config.build_environment import build_environment, build_limits
from ragen_jax.config.fields import plays_heldout
from ragen_jax.configs.base import Config
from ragen_jax.core.progress import enter_phase
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.types import (
    IMAGE,
    Environment,
    FileEnvironment,
    HarnessEnvironment,
    Observation,
    SolvableEnvironment,
    State,
)
from ragen_jax.rollout.env_calls import (
    NO_LIMITS,
    EnvFailure,
    attempt,
    begin,
    checked_observation,
    identify,
)
from ragen_jax.run.datasets import EVALUATION_SEEDS

CUT = 300  # maximum number of characters shown per problem
GENERATED = 64  # number of generated problems of each split that are played, by default
CHECKED = 16  # number of problems on which the members are checked one by one
RANDOM = 64  # number of problems played with random actions where an expert plays all


@dataclasses.dataclass(frozen=True)
class Split:
    """The problems of a split that are played."""

    environment: Environment
    problems: list[Problem]
    failed: list[tuple[str, EnvFailure]]  # problems whose initial state could not be built


def describe(config: Config, rows: int, plays: int | None = None) -> Iterator[str]:
    """Yield lines that describe config.env.

    Args:
      config: config with a single environment.
      rows: number of problems to show.
      plays: number of problems of each split to play; None: all of a file, GENERATED of generated
        ones.

    Raises:
      ValueError: the options are unusable, the file cannot be read, or the environment raised for a
        problem or breaks its contract.
    """
    environment = build_environment(config.env, "train")
    options = config.env.options
    path = options.get("path") or options.get("hub")
    failed: list[str] = []  # problems for which the environment raised
    if path is None or not isinstance(environment, FileEnvironment):
        yield f"{config.env.name}: generated"
        for seed in range(rows):
            state = attempt(lambda seed=seed: environment.reset(seed))
            yield from _problem(environment, f"seed {seed}", state, failed)
        _refuse_failed(failed, rows, config.env.name)
        splits = _generated(config, plays or GENERATED)
        yield from _check(config, environment, splits, generated=True)
        return
    yield f"{config.env.name}: {path}"
    yield f"  fields      {', '.join(environment.fields)}"
    counts, different, shown = Counter(), defaultdict(set), []
    problems: dict[str, list[Problem]] = {split: [] for split in SPLITS}
    for row, split, state in environment.list_problems():
        counts[split] += 1
        identity = attempt(lambda state=state: environment.identity(state))
        if isinstance(identity, EnvFailure):
            failed.append(f"row {row} ({split}): {_located(environment, identity)}")
        else:
            different[split].add(identity)
            problems[split].append(Problem(f"row {row}", state, None))
        if len(shown) < rows:
            problem = identity if isinstance(identity, EnvFailure) else state
            shown.append(_problem(environment, f"row {row} ({split})", problem, failed))
    yield f"  problems    {counts.total()} available"
    for split in SPLITS:
        yield f"  {split:<11} {counts[split]}, {len(different[split])} of them distinct"
    if plays_heldout(config) and len(different["eval"]) < config.eval.episodes:
        yield (
            f"  eval.episodes={config.eval.episodes} is an upper bound: the "
            f"{len(different['eval'])} held-out problems are played"
        )
    yield from itertools.chain(*shown)
    _refuse_failed(failed, counts.total(), config.env.name)
    if plays_heldout(config) and not different["eval"]:
        raise ValueError(
            f"{path} holds out no problem, but a run of this config evaluates; use a larger file, "
            "or set config.eval.every=0"
        )
    splits = {split: Split(environment, found[:plays], []) for split, found in problems.items()}
    yield from _check(config, environment, splits, generated=False)


def _generated(config: Config, count: int) -> dict[str, Split]:
    """Return {split: its first problems} of train and eval."""
    found = {}
    for split, first in (("train", 0), ("eval", EVALUATION_SEEDS)):
        environment = build_environment(config.env, split)
        enter_phase(f"building problems of the split {split}")
        seeds = range(first, first + count)
        states = begin(environment, seeds, build_limits(config.env))
        found[split] = built = Split(environment, [], [])
        for seed, state in zip(seeds, states, strict=True):
            if isinstance(state, EnvFailure):
                built.failed.append((f"seed {seed}", state))
            else:
                built.problems.append(Problem(f"seed {seed}", state, seed))
    return found


def _check(
    config: Config, environment: Environment, splits: dict[str, Split], *, generated: bool
) -> Iterator[str]:
    """Play problems, check the members of the environment, and show what the model reads.

    Args:
      generated: whether the problems are generated, so that their splits are to be compared.

    Raises:
      ValueError: the environment raised or breaks its contract; the faults were yielded.
    """
    faults = Faults(environment)
    check_members(environment, faults)
    for split in splits.values():
        for name, failure in split.failed:
            faults.add("reset", failure.error, name, failure.traceback)
        if not faults.found:
            check_problems(split.environment, split.problems[:CHECKED], faults)
    if generated and not faults.found:
        yield from _compare_splits(splits, faults)
    messages = []
    played_elsewhere = isinstance(environment, HarnessEnvironment)
    if played_elsewhere:
        yield "  the problems are played by a program, which is not run here"
    for plays in () if faults.found or played_elsewhere else _play_all(config, splits):
        yield f"  {plays.line()}"
        messages += [episode.message for episode in plays.episodes]
        for name, failure in plays.failures:
            faults.add("step", failure.error, name, failure.traceback)
    if not faults.found:
        reader = make_reader(config, environment)
        names = sorted(splits, key=lambda name: name != "train")  # those that RL trains on first
        states = [problem.state for name in names for problem in splits[name].problems]
        if reader is None:
            yield "  give --config.model.path=DIR_OR_HUB_ID to see what the model reads"
        else:
            for line in describe_prompts(config, environment, reader, states, messages):
                yield f"  {line}"
    for line in faults.lines():
        yield f"  {line}"
    if faults.found:
        raise ValueError(
            f"environment {config.env.name!r} has {len(faults.found)} fault(s); first: "
            f"{faults.lines()[0]}"
        )


def _compare_splits(splits: dict[str, Split], faults: Faults) -> Iterator[str]:
    """Yield how many generated problems are distinct; a held-out one in training is a fault."""
    identities = {}
    for name, split in splits.items():
        states = [problem.state for problem in split.problems]
        found = identify(split.environment, states, NO_LIMITS)
        identities[name] = {identity for identity in found if isinstance(identity, str)}
        yield f"  {name:<11} {len(found)} problems, {len(identities[name])} of them distinct"
    both = len(identities["train"] & identities["eval"])
    if both:
        faults.add(
            "identity",
            f"{both} of {len(identities['eval'])} problems of split='eval' are in 'train' too",
        )


def _play_all(config: Config, splits: dict[str, Split]) -> Iterator[Plays]:
    """Play all problems with the expert, if there is one, and some or all with random actions."""
    for name, split in splits.items():
        if not split.problems:
            continue
        players = {"with random actions": split.problems}
        if isinstance(split.environment, SolvableEnvironment):
            players = {
                "by the expert": split.problems,
                "with random actions": split.problems[:RANDOM],
            }
        for player, problems in players.items():
            what = f"{name} {player}"
            enter_phase(f"playing {what}", total=len(problems), unit="problems")
            yield play(
                what,
                split.environment,
                problems,
                expert=player == "by the expert",
                max_actions=config.env.max_actions,
                limits=build_limits(config.env),
            )


def _refuse_failed(failed: list[str], count: int, name: str) -> None:
    """Raise ValueError if the environment raised for any problem."""
    if failed:
        raise ValueError(
            f"environment {name!r} raises for {len(failed)} of {count} problems; first error: "
            f"{failed[0]}"
        )


def _problem(
    environment: Environment, name: str, state: State | EnvFailure, failed: list[str]
) -> list[str]:
    """Return the lines of a problem, with its solution if the environment has a solver.

    Args:
      failed: errors so far; an error that the environment raises for this problem is appended.
    """

    def show():
        lines = _describe_observation(checked_observation(environment.render(state)))[
            :CUT
        ].splitlines()
        if isinstance(environment, SolvableEnvironment):
            plan = environment.solve(state)
            lines.append(f"-> {'no solution' if plan is None else ' || '.join(plan)[:CUT]}")
        return lines

    shown = state
    if not isinstance(state, EnvFailure):
        shown = attempt(show)
    if isinstance(shown, EnvFailure):
        failure = f"{name}: {_located(environment, shown)}"
        if failure not in failed:
            failed.append(failure)
        return [f"  {name}", f"    cannot be shown: {shown.error}"]
    return [f"  {name}", *(f"    {line}" for line in shown)]


def _located(environment: Environment, failure: EnvFailure) -> str:
    """Return an error with the place that raised it."""
    frame = raised_at(environment, failure.traceback)
    return failure.error if frame is None else f"{failure.error} ({frame}, {frame.function})"


def _describe_observation(observation: str | Observation) -> str:
    """Return an observation as text, with the size of an image in its place."""
    if isinstance(observation, str):
        return observation
    text = observation.text
    for image in observation.images:
        height, width = image.shape[:2]
        text = text.replace(IMAGE, f"[image of {height} x {width} pixels]", 1)
    return text
