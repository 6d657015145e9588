"""Seconds of a whole rollout of the tiny agent's default batch, in both contexts.

    python -m benchmarks.rollout [--repeats=15]

Environment, tokenizing and reading of replies are included. Both contexts, and cross-scoring by
shared prompts and by pairs, are measured in turn in one process; medians are printed.
"""

import dataclasses
import statistics
import time

import jax
from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.config.build_environment import build_budgets, build_chat, build_environment
from ragen_jax.config.load import load_config
from ragen_jax.diagnostics.cross_scoring import cross_score, cross_score_pairs
from ragen_jax.diagnostics.scopes import first_turns, reasoning_ids
from ragen_jax.rollout.episode import PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.run.load import load_policy


def main(argv):
    del argv
    config = load_config(CONFIG.value)
    environment = build_environment(config.env, "train")
    policy = load_policy(config, None)
    chats = {}
    for context in ("single_turn", "full"):
        env = dataclasses.replace(config.env, context=context)
        with_context = dataclasses.replace(config, env=env)
        chats[context] = build_chat(with_context, policy.tokenizer, environment)
    seconds = {name: [] for name in (*chats, "shared prompts", "naive pairs")}
    for repeat in range(REPEATS.value + 3):
        seeds = [8 * repeat + g for g in range(config.rollout.groups)]
        states = [environment.reset(seed) for seed in seeds]
        for context, chat in chats.items():
            start = time.perf_counter()
            episodes = rollout(
                policy.model,
                policy.params,
                PlaySettings(
                    chat,
                    environment,
                    budgets=build_budgets(config),
                    sampling=Sampling(temperature=1.0),
                ),
                seeds,
                states,
                group_size=config.rollout.group_size,
                key=jax.random.key(0),
            )
            seconds[context].append(time.perf_counter() - start)
        sample = first_turns(episodes, samples=config.diagnose.first_turn_samples)
        prompts, reasonings = sample.prompts, [reasoning_ids(turn) for turn in sample.turns]
        for name, score in (("shared prompts", cross_score), ("naive pairs", cross_score_pairs)):
            start = time.perf_counter()
            score(policy.model, policy.params, prompts, reasonings, micro_batch=512)
            seconds[name].append(time.perf_counter() - start)
    for name, values in seconds.items():
        print(f"{name:<16} median {statistics.median(values[3:]):.3f} s  best {min(values):.3f} s")


if __name__ == "__main__":
    CONFIG = command.define_config()
    REPEATS = flags.DEFINE_integer("repeats", 15, "Measured rollouts of each context.")
    command.run_command(main)
