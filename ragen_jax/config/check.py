"""Check a config before anything compiles, and refuse values that no run could use.

configs/base.py declares each field's accepted values; this module checks constraints that involve
several fields.
"""

from typing import Any

from ml_collections import ConfigDict

from ragen_jax.algorithm import losses
from ragen_jax.algorithm.algorithms import DISTILL, OF_TOKENS
from ragen_jax.algorithm.filter import STRATEGIES
from ragen_jax.algorithm.objectives import OBJECTIVES
from ragen_jax.config.fields import FIELDS, entries, field, leaves
from ragen_jax.config.other_names import other_name
from ragen_jax.config.per_task import (
    has_critic,
    minibatch_rows,
    per_task_groups,
    row_tokens,
    step_groups,
    step_rows,
    teacher_path,
)
from ragen_jax.config.renamed import refuse_renamed
from ragen_jax.configs.base import SOLVER, WARMSTART, Config
from ragen_jax.core.domains import Field, freeze, plain
from ragen_jax.core.suggest import nearest
from ragen_jax.diagnostics.gradients import check_edges
from ragen_jax.model.qwen import ModelConfig

STEP_TOKENS = 2**26  # maximum tokens sampled per step; more would need tens of GB on the host


def check(config: ConfigDict) -> Config:
    """Return the frozen config; refuse values that no run could use.

    Raises:
      ValueError: the message names the field, its value and the accepted values.
    """
    check_domains(config)
    c = freeze(Config, config)
    check_algorithm(c)
    check_filter(c)
    check_edges(c.diagnose.gradients_edges, "config.diagnose.gradients_edges")
    if c.diagnose.probe_every and c.diagnose.probe_problems > c.eval.episodes:
        raise ValueError(
            f"config.diagnose.probe_problems is {c.diagnose.probe_problems}, but only "
            f"eval.episodes = {c.eval.episodes} problems are held out"
        )
    if c.also and c.diagnose.gradients_every and not c.diagnose.gradients_groups:
        raise ValueError(
            "config.diagnose.gradients_groups is 0, but the groups of a step come from several "
            "environments, whose rewards differ in scale; set a number"
        )
    if c.rollout.ahead and c.diagnose.gradients_every and not c.diagnose.gradients_groups:
        raise ValueError(
            "config.diagnose.gradients_groups is 0, but with rollout.ahead the groups of a "
            "step were sampled by an older policy than the one whose gradients are computed; "
            "set a number"
        )
    sections = ("env", *(f"also.{name}.env" for name in c.also))
    for section in sections:
        check_environment(c, section)
    pools = all(field(c, section).pool for section in sections)
    for name, off in (("collect.explore", 1.0), ("collect.allocate", False)):
        if field(c, name) != off and not pools:
            raise ValueError(
                f"config.{name} is {field(c, name)}, but without env.pool no problem occurs twice; "
                f"set env.pool, or set {name}={off}"
            )
    if c.collect.explore < 1 and c.collect.allocate:
        raise ValueError(
            f"config.collect.explore is {c.collect.explore} and collect.allocate is True; only one "
            "of them can choose the problems: set explore=1 or allocate=False"
        )
    check_sizes(c)
    check_warmstart(c)
    return c


def check_domains(config: ConfigDict) -> None:
    """Refuse fields that differ from base.py's, and values outside their field's domain.

    Raises:
      ValueError: the message names the first such field, its value and the accepted values.
    """
    fields = leaves(config)
    refuse_renamed(list(fields))
    for name in FIELDS:
        if name not in fields:
            raise ValueError(f"config.{name} is missing; configs/base.py lists every field")
    for name in fields:
        if name not in FIELDS:
            raise ValueError(
                f"config.{name} is unknown{other_name(name) or _similar_fields(name)} "
                "(configs/base.py lists every field)"
            )
    for name, domain in FIELDS.items():
        _check_value(name, field(config, name), domain)
    _check_also(config)
    for name, domain, _ in entries(config):
        _check_value(name, field(config, name), domain)


def _similar_fields(name: str) -> str:
    """Return "; did you mean a.b?" for an unknown field, preferring its own section."""
    by_last: dict[str, list[str]] = {}
    for known in FIELDS:
        by_last.setdefault(known.rpartition(".")[2], []).append(known)
    section, _, last = name.rpartition(".")
    near = [known for like in nearest(last, by_last) for known in by_last[like]]
    found = [known for known in near if known.rpartition(".")[0] == section] or near[:3]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _check_value(name: str, value: Any, domain: Field) -> None:
    if not domain.accepts(value):
        raise ValueError(f"config.{name} is {plain(value)!r}; it must be {domain.what}")


