"""Declares every field of a run: default, accepted values, conditions, unit and meaning.

A section is a frozen dataclass; `Config`, at the end, is the whole. A field is declared as
`name: type = domain(default, bounds or choices, conditions)  # meaning`. The domains are in
ragen_jax/core/domains.py. A condition is a test of other fields' values; if it fails, a run does
not read the field. Checks, `--help`, the command line and the reference in the documentation are
derived from this file. Rules about several fields are checked in ragen_jax/config/check.py, and the
values of env.options by the environment.

A config file calls get_config() and changes some fields; `--config.a.b=v` changes a single field.
The defaults are the values of the paper (RAGEN-2, arXiv 2604.06268, section 4.1 and appendix B.2)
where it gives them, except filter.eps; the docstring of configs/sokoban.py lists the differences of
its tiny preset.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from ragen_jax.algorithm import algorithms, filter, losses, objectives, rewards, schedules
from ragen_jax.algorithm.bonus import ENTROPY_ON
from ragen_jax.core.domains import (
    Field,
    ReadWhen,
    Section,
    above,
    any_of,
    flag,
    fractions,
    number,
    numbers_above,
    one_of,
    section,
    sections,
    several_of,
    text,
    texts,
    whole,
)
from ragen_jax.core.sharding import MEMORIES
from ragen_jax.envs import ENVS, is_environment_name
from ragen_jax.model import hf, kernels, lora, rounding
from ragen_jax.model.dates import AUTO, is_day
from ragen_jax.model.tiny_kinds import DENSE, KINDS
from ragen_jax.rollout import chat
from ragen_jax.storage.trackers import TRACKERS

MAX_INTERVAL = 10**6  # maximum number of steps between two events
# Number of training seeds: problems have seeds from seed * 2**32, below datasets.IMITATION_SEEDS.
SEEDS = 2**29
# Number of evaluation seeds: problems have seeds from datasets.EVALUATION_SEEDS + seed * 2**32,
# below 2**63.
EVAL_SEEDS = 2**30
MAX_TOKENS = 2**17  # maximum tokens of a prompt or a reply: the longest context of a known model
SOLVER = "solver"  # value of warmstart.demonstrations
INITIAL, WARMSTART = "initial", "warmstart"  # values of algorithm.kl_reference
MAX_DECAY = 0.999999  # maximum decay rate; float32 still distinguishes it from 1


def environment_name(default: str) -> str:
    """Accept a name of envs.ENVS, or MODULE:CLASS."""
    expectation = f"one of {', '.join(ENVS)}, or MODULE:CLASS for your own environment"
    return Field(default, expectation, is_environment_name, ()).declare()


def day(default: str, *read: ReadWhen) -> str:
    """Accept a date as text, or AUTO."""
    return Field(
        default,
        f"a date as YYYY-MM-DD, or {AUTO!r} (the day the run starts)",
        lambda value: type(value) is str and (value == AUTO or is_day(value)),
        read,
    ).declare()


# Conditions under which a run reads a field.

WITH_TIME_LIMIT = ReadWhen(("env.time_limit",), bool)
TINY = ReadWhen(("model.path",), lambda path: path == "tiny")
NOT_TINY = ReadWhen(("model.path",), lambda path: path != "tiny")
FINE_TUNE = ReadWhen(
    ("model.path", "warmstart.fine_tune"), lambda path, fine_tune: path != "tiny" and fine_tune
)
IMITATION = ReadWhen(
    ("model.path", "warmstart.fine_tune"), lambda path, fine_tune: path == "tiny" or fine_tune
)
WITH_VISION = ReadWhen(("warmstart.tower_layers",), bool)
LORA = ReadWhen(("model.lora.rank",), lambda rank: rank > 0)
OWN_REFERENCE = ReadWhen(  # with LoRA, the base model is the reference
    ("model.lora.rank", "algorithm.kl_reference"),
    lambda rank, reference: rank == 0 or reference != INITIAL,
)
CRITIC = ReadWhen(("algorithm.name",), lambda name: algorithms.ALGORITHMS[name].critic)
TOKEN_LEVEL = ReadWhen(("algorithm.name",), lambda name: algorithms.ALGORITHMS[name].of_tokens)
FROM_REWARD = ReadWhen(("algorithm.name",), lambda name: name != algorithms.DISTILL)
BI_LEVEL = ReadWhen(("algorithm.bi_level",), bool)
CLIP = ReadWhen(("algorithm.objective",), lambda name: objectives.OBJECTIVES[name].clips)
SECOND_CLIP = ReadWhen(
    ("algorithm.objective",), lambda name: objectives.OBJECTIVES[name].second_clip
)
KL = ReadWhen(("algorithm.kl_coef",), bool)
ENTROPY = ReadWhen(("algorithm.entropy_coef",), bool)
TEACHER_STYLES = ReadWhen(("algorithm.kl_reference",), lambda name: name == WARMSTART)
KL_TARGET = ReadWhen(("algorithm.kl_target",), bool)
MISMATCH = ReadWhen(("algorithm.mismatch_cap",), bool)
NORMALIZATION = ReadWhen(("reward.normalize",), lambda name: name != "identity")
NO_NORMALIZATION = ReadWhen(("reward.normalize",), lambda name: name == "identity")
FILTER = ReadWhen(("filter.strategy",), lambda name: name != "none")
TOP_P = ReadWhen(("filter.strategy",), lambda name: name == "top_p")
PARTIAL_TOP_P = ReadWhen(
    ("filter.value", "regimes.action"), lambda value, action: value < 1 or action == "tighten"
)
LINEAR = ReadWhen(("filter.mode",), lambda mode: mode == "linear")
SELECTION = ReadWhen(
    ("filter.strategy", "filter.top_members", "filter.bottom_members"),
    lambda name, top, bottom: name != "none" or top + bottom > 0,
)
FLOAT_CACHE = ReadWhen(("rollout.cache_dtype",), lambda dtype: dtype == "model")
SAMPLING_MESH = ReadWhen(
    ("sampling_mesh.data", "sampling_mesh.fsdp", "sampling_mesh.tensor"), lambda *axes: any(axes)
)
WINDOW = ReadWhen(("env.context",), lambda context: context == "window")
POOL = ReadWhen(("env.pool",), bool)
EXPLORE = ReadWhen(
    ("collect.explore", "collect.allocate"), lambda explore, allocate: explore < 1 or allocate
)
DIAGNOSIS = ReadWhen(("diagnose.every",), bool)
PROBE = ReadWhen(("diagnose.probe_every",), bool)
SCORING = ReadWhen(
    ("diagnose.every", "diagnose.probe_every"), lambda every, probe: every + probe > 0
)
GRADIENTS = ReadWhen(("diagnose.gradients_every",), bool)
NO_EDGES = ReadWhen(("diagnose.gradients_edges",), lambda edges: len(edges) == 0)
EVALUATION = ReadWhen(("eval.every",), bool)
HELD_OUT = ReadWhen(
    ("eval.every", "diagnose.probe_every", "diagnose.gradients_every", "diagnose.gradients_groups"),
    lambda every, probe, gradients, groups: every > 0 or probe > 0 or gradients > 0 and groups > 0,
)
TIGHTENING = ReadWhen(("regimes.action",), lambda action: action == "tighten")


def _rule(name: str) -> ReadWhen:
    return ReadWhen((f"stopping.{name}.action",), lambda action: action != "off")


@dataclasses.dataclass(frozen=True)
class Lora(Section):
    """Train low-rank adapters instead of the model."""

    rank: int = whole(0, 0, 1024)  # rank of the adapters; 0: train the model itself
    alpha: float = above(32.0, 0, 10**6, LORA)  # adapters are scaled by alpha / rank
    targets: tuple[str, ...] = several_of(
        ("q", "k", "v", "o", "gate", "up", "down"), lora.ALL_TARGETS, LORA
    )
    tower: bool = flag(False, LORA)  # also adapt the vision tower of a vision-language model


@dataclasses.dataclass(frozen=True)
class Model(Section):
    """The model that is trained."""

    # "tiny" (see warmstart), a Hugging Face directory or hub id, or a GGUF file
    path: str = text("tiny")
    # dtype of activations and matrix products; parameters are float32
    dtype: str = one_of("float32", hf.COMPUTE_DTYPES)
    # attention kernel: auto | xla | cudnn (GPU) | splash (TPU)
    attention: str = one_of("auto", ("auto", "xla", *kernels.KERNELS))
    # Date in prompts, YYYY-MM-DD, if the chat template writes one (Llama 3.2). "auto":
    # the day the run starts; a resumed run keeps it.
    date: str = day("auto", NOT_TINY)
    remat: bool = flag(False)  # recompute each layer's activations in the backward pass
    lora: Lora = Lora()


@dataclasses.dataclass(frozen=True)
class Env(Section):
    """The environment, and what its prompts show."""

    # a key of envs.ENVS, or MODULE:CLASS for your own environment
    name: str = environment_name("sokoban")
    options: Mapping[str, Any] = section(dict())  # keyword arguments of the environment
    # turns in a prompt: "full" (all) | "window" | "single_turn"
    context: str = one_of("full", chat.CONTEXTS)
    # turns that "window" shows, including the current turn
    window: int = whole(3, 1, 1000, WINDOW)
    # maximum tokens of a prompt and its reply; old turns are dropped; 0: no limit
    max_context: int = whole(0, 0, 2 * MAX_TOKENS)
    # number of training problems, which are repeated; 0: new problems every step
    pool: int = whole(0, 0, 10**6)
    # "full": rules, format, budgets; "brief": the same in few tokens; "terse": only the observation
    prompt: str = one_of("full", chat.PROMPTS)
    max_turns: int = whole(5, 1, 1000)  # maximum replies per episode
    actions_per_turn: int = whole(2, 1, 1000)  # maximum actions executed per reply
    max_actions: int = whole(10, 1, 10**6)  # maximum actions per episode
    # reward of a malformed reply or an unknown action; <= 0
    format_penalty: float = number(-0.1, -(10**6), 0)
    # Whether text after </answer> makes a reply invalid; if not, it is ignored. Matters only
    # if rollout.stop does not end replies there.
    strict_format: bool = flag(True)
    time_limit: float = number(0.0, 0, 10**5)  # seconds per environment step; 0: no limit
    # number of environment steps that run in parallel if time_limit is set
    workers: int = whole(16, 1, 1024, WITH_TIME_LIMIT)
    # Maximum fraction of a step's episodes whose environment may fail (raise, hang or
    # return invalid values). Failed episodes are excluded from training; if more fail,
    # the run stops.
    max_error_share: float = number(0.1, 0, 1)


@dataclasses.dataclass(frozen=True)
class Task(Section):
    """Another environment in the same run."""

    groups: int = whole(8, 1, 2**14)  # groups per step
    env: Env = Env()


@dataclasses.dataclass(frozen=True)
class Rollout(Section):
    """Playing the episodes of a step."""

    groups: int = whole(8, 1, 2**14)  # G: groups (prompts) per step of env
    group_size: int = whole(16, 1, 2**14)  # K: episodes per group
    temperature: float = above(1.0, 0, 100)  # temperature of sampling and of the loss
    max_new_tokens: int = whole(400, 1, MAX_TOKENS)  # maximum tokens per reply
    # Texts that end a reply, wherever they begin after the reasoning (</think>); (): replies end
    # only at the model's stop tokens. A tool environment's replies also end at </tool_call>.
    stop: tuple[str, ...] = texts(("</answer>",))
    compact: bool = flag(True)  # remove finished episodes from the decoding batch
    # Number of episodes decoded concurrently, in training and evaluation, which is also
    # the number of rows of the KV cache; a free slot takes the next episode. 0: all
    # episodes of a step at once. Use slots if reply lengths vary widely or a step's
    # cache does not fit into memory; all programs are then compiled at the start.
    slots: int = whole(0, 0, 2**20)
    # Tokens decoded between checks for finished replies, whose episodes then continue
    # independently; at most max_new_tokens. 0: with slots, an eighth of max_new_tokens
    # (at least 24); without slots, all episodes wait for the turn's longest reply.
    chunk: int = whole(0, 0, MAX_TOKENS)
    # Number of steps by which rollouts run ahead of the updates, in parallel with them. After
    # the first steps, the episodes of a step are this number of steps off-policy;
    # algorithm.mismatch_cap corrects for it (decoupled PPO). Each step ahead keeps a copy of
    # the sampled parameters (with LoRA: of the adapters). Needs a single device or
    # sampling_mesh.devices. 0: rollouts and updates alternate.
    ahead: int = whole(0, 0, 8)
    # Cached keys and values of the sampler, in training, evaluation and serving: "model"
    # (model.dtype) or "int8", with a float32 scale for each token and head, for half the memory of
    # bfloat16. Sampled log-probs then differ slightly from the policy's;
    # algorithm.mismatch_cap corrects for it.
    cache_dtype: str = one_of("model", ("model", "int8"))
    # How a decoded token reads the cache: "xla" (every position of every row that the cache
    # has), or "pages": a kernel for TPUs and GPUs that reads only the positions of each row, for
    # models with heads of 128 numbers (GPUs: a power of two from 16 to 256). Matters with slots
    # whose rows differ in length.
    cache_kernel: str = one_of("xla", ("xla", "pages"), FLOAT_CACHE)
    # Whether updates use the experts that sampling chose for each token (a mixture of experts): a
    # router that chooses differently makes log-probs jump. The weights of the experts are those of
    # the trained router. The host keeps 2 bytes per token, layer and expert of a token.
    replay_experts: bool = flag(False)
    # Steps between files in rollouts/; the first and last step, and steps with an alarm or a rule
    # that fires, are saved as well. 0: none.
    save_every: int = whole(10, 0, MAX_INTERVAL)


@dataclasses.dataclass(frozen=True)
class Collect(Section):
    """Selection of a step's groups before the filter."""

    # maximum rounds of play to find rollout.groups groups with variance (DAPO)
    max_rounds: int = whole(1, 1, 1000)
    # A problem of env.pool that had no variance in its last n visits is played with
    # probability max(explore ** n, explore_least). GRESO: 0.5; 1: always.
    explore: float = above(1.0, 0, 1, POOL)
    explore_least: float = above(0.01, 0, 1, POOL, EXPLORE)
    # Play a problem of env.pool more often the less certain its success is
    # (rollout/pool.py: allocation_chances); at least with probability explore_least.
    allocate: bool = flag(False, POOL)


