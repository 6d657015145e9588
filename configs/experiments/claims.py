"""Experiments with the tiny agent on claims of RAGEN-2 about collapse and filtering."""

import dataclasses

from ragen_jax.configs.experiments.experiment import (
    NONE,
    SPARING,
    TOP_P,
    WATCHING,
    Claim,
    Experiment,
    Fields,
)
from ragen_jax.configs.recipes import RECIPES

# Long enough to learn. Diagnosis every fifth step, not every step.
LEARNING: Fields = {
    **{"steps": 100, "eval.every": 20, "eval.episodes": 512, "diagnose.every": 5},
    **SPARING,
    **WATCHING,
}
SEEDS = (40, 41, 42)
FILTERED = {"top-p 0.9": TOP_P, "no filter": NONE}
SHORTER = tuple(
    Claim("site: replies get shorter", name, "rollout/response_length", -1, since_start=True)
    for name in FILTERED
)


def recipes(*names: str) -> Fields:
    """Return the fields of recipes whose values do not depend on other fields."""
    fields = {field: value for name in names for field, value in RECIPES[name].items()}
    return {field: value for field, value in fields.items() if not callable(value)}


ON_TINY = {
    # RAGEN-2, sections 4 and 5.
    "collapse": Experiment(
        question="Does strong regularisation or a large learning rate make reasoning lose its "
        "input before success falls, and does filtering by reward variance prevent it?",
        config="sokoban:tiny",
        settings={
            "default": {},
            "entropy 0.1": {"algorithm.entropy_coef": 0.1},
            "lr 1e-3": {"optimizer.learning_rate": 1e-3},
            "lr 1e-3, entropy 0.05": {
                "optimizer.learning_rate": 1e-3,
                "algorithm.entropy_coef": 0.05,
            },
            "lr 1e-3, KL 0.1": {"optimizer.learning_rate": 1e-3, "algorithm.kl_coef": 0.1},
        },
        treatments={"top-p 0.9": TOP_P, "no filter": NONE},
        seeds=(0, 1, 2),
        always={"steps": 60, "eval.every": 10, "eval.episodes": 512, **SPARING, **WATCHING},
        doubt="Runs of an agent that does not act by what it has just said, or in which MI "
        "falls below half while success holds (the experiment `organism` has such "
        "runs).",
        minutes=1.8,
    ),
    "algorithms": Experiment(
        question="What does the filter gain with each algorithm?",
        config="sokoban:tiny",
        settings={
            "PPO": recipes("ppo"),
            # Without the longer replies of the recipe, which do not help the tiny agent.
            "DAPO": {"algorithm.kl_coef": 0.0, "collect.max_rounds": 3},
            "GRPO": recipes("grpo"),
            "Dr.GRPO": recipes("dr_grpo"),
        },
        treatments=FILTERED,
        seeds=SEEDS,
        always=LEARNING,
        doubt="More seeds, if an interval that now includes 0 no longer did; or a language "
        "model, whose groups are without variance far more often than those of an agent "
        "that was warm-started to solve a third of its rooms.",
        minutes=2.5,
        claims=(
            Claim("table 4: success", "top-p 0.9"),
            Claim(
                "table 4: success",
                "top-p 0.9",
                sign=0,
                settings=("Dr.GRPO",),
            ),
            *SHORTER,
        ),
    ),
    "groups": Experiment(
        question="What does the filter gain with few or many episodes a prompt, 128 in all?",
        config="sokoban:tiny",
        settings={
            f"{groups} x {members}": {"rollout.groups": groups, "rollout.group_size": members}
            for groups, members in ((64, 2), (32, 4), (16, 8), (8, 16))
        },
        treatments=FILTERED,
        seeds=SEEDS,
        always=LEARNING,
        doubt="The same, over more seeds or with fewer groups of more episodes than 128 in "
        "all allow.",
        minutes=2.5,
        claims=(
            Claim("table 5: success", "top-p 0.9"),
            Claim("table 5: a step takes less time", "top-p 0.9", "time/cpu", -1),
        ),
    ),
    "quarters": Experiment(
        question="Do prompts of high reward variance teach more than those of low?",
        config="sokoban:tiny",
        settings={"16 x 8": {"rollout.groups": 16, "rollout.group_size": 8}},
        treatments={
            f"quarter {q}": {"filter.strategy": "quarter", "filter.value": float(q)}
            for q in (1, 2, 3, 4)
        },
        seeds=SEEDS,
        always=LEARNING,
        doubt="Quarters of more than 16 groups, where the lowest would hold groups without "
        "any variance.",
        minutes=2.0,
        claims=(
            Claim("table 6: success", "quarter 1"),
            Claim("table 6: MI", "quarter 1", "collapse/first_turn/mi_seq"),
        ),
    ),
    "members": Experiment(
        question="Is it prompts or episodes that should be filtered?",
        config="sokoban:tiny",
        settings={"8 x 16": {}},
        treatments={
            "top-p 0.9": TOP_P,
            "top-k 0.5": {"filter.strategy": "top_k", "filter.value": 0.5},
            "best and worst 4": NONE | {"filter.top_members": 4, "filter.bottom_members": 4},
            "no filter": NONE,
        },
        seeds=SEEDS,
        always=LEARNING,
        doubt="The same at other shares of prompts and episodes.",
        minutes=2.0,
        claims=(
            Claim("table 7: success, prompts", "top-p 0.9"),
            Claim("table 7: success, episodes", "best and worst 4"),
            Claim("table 7: MI, prompts", "top-p 0.9", "collapse/first_turn/mi_seq"),
            Claim("table 7: MI, episodes", "best and worst 4", "collapse/first_turn/mi_seq", -1),
        ),
        runs="groups",
    ),
    "slips": Experiment(
        question="Does the filter still help where chance decides the reward?",
        config="frozen_lake:tiny",
        settings={
            f"slip {slip}": {"env.options.slip": slip} for slip in (0.0, 0.1, 0.2, 0.5, 0.8, 1.0)
        },
        treatments=FILTERED,
        seeds=SEEDS,
        # At high slip rates an agent cannot learn by imitation, so all settings start from the same
        # agent, which has imitated at the default slip rate.
        always=LEARNING | {"warmstart.options": {"slip": 0.02}},
        doubt="A world in which an episode that fails by chance costs more than those that "
        "succeed give.",
        minutes=2.0,
        claims=(
            Claim(
                "figure 9: success up to 50 %",
                "top-p 0.9",
                settings=("slip 0.0", "slip 0.1", "slip 0.2", "slip 0.5"),
            ),
            Claim(
                "figure 9: gone at 80 to 100 %",
                "top-p 0.9",
                sign=0,
                settings=("slip 0.8", "slip 1.0"),
            ),
            *SHORTER,
        ),
    ),
    "sweeps": Experiment(
        question="Which strength of the filter and of the regularisers works best?",
        config="sokoban:tiny",
        settings={"8 x 16": {}},
        treatments={
            **{f"top-p {p}": TOP_P | {"filter.value": p} for p in (0.5, 0.6, 0.7, 0.8, 0.98, 1.0)},
            **{
                f"entropy {x}": TOP_P | {"algorithm.entropy_coef": x}
                for x in (0.0, 0.003, 0.01, 0.03, 0.1)
            },
            **{f"KL {x}": TOP_P | {"algorithm.kl_coef": x} for x in (0.001, 0.01, 0.03, 0.1)},
            "top-p 0.9": TOP_P,
        },
        seeds=SEEDS,
        always=LEARNING,
        doubt="Longer runs: what costs little in 100 steps may cost much in 1,000.",
        minutes=2.0,
        claims=(
            Claim("site: 0.5 is worse than 0.9", "top-p 0.5", sign=-1),
            Claim("site: 1.0 is worse than 0.9", "top-p 1.0", sign=-1),
            Claim("section 4: much entropy", "entropy 0.1", sign=-1),
            Claim("section 4: much entropy, MI", "entropy 0.1", "collapse/first_turn/mi_seq", -1),
            Claim("section 4: much KL", "KL 0.1", sign=-1),
        ),
        runs="groups",
    ),
}

