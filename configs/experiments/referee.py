"""Experiments on claims about collapse of other papers than RAGEN-2 (docs/lab/referee.md).

They are tried on agents whose truth is known: the model organism of configs/organism.py.
"""

import dataclasses
from typing import Any

from ragen_jax.configs.base import WARMSTART
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
PAIRS_PAPER, ALLOCATION_PAPER = "arXiv 2602.03452", "arXiv 2602.01601"
SPIKES_PAPER, ASKING_PAPER = "arXiv 2606.26027", "arXiv 2603.12109"
SIXTEEN_BY_FOUR: Fields = {"rollout.groups": 16, "rollout.group_size": 4}
# Doses of a difference between sampler and trainer, smallest first.
NOISES = {f"noise {std}": {"lab.sampler_noise": std} for std in (0.3, 1.0, 3.0)}
WEIGHTS = {f"{x} weights": {"lab.sampler_weights": x} for x in ("bfloat16", "int8", "float8")}
DISTILLATION_PAPER, QUESTION = "arXiv 2605.11182", "question of this page"
# Teachers that imitated almost only one style, up to the same success as the student. A style that
# a teacher never saw would have a log-prob of about -18, and its gradient would dwarf all others.
TEACHERS = {
    "informed teacher": {"grounded": 0.98, "template": 0.02},
    "uninformed teacher": {"grounded": 0.02, "template": 0.98},
}
REWARD = ("", ", reward")  # distillation alone, and with GRPO's loss
CAP = {"algorithm.mismatch_cap": 2.0}
CAPPED = ("noise 1.0", "noise 3.0", "float8 weights")  # doses that are also tried with weights


PAIRS: Fields = {
    **{"filter.strategy": "pairs", "filter.value": 4.0},
    **{"filter.metric": "reward_mean", "filter.include_zero": True},
}