@dataclasses.dataclass(frozen=True)
class Filter(Section):
    """Selection of the groups that the update learns from."""

    # top_p | top_k | top_k_abs | min_p | quarter | pairs | none
    strategy: str = one_of("top_p", filter.STRATEGIES)
    # parameter of the strategy; top_p: fraction of the variance mass kept; pairs: their number
    value: float = number(0.9, 0, 10**6, FILTER)
    # score of a group: reward_variance | reward_std | reward_sum | reward_mean |
    # entropy | entropy_variance | length
    metric: str = one_of("reward_variance", filter.METRICS)
    # mass of top_p: "linear" (paper) or "softmax" (released scripts)
    mode: str = one_of("linear", filter.MODES, TOP_P, PARTIAL_TOP_P)
    # scores to keep; "smallest": for diagnosis
    keep: str = one_of("largest", filter.KEEP, FILTER)
    include_zero: bool = flag(False, FILTER)  # whether groups without variance can be kept
    # Tolerance of the linear threshold. 0: 0.001 of the total score, and a step whose task
    # rewards do not vary is rejected, whatever its penalties; the size of the rewards then does
    # not matter. Above 0: absolute, in the unit of the score; a step whose total score is about
    # eps or less is rejected (the paper's code: 0.01).
    eps: float = number(0.0, 0, 10**9, TOP_P, PARTIAL_TOP_P, LINEAR)
    # Multiply the loss by the fraction of groups kept ("linear") or its square root
    # ("sqrt"), or only the advantages by the fraction ("advantage", the released
    # code), or "none". A loss summed over rows (algorithm.aggregation
    # seq-mean-token-sum-norm) is already linear.
    loss_scale: str = one_of("linear", filter.LOSS_SCALES, SELECTION)
    # Keep the same number of groups, but drawn at random (control experiment).
    at_random: bool = flag(False, FILTER)
    # Episodes kept per kept group: the best top_members and the worst
    # bottom_members; 0 and 0: all.
    top_members: int = whole(0, 0, 2**14)
    bottom_members: int = whole(0, 0, 2**14)