# The same experiments in FrozenLake; `slips` already uses it.
ON_TINY |= {
    f"{name}_frozen_lake": dataclasses.replace(
        ON_TINY[name],
        question=f"In FrozenLake: {ON_TINY[name].question[0].lower()}{ON_TINY[name].question[1:]}",
        config="frozen_lake:tiny",
        runs=ON_TINY[name].runs and f"{ON_TINY[name].runs}_frozen_lake",
    )
    for name in ("groups", "quarters", "members")
}

# Claims of RAGEN-2 that these experiments do not test: (source, claim, verdict, reason).
OTHERWISE = (
    (
        "figure 3",
        "the task's gradient grows with reward variance, the regularisers' does not",
        "reproduced",
        "[gradient_buckets](../results/gradient_buckets.md), three seeds of the tiny agent",
    ),
    (
        "table 4",
        "filtering helps models of 0.5B to 14B, and those that see, in eight environments",
        "cannot be tested here",
        "needs their weights, data sets and accelerators",
    ),
    (
        "table 5",
        "the memory of a step is the same",
        "cannot be tested here",
        "needs the accelerator whose memory is meant",
    ),
    (
        "project page",
        "replies get shorter in all eight environments",
        "cannot be tested here",
        "two are tried, with an agent whose replies have about twenty tokens",
    ),
    ("appendices H to N", "bounds", "cannot be tested here", "theorems"),
)