def _check_also(config: ConfigDict) -> None:
    for name, part in config.also.items():
        if "/" in name or name.startswith("."):  # a folder of the run gets this name
            raise ValueError(f"config.also has {name!r}, which cannot name a folder")
        if not isinstance(part, ConfigDict) or set(part) != {"groups", "env"}:
            raise ValueError(f"config.also.{name} must have groups and env; see configs/base.py")
        if name == config.env.name:
            raise ValueError(f"config.also.{name} has the same name as config.env; choose another")
        missing = sorted(set(config.env) ^ set(part.env))
        if missing:
            raise ValueError(
                f"config.also.{name}.env must have the same fields as config.env; only one of "
                f"them has {', '.join(missing)}"
            )


def check_environment(config: Config, section: str) -> None:
    """Check the section of an environment."""
    env = field(config, section)
    groups = "rollout.groups" if section == "env" else section.replace(".env", ".groups")
    if 0 < env.max_context <= config.rollout.max_new_tokens:
        raise ValueError(
            f"config.{section}.max_context is {env.max_context}; it must be 0, or above "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}, because it covers "
            "prompt and reply"
        )
    if 0 < env.pool < field(config, groups):
        raise ValueError(
            f"config.{section}.pool is {env.pool}; it must be at least {groups} = "
            f"{field(config, groups)}, or 0"
        )


def check_algorithm(config: Config) -> None:
    """Check config.algorithm and the fields that must agree with it."""
    a = config.algorithm

    def refuse(name, needed):
        raise ValueError(f"config.{name} is {field(config, name)!r}; {needed}")

    if a.clip_c != 0 and a.clip_c <= 1:
        refuse("algorithm.clip_c", "it must be above 1, or 0 for no dual clip")
    if a.clip_c and not OBJECTIVES[a.objective].second_clip:
        refuse("algorithm.clip_c", f"objective {a.objective} has no dual clip; set 0")
    if a.mismatch_cap and a.mismatch_cap < 1:
        refuse("algorithm.mismatch_cap", "it must be at least 1, or 0 for no weights")
    if a.name == DISTILL and (teacher_path(a) is None or a.kl_in != "loss"):
        refuse(
            "algorithm.name",
            "it learns from the KL to a teacher only; set algorithm.kl_reference to a model, "
            "kl_coef above 0 and kl_in='loss'",
        )
    if a.name == DISTILL and a.zvp_coef:
        refuse(
            "algorithm.zvp_coef",
            "its advantages come from rewards, of which algorithm.name=distill uses none; set it "
            "to 0",
        )
    if teacher_path(a) == WARMSTART and not (
        config.model.path == "tiny" or config.warmstart.fine_tune
    ):
        refuse(
            "algorithm.kl_reference",
            "only the tiny agent, or a model with warmstart.fine_tune, has a warm start, but "
            f"model.path is {config.model.path!r}; name a model with its tokenizer",
        )
    if a.imitate_every:
        tiny, w = config.model.path == "tiny", config.warmstart
        others = {
            "warmstart.fine_tune": not (tiny or w.fine_tune),
            "warmstart.demonstrations": not tiny and w.demonstrations != SOLVER,
            "model.lora.rank": config.model.lora.rank > 0,
            "warmstart.tower_layers": config.warmstart.tower_layers > 0,
            "algorithm.name": has_critic(a),
            "also": len(config.also) > 0,
        }
        if wrong := [name for name, differs in others.items() if differs]:
            refuse(
                "algorithm.imitate_every",
                "it is for the tiny agent, or a model that is fine-tuned on the solver's "
                "demonstrations, in a single environment, and without adapters, vision and critic; "
                f"set imitate_every=0, or change {wrong[0]}",
            )
    if a.kl_target and not a.kl_coef:
        refuse("algorithm.kl_target", "it controls algorithm.kl_coef, which is 0")
    if a.kl_in == "reward" and a.kl_kind == losses.EXACT:
        refuse(
            "algorithm.kl_kind",
            "the KL in the reward is estimated for each token: " + ", ".join(losses.KL_KINDS),
        )
    if config.reward.normalize != "identity" and config.reward.level != "turn":
        refuse(
            "reward.level",
            "normalised returns are placed on an episode's last token; leave it 'turn'",
        )
    alone = a.name in (*OF_TOKENS, DISTILL) and config.filter.strategy == "none"
    if config.rollout.group_size == 1 and not alone:
        refuse(
            "rollout.group_size",
            "a group of one has no variance; this needs filter.strategy none and an algorithm "
            f"that compares no members ({', '.join((*OF_TOKENS, DISTILL))})",
        )
    if config.reward.overlong_buffer >= config.rollout.max_new_tokens:
        refuse(
            "reward.overlong_buffer",
            f"it must be below rollout.max_new_tokens={config.rollout.max_new_tokens}",
        )
    if a.mi_coef and config.rollout.temperature != 1:
        refuse(
            "algorithm.mi_coef",
            f"tokens sampled at rollout.temperature={config.rollout.temperature} have other "
            "probabilities than those scored; set rollout.temperature=1.0",
        )
    if a.mi_coef and min(per_task_groups(config)) < 2:
        refuse(
            "algorithm.mi_coef",
            "a single group has no other prompt to compare with; set rollout.groups=2 or more",
        )
    for name, default in (("entropy_on", "all"), ("entropy_gate", 0)):
        if getattr(a, name) != default and config.diagnose.gradients_every:
            refuse(
                f"algorithm.{name}",
                "gradient/ metrics assume the same bonus on every token; set "
                "diagnose.gradients_every=0",
            )
    if a.entropy_gate and not config.diagnose.every:
        refuse(
            "algorithm.entropy_gate",
            "it needs the MI that diagnose.every=0 skips; set diagnose.every=1",
        )
    for name in ("zvp_coef", "virtual_rewards"):
        if getattr(a, name) and config.filter.strategy != "none":
            refuse(
                f"algorithm.{name}",
                f"filter.strategy={config.filter.strategy} drops the groups it learns from; set "
                "filter.strategy=none",
            )
    if a.virtual_rewards and a.name != "grpo":
        refuse(
            "algorithm.virtual_rewards",
            f"they are sized for the advantages of grpo, not of {a.name}; set algorithm.name=grpo",
        )


