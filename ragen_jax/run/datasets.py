"""The data sets that a run generates: imitation demonstrations and held-out problems."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from ragen_jax.core.progress import advance, enter_phase
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.envs.types import (
    Environment,
    MultiPlanEnvironment,
    NarratingEnvironment,
    Observation,
    SentenceEnvironment,
    SolvableEnvironment,
    State,
    StyledEnvironment,
)
from ragen_jax.rollout.env_calls import (
    NO_LIMITS,
    SEE_CHECK_DATA,
    EnvFailure,
    Limits,
    attempt,
    begin,
    checked_explanation,
    checked_observation,
    checked_plan,
    checked_step,
    identify,
    observe,
)
from ragen_jax.storage.console import console
from ragen_jax.storage.datasets import open_or_generate, settings_hash

# First seed of each purpose. The training seeds of a run are seed * 2**32 and up, below both.
EVALUATION_SEEDS = 1 << 62
IMITATION_SEEDS = 1 << 61
# Number of first held-out problems; an environment that raises for all of them is refused.
MOST_FAILED = 32


def load_or_generate(
    name: str,
    settings: dict[str, Any],
    *,
    features: dict[str, Any],
    generate: Callable[[], Iterable[dict[str, Any]]],
    directory: Path,
) -> list[dict[str, Any]]:
    """Return all examples of `open_or_generate`, in the order in which they were generated."""
    stored = open_or_generate(
        name, settings, features=features, generate=generate, directory=directory
    )
    return sorted(stored, key=lambda example: example["index"])


def heldout_problems(
    environment: Environment,
    *,
    count: int,
    seed: int,
    settings: dict[str, Any],
    directory: Path,
    limits: Limits = NO_LIMITS,
) -> tuple[list[int], list[State | EnvFailure]]:
    """Return the evaluation set: up to `count` distinct problems, the same every time.

    There are fewer if 100 x `count` seeds give fewer, and a line says so. Seeds for which the
    environment raises while the set is generated are left out. If it raises later for a stored
    problem, the state of the problem is an `EnvFailure`, and its episodes break. A line prints the
    number of each kind.

    Args:
      environment: built with split="eval".
      settings: the environment's name and options, which determine the problems.
      limits: time limits of the environment.

    Returns:
      (seeds, states), of equal lengths.

    Raises:
      ValueError: the environment raises for all problems, or a stored problem differs from the
        problem that it generates now.
    """
    failed: list[EnvFailure] = []  # failures of the seeds left out, if the set is generated now

    def generate():
        failed.clear()
        first = candidate = EVALUATION_SEEDS + (seed << 32)
        seen = set()
        enter_phase("generating held-out problems", total=count)
        while len(seen) < count:
            (identity,) = identify(environment, begin(environment, [candidate], limits), limits)
            if isinstance(identity, EnvFailure):
                failed.append(identity)
            elif identity not in seen:
                seen.add(identity)
                advance()
                yield {"seed": candidate, "identity": identity}
            candidate += 1
            if not seen and len(failed) == MOST_FAILED:
                raise ValueError(
                    f"the environment raises for all of the first {MOST_FAILED} held-out "
                    f"problems; first error: {failed[0].error}; {SEE_CHECK_DATA}"
                )
            if candidate - first > 100 * count:
                return  # a small file or space of problems: they are used as far as they go

    import tensorflow_datasets as tfds

    examples = load_or_generate(
        "heldout",
        {"seed": seed, "count": count, **settings},
        features={"seed": np.int64, "identity": tfds.features.Text()},
        generate=generate,
        directory=directory,
    )
    if failed:  # nothing is printed while TFDS generates
        console(
            f"warning: {len(failed)} held-out problems cannot be built and are left out; first "
            f"error: {failed[0].error}"
        )
    available = len(examples)
    if available < count:
        console(
            f"eval.episodes={count} is an upper bound: this environment has {available} distinct "
            "held-out problems"
        )
    enter_phase("building the held-out problems")
    seeds = [int(example["seed"]) for example in examples]
    states = begin(environment, seeds, limits)
    identities = identify(environment, states, limits)
    states = [
        identity if isinstance(identity, EnvFailure) else state
        for state, identity in zip(states, identities, strict=True)
    ]
    for example, identity in zip(examples, identities, strict=True):
        if not isinstance(identity, EnvFailure) and identity != example["identity"]:
            raise ValueError(
                f"held-out problem {example['seed']} in {directory} differs from the one that "
                "the environment generates now; delete that folder to build the set again"
            )
    broken = [identity for identity in identities if isinstance(identity, EnvFailure)]
    if len(broken) == available:
        raise ValueError(
            f"the environment raises for all of its {available} held-out problems; first error: "
            f"{broken[0].error}; {SEE_CHECK_DATA}"
        )
    if broken:
        console(
            f"warning: {len(broken)} of {available} held-out problems cannot be built and are not "
            f"evaluated; first error: {broken[0].error}"
        )
    return seeds, states


SAMPLE = 16  # number of problems in a fingerprint

Expert = SolvableEnvironment | NarratingEnvironment


def play_expert(
    environment: Expert,
    seeds: Iterable[int],
    *,
    plan_moves: int,
    actions_per_turn: int,
    max_turns: int,
    max_actions: int,
    styles: Mapping[str, float] | None = None,
    sentences: bool = False,
) -> Iterator[dict[str, Any]]:
    """Play problems with the environment's solver; yield the observation and reply of each turn.

    The solver runs anew at every turn, so replies are still correct after a random slip. An episode
    ends when the task is done, a budget is used up, or there is no solution (possibly in the first
    turn).

    Args:
      environment: built with split="imitation"; has solve, identity, and explain or narrate.
      seeds: seeds of the problems.
      plan_moves: number of the plan's moves that the reasoning lists.
      actions_per_turn, max_turns, max_actions: the rollout's budgets.
      styles: reasoning style -> fraction, if the environment has styles. Each episode is yielded in
        the most frequent style and, with probability (fraction of the style / largest fraction), in
        each of the others, with the same actions. None or empty: the text of `explain`.
      sentences: whether the expert writes for a language model: the text of `narrate` and the
        `sentence_styles`, and the plans of `sample_plan` if the environment has it.

    Yields:
      dicts, problem by problem, with `turn`, `observation`, `reply` (the text after "<think>",
      without the stop token) and `identity` (of the problem).

    Raises:
      ValueError: with `sentences`, the environment has no `narrate`, or styles but no
        `sentence_styles`. Otherwise any exception of the environment, which `imitated_turns`
        catches.
    """
    _require_sentences(environment, styles, sentences)
    for seed in seeds:
        plans_rng = generator(Purpose.DEMONSTRATION, seed, 1)  # of sample_plan
        rng = generator(Purpose.DEMONSTRATION, seed)
        state, done = environment.reset(seed), False
        identity = environment.identity(state)
        turns = []
        for turn in range(max_turns):
            left = max_actions - turn * actions_per_turn
            if done or left <= 0:
                break
            if sentences and isinstance(environment, MultiPlanEnvironment):
                plan = checked_plan(environment.sample_plan(state, plans_rng))
            else:
                plan = checked_plan(environment.solve(state))
            if plan is None:
                break
            now = plan[: min(actions_per_turn, left)]
            turns.append((state, plan[:plan_moves], now))
            for action in now:
                if not done:
                    step = checked_step(environment.step(state, action, rng))
                    state, done = step.state, step.done
        member = "narrate" if sentences else "explain"
        for explain in _styles_of_episodes(environment, styles or {}, seed, sentences):
            for turn, (state, plan, now) in enumerate(turns):
                text = checked_explanation(explain(state, plan), member)
                yield {
                    "observation": checked_observation(environment.render(state)),
                    "reply": f"{text}</think><answer>{'||'.join(now)}</answer>",
                    "identity": identity,
                    "turn": turn,
                }


def _require_sentences(
    environment: Expert,
    styles: Mapping[str, float] | None = None,
    sentences: bool = False,
    **_: Any,
) -> None:
    """Raise ValueError if `play_expert` with these arguments needs a member that is missing."""
    needed = ("narrate", "sentence_styles") if styles else ("narrate",)
    missing = [name for name in needed if sentences and not hasattr(environment, name)]
    if missing:
        raise ValueError(
            f"environment {type(environment).__name__} has no {', '.join(missing)} "
            "(envs/types.py), which demonstrations for a language model need; implement them"
        )


def imitated_turns(
    environment: Expert, seed: int, **play: Any
) -> list[dict[str, Any]] | EnvFailure:
    """Return the turns of `play_expert` on one problem; an `EnvFailure` if the environment raises.

    Args:
      environment, play: as in `play_expert`.

    Raises:
      ValueError: as in `play_expert`.
    """
    _require_sentences(environment, **play)
    return attempt(lambda: list(play_expert(environment, [seed], **play)))


def _styles_of_episodes(
    environment: Expert, fractions: Mapping[str, float], seed: int, sentences: bool
) -> Iterator[Callable[[State, Sequence[str]], str]]:
    """Yield (state, plan) -> text for each style in which a problem is shown."""
    if not fractions and sentences:
        yield cast(NarratingEnvironment, environment).narrate
        return
    if not fractions:
        yield cast(SolvableEnvironment, environment).explain
        return
    if sentences:
        styles = cast(SentenceEnvironment, environment).sentence_styles
    else:
        styles = cast(StyledEnvironment, environment).styles
    for number, (name, style) in enumerate(styles.items()):
        rng = generator(Purpose.THOUGHTS, seed, number)
        if rng.random() < fractions.get(name, 0.0) / max(fractions.values()):
            yield lambda state, plan, style=style, rng=rng: style.write(state, plan, rng)


def fingerprint(environment: Expert, **settings: Any) -> str:
    """Return a hash of the demonstrations on SAMPLE problems, for names of caches.

    It changes with the environment's code: its rules, rendering, solver, explanations and problems,
    which the config does not show. Problems for which the environment raises are left out.

    Args:
      environment, settings: as in `play_expert`.

    Raises:
      ValueError: as in `play_expert`.
    """
    seeds = range(IMITATION_SEEDS, IMITATION_SEEDS + SAMPLE)
    played = [imitated_turns(environment, seed, **settings) for seed in seeds]
    examples = [
        example | {"observation": _hashable_observation(example["observation"])}
        for turns in played
        if not isinstance(turns, EnvFailure)
        for example in turns
    ]
    return settings_hash(examples)


def _hashable_observation(observation: str | Observation) -> Any:
    """Return an observation as JSON-like data, with hashes in place of images."""
    if isinstance(observation, str):
        return observation
    digests = [hashlib.sha256(x.tobytes()).hexdigest() for x in observation.images]
    return [observation.text, *digests]


def demonstrations(
    environment: Expert,
    *,
    rooms: int,
    settings: dict[str, Any],
    directory: Path,
    **play: Any,
) -> list[dict[str, Any]]:
    """Return the examples of `play_expert` on `rooms` problems, which are stored in a data set.

    Problems that have no solution, or for which the environment raises, are left out. When the
    problems are played, a line prints the number of each kind. If the environment shows images, its
    problems are played anew each time, because a data set stores only text.

    Args:
      environment: as in `play_expert`.
      rooms: number of problems to play.
      settings: JSON-like settings that determine the environment's problems.
      directory: as in `load_or_generate`.
      play: further arguments of `play_expert`.

    Raises:
      ValueError: every problem has no solution or cannot be played, or as in `play_expert`.
    """
    import tensorflow_datasets as tfds

    if not play.get("sentences", True):
        del play["sentences"]  # the default: the data set keeps the name it had without this option

    # Both stay empty if the examples are read from the data set.
    unsolved = []  # seeds of the problems without a solution
    failed: list[tuple[int, EnvFailure]] = []  # seeds for which the environment raised

    def generate():
        unsolved.clear()
        enter_phase("solving demonstration problems", total=rooms)
        for seed in range(IMITATION_SEEDS, IMITATION_SEEDS + rooms):
            turns = imitated_turns(environment, seed, **play)
            advance()
            if isinstance(turns, EnvFailure):
                failed.append((seed, turns))
            elif turns:
                yield from turns
            else:
                unsolved.append(seed)
        if failed and len(unsolved) + len(failed) == rooms:
            raise ValueError(
                f"none of {rooms} demonstration problems can be used: {len(unsolved)} have no "
                f"solution, and the environment raises for {len(failed)}; "
                f"{first_failed(failed)}; {SEE_CHECK_DATA}"
            )
        if len(unsolved) == rooms:
            raise ValueError(f"`solve` finds no solution for any of {rooms} demonstration problems")

    if _draws(environment, rooms):
        examples = list(generate())
    else:
        examples = load_or_generate(
            "demonstrations",
            {"rooms": rooms, "sample": fingerprint(environment, **play), **play, **settings},
            features=dict.fromkeys(("observation", "reply", "identity"), tfds.features.Text())
            | {"turn": np.int64},
            generate=generate,
            directory=directory,
        )
    if unsolved:  # nothing is printed while TFDS generates
        console(
            f"{len(unsolved)} of {rooms} demonstration problems have no solution and are left out"
        )
    if failed:
        console(
            f"warning: {len(failed)} of {rooms} demonstration problems cannot be played and "
            f"are left out; {first_failed(failed)}"
        )
    return examples


def first_failed(failed: Sequence[tuple[int, EnvFailure]]) -> str:
    """Return the end of a message that names the first of (seed, error) pairs."""
    seed, broken = failed[0]
    return f"first error: seed {seed}: {broken.error}"


def _draws(environment: Environment, rooms: int) -> bool:
    """Return whether the first imitation problem that can be rendered contains images."""
    for seed in range(IMITATION_SEEDS, IMITATION_SEEDS + rooms):
        (shown,) = observe(environment, begin(environment, [seed], NO_LIMITS), NO_LIMITS)
        if not isinstance(shown, EnvFailure):
            return isinstance(shown, Observation)
    return False
