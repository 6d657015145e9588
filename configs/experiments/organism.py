"""Experiments on the model organism (configs/organism.py): collapse, detectors, treatments,
mechanism."""

import dataclasses

from ragen_jax.configs.experiments.experiment import (
    FEWER_FILES,
    NONE,
    TOP_P,
    WARN_ONLY,
    Experiment,
    Fields,
    Quick,
)

# Our treatments: an entropy bonus on some tokens or groups only, a bonus that fades as information
# falls, and a bonus on information with the coefficient of the entropy bonus or a fifth of it
# (ragen_jax/algorithm/bonus.py). The two that keep most information at no cost in `cures` are
# tested on fresh seeds and in a second environment.
OURS: dict[str, Fields] = {
    "bonus on actions": NONE | {"algorithm.entropy_on": "actions"},
    "bonus on the upper half": NONE | {"algorithm.entropy_on": "upper_groups"},
    "fading bonus": NONE | {"algorithm.entropy_gate": 0.75},
    "fading bonus on the upper half": NONE
    | {"algorithm.entropy_gate": 0.75, "algorithm.entropy_on": "upper_groups"},
    **{f"information {x}": NONE | {"algorithm.mi_coef": x} for x in (0.01, 0.05)},
}
# Treatments against the loss of information. First the filters of RAGEN-2, table 9, and others:
CURES: dict[str, Fields] = {
    **{f"top-p {p}": TOP_P | {"filter.value": p} for p in (0.5, 0.7, 0.9, 0.95, 1.0)},
    "top-p 0.9, softmax": TOP_P | {"filter.mode": "softmax"},
    **{f"top-k {k}": {"filter.strategy": "top_k", "filter.value": k} for k in (0.25, 0.5)},
    **{f"min-p {p}": {"filter.strategy": "min_p", "filter.value": p} for p in (0.05, 0.2)},
    **{
        f"top-p 0.9 by {name}": TOP_P | {"filter.metric": metric}
        for name, metric in (
            *(("std", "reward_std"), ("sum", "reward_sum")),
            *(("entropy", "entropy"), ("length", "length")),
        )
    },
    "smallest variance": TOP_P | {"filter.keep": "smallest"},
    # top_p 0.9 from the smallest variance keeps nearly all groups; top_k 0.5 keeps half of them.
    "top-k 0.5, smallest": {
        **{"filter.strategy": "top_k", "filter.value": 0.5, "filter.keep": "smallest"}
    },
    "best and worst episodes": NONE | {"filter.top_members": 4, "filter.bottom_members": 4},
    "random groups": TOP_P | {"filter.at_random": True},
    "seven groups played": NONE | {"rollout.groups": 7},
    # Regularisers and rewards, without a filter.
    **{f"KL {kl}": NONE | {"algorithm.kl_coef": kl} for kl in (0.01, 0.1)},
    "bonus 0.02": NONE | {"algorithm.entropy_coef": 0.02},
    "bonus by reply": NONE | {"algorithm.aggregation": "seq-mean-token-mean"},
    "RL-ZVP": NONE | {"algorithm.zvp_coef": 0.1},
    "soft weights": NONE | {"algorithm.soft_weights": True},
    "pool of 64": NONE | {"env.pool": 64},
    "pool of 64, GRESO": NONE | {"env.pool": 64, "collect.explore": 0.5},
    "Dr.GRPO": NONE | {"algorithm.name": "dr_grpo"},
    # Dr.GRPO does not divide advantages by the group's std, here 3 to 4, so the same relative bonus
    # is about four times as large.
    "Dr.GRPO, bonus 0.2": NONE | {"algorithm.name": "dr_grpo", "algorithm.entropy_coef": 0.2},
    "PPO": NONE | {"algorithm.name": "ppo"},
    **OURS,
    "no filter": NONE,
}
ORGANISM = {"steps": 160, "eval.every": 20, "diagnose.probe_mediation": True}
ORGANISM_QUICK = {"steps": 50, "eval.episodes": 128}
CURE_FIELDS = {"steps": 48, "eval.every": 16, **FEWER_FILES, **WARN_ONLY}
# Different from the seeds with which the setting was chosen.
SEEDS, CURE_SEEDS = (10, 11, 12, 13, 14), (20, 21, 22)
# The two best treatments of `cures`, and half the bonus on all groups.
BEST_OURS = {
    **{name: OURS[name] for name in ("fading bonus on the upper half", "bonus on the upper half")},
    "bonus 0.025": NONE | {"algorithm.entropy_coef": 0.025},
}
CURES_QUICK = Quick(
    treatments=("top-p 0.9", "KL 0.1", "no filter"),
    seeds=CURE_SEEDS,
    common_fields={"steps": 24, "eval.every": 12, "eval.episodes": 128},
)