@dataclasses.dataclass(frozen=True)
class Reward(Section):
    """From what an environment pays to what the algorithm credits."""

    # Length of the range below max_new_tokens, in tokens, over which a penalty rises
    # from 0 to 1; 0: no penalty.
    overlong_buffer: int = whole(0, 0, MAX_TOKENS)
    # Normalisation of returns for the algorithm; filters and logs use the undiscounted
    # return. identity | mean | mean_std | asymmetric_clip
    normalize: str = one_of("identity", rewards.METHODS, FROM_REWARD)
    # set to normalise over: state (the group) | environment | batch
    grouping: str = one_of("state", rewards.GROUPINGS, NORMALIZATION, FROM_REWARD)
    # placement of unnormalised rewards: token | turn | episode
    level: str = one_of("turn", rewards.PLACEMENTS, TOKEN_LEVEL, NO_NORMALIZATION)


@dataclasses.dataclass(frozen=True)
class Algorithm(Section):
    """The loss."""

    # ppo (with critic) | grpo | dr_grpo | rloo | reinforce_plus_plus |
    # reinforce_plus_plus_baseline | raft (imitates the best members of each group) |
    # weighted_grpo (over pairs of a hard and an easy group) |
    # distill (no reward: only the KL to kl_reference)
    name: str = one_of("grpo", algorithms.ALGORITHMS)
    # ppo, reinforce_plus_plus: discount per sampled token
    gamma: float = above(1.0, 0, 1, TOKEN_LEVEL)
    lam: float = number(1.0, 0, 1, CRITIC)  # ppo: lambda of GAE
    bi_level: bool = flag(False, CRITIC)  # ppo: GAE over turns, then over tokens within each turn
    turn_gamma: float = above(1.0, 0, 1, CRITIC, BI_LEVEL)  # discount per turn of bi_level
    # scale advantages by the group's std / largest std of the step
    soft_weights: bool = flag(False, FROM_REWARD)
    # ppo (dual clip) | gspo (sequence ratios) | cispo | reinforce (no ratio)
    objective: str = one_of("ppo", objectives.OBJECTIVES)
    clip_low: float = number(0.2, 0, 1, CLIP)  # lower bound of the ratio: 1 - clip_low
    clip_high: float = number(0.28, 0, 1000, CLIP)  # upper bound of the ratio: 1 + clip_high
    # dual clip for negative advantages, above 1; 0: none
    clip_c: float = number(3.0, 0, 1000, SECOND_CLIP)
    aggregation: str = one_of("token-mean", losses.AGGREGATIONS)  # a key of losses.AGGREGATIONS
    # Estimator: k1 | abs | k2 | k3; with the gradient of k2: k1+ | abs+ | k3+; "exact"
    # sums over the vocabulary.
    kl_kind: str = one_of("k3", (*losses.KL_KINDS, losses.EXACT), KL)
    # coefficient of KL(policy || reference); 0: no KL
    kl_coef: float = number(0.001, 0, 1000)
    # The reference of the KL: "initial" is the initial policy. Any other value is a model with the
    # same tokenizer (a directory, hub id, GGUF file or run): a teacher, and the KL distils it.
    # "warmstart" is the model that the warm start makes with lab.teacher_styles.
    kl_reference: str = text(INITIAL, KL)
    # where the KL term enters: the "loss", or the "reward" of each token (subtracted)
    kl_in: str = one_of("loss", ("loss", "reward"), KL)
    # Where to keep the reference policy between uses: "device", or "host": pinned host
    # memory, copied to the devices for every update.
    kl_memory: str = one_of("device", tuple(MEMORIES), KL, OWN_REFERENCE)
    # KL in nats per token to which kl_coef adapts; 0: fixed
    kl_target: float = number(0.0, 0, 1000, KL)
    # adaptation rate of kl_coef; at 5 or more, kl_coef could become 0
    kl_gain: float = number(0.1, 0, 4, KL, KL_TARGET)
    entropy_coef: float = number(0.001, 0, 1000)  # coefficient of the exact entropy bonus
    # Coefficient of the load-balancing loss of a mixture of experts (model/experts.py); 0: none.
    balance_coef: float = number(0.0, 0, 1000)
    # Tokens with the bonus: all | actions (inside <answer>) | upper_groups |
    # lower_groups (the half of the groups with the larger or smaller filter score)
    entropy_on: str = one_of("all", ENTROPY_ON, ENTROPY)
    # Fraction of the run's level of MI (see regimes) at which the bonus is 0; it rises
    # linearly to its full value at the level. 0: constant bonus.
    entropy_gate: float = number(0.0, 0, 0.99, ENTROPY)
    # Coefficient of an advantage for reasoning that identifies its prompt among those
    # of the step (algorithm/bonus.py), in nats minus the mean; 0: none.
    mi_coef: float = number(0.0, 0, 1000)
    # coefficient of RL-ZVP advantages of no-variance groups; 0: none
    zvp_coef: float = number(0.0, 0, 1000)
    # Number of rewards of the opposite outcome in the mean and std of a no-variance group (AVSPO;
    # algorithm/zero_variance.py); 0: none.
    virtual_rewards: int = whole(0, 0, 1000)
    # Steps between steps whose updates imitate demonstrations of the solver, as many as a step has
    # episodes, instead of learning from its episodes; for the tiny agent and after
    # warmstart.fine_tune. 0: none.
    imitate_every: int = whole(0, 0, MAX_INTERVAL, IMITATION)
    # Upper bound of the importance weights that correct differences between sampler
    # and trainer, >= 1; 0: no weights, or 2 with rollout.ahead or an int8
    # rollout.cache_dtype.
    mismatch_cap: float = number(0.0, 0, 10**6)
    # level of these weights: "token" or "sequence"
    mismatch_level: str = one_of("token", objectives.LEVELS, MISMATCH)


