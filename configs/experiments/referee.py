"""Experiments on claims about collapse of other papers than RAGEN-2 (docs/lab/referee.md).

They are tried on agents whose truth is known: the model organism of configs/organism.py.
"""

import dataclasses

from ragen_jax.configs.experiments.experiment import (
    FEWER_FILES,
    NONE,
    TOP_P,
    WARN_ONLY,
    Claim,
    Experiment,
    Fields,
    Quick,
)
from ragen_jax.configs.experiments.organism import ORGANISM_EXPERIMENTS

# Short runs of 64 episodes per step, with probes and without the scores of every step.
SHORT: Fields = {
    **{"steps": 20, "eval.every": 10, "eval.episodes": 256},
    **{"diagnose.every": 0, "diagnose.probe_every": 10, "report.every": 0},
    **FEWER_FILES,
    **WARN_ONLY,
}
SEEDS = (70, 71, 72, 73, 74)  # different from those of the other experiments
MISMATCH_PAPER, COLLAPSE_PAPER = "arXiv 2605.14220", "arXiv 2605.21125"
PAIRS_PAPER = "arXiv 2602.03452"
# Doses of a difference between sampler and trainer, smallest first.
NOISES = {f"noise {std}": {"lab.sampler_noise": std} for std in (0.3, 1.0, 3.0)}
WEIGHTS = {f"{x} weights": {"lab.sampler_weights": x} for x in ("bfloat16", "int8", "float8")}
CAP = {"algorithm.mismatch_cap": 2.0}
CAPPED = ("noise 1.0", "noise 3.0", "float8 weights")  # doses that are also tried with weights


def claims(source: str, *treatments: str, sign: int, reference: str = "") -> tuple[Claim, ...]:
    """Return the claims that each treatment moves success, and information, in a direction."""
    return tuple(
        Claim(source, name, figure, sign, reference=reference)
        for name in treatments
        for figure in ("success", "information kept")
    )


