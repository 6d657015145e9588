"""Experiments on the tiny agent: claims of RAGEN-2 about collapse and about filtering."""

import dataclasses

from ragen_jax.configs.experiments.experiment import (
    FEWER_FILES,
    NONE,
    TOP_P,
    WARN_ONLY,
    Claim,
    Experiment,
    Fields,
)
from ragen_jax.configs.recipes import RECIPES

# Enough steps for the tiny agent to learn; diagnostics every five steps.
LEARNING: Fields = {
    **{"steps": 100, "eval.every": 20, "eval.episodes": 512, "diagnose.every": 5},
    **FEWER_FILES,
    **WARN_ONLY,
}
SEEDS = (40, 41, 42)
FILTERS = {"top-p 0.9": TOP_P, "no filter": NONE}
LENGTH_CLAIMS = tuple(
    Claim(
        "project page: replies get shorter",
        name,
        "rollout/response_length",
        sign=-1,
        since_start=True,
    )
    for name in FILTERS
)


def recipes(*names: str) -> Fields:
    """Return the fields of recipes whose values do not depend on other fields."""
    fields = {field: value for name in names for field, value in RECIPES[name].items()}
    return {field: value for field, value in fields.items() if not callable(value)}


TINY_EXPERIMENTS = {
    # RAGEN-2, sections 4 and 5.
    "collapse": Experiment(
        question="Does strong regularisation or a large learning rate make reasoning independent "
        "of its input before success falls? Does filtering by reward variance prevent it?",
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
        common_fields={
            "steps": 60,
            "eval.every": 10,
            "eval.episodes": 512,
            **FEWER_FILES,
            **WARN_ONLY,
        },
        doubt="Runs of an agent whose actions do not follow its reasoning, or runs in which MI "
        "falls below half while success holds (experiment `organism` has such runs).",
        minutes=1.8,
    ),
    "algorithms": Experiment(
        question="How much does filtering by reward variance improve success with each algorithm?",
        config="sokoban:tiny",
        settings={
            "PPO": recipes("ppo"),
            # Without the recipe's longer replies, which the tiny agent does not need.
            "DAPO": {"algorithm.kl_coef": 0.0, "collect.max_rounds": 3},
            "GRPO": recipes("grpo"),
            "Dr.GRPO": recipes("dr_grpo"),
        },
        treatments=FILTERS,
        seeds=SEEDS,
        common_fields=LEARNING,
        doubt="More seeds, if an interval that now includes 0 then excluded it; or a language "
        "model, whose groups lack variance far more often than the groups of an agent that was "
        "warm-started to solve a third of its rooms.",
        minutes=2.5,
        claims=(
            Claim("table 4: success", "top-p 0.9"),
            Claim(
                "table 4: success",
                "top-p 0.9",
                sign=0,
                settings=("Dr.GRPO",),
            ),
            *LENGTH_CLAIMS,
        ),
    ),
    "groups": Experiment(
        question="How much does filtering by reward variance improve success with few or many "
        "episodes per prompt, at 128 episodes per step?",
        config="sokoban:tiny",
        settings={
            f"{groups} x {members}": {"rollout.groups": groups, "rollout.group_size": members}
            for groups, members in ((64, 2), (32, 4), (16, 8), (8, 16))
        },
        treatments=FILTERS,
        seeds=SEEDS,
        common_fields=LEARNING,
        doubt="The same experiment with more seeds, or with fewer and larger groups than 128 "
        "episodes per step allow.",
        minutes=2.5,
        claims=(
            Claim("table 5: success", "top-p 0.9"),
            Claim("table 5: a step takes less time", "top-p 0.9", "time/cpu", -1),
        ),
    ),
    "quarters": Experiment(
        question="Do prompts with high reward variance (quarter 1) teach more than prompts with "
        "low variance (quarter 4)?",
        config="sokoban:tiny",
        settings={"16 x 8": {"rollout.groups": 16, "rollout.group_size": 8}},
        treatments={
            f"quarter {q}": {"filter.strategy": "quarter", "filter.value": float(q)}
            for q in (1, 2, 3, 4)
        },
        seeds=SEEDS,
        common_fields=LEARNING,
        doubt="More than 16 groups per step, so that the lowest quarter has groups without any "
        "variance.",
        minutes=2.0,
        claims=(
            Claim("table 6: success", "quarter 1"),
            Claim("table 6: MI", "quarter 1", "collapse/first_turn/mi_seq"),
        ),
    ),
    "members": Experiment(
        question="Should a filter drop whole prompts, or single episodes "
        "(best and worst 4 keeps the four best and the four worst episodes of each group)?",
        config="sokoban:tiny",
        settings={"8 x 16": {}},
        treatments={
            "top-p 0.9": TOP_P,
            "top-k 0.5": {"filter.strategy": "top_k", "filter.value": 0.5},
            "best and worst 4": NONE | {"filter.top_members": 4, "filter.bottom_members": 4},
            "no filter": NONE,
        },
        seeds=SEEDS,
        common_fields=LEARNING,
        doubt="The same experiment with other fractions of prompts and episodes.",
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
        question="Does filtering by reward variance still help when the reward depends on chance?",
        config="frozen_lake:tiny",
        settings={
            f"slip {slip}": {"env.options.slip": slip} for slip in (0.0, 0.1, 0.2, 0.5, 0.8, 1.0)
        },
        treatments=FILTERS,
        seeds=SEEDS,
        # All arms start from one agent, trained at the default slip: at slip 1.0 it cannot learn.
        common_fields=LEARNING | {"warmstart.options": {"slip": 0.02}},
        doubt="An environment in which an episode that fails by chance costs more than a "
        "successful episode earns.",
        minutes=2.0,
        claims=(
            Claim(
                "figure 9: success, slip up to 50 %",
                "top-p 0.9",
                settings=("slip 0.0", "slip 0.1", "slip 0.2", "slip 0.5"),
            ),
            Claim(
                "figure 9: no gain at slip 80 to 100 %",
                "top-p 0.9",
                sign=0,
                settings=("slip 0.8", "slip 1.0"),
            ),
            *LENGTH_CLAIMS,
        ),
    ),
    "sweeps": Experiment(
        question="Which strengths of the filter and of the regularisers work best?",
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
        common_fields=LEARNING,
        doubt="Longer runs: a treatment that costs little in 100 steps may cost a lot in 1,000.",
        minutes=2.0,
        claims=(
            Claim("project page: 0.5 is worse than 0.9", "top-p 0.5", sign=-1),
            Claim("project page: 1.0 is worse than 0.9", "top-p 1.0", sign=-1),
            Claim("section 4: large entropy bonus", "entropy 0.1", sign=-1),
            Claim("section 4: large bonus, MI", "entropy 0.1", "collapse/first_turn/mi_seq", -1),
            Claim("section 4: large KL penalty", "KL 0.1", sign=-1),
        ),
        runs="groups",
    ),
}

