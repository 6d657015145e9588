"""What each field of a config may hold, and in which runs it is read: one entry a field.

DOMAINS names every leaf of configs/base.py. What depends on several fields is check.py's; the
values of env.options are the environment's own. Bounds are wide: they refuse what would overflow,
hang or use up all memory, not what is unwise.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from ragen_jax.algorithm import algorithms, filter, losses, objectives, rewards
from ragen_jax.algorithm.bonus import ENTROPY_ON
from ragen_jax.core.sharding import MEMORIES
from ragen_jax.diagnostics import levels, regimes, stopping
from ragen_jax.envs import ENVS, known
from ragen_jax.model import hf, kernels, lora
from ragen_jax.model.dates import AUTO, is_day
from ragen_jax.rollout import chat
from ragen_jax.run.trackers import TRACKERS
from ragen_jax.update.optimize import SCHEDULES
from ragen_jax.update.policy import EXACT


@dataclasses.dataclass(frozen=True)
class ReadWhen:
    """A condition on other fields, without which a field is not read."""

    names: tuple[str, ...]  # the fields that decide
    holds: Callable[..., bool]  # of their values


@dataclasses.dataclass(frozen=True)
class Domain:
    """The values of a field."""

    what: str  # in words, behind "it must be"
    accepts: Callable[[Any], bool]
    read: tuple[ReadWhen, ...]  # conditions that must all hold for a run to read it; (): always


def whole(least: int, most: int, *read: ReadWhen) -> Domain:
    """Ints from `least` to `most`; a bool is none."""

    def accepts(value):
        return type(value) is int and least <= value <= most

    return Domain(f"a whole number from {least} to {most}", accepts, read)


def number(least: float, most: float, *read: ReadWhen) -> Domain:
    """Finite numbers from `least` to `most`; an int is one, too."""
    return Domain(f"a number from {least} to {most}", _numbers(least, most), read)


def above(least: float, most: float, *read: ReadWhen) -> Domain:
    """Finite numbers above `least`, at most `most`."""
    return Domain(f"a number above {least}, at most {most}", _numbers(least, most, least), read)


def _numbers(least: float, most: float, open_end: float | None = None) -> Callable[[Any], bool]:
    def accepts(value):
        return type(value) in (int, float) and least <= value <= most and value != open_end

    return accepts


def one_of(choices: Collection[str], *read: ReadWhen) -> Domain:
    """One of some texts."""

    def accepts(value):
        return type(value) is str and value in choices

    return Domain(f"one of {', '.join(choices)}", accepts, read)


def several_of(choices: Collection[str], *read: ReadWhen) -> Domain:
    """A tuple (or list) of at least one of some texts."""
    member = one_of(choices)

    def accepts(value):
        return type(value) in (tuple, list) and len(value) > 0 and all(map(member.accepts, value))

    return Domain(f"a list of {', '.join(choices)}", accepts, read)


def several(member: Domain, *read: ReadWhen) -> Domain:
    """A tuple (or list), maybe empty, of values of another domain."""

    def accepts(value):
        return type(value) in (tuple, list) and all(map(member.accepts, value))

    return Domain(f"a tuple in which each item is {member.what}", accepts, read)


def flag(*read: ReadWhen) -> Domain:
    """True or False."""
    return Domain("True or False", lambda value: type(value) is bool, read)


def text(*read: ReadWhen) -> Domain:
    """A text that is not empty."""
    return Domain("a text", lambda value: type(value) is str and value.strip() != "", read)


def day(*read: ReadWhen) -> Domain:
    """A date as text, or AUTO."""
    return Domain(
        f"a date as YYYY-MM-DD, or {AUTO!r} (the day the run starts)",
        lambda value: type(value) is str and (value == AUTO or is_day(value)),
        read,
    )


def section(*read: ReadWhen) -> Domain:
    """A section of fields that base.py does not know."""
    return Domain("a section", lambda value: isinstance(value, ConfigDict), read)


def shares(*read: ReadWhen) -> Domain:
    """A section, maybe empty, of numbers from 0 to 1 that are not all 0."""
    share = number(0, 1)

    def accepts(value):
        values = list(value.values()) if isinstance(value, ConfigDict) else [None]
        return not values or (all(map(share.accepts, values)) and max(values) > 0)

    return Domain("a section of fractions from 0 to 1, not all 0", accepts, read)


# ------------------------------------------------------------------------------ when it is read

TIMED = ReadWhen(("env.time_limit",), bool)
TINY = ReadWhen(("model.path",), lambda path: path == "tiny")
NOT_TINY = ReadWhen(("model.path",), lambda path: path != "tiny")
SEEING = ReadWhen(("warmstart.tower_layers",), bool)
LORA = ReadWhen(("model.lora.rank",), lambda rank: rank > 0)
NOT_LORA = ReadWhen(("model.lora.rank",), lambda rank: rank == 0)
CRITIC = ReadWhen(("algorithm.name",), lambda name: algorithms.ALGORITHMS[name].critic)
OF_TOKENS = ReadWhen(("algorithm.name",), lambda name: algorithms.ALGORITHMS[name].of_tokens)
BI_LEVEL = ReadWhen(("algorithm.bi_level",), bool)
SECOND_CLIP = ReadWhen(
    ("algorithm.objective",), lambda name: objectives.OBJECTIVES[name].second_clip
)
KL = ReadWhen(("algorithm.kl_coef",), bool)
ENTROPY = ReadWhen(("algorithm.entropy_coef",), bool)
KL_STEERED = ReadWhen(("algorithm.kl_target",), bool)
MISMATCH = ReadWhen(("algorithm.mismatch_cap",), bool)
NORMALIZED = ReadWhen(("reward.normalize",), lambda name: name != "identity")
AS_PLACED = ReadWhen(("reward.normalize",), lambda name: name == "identity")
FILTERED = ReadWhen(("filter.strategy",), lambda name: name != "none")
MASS = ReadWhen(("filter.strategy",), lambda name: name == "top_p")
PART_OF_MASS = ReadWhen(
    ("filter.value", "regimes.action"), lambda value, action: value < 1 or action == "tighten"
)
LINEAR = ReadWhen(("filter.mode",), lambda mode: mode == "linear")
DROPPED = ReadWhen(
    ("filter.strategy", "filter.top_members", "filter.bottom_members"),
    lambda name, top, bottom: name != "none" or top + bottom > 0,
)
WINDOW = ReadWhen(("env.context",), lambda context: context == "window")
POOL = ReadWhen(("env.pool",), bool)
EXPLORE = ReadWhen(("collect.explore",), lambda explore: explore < 1)
DIAGNOSED = ReadWhen(("diagnose.every",), bool)
PROBED = ReadWhen(("diagnose.probe_every",), bool)
SCORED = ReadWhen(
    ("diagnose.every", "diagnose.probe_every"), lambda every, probe: every + probe > 0
)
GRADIENTS = ReadWhen(("diagnose.gradients_every",), bool)
NO_EDGES = ReadWhen(("diagnose.gradients_edges",), lambda edges: len(edges) == 0)
EVALUATED = ReadWhen(("eval.every",), bool)
HELD_OUT = ReadWhen(
    ("eval.every", "diagnose.probe_every", "diagnose.gradients_every", "diagnose.gradients_groups"),
    lambda every, probe, gradients, groups: every > 0 or probe > 0 or gradients > 0 and groups > 0,
)
TIGHTENED = ReadWhen(("regimes.action",), lambda action: action == "tighten")


def _rule(name: str) -> ReadWhen:
    return ReadWhen((f"stopping.{name}.action",), lambda action: action != "off")


# ------------------------------------------------------------------------------ the table

EVERY = 10**6  # steps between two of anything, at most
SEEDS = 2**29  # an environment's seeds are seed * 2**32 and up, below datasets.IMITATION_SEEDS
EVAL_SEEDS = 2**30  # datasets.EVALUATION_SEEDS + seed * 2**32 and up, below 2**63
TOKENS = 2**17  # of a prompt or a reply: the longest that a known model reads
# Of float32 a number this near to 1 can still be told from it.
MOST_DECAY = 0.999999

FIELDS = {
    "seed": whole(0, SEEDS - 1),
    "steps": whole(0, EVERY),  # times minibatches below 2**31, which the optimizer counts to
    "model.path": text(),
    "model.dtype": one_of(hf.COMPUTE_DTYPES),
    "model.attention": one_of(("auto", "xla", *kernels.KERNELS)),
    "model.date": day(NOT_TINY),
    "model.remat": flag(),
    "model.lora.rank": whole(0, 1024),
    "model.lora.alpha": above(0, 10**6, LORA),
    "model.lora.targets": several_of(lora.TARGETS, LORA),
    "model.lora.tower": flag(LORA),
    "env.name": Domain(
        f"one of {', '.join(ENVS)}, or MODULE:CLASS for your own environment", known, ()
    ),
    "env.options": section(),
    "env.context": one_of(chat.CONTEXTS),
    "env.window": whole(1, 1000, WINDOW),
    "env.max_context": whole(0, 2 * TOKENS),
    "env.pool": whole(0, 10**6),
    "env.prompt": one_of(chat.PROMPTS),
    "env.max_turns": whole(1, 1000),
    "env.actions_per_turn": whole(1, 1000),
    "env.max_actions": whole(1, 10**6),
    "env.format_penalty": number(-(10**6), 0),
    "env.time_limit": number(0, 10**5),
    "env.workers": whole(1, 1024, TIMED),
    "env.max_error_share": number(0, 1),
    "also": section(),
    "rollout.groups": whole(1, 2**14),
    "rollout.group_size": whole(1, 2**14),
    "rollout.temperature": above(0, 100),
    "rollout.max_new_tokens": whole(1, TOKENS),
    "rollout.compact": flag(),
    "rollout.slots": whole(0, 2**20),
    "rollout.chunk": whole(0, TOKENS),
    "rollout.ahead": whole(0, 1),
    "rollout.save_every": whole(0, EVERY),
    "collect.max_rounds": whole(1, 1000),
    "collect.explore": above(0, 1, POOL),
    "collect.explore_least": above(0, 1, POOL, EXPLORE),
    "filter.strategy": one_of(filter.STRATEGIES),
    "filter.value": number(0, 10**6, FILTERED),
    "filter.metric": one_of(filter.METRICS),
    "filter.mode": one_of(filter.MODES, MASS, PART_OF_MASS),
    "filter.keep": one_of(filter.KEEP, FILTERED),
    "filter.include_zero": flag(FILTERED),
    "filter.eps": number(0, 10**9, MASS, PART_OF_MASS, LINEAR),
    "filter.loss_scale": one_of(filter.LOSS_SCALES, DROPPED),
    "filter.at_random": flag(FILTERED),
    "filter.top_members": whole(0, 2**14),
    "filter.bottom_members": whole(0, 2**14),
    "reward.overlong_buffer": whole(0, TOKENS),
    "reward.normalize": one_of(rewards.METHODS),
    "reward.grouping": one_of(rewards.GROUPINGS, NORMALIZED),
    "reward.level": one_of(rewards.PLACEMENTS, OF_TOKENS, AS_PLACED),
    "algorithm.name": one_of(algorithms.ALGORITHMS),
    "algorithm.gamma": above(0, 1, OF_TOKENS),
    "algorithm.lam": number(0, 1, CRITIC),
    "algorithm.bi_level": flag(CRITIC),
    "algorithm.turn_gamma": above(0, 1, CRITIC, BI_LEVEL),
    "algorithm.soft_weights": flag(),
    "algorithm.objective": one_of(objectives.OBJECTIVES),
    "algorithm.clip_low": number(0, 1),
    "algorithm.clip_high": number(0, 1000),
    "algorithm.clip_c": number(0, 1000, SECOND_CLIP),
    "algorithm.aggregation": one_of(losses.AGGREGATIONS),
    "algorithm.kl_kind": one_of((*losses.KL_KINDS, EXACT), KL),
    "algorithm.kl_coef": number(0, 1000),
    "algorithm.kl_in": one_of(("loss", "reward"), KL),
    "algorithm.kl_memory": one_of(tuple(MEMORIES), KL, NOT_LORA),
    "algorithm.kl_target": number(0, 1000, KL),
    "algorithm.kl_gain": number(0, 4, KL, KL_STEERED),  # from 5 on kl_coef would reach 0
    "algorithm.entropy_coef": number(0, 1000),
    "algorithm.zvp_coef": number(0, 1000),
    "algorithm.entropy_on": one_of(ENTROPY_ON, ENTROPY),
    "algorithm.entropy_gate": number(0, 0.99, ENTROPY),
    "algorithm.mi_coef": number(0, 1000),
    "algorithm.mismatch_cap": number(0, 10**6),
    "algorithm.mismatch_level": one_of(objectives.LEVELS, MISMATCH),
    "critic.learning_rate": above(0, 1, CRITIC),
    "critic.clip": above(0, 10**6, CRITIC),
    "critic.warmup_steps": whole(0, EVERY, CRITIC),
    "optimizer.learning_rate": above(0, 1),
    "optimizer.schedule": one_of(SCHEDULES),
    "optimizer.warmup_updates": whole(0, 10**9),
    "optimizer.b1": number(0, MOST_DECAY),
    "optimizer.b2": number(0, MOST_DECAY),
    "optimizer.eps": number(1e-20, 1),  # above 0 as float32
    "optimizer.weight_decay": number(0, 10),
    "optimizer.max_grad_norm": above(0, 10**9),
    "optimizer.minibatches": whole(1, 1024),
    "optimizer.micro_batch": whole(1, 2**16),
    "diagnose.every": whole(0, EVERY),
    "diagnose.flow_every": whole(0, EVERY, DIAGNOSED),
    "diagnose.scores_every": whole(0, EVERY, DIAGNOSED),
    "diagnose.first_turn_samples": whole(1, 4096, DIAGNOSED),
    "diagnose.trajectory_samples": whole(1, 4096, DIAGNOSED),
    "diagnose.micro_batch": whole(1, 2**16, SCORED),
    "diagnose.probe_every": whole(0, EVERY),
    "diagnose.probe_problems": whole(2, 4096, PROBED),
    "diagnose.probe_samples": whole(1, 1024, PROBED),
    "diagnose.probe_mediation": flag(PROBED),
    "diagnose.gradients_every": whole(0, EVERY),
    "diagnose.gradients_groups": whole(0, 10**5, GRADIENTS),
    "diagnose.gradients_buckets": whole(1, 1000, GRADIENTS, NO_EDGES),
    "diagnose.gradients_edges": several(above(0, 10**12), GRADIENTS),
    "eval.every": whole(0, EVERY),
    "eval.episodes": whole(1, 10**5, HELD_OUT),
    "eval.temperature": above(0, 100, EVALUATED),
    "eval.top_k": whole(0, 10**6, EVALUATED),
    "eval.top_p": above(0, 1, EVALUATED),
    "eval.min_p": number(0, MOST_DECAY, EVALUATED),
    "eval.seed": whole(0, EVAL_SEEDS - 1, HELD_OUT),
    "stopping.variance.action": one_of(stopping.ACTIONS),
    "stopping.variance.patience": whole(1, EVERY, _rule("variance")),
    "stopping.variance.ratio": above(0, 1, _rule("variance")),
    "stopping.variance.baseline": whole(1, EVERY, _rule("variance")),
    "stopping.success.action": one_of(stopping.ACTIONS, EVALUATED),
    "stopping.success.patience": whole(1, EVERY, EVALUATED, _rule("success")),
    "stopping.success.least": above(0, 1, EVALUATED, _rule("success")),
    "stopping.empty.action": one_of(stopping.ACTIONS),
    "stopping.empty.patience": whole(1, EVERY, _rule("empty")),
    "stopping.nonfinite.action": one_of(stopping.ACTIONS),
    "stopping.nonfinite.patience": whole(1, EVERY, _rule("nonfinite")),
    "regimes.action": one_of(regimes.ACTIONS),
    "regimes.baseline": whole(2, levels.FIRST),
    "regimes.recent": whole(1, levels.LAST),
    "regimes.long": whole(2, levels.FIRST),
    "regimes.clear_patience": whole(1, EVERY),
    "regimes.recover": above(0, 1),
    "regimes.low": above(0, 1, DIAGNOSED),
    "regimes.mi": above(0, 1, DIAGNOSED),
    "regimes.mi_sign": above(0, 1, DIAGNOSED),
    "regimes.valid_think": above(0, 1),
    "regimes.valid_action": above(0, 1),
    "regimes.grounded": above(0, 1, DIAGNOSED),
    "regimes.length.fall": above(0, 1),
    "regimes.length.rise": above(1, 10**6),
    "regimes.entropy.fall": above(0, 1, DIAGNOSED),
    "regimes.entropy.rise": above(1, 10**6, DIAGNOSED),
    "regimes.tighten.every": whole(1, EVERY, TIGHTENED),
    "regimes.tighten.factor": above(0, 1, TIGHTENED),
    "regimes.tighten.least": above(0, 1, TIGHTENED),
    "report.every": whole(0, EVERY),
    "checkpoint.every": whole(0, EVERY),
    "checkpoint.keep": whole(1, EVERY),
    "checkpoint.disk_retry_seconds": number(0, 10**6),
    "checkpoint.export": flag(),
    "log.trackers": several(one_of(TRACKERS)),
    "mesh.data": whole(-1, 2**20),
    "mesh.fsdp": whole(-1, 2**20),
    "mesh.tensor": whole(-1, 2**20),
    "sampling_mesh.data": whole(-1, 2**20),
    "sampling_mesh.fsdp": whole(-1, 2**20),
    "sampling_mesh.tensor": whole(-1, 2**20),
    "sampling_mesh.devices": whole(0, 2**20),
    "warmstart.seed": whole(0, 2**63 - 1, TINY),
    "warmstart.width": whole(2, 4096, TINY),
    "warmstart.layers": whole(1, 64, TINY),
    "warmstart.heads": whole(1, 64, TINY),
    "warmstart.kv_heads": whole(1, 64, TINY),
    "warmstart.mlp_width": whole(1, 2**14, TINY),
    "warmstart.tower_layers": whole(0, 64, TINY),
    "warmstart.tower_width": whole(16, 4096, TINY, SEEING),
    "warmstart.rooms": whole(1, 2**17, TINY),
    "warmstart.plan_moves": whole(0, 1000, TINY),
    "warmstart.styles": shares(),
    "warmstart.options": section(TINY),
    "warmstart.batch": whole(1, 2**14, TINY),
    "warmstart.learning_rate": above(0, 1, TINY),
    "warmstart.check_every": whole(1, EVERY, TINY),
    "warmstart.check_episodes": whole(1, 10**5, TINY),
    "warmstart.success": number(0, 1, TINY),
    "warmstart.max_updates": whole(1, EVERY, TINY),
}


# ------------------------------------------------------------------------------ applying it


def field(config: ConfigDict, dotted: str) -> Any:
    """config.a.b for "a.b"."""
    for name in dotted.split("."):
        config = config[name]
    return config


WHOLE = (
    "also",
    "env.options",
    "warmstart.styles",
    "warmstart.options",
)  # sections that are one field


def leaves(config: ConfigDict) -> dict[str, Any]:
    """{"a.b": value} of a config's fields; those of WHOLE and what is empty are leaves."""

    def walk(node, prefix):
        for name, value in node.items():
            name = prefix + name
            if isinstance(value, ConfigDict) and name not in WHOLE:
                yield from walk(value, f"{name}.")
            else:
                yield name, value

    return dict(walk(config, ""))


