"""What a config must be for a run to use it: anything else is refused before it compiles."""

import math

from ml_collections import ConfigDict

from ragen_jax import chat, credit, filter, losses, objectives, rewards
from ragen_jax.config import minibatch_rows, step_groups
from ragen_jax.diagnostics import regimes, stopping
from ragen_jax.diagnostics.gradients import check_edges
from ragen_jax.model import lora
from ragen_jax.optimize import SCHEDULES
from ragen_jax.update import EXACT


def check(config):
    """Refuses values that no run could use.

    Raises:
      ValueError: names the field, its value and what is accepted.
    """
    c = config
    sections = environment_sections(c)
    for name, accepted in (
        ("filter.strategy", filter.STRATEGIES),
        ("filter.metric", filter.METRICS),
        ("filter.mode", filter.MODES),
        ("filter.keep", filter.KEEP),
        ("filter.loss_scale", filter.LOSS_SCALES),
        ("reward.normalize", rewards.METHODS),
        ("reward.grouping", rewards.GROUPINGS),
        ("reward.level", rewards.PLACEMENTS),
        ("algorithm.name", credit.ALGORITHMS),
        ("algorithm.objective", objectives.OBJECTIVES),
        ("algorithm.aggregation", losses.AGGREGATIONS),
        ("optimizer.schedule", SCHEDULES),
        ("algorithm.kl_kind", (*losses.KL_KINDS, EXACT)),
        ("algorithm.kl_in", ("loss", "reward")),
        ("algorithm.mismatch_level", objectives.LEVELS),
        ("model.dtype", ("float32", "bfloat16", "float16")),
        *((f"{section}.context", chat.CONTEXTS) for section in sections),
        *((f"{section}.prompt", chat.PROMPTS) for section in sections),
        *((f"stopping.{rule}.action", stopping.ACTIONS) for rule in stopping.RULES),
        ("regimes.action", regimes.ACTIONS),
    ):
        value = field(c, name)
        if value not in accepted:
            raise ValueError(f"config.{name} is {value!r}; accepted: {', '.join(accepted)}")
    for name, least in (
        ("seed", 0),
        ("steps", 0),
        *(
            (f"{section}.{name}", least)
            for section in sections
            for name, least in (
                ("max_turns", 1),
                ("actions_per_turn", 1),
                ("max_actions", 1),
                ("window", 1),
                ("max_context", 0),
                ("pool", 0),
            )
        ),
        *((f"also.{name}.groups", 1) for name in c.also),
        ("collect.max_rounds", 1),
        *((f"stopping.{rule}.patience", 1) for rule in stopping.RULES),
        ("stopping.variance.baseline", 1),
        ("regimes.baseline", 1),
        ("regimes.recent", 1),
        ("regimes.long", 1),
        ("regimes.tighten.every", 1),
        ("regimes.clear_patience", 1),
        ("model.lora.rank", 0),
        ("rollout.groups", 1),
        ("rollout.group_size", 1),
        ("rollout.max_new_tokens", 1),
        ("rollout.save_every", 0),
        ("optimizer.minibatches", 1),
        ("optimizer.micro_batch", 1),
        ("optimizer.warmup_updates", 0),
        ("critic.warmup_steps", 0),
        ("reward.overlong_buffer", 0),
        ("filter.top_members", 0),
        ("filter.bottom_members", 0),
        ("diagnose.every", 0),
        ("diagnose.flow_every", 0),
        ("diagnose.first_turn_samples", 1),
        ("diagnose.trajectory_samples", 1),
        ("diagnose.micro_batch", 1),
        ("diagnose.gradients_every", 0),
        ("diagnose.gradients_groups", 0),
        ("diagnose.gradients_buckets", 1),
        ("eval.every", 0),
        ("eval.episodes", 1),
        ("eval.top_k", 0),
        ("eval.seed", 0),
        ("checkpoint.every", 0),
        ("checkpoint.keep", 1),
        ("warmstart.rooms", 1),
        ("warmstart.batch", 1),
        ("warmstart.check_every", 1),
        ("warmstart.check_episodes", 1),
    ):
        if field(c, name) < least:
            raise ValueError(f"config.{name} is {field(c, name)}; it must be at least {least}")
    for name, low, high in (  # open below, closed above
        ("rollout.temperature", 0, 100),
        ("eval.temperature", 0, 100),
        ("eval.top_p", 0, 1),
        ("optimizer.learning_rate", 0, 1),
        ("critic.learning_rate", 0, 1),
        ("critic.clip", 0, math.inf),
        ("algorithm.gamma", 0, 1),
        ("algorithm.turn_gamma", 0, 1),
        ("collect.explore", 0, 1),
        ("collect.explore_least", 0, 1),
        ("stopping.variance.ratio", 0, 1),
        ("stopping.success.least", 0, 1),
        ("regimes.recover", 0, 1),
        ("regimes.margin", 0, 10),
        *((f"regimes.{level}", 0, 1) for level in ("low", *regimes.FALLING)),
        *((f"regimes.{kind}.fall", 0, 1) for kind in regimes.EITHER),
        *((f"regimes.{kind}.rise", 1, math.inf) for kind in regimes.EITHER),
        ("regimes.tighten.factor", 0, 1),
        ("regimes.tighten.least", 0, 1),
    ):
        if not low < field(c, name) <= high:
            raise ValueError(
                f"config.{name} is {field(c, name)}; it must be above {low}, at most {high}"
            )
    if not 0 <= c.eval.min_p < 1:
        raise ValueError(f"config.eval.min_p is {c.eval.min_p}; it must be at least 0, below 1")
    lora.check_targets(c.model.lora.targets)
    if c.seed >= 2**29:  # an environment's seeds are seed * 2**32 and up, below IMITATION_SEEDS
        raise ValueError(f"config.seed is {c.seed}; it must be below {2**29}")
    check_algorithm(c)
    if c.filter.strategy == "min_p" and c.filter.keep == "smallest" and c.filter.value <= 0:
        raise ValueError(
            f"config.filter.value is {c.filter.value}; min_p over the smallest needs more than 0"
        )
    check_edges(c.diagnose.gradients_edges, "config.diagnose.gradients_edges")
    if c.also and c.diagnose.gradients_every and not c.diagnose.gradients_groups:
        raise ValueError(
            "config.diagnose.gradients_groups is 0, but the groups of a step are of several "
            "environments, whose rewards differ in scale: give a number"
        )
    if c.regimes.action == "tighten" and c.filter.strategy not in regimes.TIGHTENED:
        raise ValueError(
            f"config.regimes.action is tighten, but filter.strategy is {c.filter.strategy!r}; it "
            "lowers filter.value, which tightens " + ", ".join(regimes.TIGHTENED)
        )
    for section in sections:
        check_environment(c, section)
    if c.collect.explore < 1 and not all(field(c, section).pool for section in sections):
        raise ValueError(
            f"config.collect.explore is {c.collect.explore}, but without env.pool no problem is "
            "met twice; set env.pool, or collect.explore to 1"
        )
    if not 0 <= c.algorithm.zvp_coef < math.inf:
        raise ValueError(f"config.algorithm.zvp_coef is {c.algorithm.zvp_coef}; it must be >= 0")
    if c.algorithm.zvp_coef and c.filter.strategy != "none":
        raise ValueError(
            f"config.algorithm.zvp_coef is {c.algorithm.zvp_coef}, but filter.strategy="
            f"{c.filter.strategy} drops the groups it learns from; it needs filter.strategy=none"
        )
    episodes = step_groups(c) * c.rollout.group_size
    if c.optimizer.minibatches > episodes:
        raise ValueError(
            f"config.optimizer.minibatches is {c.optimizer.minibatches}, but a step has only "
            f"{episodes} episodes (groups of all environments x rollout.group_size)"
        )
    if c.optimizer.micro_batch > minibatch_rows(c):
        raise ValueError(
            f"config.optimizer.micro_batch is {c.optimizer.micro_batch}, but a minibatch has at "
            f"most {minibatch_rows(c)} rows (all rows of a step over optimizer.minibatches)"
        )


