"""Train an LLM agent by multi-turn reinforcement learning.

    python -m ragen_jax.train --config=configs/sokoban.py[:PRESET] [--workdir=DIR]
                              [--config.FIELD=VALUE ...]

This file is the algorithm: one call a stage, one timer a stage. Given the folder of an earlier
run, it goes on where that run's newest checkpoint stands.
"""

import functools
import json
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags
from tqdm import tqdm

from ragen_jax import config as cfg
from ragen_jax.advantage import sample_variance
from ragen_jax.batch import make_batch, take_rows
from ragen_jax.check import check
from ragen_jax.checkpoint import Checkpoints
from ragen_jax.collect import collect_groups
from ragen_jax.diagnostics.scopes import collapse_metrics
from ragen_jax.diagnostics.stopping import update_stopping
from ragen_jax.evaluate import evaluate, load_policy
from ragen_jax.filter import ZERO_SCORE
from ragen_jax.learn import (
    build_learner,
    learn,
    needs_statistics,
    policy_statistics,
    select_episodes,
)
from ragen_jax.log import (
    MetricsLog,
    Timers,
    console,
    eval_line,
    learning_curve,
    step_line,
    write_outcomes,
    write_rollouts,
)
from ragen_jax.model import hf, lora
from ragen_jax.pool import count_visits, draw_seeds, play_chances
from ragen_jax.rewards import add_rewards, turn_reward, turn_rewards
from ragen_jax.rollout import Sampling, compile_ahead, length_bucket, rollout
from ragen_jax.sharding import agree, is_first, place, sampling_params
from ragen_jax.update import Frozen

PREEMPTED = 143  # exit code after a SIGTERM whose checkpoint was saved
STOPPED = 3  # exit code after a stopping rule's "stop"
STOPPING = {"stop": "stopped", "warn": "warning"}


