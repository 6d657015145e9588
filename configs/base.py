"""Every field of a run, once: default, domain, when it is read, unit and meaning.

A field is declared as `name=domain(default, bounds or choices, conditions)`. Domains are those of
ragen_jax/core/domains.py; a condition names the fields without whose values a run never reads the
field. Checks, `--help`, the command line and the reference in the documentation derive from this
page. What depends on several fields is checked in ragen_jax/config/check.py; the values of
env.options are checked by the environment.

A config file calls get_config() and changes what it needs; `--config.a.b=v` changes one field. The
values here are those of the paper (RAGEN-2, arXiv 2604.06268, section 4.1 and appendix B.2) where
it gives one; the tiny preset of configs/sokoban.py says where and why it departs.
"""

from ml_collections import ConfigDict

from ragen_jax.algorithm import algorithms, filter, losses, objectives, rewards
from ragen_jax.algorithm.bonus import ENTROPY_ON
from ragen_jax.core.domains import (
    Field,
    ReadWhen,
    above,
    any_of,
    default_values,
    flag,
    fractions,
    number,
    numbers_above,
    one_of,
    section,
    several_of,
    text,
    whole,
)
from ragen_jax.core.sharding import MEMORIES
from ragen_jax.diagnostics import levels, regimes, stopping
from ragen_jax.envs import ENVS, known
from ragen_jax.model import hf, kernels, lora
from ragen_jax.model.dates import AUTO, is_day
from ragen_jax.rollout import chat
from ragen_jax.storage.trackers import TRACKERS
from ragen_jax.update.optimize import SCHEDULES
from ragen_jax.update.policy import EXACT

EVERY = 10**6  # steps between two of anything, at most
SEEDS = 2**29  # an environment's seeds are seed * 2**32 and up, below datasets.IMITATION_SEEDS
EVAL_SEEDS = 2**30  # datasets.EVALUATION_SEEDS + seed * 2**32 and up, below 2**63
TOKENS = 2**17  # of a prompt or a reply: the longest that a known model reads
# Of float32 a number this near to 1 can still be told from it.
MOST_DECAY = 0.999999


def environment_name(default: str) -> Field:
    """A name of envs.ENVS, or MODULE:CLASS."""
    return Field(default, f"one of {', '.join(ENVS)}, or MODULE:CLASS of your own", known, ())


def day(default: str, *read: ReadWhen) -> Field:
    """A date as text, or AUTO."""
    return Field(
        default,
        f"a day as YYYY-MM-DD, or {AUTO!r} (the day on which the run starts)",
        lambda value: type(value) is str and (value == AUTO or is_day(value)),
        read,
    )


# Conditions: when a run reads a field.

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