@dataclasses.dataclass(frozen=True)
class Critic(Section):
    """For ppo; other settings as in optimizer."""

    learning_rate: float = above(1e-5, 0, 1, CRITIC)
    # largest change of a value per update, in units of reward
    clip: float = above(0.5, 0, 10**6, CRITIC)
    warmup_steps: int = whole(0, 0, MAX_INTERVAL, CRITIC)  # iterations that train only the critic


@dataclasses.dataclass(frozen=True)
class Optimizer(Section):
    """AdamW, and the division of a step into updates."""

    learning_rate: float = above(1e-6, 0, 1)
    # constant | linear, cosine: decay to 0 over the run
    schedule: str = one_of("constant", schedules.SCHEDULES)
    warmup_updates: int = whole(0, 0, 10**9)  # updates of linear warm-up from 0
    b1: float = number(0.9, 0, MAX_DECAY)
    b2: float = number(0.999, 0, MAX_DECAY)
    eps: float = number(1e-8, 1e-20, 1)  # must be above 0 in float32
    weight_decay: float = number(0.01, 0, 10)
    max_grad_norm: float = above(1.0, 0, 10**9)  # maximum global norm of the gradient
    # updates per step, each with an equal part of the kept rows
    minibatches: int = whole(4, 1, 1024)
    # rows per forward and backward pass; rows that share their beginnings are packed into as many
    # positions, up to eight times as many rows
    micro_batch: int = whole(4, 1, 2**16)


