"""Fields of playing, collecting, diagnosing, evaluating and writing, each changed in a short run.

In most runs the filter keeps no groups (filter.eps), so the policy does not learn:
test_fields_learn.py tests learning. Fields whose effects can be distinguished are changed together.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from field_entries import Entry, check_entry, configured, once
from ml_collections import ConfigDict

from ragen_jax import train
from ragen_jax.config.build_learner import build_collecting
from ragen_jax.diagnostics import cross_scoring
from ragen_jax.programs.monitor import THREAD
from ragen_jax.rollout import pages as slot_pages
from ragen_jax.rollout import play
from ragen_jax.rollout.collect import collect, mark_played
from ragen_jax.rollout.pool import init_streaks, init_tallies
from ragen_jax.run import reports as background
from ragen_jax.run import start as start_of_run
from ragen_jax.run.datasets import EVALUATION_SEEDS
from ragen_jax.run.heldout import evaluate
from ragen_jax.run.load import load_policy
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.update.state import TrainState

pytestmark = pytest.mark.long

REPLY = 22  # tokens


@pytest.fixture(scope="module")
def start(agent):
    """() -> the config of two steps of two groups, with rollouts written to files."""

    def make():
        return configured(
            {
                **{"model.path": str(agent.directory), "steps": 2, "env.max_turns": 3},
                **{"rollout.groups": 2, "rollout.group_size": 2, "rollout.save_every": 1},
                **{"rollout.compact": False, "rollout.max_new_tokens": REPLY},
                **{"filter.eps": 1e6, "optimizer.minibatches": 1, "optimizer.micro_batch": 4},
                **{"stopping.empty.action": "off", "regimes.action": "off"},
                **{"checkpoint.every": 0, "checkpoint.export": False},
                **{"diagnose.every": 0, "eval.every": 0, "eval.episodes": 4},
            },
            agent.config.copy_and_resolve_references,
        )

    return make


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """A run: the contents of its folder, and the sizes of its rollouts and score matrices."""

    @once
    def stage(config, given):
        workdir, decoded, scored = tmp_path_factory.mktemp("runs") / "run", [], []
        decode, blocks, pages = play.decode, cross_scoring.blocks, []
        served, decode_chunk = [], slot_pages.decode_chunk
        waits, retry_disk_errors = [], start_of_run.retry_disk_errors
        begin = background.subprocess.Popen

        def decode_seen(model, params, segment, logits, keys_B, *args, **settings):
            decoded.append(len(keys_B))
            return decode(model, params, segment, logits, keys_B, *args, **settings)

        def chunk_seen(model, params, pages, batch, temperature, *, settings):
            served.append((len(batch.token_B), settings.max_tokens))
            return decode_chunk(model, params, pages, batch, temperature, settings=settings)

        def blocks_seen(N, M, micro_batch, shards=1):
            if not threading.current_thread().name.startswith(THREAD):  # that thread only compiles
                scored.append((M, micro_batch))
            return blocks(N, M, micro_batch, shards)

        def retry_seen(seconds, say):
            waits.append(seconds)
            return retry_disk_errors(seconds, say)

        def begin_seen(*args, **settings):
            pages.append(args)
            return begin(*args, **settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(background.subprocess, "Popen", begin_seen)
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "xdg"))
            patch.setattr(start_of_run, "retry_disk_errors", retry_seen)
            patch.setattr(play, "decode", decode_seen)
            patch.setattr(slot_pages, "decode_chunk", chunk_seen)
            patch.setattr(cross_scoring, "blocks", blocks_seen)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                assert train.train(config, workdir) == 0
        played = {int(p.stem[5:]): p for p in sorted((workdir / "rollouts").glob("*.jsonl"))}
        solved = {int(p.stem[5:]): p for p in sorted((workdir / "eval").glob("*.json"))}
        return types.SimpleNamespace(
            rows=read_metrics(workdir / "metrics.jsonl"),
            played={
                step: [json.loads(line) for line in path.read_text().splitlines()]
                for step, path in played.items()
            },
            solved={step: json.loads(path.read_text()) for step, path in solved.items()},
            saved=sorted(int(p.name) for p in (workdir / "checkpoints").iterdir()),
            exported=(workdir / "policy").exists(),
            stored=sorted(int(p.stem[5:]) for p in (workdir / "diagnostics").glob("*.npz")),
            printed=printed.getvalue(),
            pages=len(pages),  # report pages started during the run
            waits=waits,  # seconds that a full disk is waited for
            decoded=decoded,  # seconds to wait while the disk is full
            served=set(served),  # (slots, tokens) of decode chunks
            scored=scored,  # (reasonings, rows of a device call) of each table of scores
        )

    return stage


# ---- helpers that read an outcome ---------------------------------------------------------------


def episodes(o):
    return [episode for step in o.played.values() for episode in step]


def turns(o):
    return [turn for episode in episodes(o) for turn in episode["turns"]]


def log_prob_gap(a, b):
    """The largest difference of the log-probs of equal replies to equal prompts."""
    return max(
        max(abs(p - q) for p, q in zip(x["logps"], y["logps"], strict=True))
        for x, y in itertools.product(turns(a), turns(b))
        if (x["prompt_ids"], x["sampled_ids"]) == (y["prompt_ids"], y["sampled_ids"])
    )


def shown(turn):
    """The text of a prompt's messages."""
    return "\n".join(message["content"] for message in turn["messages"][:-1])