def environment_sections(config):
    """The dotted names of the sections that describe environments.

    Raises:
      ValueError: config.also holds something that is none.
    """
    for name, part in config.also.items():
        if not isinstance(part, ConfigDict) or set(part) != {"groups", "env"}:
            raise ValueError(f"config.also.{name} must have groups and env, see configs/base.py")
        if name == config.env.name:
            raise ValueError(f"config.also.{name} has the name of config.env; give it another")
        missing = sorted(set(config.env) ^ set(part.env))
        if missing:
            raise ValueError(
                f"config.also.{name}.env must have the fields of config.env; one of them alone has "
                f"{', '.join(missing)}"
            )
    return ("env", *(f"also.{name}.env" for name in config.also))


def check_environment(config, section):
    """The part of `check` that is about one environment."""
    env = field(config, section)
    groups = "rollout.groups" if section == "env" else section.replace(".env", ".groups")
    if not -math.inf < env.format_penalty <= 0:
        raise ValueError(
            f"config.{section}.format_penalty is {env.format_penalty}; it must be <= 0"
        )
    if 0 < env.max_context <= config.rollout.max_new_tokens:
        raise ValueError(
            f"config.{section}.max_context is {env.max_context}; it must be above "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}, which it holds beside the "
            "prompt, or 0"
        )
    if 0 < env.pool < field(config, groups):
        raise ValueError(
            f"config.{section}.pool is {env.pool}; it must be at least {groups} = "
            f"{field(config, groups)}, or 0"
        )


