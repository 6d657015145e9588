"""Show the problems of a config's environments, and check the file that they come from, if any.

    python -m ragen_jax.check_data --config=configs/metamathqa.py [--rows=3]
                                   [--config.env.options.path=FILE] [--config.FIELD=VALUE ...]

For a file: the fields that are read, the number of problems that can be drawn, in all and in each
split, whether enough are held out, and the first problems. For generated problems: the first
problems. No model is loaded and nothing is compiled.

A file that cannot be used is reported in one line, and the exit code is 2. The same happens at the
end if an environment raised for a problem.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.config.build import build_environment
from ragen_jax.config.fields import plays_heldout
from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs.base import Config
from ragen_jax.core.domains import freeze
from ragen_jax.envs.problems import SPLITS
from ragen_jax.envs.types import (
    IMAGE,
    Environment,
    FileEnvironment,
    Observation,
    SolvableEnvironment,
    State,
)
from ragen_jax.rollout.env_calls import EnvFailure, attempt, checked_observation
from ragen_jax.storage.console_streams import show

CUT = 300  # maximum number of characters shown per problem


def describe(config: Config, rows: int) -> Iterator[str]:
    """Yield lines that describe config.env.

    Args:
      config: config with a single environment.
      rows: number of problems to show.

    Raises:
      ValueError: the options are unusable, the file cannot be read, the environment raised for a
        problem, or a run of the config would play more held-out problems (eval.episodes) than there
        are distinct ones.
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
        return
    yield f"{config.env.name}: {path}"
    yield f"  fields      {', '.join(environment.fields)}"
    counts, different, shown = Counter(), defaultdict(set), []
    for row, split, state in environment.list_problems():
        counts[split] += 1
        identity = attempt(lambda state=state: environment.identity(state))
        if isinstance(identity, EnvFailure):
            failed.append(f"row {row} ({split}): {identity.error}")
        else:
            different[split].add(identity)
        if len(shown) < rows:
            problem = identity if isinstance(identity, EnvFailure) else state
            shown.append(_problem(environment, f"row {row} ({split})", problem, failed))
    yield f"  problems    {counts.total()} available"
    for split in SPLITS:
        yield f"  {split:<11} {counts[split]}, {len(different[split])} of them distinct"
    yield from itertools.chain(*shown)
    if plays_heldout(config) and len(different["eval"]) < config.eval.episodes:
        raise ValueError(
            f"config.eval.episodes is {config.eval.episodes}, but {path} holds out only "
            f"{len(different['eval'])} distinct problems; lower it or use a larger file"
        )
    _refuse_failed(failed, counts.total(), config.env.name)


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
        failure = f"{name}: {shown.error}"
        if failure not in failed:
            failed.append(failure)
        return [f"  {name}", f"    cannot be shown: {shown.error}"]
    return [f"  {name}", *(f"    {line}" for line in shown)]


def _describe_observation(observation: str | Observation) -> str:
    """Return an observation as text, with the size of an image in its place."""
    if isinstance(observation, str):
        return observation
    text = observation.text
    for image in observation.images:
        height, width = image.shape[:2]
        text = text.replace(IMAGE, f"[image of {height} x {width} pixels]", 1)
    return text


def main(argv: Sequence[str]) -> None:
    del argv
    with command.bad_input():
        if ROWS.value < 0:
            raise ValueError(f"--rows is {ROWS.value}; it must be at least 0")
        faults = []
        for config in per_task_configs(freeze(Config, CONFIG.value)).values():
            try:
                for line in describe(config, ROWS.value):
                    show(line)
            except ValueError as error:
                faults.append(str(error))
        if faults:
            raise ValueError("; ".join(faults))


if __name__ == "__main__":
    CONFIG = command.define_config()
    ROWS = flags.DEFINE_integer("rows", 3, "Number of problems to show.")
    command.run_command(main)