ORGANISM_EXPERIMENTS = {
    "organism": Experiment(
        question="An agent has learned two reasoning styles, of which one depends on its input. "
        "Does it lose that style while its replies stay valid and its success holds? Does "
        "filtering by reward variance slow the loss more than training on the same number of "
        "random groups?",
        config="organism:sokoban",
        settings={"entropy 0.05": {}},
        treatments={
            "top-p 0.9": TOP_P,
            "random groups": TOP_P | {"filter.at_random": True},
            "no filter": NONE,
        },
        seeds=SEEDS,
        common_fields=ORGANISM | FEWER_FILES | WARN_ONLY,
        doubt="A longer sentence, other openings or another fraction of templates, if filtering "
        "then slowed the loss; a language model that has learned both styles; or an environment "
        "(FrozenLake is available) in which reward variance says more about a prompt. The result "
        "that information falls before success does not depend on the filter; a run in which "
        "success falls first would refute it.",
        minutes=8.0,
        quick=Quick(
            treatments=("top-p 0.9", "no filter"),
            seeds=SEEDS[:3],
            common_fields=ORGANISM_QUICK,
        ),
    ),
    "detectors": Experiment(
        question="Which metrics detect that an agent's reasoning no longer depends on its input? "
        "How early do they detect it, and how often do they raise a false alarm?",
        config="organism:sokoban",
        settings={"entropy 0.05": {}, "entropy 0": {"algorithm.entropy_coef": 0.0}},
        treatments={"top-p 0.9": TOP_P, "no filter": NONE},
        seeds=SEEDS[:3],
        common_fields=ORGANISM | FEWER_FILES | WARN_ONLY,
        doubt="Another model organism, whose templates reveal something about the input, or whose "
        "actions ignore the grounded text: a metric that distinguishes the two styles here may "
        "fail there.",
        minutes=8.0,
        quick=Quick(
            treatments=("top-p 0.9", "no filter"), seeds=SEEDS[:3], common_fields=ORGANISM_QUICK
        ),
        runs="organism",
    ),
    "cures": Experiment(
        question="Which treatments keep the reasoning of an agent with an entropy bonus dependent "
        "on its input, at equal numbers of updates and episodes? What do they cost in success?",
        config="organism:sokoban",
        settings={"entropy 0.05": {}},
        treatments=CURES,
        seeds=CURE_SEEDS,
        common_fields=CURE_FIELDS,
        doubt="A treatment that helps here but not on fresh seeds or in the second environment; or "
        "a treatment whose replies keep their information in a form that no reader can use (column "
        "`neither style`). Dr.GRPO does not divide advantages by the group's standard deviation, "
        "which is 3 to 4 here, so the same bonus has less weight: with a bonus four times as large "
        "it keeps no more information than no filter. A bonus on half of the groups is also half a "
        "bonus; experiment `ours` tests both.",
        minutes=2.3,
        quick=CURES_QUICK,
    ),
    # On seeds with which they were not designed, and in another environment.
    "ours": Experiment(
        question="Do our two best treatments keep an agent's reasoning dependent on its input on "
        "fresh seeds? Do they keep more information than the paper's filter does?",
        config="organism:sokoban",
        settings={"entropy 0.05": {}},
        treatments=BEST_OURS | {"top-p 0.9": TOP_P, "no filter": NONE},
        seeds=(50, 51, 52, 53, 54),
        common_fields=CURE_FIELDS,
        doubt="Half the bonus on all groups keeps as much information as the full bonus on the "
        "upper half: the size of the bonus matters, not the groups that receive it. Groups without "
        "any variance, which do not occur here, might distinguish the two. So might longer runs, "
        "in which a faded bonus returns together with information, or a filter with another "
        "value.",
        minutes=2.3,
    ),
    "figures": Experiment(
        question="Which metrics at the end of a run correlate with its success, over runs with "
        "many kinds of regularisers, filters and rewards?",
        config="organism:sokoban",
        settings={"entropy 0.05": {}},
        treatments=CURES,
        seeds=CURE_SEEDS,
        common_fields=CURE_FIELDS,
        doubt="Runs of agents that start differently: here all have learned from the same "
        "demonstrations, and 48 steps change success by only 0.1 to 0.2. Other treatments: without "
        "our own treatments, some of which keep information at a cost in success, the correlation "
        "of `mi_zscore` is -0.16 (95 % CI -0.40 to +0.11), with identical runs counted once.",
        minutes=2.3,
        quick=CURES_QUICK,
        runs="cures",
    ),
    # RAGEN-2, sections 3 and 5: regularisers on prompts without signal cause the drift.
    "mechanism": Experiment(
        question="Which prompts and which part of the loss cause the drift into templates? Does it "
        "stop if only the prompts with low reward variance lose their entropy bonus?",
        config="organism:sokoban",
        settings={"entropy 0.05": {}},
        treatments={
            "bonus on the upper half": NONE | {"algorithm.entropy_on": "upper_groups"},
            "bonus on the lower half": NONE | {"algorithm.entropy_on": "lower_groups"},
            "bonus on all": NONE
            | {
                **{"diagnose.gradients_every": 8, "diagnose.gradients_groups": 48},
                **{"diagnose.gradients_buckets": 4},
            },
        },
        seeds=(30, 31, 32, 33, 34),
        common_fields={"steps": 48, "eval.every": 16, **FEWER_FILES, **WARN_ONLY},
        doubt="Gradients of advantages that are divided by the group's standard deviation (here "
        "they are deviations from its mean), or gradients after Adam's scaling, if they pulled in "
        "the other direction.",
        minutes=4.0,
        least_seeds=3,
        quick=Quick(
            treatments=("bonus on the upper half", "bonus on the lower half", "bonus on all"),
            seeds=(30, 31),
            common_fields={
                **{"steps": 24, "eval.every": 12, "eval.episodes": 128},
                "diagnose.gradients_groups": 16,
            },
        ),
    ),
}