def train(config, workdir):
    """Runs or continues a training run in `workdir`; returns the exit code."""
    c = config
    with cfg.bad_input():
        # ---------------------------------------------------------------- check, mesh, model
        check(c)
        mesh, sampling_mesh = cfg.build_meshes(c)
        cfg.same_run(c, workdir)
        environment = cfg.build_environment(c, "train")
        model, params, chat, *evaluation = load_policy(c, workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    if is_first():
        (workdir / "config.json").write_text(json.dumps(c.to_dict(), indent=2) + "\n")

    # -------------------------------------------------------------------------- state
    learner, state = build_learner(c, model, params, mesh)
    frozen = learner.frozen
    if frozen is not None:
        base_policy = sampling_params(params, model, sampling_mesh)  # does not change
    del params

    def policy_of(state):
        """The parameters that sampling and scoring read."""
        if frozen is None:
            return sampling_params(state.params, model, sampling_mesh)
        adapters = lora.place_adapters(state.params, model, sampling_mesh)
        return Frozen(base_policy, frozen.scale).attach(adapters)

    checkpoints = Checkpoints(workdir / "checkpoints", keep=c.checkpoint.keep)
    latest = checkpoints.latest_step()
    if latest is not None:
        state = checkpoints.restore(latest, state)
        console(f"continuing {workdir} behind step {latest}")
    log = MetricsLog(workdir / "metrics.jsonl", last_step=-1 if latest is None else latest)
    rollout_key = jax.random.fold_in(jax.random.key(c.seed), 0)
    budgets, sampling = cfg.build_budgets(c), Sampling(temperature=c.rollout.temperature)
    stop = Preemption()

    # -------------------------------------------------------------------------- first look
    policy = policy_of(state)
    if c.rollout.compact:
        with jax.set_mesh(sampling_mesh):
            compile_ahead(
                model,
                policy,
                chat,
                environment,
                0,
                environment.reset(0),
                rows=c.rollout.groups * c.rollout.group_size,
                key=rollout_key,
                budgets=budgets,
                sampling=sampling,
            )
    if latest is None and c.eval.every:
        timer = Timers()
        with timer("eval"), jax.set_mesh(sampling_mesh):
            metrics, played = evaluate(c, model, policy, chat, *evaluation)
        write_outcomes(workdir, 0, played)
        console(eval_line(0, log.write(0, metrics | timer.seconds)))

    # -------------------------------------------------------------------------- loop
    bar = None if is_first() else True  # None: on a terminal
    first = int(state.step) + 1
    for step in tqdm(range(first, c.steps + 1), initial=first - 1, total=c.steps, disable=bar):
        timer, started = Timers(), time.perf_counter()
        metrics = {}

        with timer("rollout"), jax.set_mesh(sampling_mesh):
            play = functools.partial(
                rollout,
                model,
                policy,
                chat,
                environment,
                group_size=c.rollout.group_size,
                budgets=budgets,
                sampling=sampling,
                compact=c.rollout.compact,
            )
            collected, cursor = collect(c, play, environment, state, step, rollout_key)
            del play  # it holds the policy, which an update replaces
            episodes = collected.episodes
            metrics |= collected.metrics()

        with timer("batch"):
            longest = max(len(t.prompt) + len(t.sampled) for e in episodes for t in e.turns)
            batch = make_batch(episodes, length=length_bucket(longest))
            batch = take_rows(batch, np.arange(len(batch.weight_B)), size=cfg.step_rows(c))
            batch, return_GK = add_rewards(
                batch,
                episodes,
                format_penalty=c.env.format_penalty,
                max_length=c.rollout.max_new_tokens,
                overlong_buffer=c.reward.overlong_buffer,
            )
            metrics |= rollout_metrics(episodes, return_GK)

        with timer("diagnose"), jax.set_mesh(sampling_mesh):
            if c.diagnose.every and step % c.diagnose.every == 0:
                metrics |= collapse_metrics(
                    model,
                    policy,
                    episodes,
                    first_turn_samples=c.diagnose.first_turn_samples,
                    trajectory_samples=c.diagnose.trajectory_samples,
                    micro_batch=c.diagnose.micro_batch,
                    seed=c.seed,
                    step=step,
                )

        with timer("update"):
            del policy  # the update replaces the parameters that it is, or is a copy of
            with jax.set_mesh(mesh):
                logp_BT = entropy_BT = entropy_GK = None
                if needs_statistics(c):
                    logp_BT, entropy_BT = policy_statistics(learner, state, batch)
                    entropy_GK = episode_means(entropy_BT, batch).reshape(return_GK.shape)
                length_GK = episode_lengths(episodes).reshape(return_GK.shape)
                keep_GK, found = select_episodes(
                    learner, return_GK, length_GK=length_GK, entropy_GK=entropy_GK
                )
                metrics |= found
                state, found, advantage_BT = learn(
                    learner,
                    state,
                    batch,
                    keep_GK,
                    return_GK,
                    np.array([e.success for e in episodes]).reshape(return_GK.shape),
                    step=step,
                    logp_BT=logp_BT,
                    entropy_BT=entropy_BT,
                )
            policy = policy_of(state)
            state = state.replace(step=state.step + 1, **place_cursor(state, collected, cursor))
            metrics["rollout/logp_gap"] = found.pop("update/logp_gap", np.nan)
            metrics |= found
        train_seconds = time.perf_counter() - started
        sampled_tokens = metrics["rollout/response_length"] * metrics["rollout/replies"]
        metrics["throughput/tokens_per_second"] = sampled_tokens / train_seconds

        # ---------------------------------------------------------------------- write
        evaluated = c.eval.every and (step % c.eval.every == 0 or step == c.steps)
        if evaluated:
            with timer("eval"), jax.set_mesh(sampling_mesh):
                found, played = evaluate(c, model, policy, chat, *evaluation)
            metrics |= found
            write_outcomes(workdir, step, played)
        if c.rollout.save_every and step % c.rollout.save_every == 0 and is_first():
            write_rollouts(
                workdir / "rollouts" / f"step_{step:06d}.jsonl",
                episodes,
                chat,
                lambda turn: turn_reward(turn, format_penalty=c.env.format_penalty),
            )
        metrics |= timer.seconds
        metrics["time/step"] = train_seconds
        metrics["time/diagnose_share"] = metrics["time/diagnose"] / train_seconds
        row = log.write(step, metrics)
        console(step_line(step, c.steps, row))
        if evaluated:
            console(eval_line(step, row))
        state, fired = watch(c, state, row, return_GK)
        for rule in fired:
            console(f"{STOPPING[rule.action]}: {rule.reason}")
            if rule.rule == "nonfinite" and is_first():
                dump = workdir / f"nonfinite_step_{step}.npz"
                np.savez_compressed(dump, advantage_BT=advantage_BT, **vars(batch))
                console(f"its batch is in {dump}")
        halted = any(rule.action == "stop" for rule in fired)
        due = c.checkpoint.every and step % c.checkpoint.every == 0
        with jax.set_mesh(mesh):
            (stopping,) = agree(int(stop.requested))
        if due or step == c.steps or stopping or halted:
            checkpoints.save(step, state)
        if halted:
            checkpoints.close()
            return STOPPED
        if stopping:
            checkpoints.close()
            console(f"stopped by SIGTERM; step {step} is saved in {workdir}")
            return PREEMPTED

    checkpoints.close()
    log.close()
    if c.checkpoint.export:
        export(workdir, c, model, state.params, frozen, chat)
    if c.eval.every and is_first():
        console(learning_curve(workdir))
    console(f"done: {workdir}")
    return 0


def export(workdir, config, model, trained, frozen, chat):
    """Writes policy/ in Hugging Face format and, of a LoRA run, adapter/ in PEFT's."""
    params = trained
    if frozen is not None:
        c = config.model.lora
        lora.save_adapter(
            workdir / "adapter",
            trained,
            config=model.config,
            rank=c.rank,
            alpha=c.alpha,
            targets=c.targets,
            base_model=config.model.path,
        )
        params = lora.merge(frozen.params, trained, scale=frozen.scale)
    hf.save(workdir / "policy", model, params, chat.tokenizer, stop_ids=chat.stop_ids)


def collect(c, play, environment, state, step, key):
    """The groups of a step, by rollouts `play(seeds_G, states_G, key=key)`.

    Returns:
      (`Collected`, the cursor of seeds behind them).
    """
    cursor, chance_P = int(state.seed_cursor), None
    if c.env.pool:
        # The same problem draws other noise when it comes again.
        key = jax.random.fold_in(key, step)
        chance_P = play_chances(
            jax.device_get(state.streak_P), explore=c.collect.explore, least=c.collect.explore_least
        )

    def play_round(round_):
        nonlocal cursor
        seeds_G, cursor = draw_seeds(
            cursor, c.rollout.groups, pool=c.env.pool, seed=c.seed, chance_P=chance_P
        )
        noise = jax.random.fold_in(key, round_) if round_ and c.env.pool else key
        return play(seeds_G, [environment.reset(seed) for seed in seeds_G], key=noise)

    def informative(episodes):
        rewards = turn_rewards(
            episodes,
            format_penalty=c.env.format_penalty,
            max_length=c.rollout.max_new_tokens,
            overlong_buffer=c.reward.overlong_buffer,
        )
        return_GK = np.reshape([sum(turns) for turns in rewards], (-1, c.rollout.group_size))
        return np.asarray(sample_variance(return_GK)) > ZERO_SCORE

    collected = collect_groups(
        play_round, informative, wanted=c.rollout.groups, max_rounds=c.collect.max_rounds
    )
    return collected, cursor


def place_cursor(state, collected, cursor):
    """The fields of `TrainState` that say which problems come next."""
    sharding = state.seed_cursor.sharding
    fields = {"seed_cursor": place(np.uint32(cursor), sharding)}
    if state.streak_P is not None:
        streak_P = count_visits(
            jax.device_get(state.streak_P), collected.seeds_N, collected.informative_N
        )
        fields["streak_P"] = place(streak_P, sharding)
    return fields


def watch(c, state, row, return_GK):
    """(TrainState, rules that fired) after an iteration; `row` is its line of metrics.jsonl."""
    stopping, fired = update_stopping(
        jax.device_get(state.stopping),
        c.stopping.to_dict(),
        variance=float(sample_variance(return_GK).mean()),
        kept=row["filter/kept_ratio"],
        skipped=row.get("update/skipped", 0) + row.get("critic/skipped", 0),
        success=row.get("eval/success"),
    )
    return state.replace(stopping=place(stopping, state.step.sharding)), fired


def rollout_metrics(episodes, return_GK):
    """rollout/* figures of a step's episodes."""
    turns = [turn for episode in episodes for turn in episode.turns]
    lengths = [len(turn.sampled) for turn in turns]
    return {
        "rollout/success": np.mean([episode.success for episode in episodes]),
        "rollout/return": return_GK.mean(),
        "rollout/turns": len(turns) / len(episodes),
        "rollout/replies": len(turns),
        "rollout/response_length": np.mean(lengths),
        "rollout/reasoning_length": np.mean([t.reasoning[1] - t.reasoning[0] for t in turns]),
        "rollout/valid_rate": np.mean([turn.valid for turn in turns]),
        "rollout/valid_think_rate": np.mean([t.reasoning[1] > t.reasoning[0] for t in turns]),
    }


def episode_lengths(episodes):
    """Sampled tokens of each episode, int."""
    return np.array([sum(len(turn.sampled) for turn in e.turns) for e in episodes])


def episode_means(x_BT, batch):
    """Mean of x over the sampled tokens of each episode, float64."""
    real = batch.weight_B > 0
    sums, tokens = (
        np.bincount(batch.episode_B[real], weights=(y * batch.mask_BT).sum(1)[real])
        for y in (x_BT, 1.0)
    )
    return sums / tokens


class Preemption:
    """Whether SIGTERM has asked the run to save and stop."""

    def __init__(self):
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, signum, frame):
        self.requested = True


def main(argv):
    del argv
    with cfg.bad_input():
        if jax.process_count() > 1 and not WORKDIR.value:
            raise ValueError("several processes need --workdir, the same folder for all of them")
        if "://" in (WORKDIR.value or ""):
            raise ValueError(
                f"--workdir is {WORKDIR.value}; it must be a path (of a folder that all processes "
                "see, such as an NFS mount): metrics.jsonl grows by lines, which a bucket cannot"
            )
    name = time.strftime("%Y%m%d-%H%M%S")
    workdir = Path(WORKDIR.value or Path("runs") / f"{CONFIG.value.env.name}-{name}")
    sys.exit(train(CONFIG.value, workdir))


if __name__ == "__main__":
    CONFIG = cfg.define_config()
    WORKDIR = flags.DEFINE_string(
        "workdir", None, "Folder of the run; one of an earlier run is continued."
    )
    cfg.run_command(main)