def replies_shown(turn):
    return [message["role"] for message in turn["messages"]].count("assistant") - 1


def most(numbers):
    return max(numbers, default=0)


def with_figure(name, o):
    """Steps that have a figure whose name starts with `name`."""
    return [row["step"] for row in o.rows if any(key.startswith(name) for key in row)]


def figure(o, step, name):
    return next(row[name] for row in o.rows if row["step"] == step)


def seeds(o, step):
    return [episode["seed"] for episode in o.played[step][::2]]


def lengths(o, step):
    """Mean sampled tokens of the episodes of a step."""
    tokens = sum(len(t["sampled_ids"]) for e in o.played[step] for t in e["turns"])
    return tokens / len(o.played[step])


# ---- the entries --------------------------------------------------------------------------------

SIZES = {
    **{"seed": 7, "steps": 3, "env.max_turns": 2, "env.actions_per_turn": 1},
    **{"rollout.groups": 3, "rollout.group_size": 3, "rollout.save_every": 2},
    **{"eval.every": 2, "eval.episodes": 5, "eval.seed": 9, "filter.metric": "length"},
    **{"checkpoint.every": 1, "checkpoint.keep": 3, "checkpoint.export": True},
    **{"checkpoint.disk_retry_seconds": 7.0, "report.every": 2},
}
BUDGETS = {
    **{"env.max_actions": 3, "env.pool": 2, "rollout.max_new_tokens": REPLY - 1},
    **{"filter.metric": "entropy"},
}
CUT = {"rollout.max_new_tokens": 3, "collect.max_rounds": 3, "env.format_penalty": -0.25}
LAKES = {
    **{"env.name": "frozen_lake", "env.prompt": "full", "rollout.temperature": 0.001},
    "env.options": ConfigDict(dict(size=(3, 3), min_solution=1)),
    "env.max_turns": 1,
}
WINDOW = {"env.context": "window", "steps": 1}
# Most of 80 episodes end after their first action.
MANY = {
    **{"rollout.groups": 16, "rollout.group_size": 5, "rollout.save_every": 0, "steps": 1},
    **{"env.max_actions": 1, "env.max_turns": 2},
}
SCORED = {
    **{"diagnose.every": 1, "diagnose.flow_every": 2, "diagnose.gradients_every": 2},
    **{"diagnose.first_turn_samples": 2, "diagnose.trajectory_samples": 3},
    "diagnose.scores_every": 2,
    **{"algorithm.mi_coef": 0.5},
    **{"diagnose.gradients_groups": 3, "diagnose.micro_batch": 16},
}
PROBED = {
    **{"diagnose.probe_every": 2, "diagnose.probe_problems": 3, "diagnose.probe_samples": 5},
    "diagnose.probe_mediation": True,
}
# Update sizes grow until no reply is valid, which raises an alarm at any level.
NERVOUS = {
    **{"regimes.baseline": 2, "optimizer.learning_rate": 0.1, "optimizer.warmup_updates": 400},
    **{"diagnose.every": 0, "stopping.variance.action": "off", "steps": 60},
    **{"filter.strategy": "top_k", "filter.value": 1.0, "filter.include_zero": True},
    **{"regimes.tighten.factor": 0.5, "regimes.tighten.least": 0.5, "env.max_turns": 1},
}


