"""Episodes of a harness with a policy, outside of a run."""

import dataclasses

import jax
from harness_agents import TURNS, write_problems

from ragen_jax.core.clean_text import last_line
from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.harness.env import Harness, Problem
from ragen_jax.rollout.env_calls import Limits
from ragen_jax.rollout.play import rollout


class Played:
    """Episodes of problems that a `Harness` with the given options plays with a policy."""

    def __init__(
        self,
        policy,
        folder,
        rows,
        *,
        time_limit=60.0,
        cut=False,
        workers=8,
        max_turns=TURNS,
        **options,
    ):
        rows = [{**row, "split": "train", "row": i} for i, row in enumerate(rows)]
        rows.append({"split": "eval"})
        problems = write_problems(folder / "problems.jsonl", rows)
        environment = Harness(problems=problems, split_field="split", **options)
        settings = policy.tasks[0].settings
        # A random model hardly ever ends a reply: any token ends one unless they are to be cut off.
        ends = settings.chat.stop_ids if cut else tuple(range(policy.model.config.vocab_size))
        settings = dataclasses.replace(
            settings,
            chat=dataclasses.replace(settings.chat, stop_ids=ends),
            environment=environment,
            budgets=dataclasses.replace(settings.budgets, max_turns=max_turns),
            limits=Limits(time_limit, workers),
        )
        with jax.set_mesh(make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])):
            self.episodes = rollout(
                *(policy.model, policy.params, settings, range(len(rows) - 1)),
                [Problem(row) for row in range(len(rows) - 1)],
                group_size=1,
                key=jax.random.key(7),
            )
        self.rewards = [sum(turn.reward for turn in e.turns) for e in self.episodes]
        self.errors = [last_line(e.error) for e in self.episodes]