def taught(styles: dict[str, float], **fields: Any) -> Fields:
    """Return the fields of a student of a model that imitated a mixture of styles.

    Args:
      fields: further fields of `algorithm`.
    """
    teacher: Fields = {"algorithm.kl_reference": WARMSTART, "algorithm.kl_kind": "exact"}
    more = {f"algorithm.{name}": value for name, value in fields.items()}
    return NONE | teacher | {"lab.teacher_styles": styles} | more


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
        "prompt, with and without weights, teach more or keep more information than a choice of "
        "groups by reward variance?",
        config="organism:frozen_lake",
        settings={"16 x 4": SIXTEEN_BY_FOUR},
        treatments={
            "virtual rewards": NONE | {"algorithm.virtual_rewards": 1},
            "RL-ZVP": NONE | {"algorithm.zvp_coef": 0.1},
            "4 pairs": PAIRS,
            "4 weighted pairs": PAIRS | {"algorithm.name": "weighted_grpo"},
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
            *claims(PAIRS_PAPER, "4 weighted pairs", sign=1, reference="top-k 0.5"),
            *claims(PAIRS_PAPER, "4 weighted pairs", sign=1, reference="4 pairs"),
        ),
        paper=f"{COLLAPSE_PAPER}, {PAIRS_PAPER}",
    ),
    # Each problem of the pool is visited about five times; slips make its success uncertain.
    "allocation": Experiment(
        question="Does it teach more, or keep more information, to play problems in proportion to "
        "the standard deviation of their expected reward?",
        config="organism:frozen_lake",
        settings={"16 x 4, pool of 64": {**SIXTEEN_BY_FOUR, "env.pool": 64}},
        treatments={
            "allocation": NONE | {"collect.allocate": True},
            "uniform": NONE,
        },
        seeds=SEEDS,
        common_fields=SHORT | {"warmstart.options": {"slip": 0.02}},
        doubt="Longer runs, in which the success of a problem is known better; a larger pool with "
        "more problems that are always solved or always failed; or the paper's own form, which "
        "varies the size of a group and predicts success from other problems.",
        minutes=0.5,
        claims=claims(ALLOCATION_PAPER, "allocation", sign=1),
        paper=ALLOCATION_PAPER,
    ),
    # Half of the student's reasoning is grounded, half is templates.
    "distillation": Experiment(
        question="Does on-policy distillation keep the information in a student's reasoning: with "
        "a teacher whose reasoning depends on its input, and with a teacher, of equal success, "
        "whose reasoning does not? With and without reward?",
        config="organism:sokoban",
        settings={"entropy 0": {"algorithm.entropy_coef": 0.0, "rollout.group_size": 8}},
        treatments={
            **{x: taught(TEACHERS[x], name="distill", kl_coef=1.0) for x in TEACHERS},
            **{f"{x}, reward": taught(TEACHERS[x], kl_coef=0.1) for x in TEACHERS},
            "no teacher": NONE,
        },
        seeds=SEEDS,
        common_fields=SHORT,
        doubt="A teacher that lost its information in training instead of imitation; a teacher "
        "that is much better than its student; longer replies, on whose prefixes a teacher knows "
        "less; or another weight of the KL.",
        minutes=1,
        claims=(
            *(Claim(QUESTION, f"informed teacher{x}", "information kept", 1) for x in REWARD),
            *(Claim(QUESTION, f"uninformed teacher{x}", "information kept", -1) for x in REWARD),
            *(
                Claim(
                    DISTILLATION_PAPER,
                    f"uninformed teacher{x}",
                    "success",
                    -1,
                    reference=f"informed teacher{x}",
                )
                for x in REWARD
            ),
        ),
        paper="arXiv 2606.15912, 2606.19659, 2605.11182",
    ),
    # With a learning rate of 1e-3, this agent loses its success (experiment collapse).
    "spikes": Experiment(
        question="Do tags (</think>, <answer>, </answer>) appear where they do not belong before "
        "an agent loses its success? Are its replies broken after that? Does imitation between the "
        "steps of RL prevent it?",
        config="sokoban:tiny",
        settings={
            f"entropy {entropy}": {"algorithm.entropy_coef": entropy, "rollout.group_size": 8}
            for entropy in (0.05, 0.1)
        },
        treatments={
            "interleaved imitation": NONE | {"algorithm.imitate_every": 2},
            "RL alone": NONE,
        },
        seeds=SEEDS,
        common_fields=SHORT
        | {
            **{"steps": 30, "optimizer.learning_rate": 1e-3, "diagnose.tags_every": 1},
            "diagnose.probe_every": 0,
        },
        doubt="A model whose tool calls have more structure to lose than three tags, such as JSON; "
        "an agent that fails without an entropy bonus; tags that a model has seen in other places; "
        "or the paper's own spikes, of probabilities and not of sampled tags.",
        minutes=0.8,
        paper=SPIKES_PAPER,
    ),
    # Where a search costs 0.3, an answer without searches, which is rarely right, pays more than an
    # answer after two searches, which is right in about half of the episodes; but the agent, which
    # has learned to search, seldom tries it. Where a search costs 1, each search less pays: a run
    # of another seed (89) no longer searched after 20 steps.
    "asking": Experiment(
        question="Does an agent that must search for its answers stop searching while its reward "
        "rises? Does it lose the use of what it finds? And if searches cost reward, so that it has "
        "a reason to stop?",
        config="search_qa:tiny",
        settings={"SearchQA": {"rollout.group_size": 8}},
        treatments={
            "search cost 1": {"env.options.search_cost": 1.0},
            "search cost 0.3": {"env.options.search_cost": 0.3},
            "free searches": {},
        },
        seeds=SEEDS,
        common_fields=SHORT
        | {
            **{"steps": 40, "eval.every": 20, "eval.episodes": 512},
            "diagnose.probe_every": 0,
            "warmstart.options": {"search_cost": 0.0},
        },
        doubt="Longer runs; an agent whose questions are its own words, so that they can be more "
        "or less informative; a language model that knows some answers without searching; or an "
        "agent whose searches seldom help at first, as in the paper.",
        minutes=1.5,
        paper=ASKING_PAPER,
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
            "lab.hidden_prompts": 0.5,
        },
        doubt="An agent whose actions ignore its grounded reasoning, or one whose templates tell "
        "something about the room; longer reasoning with steps that are sentences; several agents; "
        "and one that has come to need its reasoning in another way than by hidden prompts.",
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
LANGUAGE: Fields = {
    **{"eval.every": 5, "diagnose.every": 0, "diagnose.probe_every": 5, "report.every": 0},
    **FEWER_FILES,
    **WARN_ONLY,
}
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
    # SmolLM2 answers from reasoning without its prompt although it has not imitated such answers.
    "faithfulness_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["faithfulness"],
        settings={f"problems {i}": {"eval.seed": i} for i in range(80, 83)},
        common_fields=LANGUAGE
        | REFEREE_EXPERIMENTS["faithfulness"].common_fields
        | {"lab.hidden_prompts": 0.0},
        **{**LANGUAGE_FORM, "seeds": (80,), "minutes": 5},
    ),
    "allocation_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["allocation"],
        settings={"8 x 4, pool of 16": {"env.pool": 16}},
        common_fields=LANGUAGE,
        **LANGUAGE_FORM,
    ),
    # The two teachers are fine-tuned as the student is, for the same number of updates on other
    # fractions of the same styles.
    "distillation_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["distillation"],
        settings={"no penalty": {"reward.overlong_buffer": 0}},
        common_fields=LANGUAGE,
        **LANGUAGE_FORM,
    ),
    # Half of all guesses are right. With a coefficient of 0.05, a run of another seed (89) lost its
    # words, but its success fell from 0.97 to 0.59 only.
    "spikes_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["spikes"],
        settings={
            f"entropy {entropy}": {"algorithm.entropy_coef": entropy, "reward.overlong_buffer": 0}
            for entropy in (0.05, 0.1)
        },
        common_fields=LANGUAGE
        | {
            **{"steps": 20, "eval.every": 10, "diagnose.tags_every": 1},
            "diagnose.probe_every": 0,
        },
        **(LANGUAGE_FORM | {"minutes": 8}),
    ),
    # The tiny agent's encyclopedias; a step has 32 episodes of up to four replies.
    "asking_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["asking"],
        settings={
            "SearchQA": {
                **{"rollout.groups": 8, "rollout.group_size": 4},
                **{"env.options.things": 20, "env.options.worlds": 32, "env.options.documents": 1},
                **{"env.max_turns": 4, "env.max_actions": 4},
            }
        },
        common_fields=LANGUAGE
        | {
            **{"steps": 20, "eval.every": 10, "eval.episodes": 128, "diagnose.probe_every": 0},
            "warmstart.options": {"search_cost": 0.0},
        },
        **{**LANGUAGE_FORM, "config": "search_qa:smollm2-135m", "minutes": 25, "cores": 1},
    ),
    "signals_language": dataclasses.replace(
        REFEREE_EXPERIMENTS["signals"],
        settings={"length penalty": {}},
        treatments=REFEREE_EXPERIMENTS["signals"].treatments
        | {
            name: REFEREE_EXPERIMENTS["signals"].treatments[name] | {"filter.value": 2.0}
            for name in ("4 pairs", "4 weighted pairs")
        },
        common_fields=LANGUAGE,
        **LANGUAGE_FORM,
    ),
}