@dataclasses.dataclass(frozen=True)
class Diagnose(Section):
    """Collapse diagnostics."""

    every: int = whole(1, 0, MAX_INTERVAL)  # steps between collapse diagnostics; 0: never
    # Steps between flow/ metrics, on steps that `every` selects; 0: never. If prompts
    # show earlier replies, these steps also compute collapse/trajectory_stripped,
    # which doubles the cost of the trajectory scope.
    flow_every: int = whole(5, 0, MAX_INTERVAL, DIAGNOSIS)
    # Steps between diagnostics/*.npz, on steps that `every` selects: the first-turn
    # scores from which MI is computed, at most 64 x 64 (reasonings x prompts); 0: none.
    scores_every: int = whole(10, 0, MAX_INTERVAL, DIAGNOSIS)
    # maximum number of first turns to score, each under the first prompts of all groups
    first_turn_samples: int = whole(64, 1, 4096, DIAGNOSIS)
    trajectory_samples: int = whole(64, 1, 4096, DIAGNOSIS)  # episodes with a random turn to score
    micro_batch: int = whole(64, 1, 2**16, SCORING)  # (prompt, reasoning) pairs per device call
    # Steps between probe/ metrics, from first turns on a fixed set of held-out
    # problems with fixed noise; the first probe is before any update. 0: never.
    probe_every: int = whole(0, 0, MAX_INTERVAL)
    probe_problems: int = whole(32, 2, 4096, PROBE)  # at most eval.episodes
    probe_samples: int = whole(4, 1, 1024, PROBE)  # replies per problem
    # Compute probe/mediation/ (diagnostics/mediation.py): whether actions depend on
    # the reasoning, by blocked attention, gradients and exchanged reasoning.
    probe_mediation: bool = flag(False, PROBE)
    # Compute probe/faithfulness/ (diagnostics/faithfulness.py) of an agent that imitated several
    # warmstart.styles: early answers, exchanged and perturbed steps of the reasoning.
    probe_faithfulness: bool = flag(False, PROBE)
    # steps between tags/ metrics, about the format of replies (diagnostics/tags.py); 0: never
    tags_every: int = whole(0, 0, MAX_INTERVAL)
    # steps between gradients by reward variance; 0: never
    gradients_every: int = whole(0, 0, MAX_INTERVAL)
    # held-out groups to use; 0: the step's groups
    gradients_groups: int = whole(96, 0, 10**5, GRADIENTS)
    # buckets of equal size; groups without variance are separate
    gradients_buckets: int = whole(6, 1, 1000, GRADIENTS, NO_EDGES)
    # increasing reward variances that separate the buckets; (): buckets of equal size
    gradients_edges: tuple[float, ...] = numbers_above((), 0, 10**12, GRADIENTS)