SETTINGS = dict(
    seed=whole(0, 0, SEEDS - 1),  # of everything random in the run
    # iterations: one rollout and optimizer.minibatches updates each; times minibatches below 2**31,
    # which the optimizer counts to
    steps=whole(200, 0, EVERY),
    model=dict(
        path=text("tiny"),  # "tiny" (see warmstart), or a Hugging Face directory or hub id
        # of activations and products; parameters are float32
        dtype=one_of("float32", hf.COMPUTE_DTYPES),
        # kernel of whole rows: auto | xla | cudnn (GPU) | splash (TPU)
        attention=one_of("auto", ("auto", "xla", *kernels.KERNELS)),
        # The day that the chat template writes into prompts if it writes one (Llama 3.2's),
        # YYYY-MM-DD. "auto": the day on which the run starts, which it keeps when resumed.
        date=day("auto", NOT_TINY),
        remat=flag(False),  # recompute each layer's activations in the backward pass
        lora=dict(  # train low-rank adapters instead of the model
            rank=whole(0, 0, 1024),  # 0: train the model itself
            alpha=above(32.0, 0, 10**6, LORA),  # the adapters are scaled by alpha / rank
            targets=several_of(("q", "k", "v", "o", "gate", "up", "down"), lora.TARGETS, LORA),
            tower=flag(False, LORA),  # those of the vision tower, too, where the model sees
        ),
    ),
    env=dict(
        name=environment_name("sokoban"),  # a key of envs.ENVS, or MODULE:CLASS of your own
        options=section(dict()),  # keyword arguments of the environment
        # turns a prompt shows: "full" all | "window" | "single_turn" one
        context=one_of("full", chat.CONTEXTS),
        window=whole(3, 1, 1000, WINDOW),  # turns that "window" shows, the current one included
        # tokens of prompt and reply: older turns make room; 0: no limit
        max_context=whole(0, 0, 2 * TOKENS),
        # problems that training plays again and again; 0: always fresh ones
        pool=whole(0, 0, 10**6),
        # "full": rules, format, budgets; "terse": the observation alone
        prompt=one_of("full", chat.PROMPTS),
        max_turns=whole(5, 1, 1000),  # replies an episode may hold
        actions_per_turn=whole(2, 1, 1000),  # actions of a reply that are run
        max_actions=whole(10, 1, 10**6),  # actions of an episode
        format_penalty=number(-0.1, -(10**6), 0),  # of a malformed reply or an unknown action, <= 0
        time_limit=number(0.0, 0, 10**5),  # seconds of a step, for environments that wait; 0: none
        # episodes whose steps run at the same time, where there is a limit
        workers=whole(16, 1, 1024, TIMED),
        # Share of a step's episodes that may break (raise, hang, return nonsense), which
        # are not learnt from; beyond it the run stops.
        max_error_share=number(0.1, 0, 1),
    ),
    # Environments that train together with env, as in configs/mixture.py:
    # name -> dict(groups of a step, env: a section like env).
    also=section(dict()),
    rollout=dict(
        groups=whole(8, 1, 2**14),  # G: environment seeds (prompts) a step, of env alone
        group_size=whole(16, 1, 2**14),  # K: episodes of each
        temperature=above(1.0, 0, 100),  # of sampling and of the loss
        max_new_tokens=whole(400, 1, TOKENS),  # of one reply
        compact=flag(True),  # drop finished episodes from the batch
        # Episodes played at a time, a free slot taking the next one, in training and
        # evaluation; 0: all of a step. The cache has room for so many. What to use where
        # replies are long and of many lengths, or where a step's cache does not fit. All
        # programs of a run are then compiled at its start.
        slots=whole(0, 0, 2**20),
        # Tokens between two looks at which replies have ended, whose episodes then go on
        # without the others; at most max_new_tokens. 0: with slots an eighth of it (24 at
        # least); without, a turn ends for all when its longest reply does.
        chunk=whole(0, 0, TOKENS),
        # 1: the next step's episodes are played while this one's updates run, by the policy
        # before them: from the second step on they are one step old when they are learnt
        # from, which algorithm.mismatch_cap weighs. One device, or sampling_mesh.devices.
        ahead=whole(0, 0, 1),
        save_every=whole(10, 0, EVERY),  # steps between rollouts/*.jsonl files; 0: none
    ),
    collect=dict(  # which groups a step has, before the filter
        # rollouts to find rollout.groups groups with variance in (DAPO)
        max_rounds=whole(1, 1, 1000),
        # A problem of env.pool whose last n visits had no variance is played with chance
        explore=above(1.0, 0, 1, POOL),  # explore ** n (GRESO: 0.5); 1: always
        explore_least=above(0.01, 0, 1, POOL, EXPLORE),  # but no less
    ),
    filter=dict(
        # top_p | top_k | top_k_abs | min_p | quarter | none
        strategy=one_of("top_p", filter.STRATEGIES),
        value=number(0.9, 0, 10**6, FILTERED),  # top_p: share of the variance mass kept
        # or reward_std, reward_sum, reward_mean, length
        metric=one_of("reward_variance", filter.METRICS),
        # top_p by "linear" mass (paper) or "softmax" (released scripts)
        mode=one_of("linear", filter.MODES, MASS, PART_OF_MASS),
        keep=one_of("largest", filter.KEEP, FILTERED),  # or "smallest", for diagnosis
        include_zero=flag(False, FILTERED),  # whether groups without variance are candidates
        eps=number(0.01, 0, 10**9, MASS, PART_OF_MASS, LINEAR),  # slack of the linear threshold
        # The loss times the keep rate ("linear") or its root ("sqrt"), or the advantages
        # alone times it ("advantage", the released code), or "none". A loss that is a sum
        # over rows (algorithm.aggregation seq-mean-token-sum-norm) is linear as it is.
        loss_scale=one_of("linear", filter.LOSS_SCALES, DROPPED),
        # Keep as many groups, but drawn at random whatever they scored: the control.
        at_random=flag(False, FILTERED),
        # Of each group kept, only so many episodes, the best ones; 0 and 0: all.
        top_members=whole(0, 0, 2**14),
        bottom_members=whole(0, 0, 2**14),  # the worst ones
    ),
    reward=dict(
        # A reply's last so many tokens before max_new_tokens cost it up to 1; 0: nothing.
        overlong_buffer=whole(0, 0, TOKENS),
        # What the algorithm is given; filters and logs see the undiscounted return.
        # identity | mean | mean_std | asymmetric_clip: of returns
        normalize=one_of("identity", rewards.METHODS),
        # over what: state (the group) | environment | batch
        grouping=one_of("state", rewards.GROUPINGS, NORMALIZED),
        # where unnormalised rewards lie: token | turn | episode
        level=one_of("turn", rewards.PLACEMENTS, OF_TOKENS, AS_PLACED),
    ),
    algorithm=dict(
        # ppo (with critic) | grpo | dr_grpo | rloo | reinforce_plus_plus |
        # reinforce_plus_plus_baseline
        name=one_of("grpo", algorithms.ALGORITHMS),
        # ppo, reinforce_plus_plus: discount a sampled token of an episode
        gamma=above(1.0, 0, 1, OF_TOKENS),
        lam=number(1.0, 0, 1, CRITIC),  # ppo: lambda of GAE
        bi_level=flag(False, CRITIC),  # ppo: GAE over turns, then over the tokens of each
        turn_gamma=above(1.0, 0, 1, CRITIC, BI_LEVEL),  # its discount a turn
        soft_weights=flag(False),  # advantages times the group's std over the largest of the step
        # ppo (dual clip) | gspo (sequence ratios) | cispo
        objective=one_of("ppo", objectives.OBJECTIVES),
        clip_low=number(0.2, 0, 1),  # ratio may fall to 1 - clip_low
        clip_high=number(0.28, 0, 1000),  # and rise to 1 + clip_high
        clip_c=number(3.0, 0, 1000, SECOND_CLIP),  # dual clip for negative advantages; 0: none
        aggregation=one_of("token-mean", losses.AGGREGATIONS),  # a key of losses.AGGREGATIONS
        # k1 | abs | k2 | k3; with the gradient of k2: k1+ | abs+ | k3+; over the whole
        # vocabulary: exact
        kl_kind=one_of("k3", (*losses.KL_KINDS, EXACT), KL),
        kl_coef=number(0.001, 0, 1000),  # of KL(policy || initial policy); 0 skips its forward pass
        kl_in=one_of("loss", ("loss", "reward"), KL),  # or "reward": taken off each token's reward
        # Where the reference rests while it is not read: "device", or "host", pinned memory
        # from which it is copied to the devices for every update.
        kl_memory=one_of("device", tuple(MEMORIES), KL, NOT_LORA),
        # nats a token that kl_coef is steered to; 0: kl_coef stays
        kl_target=number(0.0, 0, 1000, KL),
        kl_gain=number(0.1, 0, 4, KL, KL_STEERED),  # how fast; from 5 on kl_coef would reach 0
        entropy_coef=number(0.001, 0, 1000),  # of the exact entropy bonus
        # all | actions (the tokens inside <answer>) | upper_groups, lower_groups (the half
        # of the groups with the larger, the smaller filter score)
        entropy_on=one_of("all", ENTROPY_ON, ENTROPY),
        # Share of the run's level of MI (regimes) at which the bonus has faded to nothing,
        # from all of it at the level; 0: it does not fade.
        entropy_gate=number(0.0, 0, 0.99, ENTROPY),
        # Of an advantage that a reasoning gets for what it tells of its prompt among those
        # of the step (bonus.py), in nats, less the mean; 0: none.
        mi_coef=number(0.0, 0, 1000),
        zvp_coef=number(0.0, 0, 1000),  # of RL-ZVP's advantages of groups without variance; 0: none
        # Of the weights for a sampler unlike the trainer; 0: no weights, but 2 with
        # rollout.ahead.
        mismatch_cap=number(0.0, 0, 10**6),
        mismatch_level=one_of("token", objectives.LEVELS, MISMATCH),  # or "sequence"
    ),
    critic=dict(  # of ppo; all else as the policy's optimizer
        learning_rate=above(1e-5, 0, 1, CRITIC),
        # how far a value may move in an update, in units of reward
        clip=above(0.5, 0, 10**6, CRITIC),
        warmup_steps=whole(0, 0, EVERY, CRITIC),  # iterations in which the critic alone learns
    ),
    optimizer=dict(
        learning_rate=above(1e-6, 0, 1),
        # or "linear", "cosine": to 0 over the run's updates
        schedule=one_of("constant", SCHEDULES),
        warmup_updates=whole(0, 0, 10**9),  # linear from 0
        b1=number(0.9, 0, MOST_DECAY),
        b2=number(0.999, 0, MOST_DECAY),
        eps=number(1e-8, 1e-20, 1),  # above 0 as float32
        weight_decay=number(0.01, 0, 10),
        max_grad_norm=above(1.0, 0, 10**9),  # clip by global norm
        # updates an iteration; the kept rows are split evenly over them
        minibatches=whole(4, 1, 1024),
        micro_batch=whole(4, 1, 2**16),  # rows of one forward and backward pass
    ),
    diagnose=dict(
        every=whole(1, 0, EVERY),  # steps between collapse diagnostics; 0: never
        # Steps between flow figures, where `every` falls, too; 0: never. Where prompts show
        # earlier replies these steps also score collapse/trajectory_stripped, in a pass of
        # its own that doubles what the trajectory scope costs.
        flow_every=whole(5, 0, EVERY, DIAGNOSED),
        # Steps between diagnostics/*.npz, where `every` falls, too: the first-turn scores
        # that MI is computed from, of at most 64 reasonings under 64 prompts; 0: none.
        scores_every=whole(10, 0, EVERY, DIAGNOSED),
        # reasonings scored under all first prompts
        first_turn_samples=whole(64, 1, 4096, DIAGNOSED),
        trajectory_samples=whole(64, 1, 4096, DIAGNOSED),  # turns drawn over whole trajectories
        micro_batch=whole(64, 1, 2**16, SCORED),  # (prompt, reasoning) rows of a device call
        # Steps between probe/ figures: first turns of held-out problems, the same with the
        # same noise every time, more of them than a step has; the first before any update.
        # 0: never.
        probe_every=whole(0, 0, EVERY),
        probe_problems=whole(32, 2, 4096, PROBED),
        probe_samples=whole(4, 1, 1024, PROBED),  # replies to each
        # Also probe/mediation/ (diagnostics/mediation.py): whether their actions hang on
        # the reasoning, by attention that is blocked, gradients and reasoning exchanged.
        probe_mediation=flag(False, PROBED),
        gradients_every=whole(0, 0, EVERY),  # steps between gradients by reward variance; 0: never
        # of so many held-out problems; 0: of the step's own groups
        gradients_groups=whole(96, 0, 10**5, GRADIENTS),
        # of equally many groups, those without variance apart
        gradients_buckets=whole(6, 1, 1000, GRADIENTS, NO_EDGES),
        # instead: reward variances that part the buckets, rising
        gradients_edges=numbers_above((), 0, 10**12, GRADIENTS),
    ),
    eval=dict(
        # steps between evaluations; the first is before any update; 0: none
        every=whole(20, 0, EVERY),
        # problems of the held-out set, the same every time
        episodes=whole(512, 1, 10**5, HELD_OUT),
        temperature=above(0.5, 0, 100, EVALUATED),
        top_k=whole(0, 0, 10**6, EVALUATED),  # 0: all
        top_p=above(1.0, 0, 1, EVALUATED),  # 1: all
        min_p=number(0.0, 0, MOST_DECAY, EVALUATED),  # 0: all
        seed=whole(0, 0, EVAL_SEEDS - 1, HELD_OUT),  # of the set and of the noise of each problem
    ),
    stopping=dict(  # action of a rule: "stop" (exit code 3) | "warn" once a streak | "off"
        variance=dict(  # the groups' mean reward variance has collapsed
            action=one_of("stop", stopping.ACTIONS),
            patience=whole(5, 1, EVERY, _rule("variance")),  # iterations in a row
            # of the mean over the first iterations, below which one counts
            ratio=above(0.1, 0, 1, _rule("variance")),
            baseline=whole(10, 1, EVERY, _rule("variance")),  # those first iterations
        ),
        success=dict(  # held-out success stays low
            action=one_of("stop", stopping.ACTIONS, EVALUATED),
            # evaluations in a row, the first (before any update) apart
            patience=whole(5, 1, EVERY, EVALUATED, _rule("success")),
            least=above(0.01, 0, 1, EVALUATED, _rule("success")),  # success below which one counts
        ),
        empty=dict(  # the filter keeps nothing
            action=one_of("stop", stopping.ACTIONS),
            patience=whole(5, 1, EVERY, _rule("empty")),  # iterations in a row
        ),
        nonfinite=dict(  # an update was skipped: its loss or gradient was not finite
            action=one_of("stop", stopping.ACTIONS),
            patience=whole(3, 1, EVERY, _rule("nonfinite")),  # iterations in a row
        ),
    ),
    # The alarm of diagnostics/regimes.py, which says what these mean. Numbers of kinds are
    # shares of the figure's own level.
    regimes=dict(
        # warn | stop (exit code 3) | checkpoint | tighten (the filter) | off
        action=one_of("warn", regimes.ACTIONS),
        baseline=whole(5, 2, levels.FIRST),  # values, the fewest that a level is a mean of
        # steps of the mean that is judged, at least its last 4 to 6 values
        recent=whole(15, 1, levels.LAST),
        long=whole(100, 2, levels.FIRST),  # values, the most that a level is a mean of
        clear_patience=whole(5, 1, EVERY),  # steps nearer to the level that end a sign
        # the way back: this share of it, in logarithms, towards the level
        recover=above(0.5, 0, 1),
        # below which H(Z|X) or information counts as low for regime/index
        low=above(0.5, 0, 1, DIAGNOSED),
        mi=above(0.63, 0, 1, DIAGNOSED),  # below: an alarm on its own
        mi_sign=above(0.8, 0, 1, DIAGNOSED),  # below: a sign, an alarm with another one
        valid_think=above(0.9, 0, 1),  # below: a sign
        valid_action=above(0.92, 0, 1),
        grounded=above(0.85, 0, 1, DIAGNOSED),  # share of the facts stated that are so
        # below, above: a sign, but no alarm alone
        length=dict(fall=above(0.5, 0, 1), rise=above(1.5, 1, 10**6)),
        # the same
        entropy=dict(fall=above(0.25, 0, 1, DIAGNOSED), rise=above(2.0, 1, 10**6, DIAGNOSED)),
        tighten=dict(
            every=whole(3, 1, EVERY, TIGHTENED),  # steps of an alarm
            # filter.value is multiplied by it, again and again
            factor=above(0.95, 0, 1, TIGHTENED),
            least=above(0.8, 0, 1, TIGHTENED),  # until that is left of it
        ),
    ),
    report=dict(
        # Steps between two pages report.html of a run that goes on, written by a process
        # beside it; 0: none but the one at the end.
        every=whole(50, 0, EVERY),
    ),
    checkpoint=dict(
        every=whole(20, 0, EVERY),  # steps; the last step is always saved; 0: only the last
        keep=whole(2, 1, EVERY),  # newest checkpoints kept
        # how long to wait for a full or failing disk; 0: not
        disk_retry_seconds=number(600.0, 0, 10**6),
        export=flag(True),  # write the trained model in Hugging Face format at the end
    ),
    log=dict(
        # What shows metrics.jsonl elsewhere: any of tensorboard, wandb, mlflow, trackio
        # (ragen_jax/run/trackers.py).
        trackers=any_of(("tensorboard",), TRACKERS),
    ),
    mesh=dict(  # devices along each axis; one may be -1: all the rest
        data=whole(-1, -1, 2**20),  # splits rows
        fsdp=whole(1, -1, 2**20),  # splits rows and parameters
        tensor=whole(1, -1, 2**20),  # splits heads, MLP and vocabulary
    ),
    # The same for sampling and scoring: weights gathered where fsdp is 1, split by heads
    # where tensor is more. All three 0: as mesh.
    sampling_mesh=dict(
        data=whole(0, -1, 2**20),
        fsdp=whole(0, -1, 2**20),
        tensor=whole(0, -1, 2**20),
        # the last so many devices, which then do not train; 0: all do both
        devices=whole(0, 0, 2**20),
    ),
    warmstart=dict(  # the tiny agent, used when model.path is "tiny"
        seed=whole(0, 0, 2**63 - 1, TINY),  # of its parameters and data order
        width=whole(96, 2, 4096, TINY),
        layers=whole(2, 1, 64, TINY),
        heads=whole(4, 1, 64, TINY),
        kv_heads=whole(1, 1, 64, TINY),
        mlp_width=whole(256, 1, 2**14, TINY),
        # of a vision tower, with which it sees images; 0: it does not see
        tower_layers=whole(0, 0, 64, TINY),
        tower_width=whole(64, 16, 4096, TINY, SEEING),
        rooms=whole(8192, 1, 2**17, TINY),  # solved for imitation
        # moves of the solver's plan that the reasoning spells out
        plan_moves=whole(4, 0, 1000, TINY),
        # style of envs/styles.py -> its share of the demonstrations; nothing given: what
        # the environment's `explain` writes
        styles=fractions(dict()),
        # env.options that are other ones while it is taught: an easier world than the one
        # that it is trained in, say
        options=section(dict(), TINY),
        batch=whole(64, 1, 2**14, TINY),  # replies an update
        learning_rate=above(3e-3, 0, 1, TINY),
        check_every=whole(50, 1, EVERY, TINY),  # updates between checks of success
        check_episodes=whole(256, 1, 10**5, TINY),  # rooms of a check, at temperature 1
        success=number(0.35, 0, 1, TINY),  # stop at the first check that reaches it
        max_updates=whole(6000, 1, EVERY, TINY),  # give up after as many
    ),
)


def get_config() -> ConfigDict:
    """The defaults."""
    return ConfigDict(default_values(SETTINGS))