ORGANISM_EXPERIMENTS["ours_frozen_lake"] = dataclasses.replace(
    ORGANISM_EXPERIMENTS["ours"],
    question="Do our two best treatments also help in FrozenLake, with settings that were chosen "
    "in Sokoban?",
    config="organism:frozen_lake",
    seeds=(50, 51, 52),
)

# The same questions of a language model, by the rules of the pages of the tiny agent.
LANGUAGE: Fields = FEWER_FILES | WARN_ONLY | {"eval.every": 20, "report.every": 0}
ORGANISM_EXPERIMENTS["language"] = Experiment(
    question="SmolLM2-135M has learned two reasoning styles in sentences, of which one depends on "
    "its input and is longer. With a penalty for long replies, does its reasoning lose its input "
    "dependence? Do the paper's filter or a bonus on information keep it?",
    config="organism:bandit",
    settings={"length penalty": {}},
    # There is no entropy bonus that could fade, so of our treatments the bonus on information.
    treatments={
        **{"top-p 0.9": TOP_P, "random groups": TOP_P | {"filter.at_random": True}},
        "information 0.05": OURS["information 0.05"],
        "no filter": NONE,
    },
    seeds=(60, 61, 62),
    common_fields=LANGUAGE,
    doubt="More seeds and longer runs; a larger model; a task in which only the grounded reasoning "
    "finds the answer; another cause of the collapse than a penalty; or a model that was not "
    "fine-tuned on both styles.",
    minutes=5,
    cores=2,
)
ORGANISM_EXPERIMENTS["language_detectors"] = dataclasses.replace(
    ORGANISM_EXPERIMENTS["language"],
    question="Which metrics detect that a language model's reasoning no longer depends on its "
    "input, and which raise false alarms?",
    settings={"length penalty": {}, "no penalty": {"reward.overlong_buffer": 0}},
    treatments={"top-p 0.9": TOP_P, "no filter": NONE},
    runs="language",
)