@dataclasses.dataclass(frozen=True)
class Eval(Section):
    """Evaluation on held-out problems."""

    # steps between evaluations; the first is before any update; 0: none
    every: int = whole(20, 0, MAX_INTERVAL)
    # number of held-out problems, the same every time
    episodes: int = whole(512, 1, 10**5, HELD_OUT)
    temperature: float = above(0.5, 0, 100, EVALUATION)
    top_k: int = whole(0, 0, 10**6, EVALUATION)  # 0: all tokens
    top_p: float = above(1.0, 0, 1, EVALUATION)  # 1: all tokens
    min_p: float = number(0.0, 0, MAX_DECAY, EVALUATION)  # 0: all tokens
    # seed of the held-out set and of its sampling noise
    seed: int = whole(0, 0, EVAL_SEEDS - 1, HELD_OUT)


@dataclasses.dataclass(frozen=True)
class VarianceRule(Section):
    """The groups' mean reward variance has collapsed."""

    action: str = one_of("stop", ("stop", "warn", "off"))
    patience: int = whole(5, 1, MAX_INTERVAL, _rule("variance"))  # iterations in a row
    # threshold, as a fraction of the mean over the first iterations
    ratio: float = above(0.1, 0, 1, _rule("variance"))
    baseline: int = whole(10, 1, MAX_INTERVAL, _rule("variance"))  # number of first iterations


@dataclasses.dataclass(frozen=True)
class SuccessRule(Section):
    """Held-out success stays low."""

    action: str = one_of("stop", ("stop", "warn", "off"), EVALUATION)
    # evaluations in a row, not counting the evaluation before any update
    patience: int = whole(5, 1, MAX_INTERVAL, EVALUATION, _rule("success"))
    least: float = above(0.01, 0, 1, EVALUATION, _rule("success"))  # threshold of success