def entries(config: ConfigDict) -> Iterator[tuple[str, Domain, Callable[[str], str]]]:
    """(name, `Domain`, name -> the name of the field that it means there) of all fields.

    Fields of also.NAME.env have the entries of env, also.NAME.groups that of rollout.groups.
    """
    yield from ((name, domain, str) for name, domain in FIELDS.items())
    for other in config.also:
        yield f"also.{other}.groups", FIELDS["rollout.groups"], str

        def inside(name, other=other):
            return f"also.{other}.{name}" if name.startswith("env.") else name

        for name, domain in FIELDS.items():
            if name.startswith("env."):
                yield inside(name), domain, inside


def plays_heldout(config: ConfigDict) -> bool:
    """Return whether a run of the config plays held-out problems at all."""
    return HELD_OUT.holds(*(field(config, name) for name in HELD_OUT.names))


def unused_fields(config: ConfigDict, names: Collection[str]) -> dict[str, str]:
    """{field: why} of those of the fields `names` that a run of the config never reads.

    Args:
      config: one that passes check.check.
      names: dotted, as in DOMAINS or in also; others (options of environments) are passed over.
    """
    reasons = {}
    for name, domain, inside in entries(config):
        if name not in names:
            continue
        for when in domain.read:
            deciding = {inside(other): field(config, inside(other)) for other in when.names}
            if not when.holds(*deciding.values()):
                decided = ", ".join(f"{other}={value}" for other, value in deciding.items())
                reasons[name] = f"with {decided}"
                break
    return reasons


def warning(reasons: Mapping[str, str]) -> str:
    """One line about fields that were set in vain, or "" where there is none.

    Args:
      reasons: {field: why}, as `unread` gives them.
    """
    by_reason = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    parts = [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} set but not read {why}"
        for why, names in by_reason.items()
    ]
    return "warning: " + "; ".join(parts) if parts else ""