def check_filter(config: Config) -> None:
    """Check config.filter and the fields that must agree with it."""
    f = config.filter
    strategy = STRATEGIES[f.strategy]
    if not strategy.accepts(f.value):
        raise ValueError(
            f"config.filter.value is {f.value}; with filter.strategy={f.strategy} it must be "
            f"{strategy.what}"
        )
    if f.strategy == "min_p" and f.keep == "smallest" and f.value <= 0:
        raise ValueError(
            f"config.filter.value is {f.value}; min_p with the smallest scores needs a value "
            "above 0"
        )
    members = f.top_members + f.bottom_members
    if members > config.rollout.group_size:
        raise ValueError(
            f"config.filter.top_members + bottom_members is {members}; a group has "
            f"rollout.group_size={config.rollout.group_size} episodes"
        )
    if members and f.at_random:  # the best members of a group are not the best of its replacement
        raise ValueError(
            "config.filter.at_random is True, which assigns whole groups; set "
            "filter.top_members and bottom_members to 0"
        )
    if config.regimes.action == "tighten" and not strategy.tightened:
        raise ValueError(
            f"config.regimes.action is tighten, but filter.strategy is {f.strategy!r}; tighten "
            "lowers filter.value, which tightens "
            + ", ".join(name for name, row in STRATEGIES.items() if row.tightened)
        )


def check_sizes(config: Config) -> None:
    """Check the sizes of a step and of its batches."""
    c = config
    tokens = step_rows(c) * row_tokens(c)
    if tokens > STEP_TOKENS:
        raise ValueError(
            f"config.rollout.groups is {c.rollout.groups}, group_size {c.rollout.group_size} "
            f"and max_new_tokens {c.rollout.max_new_tokens}; a step could sample {tokens} "
            f"tokens, but at most {STEP_TOKENS} fit"
        )
    episodes = step_groups(c) * c.rollout.group_size
    if c.optimizer.minibatches > episodes:
        raise ValueError(
            f"config.optimizer.minibatches is {c.optimizer.minibatches}, but a step has only "
            f"{episodes} episodes (groups of all environments x rollout.group_size)"
        )
    if c.optimizer.micro_batch > minibatch_rows(c):
        raise ValueError(
            f"config.optimizer.micro_batch is {c.optimizer.micro_batch}, but a minibatch has "
            f"at most {minibatch_rows(c)} rows (rows of a step / optimizer.minibatches)"
        )


def check_warmstart(config: Config) -> None:
    """Check the settings of the tiny agent."""
    w = config.warmstart
    if w.width % (2 * w.heads):
        raise ValueError(
            f"config.warmstart.width is {w.width}; it must be an even multiple of "
            f"warmstart.heads = {w.heads}"
        )
    if w.heads % w.kv_heads:
        raise ValueError(
            f"config.warmstart.heads is {w.heads}; it must be a multiple of warmstart.kv_heads = "
            f"{w.kv_heads}"
        )
    if w.batch > w.rooms:
        raise ValueError(
            f"config.warmstart.batch is {w.batch}; it must be at most warmstart.rooms = {w.rooms}"
        )
    limit = ModelConfig.max_positions
    if config.model.path == "tiny" and config.rollout.max_new_tokens >= limit:
        raise ValueError(
            f"config.rollout.max_new_tokens is {config.rollout.max_new_tokens}; the tiny agent "
            f"has {limit} positions for prompt and reply"
        )