@dataclasses.dataclass(frozen=True)
class EmptyRule(Section):
    """The filter keeps nothing."""

    action: str = one_of("stop", ("stop", "warn", "off"))
    patience: int = whole(5, 1, MAX_INTERVAL, _rule("empty"))  # iterations in a row


@dataclasses.dataclass(frozen=True)
class NonfiniteRule(Section):
    """An update was skipped: its loss or gradient was not finite."""

    action: str = one_of("stop", ("stop", "warn", "off"))
    patience: int = whole(3, 1, MAX_INTERVAL, _rule("nonfinite"))  # iterations in a row


@dataclasses.dataclass(frozen=True)
class Stopping(Section):
    """Action: "stop" (exit code 3) | "warn" (once per streak) | "off"."""

    variance: VarianceRule = VarianceRule()
    success: SuccessRule = SuccessRule()
    empty: EmptyRule = EmptyRule()
    nonfinite: NonfiniteRule = NonfiniteRule()


@dataclasses.dataclass(frozen=True)
class Tighten(Section):
    """Steps of the action "tighten"."""

    every: int = whole(3, 1, MAX_INTERVAL, TIGHTENING)  # steps between two changes during an alarm
    factor: float = above(0.95, 0, 1, TIGHTENING)  # factor applied to filter.value at each change
    least: float = above(0.8, 0, 1, TIGHTENING)  # smallest fraction of filter.value


@dataclasses.dataclass(frozen=True)
class Regimes(Section):
    """The collapse alarm; diagnostics/regimes.py explains it and has its other thresholds."""

    # warn | stop (exit code 3) | checkpoint | tighten (the filter) | off
    action: str = one_of("warn", ("warn", "stop", "checkpoint", "tighten", "off"))
    # minimum number of values in a metric's level, its mean over an early part of the run
    baseline: int = whole(5, 2, 100)
    # information below this fraction of its level is an alarm
    mi: float = above(0.63, 0, 1, DIAGNOSIS)
    tighten: Tighten = Tighten()


@dataclasses.dataclass(frozen=True)
class Report(Section):
    """The run's page."""

    # Steps between updates of report.html, written by a separate process; 0: only at
    # the end of the run.
    every: int = whole(50, 0, MAX_INTERVAL)


@dataclasses.dataclass(frozen=True)
class Checkpoint(Section):
    """What is saved, and how long a failing disk is waited for."""

    # steps between checkpoints; 0: only the last step, always saved
    every: int = whole(20, 0, MAX_INTERVAL)
    keep: int = whole(2, 1, MAX_INTERVAL)  # number of newest checkpoints to keep
    disk_retry_seconds: float = number(600.0, 0, 10**6)  # maximum wait for a failing disk; 0: none
    export: bool = flag(True)  # write the trained model in Hugging Face format at the end


@dataclasses.dataclass(frozen=True)
class Log(Section):
    """Where metrics go besides metrics.jsonl."""

    # Trackers that receive the metrics: any of tensorboard, wandb, mlflow, trackio
    # (ragen_jax/storage/trackers.py).
    trackers: tuple[str, ...] = any_of(("tensorboard",), TRACKERS)
    completions: int = whole(0, 0, 1000)  # replies printed in each step


@dataclasses.dataclass(frozen=True)
class Mesh(Section):
    """Devices along each axis; one may be -1: the remaining devices."""

    data: int = whole(-1, -1, 2**20)  # splits rows
    fsdp: int = whole(1, -1, 2**20)  # splits rows and parameters
    tensor: int = whole(1, -1, 2**20)  # splits heads, MLP and vocabulary
    expert: int = whole(1, -1, 2**20)  # splits rows and the experts of a mixture


@dataclasses.dataclass(frozen=True)
class SamplingMesh(Section):
    """The same for sampling and scoring: fsdp=1 gathers weights, tensor>1 splits them by heads.

    data, fsdp and tensor 0: same as mesh.
    """

    data: int = whole(0, -1, 2**20)
    fsdp: int = whole(0, -1, 2**20)
    tensor: int = whole(0, -1, 2**20)
    expert: int = whole(1, -1, 2**20, SAMPLING_MESH)
    # number of devices for sampling only; 0: all devices sample and train
    devices: int = whole(0, 0, 2**20)