REFEREE_EXPERIMENTS = {
    # Slips differ in success and groups of two and of eight in how often all members agree. With
    # the entropy bonus, reasoning loses its input dependence; without it, it does not.
    "dead_groups": Experiment(
        question="Does the early rate of groups without gradient (all members have the same "
        "reward) predict final success? Does it see that reasoning no longer depends on its input?",
        config="organism:frozen_lake",
        settings={
            f"slip {slip}, {groups} x {members}, entropy {entropy}": {
                "env.options.slip": slip,
                **{"rollout.groups": groups, "rollout.group_size": members},
                "algorithm.entropy_coef": entropy,
            }
            for slip in (0.02, 0.2, 0.5, 0.8, 1.0)
            for groups, members in ((32, 2), (8, 8))
            for entropy in (0.0, 0.05)
        },
        treatments={"no filter": NONE},
        seeds=SEEDS,
        # All arms start from one agent, trained at the default slip: at slip 1.0 it cannot learn.
        common_fields=SHORT | {"warmstart.options": {"slip": 0.02}},
        doubt="Agents that start with different skill, longer runs, or a reward whose groups tie "
        "for another reason than chance.",
        minutes=0.5,
        quick=Quick(treatments=("no filter",), seeds=SEEDS[:1], common_fields={"steps": 10}),
        paper=COLLAPSE_PAPER,
    ),
    # Without the entropy bonus, this agent keeps its information, so any loss is the mismatch's.
    "mismatch": Experiment(
        question="Does a difference between the log-probs of the sampler and those of the trainer "
        "cost success or information? From which size on, and does `algorithm.mismatch_cap` help?",
        config="organism:sokoban",
        settings={"entropy 0": {"algorithm.entropy_coef": 0.0, "rollout.group_size": 8}},
        treatments={
            name: NONE | changes
            for name, changes in (
                *(NOISES | WEIGHTS).items(),
                *((f"{x}, cap 2", (NOISES | WEIGHTS)[x] | CAP) for x in CAPPED),
                ("exact", {}),
            )
        },
        seeds=SEEDS,
        common_fields=SHORT,
        doubt="Longer runs, in which a small bias of every step adds up; a deep model in bfloat16, "
        "whose mismatch grows with the length of the reply; or a mismatch that depends on the "
        "token, as that of a quantized sampler does and that of added noise does not.",
        minutes=0.5,
        quick=Quick(
            treatments=("noise 3.0", "noise 3.0, cap 2", "exact"),
            seeds=SEEDS[:3],
            common_fields={"steps": 10, "eval.every": 5, "eval.episodes": 128},
        ),
        claims=(
            *(Claim(MISMATCH_PAPER, name, "success", -1) for name in (*NOISES, *WEIGHTS)),
            *(Claim(MISMATCH_PAPER, name, "information kept", -1) for name in CAPPED),
            *(
                Claim(MISMATCH_PAPER, f"{name}, cap 2", "success", 1, reference=name)
                for name in CAPPED
            ),
        ),
        paper=MISMATCH_PAPER,
        ladders=(tuple(NOISES), tuple(WEIGHTS)),
    ),
    # In FrozenLake a third of the groups of four have no gradient.
    "signals": Experiment(
        question="Do virtual rewards in groups without gradient, or pairs of a hard and an easy "
        "prompt, teach more or keep more information than a choice of groups by reward variance?",
        config="organism:frozen_lake",
        settings={"16 x 4": {"rollout.groups": 16, "rollout.group_size": 4}},
        treatments={
            "virtual rewards": NONE | {"algorithm.virtual_rewards": 1},
            "RL-ZVP": NONE | {"algorithm.zvp_coef": 0.1},
            "4 pairs": {
                **{"filter.strategy": "pairs", "filter.value": 4.0},
                **{"filter.metric": "reward_mean", "filter.include_zero": True},
            },
            "top-k 0.5": {"filter.strategy": "top_k", "filter.value": 0.5},
            "top-p 0.9": TOP_P,
            "no filter": NONE,
        },
        seeds=SEEDS,
        common_fields=SHORT | {"warmstart.options": {"slip": 0.02}},
        doubt="Longer runs; sparse rewards, under which most groups have no gradient; or the "
        "papers' own settings, of which only the abstracts were known here.",
        minutes=0.5,
        claims=(
            *claims(COLLAPSE_PAPER, "virtual rewards", sign=1),
            *claims(PAIRS_PAPER, "4 pairs", sign=1, reference="top-p 0.9"),
            *claims(PAIRS_PAPER, "4 pairs", sign=1, reference="top-k 0.5"),
        ),
        paper=f"{COLLAPSE_PAPER}, {PAIRS_PAPER}",
    ),
    # Measured before any update: replicates are sets of held-out problems.
    "faithfulness": Experiment(
        question="Which measure of faithfulness tells decorative reasoning from reasoning that an "
        "answer uses, and that from reasoning it needs? At what cost?",
        config="organism:sokoban",
        settings={f"problems {i}": {"eval.seed": i} for i in range(70, 75)},
        treatments={"before training": NONE},
        seeds=(70,),
        common_fields=SHORT
        | {
            **{"steps": 1, "eval.every": 0, "diagnose.probe_every": 1},
            "diagnose.probe_faithfulness": True,
        },
        doubt="An agent whose actions ignore its grounded reasoning, or one whose templates tell "
        "something about the room; longer reasoning with steps that are sentences; several agents; "
        "and an agent that has learned to act on reasoning alone, which would be a third case.",
        minutes=0.3,
        paper="arXiv 2510.24941",
    ),
    "lengths": dataclasses.replace(
        ORGANISM_EXPERIMENTS["figures"],
        question="Do replies get shorter when reasoning loses its input dependence? Is a reply "
        "that gets shorter a sign of it?",
        doubt="A reward that pays for short replies, or an agent whose replies have hundreds of "
        "tokens to lose: here a reasoning has about thirteen.",
        quick=None,
        rows="figures",
        paper="RAGEN-2, length",
    ),
    "lengths_language": dataclasses.replace(
        ORGANISM_EXPERIMENTS["language_detectors"],
        question="Do SmolLM2's replies get shorter when its reasoning loses its input dependence?",
        doubt="A model that shortens its replies without losing its input dependence: here the "
        "shorter style is the one without information, and a penalty pays for it.",
        rows="language_detectors",
        paper="RAGEN-2, length",
    ),
}