def continues(_, o):
    """A prompt begins with the previous prompt and its reply."""
    pairs = [pair for e in episodes(o) for pair in zip(e["turns"], e["turns"][1:], strict=False)]
    starts = [a["prompt_ids"] + a["sampled_ids"] for a, _ in pairs]
    return len(pairs) > 0 and all(
        b["prompt_ids"][: len(first)] == first for first, (_, b) in zip(starts, pairs, strict=True)
    )


def tightened(_, o):
    """All groups are kept until the step of the alarm, and half of them after it."""
    alarm = next(row["step"] for row in o.rows if row["regime/alarm"])
    expected = [1.0 if row["step"] <= alarm else 0.5 for row in o.rows]
    return alarm < 60 and [row["filter/kept_ratio"] for row in o.rows] == expected


RUNS = {
    "seed": Entry(7, lambda _, o: {s >> 32 for s in seeds(o, 2)} == {7}, along=SIZES),
    "steps": Entry(3, lambda _, o: o.rows[-1]["step"] == 3, along=SIZES),
    "env.max_turns": Entry(
        2, lambda _, o: most(len(e["turns"]) for e in episodes(o)) == 2, along=SIZES
    ),
    "env.actions_per_turn": Entry(
        1, lambda _, o: most(len(t["actions"]) for t in turns(o)) == 1, along=SIZES
    ),
    "rollout.groups": Entry(
        3, lambda _, o: {e["group"] for e in episodes(o)} == {0, 1, 2}, along=SIZES
    ),
    "rollout.group_size": Entry(
        3, lambda _, o: {e["member"] for e in episodes(o)} == {0, 1, 2}, along=SIZES
    ),
    # The first and the last of three steps are saved as well.
    "rollout.save_every": Entry(2, lambda _, o: [*o.played] == [1, 2, 3], along=SIZES),
    "log.completions": Entry(
        1,  # the example of an invalid reply is printed without its reward
        lambda _, o: o.printed.count("\n    reward ") == len(o.rows),
    ),
    "filter.metric": Entry(
        "length",
        lambda _, o: abs(figure(o, 2, "filter/score_mean") - lengths(o, 2)) < 1e-3,
        along=SIZES,
    ),
    "eval.every": Entry(2, lambda _, o: with_figure("eval/", o) == [0, 2, 3], along=SIZES),
    "eval.episodes": Entry(
        5, lambda _, o: {len(found) for found in o.solved.values()} == {5}, along=SIZES
    ),
    "eval.seed": Entry(
        9,
        lambda _, o: (
            {(seed - EVALUATION_SEEDS) >> 32 for found in o.solved.values() for seed, _ in found}
            == {9}
        ),
        along=SIZES,
    ),
    "report.every": Entry(2, lambda _, o: o.pages == 1, along=SIZES),
    "checkpoint.every": Entry(1, lambda _, o: {2, 3} <= {*o.saved}, along=SIZES),
    "checkpoint.keep": Entry(3, lambda _, o: o.saved == [1, 2, 3], along=SIZES),
    "checkpoint.disk_retry_seconds": Entry(7.0, lambda _, o: o.waits == [7.0], along=SIZES),
    "checkpoint.export": Entry(True, lambda _, o: o.exported, along=SIZES),
    "env.max_actions": Entry(
        3,
        lambda _, o: most(sum(len(t["actions"]) for t in e["turns"]) for e in episodes(o)) == 3,
        along=BUDGETS,
    ),
    "env.pool": Entry(2, lambda _, o: {*seeds(o, 1)} == {*seeds(o, 2)}, along=BUDGETS),
    "rollout.max_new_tokens": Entry(
        3, lambda _, o: most(len(t["sampled_ids"]) for t in turns(o)) == 3, along=CUT
    ),
    # No group earns a reward, so every round is played.
    "collect.max_rounds": Entry(
        3,
        lambda _, o: [row["collect/groups"] for row in o.rows] == [6, 6],
        along=CUT,
    ),
    "env.format_penalty": Entry(
        -0.25,
        lambda _, o: (
            {t["reward"] for t in turns(o)} == {-0.25} and not any(t["valid"] for t in turns(o))
        ),
        along=CUT,
    ),
    "env.name": Entry(
        "frozen_lake", lambda _, o: "frozen lake" in shown(turns(o)[0]).lower(), along=LAKES
    ),
    # Rows of a lake's grid, made of the symbols P, G, O and _.
    "env.options": Entry(
        LAKES["env.options"],
        lambda _, o: all(rows_of_the_grid(t) == [3, 3, 3] for t in turns(o)),
        along=LAKES,
    ),
    "env.prompt": Entry("full", lambda _, o: "<answer>" in shown(turns(o)[0]), along=LAKES),
    # All members of a group give the same reply.
    "rollout.temperature": Entry(
        0.001,
        lambda _, o: all(
            a["turns"][0]["sampled_ids"] == b["turns"][0]["sampled_ids"]
            for step in o.played.values()
            for a, b in zip(step[::2], step[1::2], strict=True)
        ),
        along=LAKES,
    ),
    "rollout.stop": Entry(
        ("</answer>",), lambda _, o: any(t["end"] == "stop string" for t in turns(o))
    ),
    "env.context": Entry("window", continues, {"steps": 1}),
    "env.window": Entry(
        2,
        lambda _, o: (
            {len(e["turns"]) for e in episodes(o)} == {3}
            and {replies_shown(e["turns"][2]) for e in episodes(o)} == {1}
        ),
        WINDOW,
    ),
    "env.max_context": Entry(
        90,
        lambda _, o: most(len(t["prompt_ids"]) for t in turns(o)) + REPLY <= 90,
        WINDOW,
    ),
    "rollout.slots": Entry(3, lambda _, o: o.served == {(3, REPLY)} and not o.decoded),
    "rollout.chunk": Entry(5, lambda _, o: o.served == {(4, 5)} and not o.decoded),
    "rollout.ahead": Entry(1, lambda _, o: with_figure("rollout/staleness", o) == [1, 2]),
    # Log-probs are of the rounded cache.
    "rollout.cache_dtype": Entry("int8", lambda a, b: 1e-6 < log_prob_gap(a, b) < 0.5),
    "rollout.compact": Entry(True, lambda _, o: o.decoded[-1] == 64, MANY),
    # From the sixth step on, the run's information is compared with its level.
    "algorithm.entropy_gate": Entry(
        0.5,
        lambda _, o: (
            with_figure("update/entropy_gate", o) == [*range(1, 10)]
            and figure(o, 6, "update/entropy_gate") == 1
            and figure(o, 9, "update/entropy_gate")
            == pytest.approx(min(1, max(0, 2 * figure(o, 8, "regime/mi_relative") - 1)), abs=1e-5)
        ),
        {
            **{"diagnose.every": 1, "diagnose.flow_every": 0, "steps": 9},
            **{"regimes.baseline": 2, "env.max_turns": 1},
        },
    ),
    "algorithm.mi_coef": Entry(
        0.5, lambda _, o: with_figure("bonus/mi", o) == [1, 2], along=SCORED
    ),
    "diagnose.every": Entry(
        1, lambda _, o: with_figure("collapse/first_turn/mi", o) == [1, 2], along=SCORED
    ),
    "diagnose.flow_every": Entry(
        2, lambda _, o: with_figure("flow/first_turn/", o) == [2], along=SCORED
    ),
    "diagnose.scores_every": Entry(2, lambda _, o: o.stored == [1, 2], along=SCORED),
    "diagnose.first_turn_samples": Entry(2, lambda _, o: o.scored[:1] == [(2, 16)], along=SCORED),
    "diagnose.trajectory_samples": Entry(
        3, lambda _, o: most(M for M, _ in o.scored[:2]) == 3, along=SCORED
    ),
    "diagnose.probe_every": Entry(2, lambda _, o: with_figure("probe/", o) == [1, 2], along=PROBED),
    "diagnose.tags_every": Entry(2, lambda _, o: with_figure("tags/", o) == [2], along=PROBED),
    # Chance is 1 / problems, and the table has a row per reply.
    "diagnose.probe_problems": Entry(
        3,
        lambda _, o: (
            [row["probe/retrieval_chance"] for row in o.rows if "probe/mi" in row]
            == [pytest.approx(1 / 3)] * 2
        ),
        along=PROBED,
    ),
    "diagnose.probe_samples": Entry(
        5, lambda _, o: most(M for M, _ in o.scored) == 3 * 5, along=PROBED
    ),
    "diagnose.probe_mediation": Entry(
        True, lambda _, o: with_figure("probe/mediation/", o) == [1, 2], along=PROBED
    ),
    "diagnose.micro_batch": Entry(
        16, lambda _, o: {rows for _, rows in o.scored} == {16}, along=SCORED
    ),
    "diagnose.gradients_every": Entry(
        2, lambda _, o: with_figure("gradient/", o) == [2], along=SCORED
    ),
    "diagnose.gradients_groups": Entry(
        3,
        lambda _, o: (
            sum(
                value
                for name, value in o.rows[1].items()
                if name.startswith("gradient/") and name.endswith("/groups")
            )
            == 3
        ),
        along=SCORED,
    ),
    "regimes.action": Entry("tighten", tightened, NERVOUS),
}