# The same experiments in a second environment, which `slips` uses already.
TINY_EXPERIMENTS |= {
    f"{name}_frozen_lake": dataclasses.replace(
        TINY_EXPERIMENTS[name],
        question=(
            f"In FrozenLake: {TINY_EXPERIMENTS[name].question[0].lower()}"
            f"{TINY_EXPERIMENTS[name].question[1:]}"
        ),
        config="frozen_lake:tiny",
        runs=TINY_EXPERIMENTS[name].runs and f"{TINY_EXPERIMENTS[name].runs}_frozen_lake",
    )
    for name in ("groups", "quarters", "members")
}

# Claims of RAGEN-2 that these experiments do not judge: (source, claim, verdict, reason).
OTHER_CLAIMS = (
    (
        "figure 3",
        "the norm of the task gradient grows with reward variance, that of the regularisers does "
        "not",
        "reproduced",
        "[gradient_buckets](../results/gradient_buckets.md), three seeds of the tiny agent",
    ),
    (
        "table 4",
        "filtering helps models of 0.5B to 14B parameters, and vision-language models, in eight "
        "environments",
        "cannot be tested here",
        "needs their weights, data sets and accelerators",
    ),
    (
        "table 5",
        "a step needs the same memory",
        "cannot be tested here",
        "needs the accelerator of the paper",
    ),
    (
        "project page",
        "replies get shorter in all eight environments",
        "cannot be tested here",
        "two environments are tested, with an agent whose replies have about twenty tokens",
    ),
    ("appendices H to N", "theoretical bounds", "cannot be tested here", "needs proofs, not runs"),
)