# The same questions of SmolLM2-135M: its organism, short runs, three seeds.
LANGUAGE: Fields = FEWER_FILES | WARN_ONLY | {"eval.every": 5, "report.every": 0}
LANGUAGE_FORM = dict(config="organism:bandit", seeds=(80, 81, 82), minutes=6, cores=2, quick=None)
REFEREE_EXPERIMENTS |= {
    "dead_groups_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["dead_groups"],
        settings={
            f"{groups} x {members}, {penalty}": {
                **{"rollout.groups": groups, "rollout.group_size": members},
                "reward.overlong_buffer": buffer,
            }
            for groups, members in ((16, 2), (8, 4), (4, 8))
            for penalty, buffer in (("length penalty", 64), ("no penalty", 0))
        },
        common_fields=LANGUAGE,
        **LANGUAGE_FORM,
    ),
    "mismatch_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["mismatch"],
        settings={"no penalty": {"reward.overlong_buffer": 0}},
        common_fields=LANGUAGE,
        **LANGUAGE_FORM,
    ),
    "faithfulness_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["faithfulness"],
        settings={f"problems {i}": {"eval.seed": i} for i in range(80, 83)},
        common_fields=LANGUAGE | REFEREE_EXPERIMENTS["faithfulness"].common_fields,
        **{**LANGUAGE_FORM, "seeds": (80,), "minutes": 3},
    ),
    "signals_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["signals"],
        settings={"length penalty": {}},
        treatments=REFEREE_EXPERIMENTS["signals"].treatments
        | {"4 pairs": REFEREE_EXPERIMENTS["signals"].treatments["4 pairs"] | {"filter.value": 2.0}},
        common_fields=LANGUAGE,
        **LANGUAGE_FORM,
    ),
}

# Rows of docs/lab/referee.md: experiment on the tiny agent -> the same on the language model.
REFEREE = {
    name: f"{name}_language"
    for name in ("dead_groups", "mismatch", "signals", "faithfulness", "lengths")
}
REFEREE_QUICK = ("dead_groups", "mismatch")  # the rows of `run referee --quick`
# Claims that no experiment judges yet: (claim, paper, verdict, reason).
OPEN_CLAIMS = (
    (
        "a collapse of tool calls begins with spikes of the log-probs of control tokens; "
        "interleaved imitation prevents it",
        "arXiv 2606.26027",
        "not tested",
        "needs an organism whose tool calls lose their format, and its log-probs by token",
    ),
    (
        "Weighted GRPO teaches more than a choice by variance",
        PAIRS_PAPER,
        "not tested",
        "its weights of pairs were not known here; the row on pairs has group-normalised "
        "advantages without them",
    ),
    (
        "rollouts are best allocated by the expected gradient of each prompt",
        "arXiv 2602.01601",
        "not tested",
        "only GRESO (`collect.explore`) is in the bench ([cures](cures.md)), which is another rule",
    ),
    (
        "agents stop asking while reward rises",
        "arXiv 2603.12109",
        "not tested",
        "needs the axis from observation to belief in SearchQA",
    ),
    (
        "on-policy distillation keeps information with a teacher that has it, and loses it with "
        "one that has not",
        "arXiv 2606.15912, 2606.19659, 2605.11182",
        "not tested",
        "a student of a teacher that has information keeps it "
        "([distillation](../results/distillation.md)); a teacher without was not tried",
    ),
)
NOT_TO_CONCLUDE = (
    "That a paper is wrong. The tiny agent has 0.2 M parameters, starts from imitation, and its "
    "replies have about twenty tokens; the runs have twenty steps. A reversed verdict says that "
    "the claim does not hold for every agent that learns in this way.",
    "That an undecided claim is false: its interval includes both answers.",
    "That a paper's method does not work: of arXiv 2605.14220, 2605.21125, 2602.03452 and "
    "2510.24941 only abstracts and summaries were known here. The number of virtual rewards is "
    "constant (`ragen_jax/algorithm/zero_variance.py`), pairs have none of the weights of Weighted "
    "GRPO (`ragen_jax/algorithm/filter.py`), and a step is a third of a reasoning "
    "(`ragen_jax/diagnostics/faithfulness.py`).",
    "That the rate of groups without gradient, or a length, is useless: both are free, and what "
    "they say about learning is another question than whether reasoning depends on its input.",
    "Anything about quantized samplers of language models from noise added to the log-probs of a "
    "tiny agent: real differences grow with depth, length and rare tokens.",
)