def rows_of_the_grid(turn):
    """Letters of each row of the observation, between the last two empty lines."""
    lines = [line.replace(" ", "") for line in shown(turn).splitlines()]
    return [len(line) for line in lines if line and set(line) <= set("PGO_X√")]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_run(name, outcome, start):
    check_entry(name, RUNS[name], outcome, start)


def test_entropies_are_what_the_filter_reads_as_such(outcome, start):
    """Lengths would be above 40 in a run, and entropies are not."""
    o = outcome(configured(BUDGETS, start), None)
    for row in o.rows:
        assert 0 < row["filter/score_mean"] <= row["filter/score_max"] < np.log(400)


# ---- how evaluation draws tokens ----------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """Log-probs of the tokens sampled in an evaluation, under the distribution they came from."""

    @once
    def stage(config, given):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "xdg"))
            model, params, _, tasks = load_policy(config, None)
        _, (played,) = evaluate(model, params, tasks)
        return np.concatenate([turn.logp for episode in played for turn in episode.turns])

    return stage


def certain(before, behind):
    """Every sampled token had probability 1."""
    return before.min() < -0.1 and behind.min() > -1e-3


EVALUATED = {"eval.every": 1, "eval.temperature": 1.0, "env.max_turns": 1}
DRAWS = {
    "eval.temperature": Entry(1e-4, certain, EVALUATED),
    "eval.top_k": Entry(1, certain, EVALUATED),
    "eval.top_p": Entry(1e-6, certain, EVALUATED),
    "eval.min_p": Entry(0.999999, certain, EVALUATED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_draws(name, evaluated, start):
    check_entry(name, DRAWS[name], evaluated, start)


# ---- visited problems of a pool -----------------------------------------------------------------


@pytest.fixture(scope="module")
def visited(make_turn, make_episode):
    """The number of pool visits in 40 steps whose groups never differ in reward."""

    @once
    def stage(config, given):
        def play(task, seeds_G, key):
            return [
                dataclasses.replace(make_episode(g, k, [make_turn([1], [2])]), seed=seed)
                for g, seed in enumerate(seeds_G)
                for k in range(2)
            ]

        task = types.SimpleNamespace(
            name=config.env.name,
            collecting=build_collecting(config),
            key=jax.random.key(0),
        )
        state = TrainState(
            params=None,
            opt_state=None,
            step=None,
            seed_cursor={task.name: jnp.uint32(0)},
            kl_scale=None,
            streak_P={task.name: jnp.asarray(init_streaks(config.env.pool))},
            tally_P={task.name: jnp.asarray(init_tallies(config.env.pool))},
        )
        for step in range(1, 41):
            state = mark_played(state, [task], [collect(task, play, state, step)])
        return int(state.seed_cursor[task.name])

    return stage


POOL = {"env.pool": 5, "rollout.groups": 1}
VISITS = {
    # A problem is played 8 times; before the n-th time it is skipped 2^n times on average.
    "collect.explore": Entry(
        0.5, lambda a, b: a == 40 and b > 40 * 8, POOL | {"collect.explore_least": 0.01}
    ),
    # Skipped twice on average before each time except the first.
    "collect.explore_least": Entry(
        0.33, lambda _, b: 60 < b < 200, POOL | {"collect.explore": 0.1}
    ),
    # Of a problem whose visits all end the same way, 4 episodes count: p = 1 / 6 or 5 / 6, which is
    # played with probability 0.75.
    "collect.allocate": Entry(True, lambda a, b: a == 40 and 50 < b < 80, POOL),
}


@pytest.mark.parametrize("name", VISITS)
def test_visits(name, visited, start):
    check_entry(name, VISITS[name], visited, start)