def check_algorithm(config):
    """The part of `check` that is about config.algorithm and what must agree with it."""
    a = config.algorithm

    def refuse(name, needed):
        raise ValueError(f"config.{name} is {field(config, name)!r}; {needed}")

    if a.clip_c != 0 and a.clip_c <= 1:
        refuse("algorithm.clip_c", "it must be above 1, or 0 for no second clip")
    if a.objective == "cispo" and a.clip_c:
        refuse("algorithm.clip_c", "objective cispo has no second clip: give 0")
    if not 0 <= a.lam <= 1:
        refuse("algorithm.lam", "it must be from 0 to 1")
    if a.mismatch_cap and a.mismatch_cap < 1:
        refuse("algorithm.mismatch_cap", "it must be at least 1, or 0 for no weights")
    if min(a.kl_target, a.kl_gain, a.kl_coef) < 0:
        name = next(n for n in ("kl_target", "kl_gain", "kl_coef") if a[n] < 0)
        refuse(f"algorithm.{name}", "it must be at least 0")
    if a.kl_target and not a.kl_coef:
        refuse("algorithm.kl_target", "it steers algorithm.kl_coef, which is 0")
    if a.kl_in == "reward" and a.kl_kind == EXACT:
        refuse(
            "algorithm.kl_kind",
            "KL in the reward is an estimate of each token: " + ", ".join(losses.KL_KINDS),
        )
    if config.reward.normalize != "identity" and config.reward.level != "turn":
        refuse("reward.level", "normalised returns lie on an episode's last token: leave it 'turn'")
    alone = a.name in credit.OF_TOKENS and config.filter.strategy == "none"
    if config.rollout.group_size == 1 and not alone:
        refuse(
            "rollout.group_size",
            "a group of one has no variance: it needs filter.strategy none and an algorithm that "
            f"learns from tokens ({', '.join(credit.OF_TOKENS)})",
        )
    if config.reward.overlong_buffer >= config.rollout.max_new_tokens:
        refuse(
            "reward.overlong_buffer",
            f"it must be below rollout.max_new_tokens={config.rollout.max_new_tokens}",
        )
    members = config.filter.top_members + config.filter.bottom_members
    if members > config.rollout.group_size:
        raise ValueError(
            f"config.filter.top_members + bottom_members is {members}; a group has "
            f"rollout.group_size={config.rollout.group_size} episodes"
        )


def field(config, dotted):
    """config.a.b for "a.b"."""
    for name in dotted.split("."):
        config = config[name]
    return config