@dataclasses.dataclass(frozen=True)
class Warmstart(Section):
    """Imitation before training: of the tiny agent, or supervised fine-tuning of a model."""

    # Whether a language model is first fine-tuned on demonstrations of the environment's
    # solver; the tiny agent always imitates.
    fine_tune: bool = flag(False, NOT_TINY)
    # "solver", or a JSON Lines or Parquet file of chat messages to imitate instead; rooms,
    # plan_moves, styles and options are then not read
    demonstrations: str = text(SOLVER, FINE_TUNE)
    # seed of the tiny agent's parameters, and of the order of the demonstrations
    seed: int = whole(0, 0, 2**63 - 1, IMITATION)
    width: int = whole(96, 2, 4096, TINY)
    layers: int = whole(2, 1, 64, TINY)
    heads: int = whole(4, 1, 64, TINY)
    kv_heads: int = whole(1, 1, 64, TINY)
    mlp_width: int = whole(256, 1, 2**14, TINY)
    # Its layers: dense | windowed (half of them read the last 32 positions only, as in
    # Gemma 3) | experts (2 of 8 for each token, as in Qwen3-MoE) | hybrid (half of them have
    # linear attention, as in Qwen3.5)
    kind: str = one_of(DENSE, KINDS, TINY)
    tower_layers: int = whole(0, 0, 64, TINY)  # layers of its vision tower; 0: no vision
    tower_width: int = whole(64, 16, 4096, TINY, WITH_VISION)
    rooms: int = whole(8192, 1, 2**17, IMITATION)  # number of solved problems to imitate
    # moves of the solver's plan in the reasoning
    plan_moves: int = whole(4, 0, 1000, IMITATION)
    # Reasoning style (envs/styles.py) -> its fraction of the demonstrations; empty: the
    # environment's `explain`, or `narrate` for a language model
    styles: Mapping[str, float] = fractions(dict())
    # env.options that differ in the demonstrations, for example an easier world
    options: Mapping[str, Any] = section(dict(), IMITATION)
    # demonstrations per update: rows, which are single replies where prompts show one turn
    batch: int = whole(64, 1, 2**14, IMITATION)
    learning_rate: float = above(3e-3, 0, 1, IMITATION)
    # constant | linear, cosine: decay to 0 over max_updates
    schedule: str = one_of("constant", schedules.SCHEDULES, FINE_TUNE)
    # updates of linear warm-up from 0 (the tiny agent: 50)
    warmup_updates: int = whole(10, 0, MAX_INTERVAL, FINE_TUNE)
    check_every: int = whole(50, 1, MAX_INTERVAL, IMITATION)  # updates between checks of success
    # problems per check, at temperature 1
    check_episodes: int = whole(256, 1, 10**5, IMITATION)
    success: float = number(0.35, 0, 1, IMITATION)  # success rate at which imitation stops; 0 to 1
    # Maximum updates. If success is not reached by then, the tiny agent is refused; a language
    # model is used as it is.
    max_updates: int = whole(6000, 1, MAX_INTERVAL, IMITATION)


@dataclasses.dataclass(frozen=True)
class Lab(Section):
    """Faults and teachers that experiments use on purpose (configs/experiments/referee.py)."""

    # standard deviation of normal noise added to the sampler's log-probs before the update reads
    # them, in nats; 0: none
    sampler_noise: float = number(0.0, 0, 100)
    # Precision to which weights are rounded for sampling training episodes; evaluation,
    # diagnostics and updates keep the exact weights: exact | bfloat16 | float8 | int8
    sampler_weights: str = one_of("exact", rounding.PRECISIONS)
    # Reasoning style -> its fraction of the demonstrations of a teacher from the warm start, with
    # the words of the policy's styles; empty: as warmstart.styles
    teacher_styles: Mapping[str, float] = fractions(dict(), KL, TEACHER_STYLES)
    # Fraction of the demonstrated replies that the warm start imitates once more without their
    # prompt, from the end of their reasoning on, so that answers follow from reasoning alone
    hidden_prompts: float = number(0.0, 0, 1, IMITATION)


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """The settings of a run."""

    seed: int = whole(0, 0, SEEDS - 1)  # random seed of the run; int >= 0
    # number of steps, each with a rollout and optimizer.minibatches updates; the number of updates
    # must be below 2**31
    steps: int = whole(200, 0, MAX_INTERVAL)
    model: Model = Model()
    env: Env = Env()
    # Further environments in the same run, as in configs/mixture.py:
    # name -> dict(groups=groups per step, env=a section like env).
    also: Mapping[str, Task] = sections(Task)
    rollout: Rollout = Rollout()
    collect: Collect = Collect()
    filter: Filter = Filter()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    critic: Critic = Critic()
    optimizer: Optimizer = Optimizer()
    diagnose: Diagnose = Diagnose()
    eval: Eval = Eval()
    stopping: Stopping = Stopping()
    regimes: Regimes = Regimes()
    report: Report = Report()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    mesh: Mesh = Mesh()
    sampling_mesh: SamplingMesh = SamplingMesh()
    warmstart: Warmstart = Warmstart()
    lab: Lab = Lab()


def get_config() -> ConfigDict:
    """Return the default config."""
    return ConfigDict(Config().to_dict())