# Rows of docs/lab/referee.md: experiment on the tiny agent -> the same on the language model.
REFEREE = {
    name: f"{name}_language"
    for name in (
        *("dead_groups", "mismatch", "signals", "allocation", "distillation", "spikes", "asking"),
        *("faithfulness", "lengths"),
    )
}
REFEREE_QUICK = ("dead_groups", "mismatch")  # the rows of `run referee --quick`
NOT_TO_CONCLUDE = (
    "That a paper is wrong. The tiny agent has 0.2 M parameters, starts from imitation, and its "
    "replies have about twenty tokens; the runs have twenty steps. A reversed verdict says that "
    "the claim does not hold for every agent that learns in this way.",
    "That an undecided claim is false: its interval includes both answers.",
    "That a paper's method does not work: of arXiv 2605.14220, 2605.21125, 2602.03452, 2602.01601 "
    "and 2510.24941 only abstracts and summaries were known here. The number of virtual rewards "
    "is constant (`ragen_jax/algorithm/zero_variance.py`), the weights of Weighted GRPO are our "
    "reading of its abstract (`ragen_jax/algorithm/pairs.py`), rollouts are allocated by visits "
    "(`ragen_jax/rollout/pool.py`), and a step is a third of a reasoning "
    "(`ragen_jax/diagnostics/faithfulness.py`).",
    "That the rate of groups without gradient, or a length, is useless: both are free, and what "
    "they say about learning is another question than whether reasoning depends on its input.",
    "Anything about quantized samplers of language models from noise added to the log-probs of a "
    "tiny agent: real differences grow with depth, length and rare tokens.",
)
