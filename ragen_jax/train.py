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

from ragen_jax.advantage import sample_variance
from ragen_jax.batch import take_rows
from ragen_jax.diagnose import diagnose
from ragen_jax.diagnostics.gradients import gradient_report, heldout_gradients
from ragen_jax.diagnostics.intervals import rate_with_interval
from ragen_jax.diagnostics.regimes import update_regimes
from ragen_jax.diagnostics.stopping import update_stopping
from ragen_jax.evaluate import evaluate, load_policy
from ragen_jax.model import hf, lora
from ragen_jax.rewards import sum_turns, turn_reward, turn_rewards
from ragen_jax.rollout.collect import collect, joined_episodes, mark_played
from ragen_jax.rollout.play import Sampling, compile_ahead, rollout
from ragen_jax.run import command
from ragen_jax.run.build import build_budgets, build_meshes
from ragen_jax.run.check import check
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.domains import unread, warning
from ragen_jax.run.log import (
    MetricsLog,
    Timers,
    console,
    eval_line,
    learning_curve,
    step_line,
    write_outcomes,
    write_rollouts,
)
from ragen_jax.run.settle import settle
from ragen_jax.run.sizes import step_rows
from ragen_jax.run.tasks import apart, joined, labelled, own_rows
from ragen_jax.run.workdir import same_run
from ragen_jax.sharding import agree, is_first, place, sampling_params
from ragen_jax.update.learner import (
    build_learner,
    filter_metrics,
    learn,
    needs_statistics,
    policy_statistics,
    rewarded_batch,
    select_episodes,
)
from ragen_jax.update.policy import Frozen

PREEMPTED = 143  # exit code after a SIGTERM whose checkpoint was saved
STOPPED = 3  # exit code after a stopping rule's "stop"
ACTIONS = {"stop": "stopped", "warn": "warning", "checkpoint": "saved", "tighten": "tightened"}


def train(config, workdir):
    """Runs or continues a training run in `workdir`; returns the exit code."""
    c = config
    with command.bad_input():
        # ---------------------------------------------------------------- check, mesh, model
        settle(c, jax.devices())
        check(c)
        mesh, sampling_mesh = build_meshes(c)
        same_run(c, workdir)
        model, params, tokenizer, tasks = load_policy(c, workdir)
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
    penalty_G = np.concatenate([np.full(t.groups, t.config.env.format_penalty) for t in tasks])
    stop = Preemption()

    # -------------------------------------------------------------------------- first look
    policy, sampling = policy_of(state), Sampling(temperature=c.rollout.temperature)

    def play(task, seeds_G, states_G, key):
        """Episodes of the policy as it is."""
        return rollout(
            model,
            policy,
            task.chat,
            task.environment,
            seeds_G,
            states_G,
            group_size=c.rollout.group_size,
            key=key,
            budgets=build_budgets(task.config),
            sampling=sampling,
            compact=c.rollout.compact,
        )

    for task in tasks if c.rollout.compact else ():
        with jax.set_mesh(sampling_mesh):
            compile_ahead(
                model,
                policy,
                task.chat,
                task.environment,
                0,
                task.environment.reset(0),
                rows=task.groups * c.rollout.group_size,
                key=task.key,
                budgets=build_budgets(task.config),
                sampling=sampling,
            )
    if latest is None and c.eval.every:
        timer = Timers()
        with timer("eval"), jax.set_mesh(sampling_mesh):
            metrics, played = evaluate(model, policy, tasks)
        for task, episodes in zip(tasks, played, strict=True):
            write_outcomes(workdir / "eval" / task.label, 0, episodes)
        console(eval_line(0, log.write(0, metrics | timer.seconds)))

    # -------------------------------------------------------------------------- loop
    bar = None if is_first() else True  # None: on a terminal
    first = int(state.step) + 1
    for step in tqdm(range(first, c.steps + 1), initial=first - 1, total=c.steps, disable=bar):
        timer, started = Timers(), time.perf_counter()
        metrics = {}

        with timer("rollout"), jax.set_mesh(sampling_mesh):
            collected = [collect(task, play, state, step) for task in tasks]
            metrics |= joined(tasks, [one.metrics() for one in collected])
            episodes = joined_episodes(one.episodes for one in collected)

        with timer("batch"):
            batch, return_GK = rewarded_batch(c, episodes, format_penalty=penalty_G)
            batch = take_rows(batch, np.arange(len(batch.weight_B)), size=step_rows(c))
            # The figures are of all that was played, not of what dynamic sampling chose to keep.
            played = [one.played for one in collected]
            returns = [played_returns(t.config, es) for t, es in zip(tasks, played, strict=True)]
            metrics |= rollout_metrics(joined_episodes(played), np.concatenate(returns))
            if len(tasks) > 1:
                metrics |= apart(tasks, list(map(rollout_metrics, played, returns)))
            if c.collect.max_rounds > 1:
                metrics |= selected_metrics(episodes, return_GK)
                metrics |= labelled(tasks, selected_metrics, episodes, return_GK)

        with timer("diagnose"), jax.set_mesh(sampling_mesh):
            if c.diagnose.every and step % c.diagnose.every == 0:
                state, found = diagnose(c, model, policy, tasks, played, returns, state, step)
                metrics |= found
        if c.diagnose.gradients_every and step % c.diagnose.gradients_every == 0:
            with timer("gradients"):
                if c.diagnose.gradients_groups:
                    metrics |= heldout_gradients(learner, state, policy, tasks, sampling_mesh)
                else:  # one environment (check.py)
                    with jax.set_mesh(mesh):
                        metrics |= gradient_report(learner, state, batch, return_GK, tasks[0])

        with timer("update"):
            del policy  # the update replaces the parameters that it is, or is a copy of
            with jax.set_mesh(mesh):
                logp_BT = entropy_BT = entropy_GK = None
                if needs_statistics(c):
                    logp_BT, entropy_BT = policy_statistics(learner, state, batch)
                    entropy_GK = episode_means(entropy_BT, batch).reshape(return_GK.shape)
                length_GK = episode_lengths(episodes).reshape(return_GK.shape)
                score_G, keep_GK = select_episodes(
                    learner,
                    return_GK,
                    tighten_E=state.regimes.filter_scale_E.tolist(),
                    length_GK=length_GK,
                    entropy_GK=entropy_GK,
                )
                metrics |= filter_metrics(score_G, keep_GK)
                metrics |= labelled(tasks, filter_metrics, score_G, keep_GK)
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
            state = mark_played(state.replace(step=state.step + 1), tasks, collected)
            metrics["rollout/logp_gap"] = found.pop("update/logp_gap", np.nan)
            metrics |= found
        train_seconds = time.perf_counter() - started
        sampled_tokens = metrics["rollout/response_length"] * metrics["rollout/replies"]
        metrics["throughput/tokens_per_second"] = sampled_tokens / train_seconds

        # ---------------------------------------------------------------------- write
        evaluated = c.eval.every and (step % c.eval.every == 0 or step == c.steps)
        if evaluated:
            with timer("eval"), jax.set_mesh(sampling_mesh):
                found, played = evaluate(model, policy, tasks)
            metrics |= found
            for task, part in zip(tasks, played, strict=True):
                write_outcomes(workdir / "eval" / task.label, step, part)
        if c.rollout.save_every and step % c.rollout.save_every == 0 and is_first():
            for task, one in zip(tasks, collected, strict=True):
                write_rollouts(
                    workdir / "rollouts" / task.label / f"step_{step:06d}.jsonl",
                    one.played,
                    task.chat,
                    functools.partial(turn_reward, format_penalty=task.config.env.format_penalty),
                )
        metrics |= timer.seconds
        metrics["time/step"] = train_seconds
        metrics["time/diagnose_share"] = metrics["time/diagnose"] / train_seconds
        state, found, fired = watch(c, tasks, state, metrics, returns)
        row = log.write(step, metrics | found)
        console(step_line(step, c.steps, row))
        if evaluated:
            console(eval_line(step, row))
        for rule in fired:
            console(f"{ACTIONS[rule.action]}: {rule.reason}")
            if rule.rule == "nonfinite" and is_first():
                dump = workdir / f"nonfinite_step_{step}.npz"
                np.savez_compressed(dump, advantage_BT=advantage_BT, **vars(batch))
                console(f"its batch is in {dump}")
        halted = any(rule.action == "stop" for rule in fired)
        kept = any(rule.action == "checkpoint" for rule in fired)
        due = c.checkpoint.every and step % c.checkpoint.every == 0
        with jax.set_mesh(mesh):
            (stopping,) = agree(int(stop.requested))
        if due or kept or step == c.steps or stopping or halted:
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
        end_ids = tasks[0].chat.end_ids
        export(workdir, c, model, state.params, frozen, tokenizer, end_ids)
    for task in tasks if c.eval.every and is_first() else ():
        title = f"held-out success {task.label}".rstrip()
        console(learning_curve(workdir / "eval" / task.label, title))
    console(f"done: {workdir}")
    return 0


def export(workdir, config, model, trained, frozen, tokenizer, end_ids):
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
    hf.save(workdir / "policy", model, params, tokenizer, stop_ids=end_ids)


def watch(c, tasks, state, metrics, returns):
    """What the stopping rules and the alarm say of an iteration.

    Args:
      returns: return_GK of all that was played, of each task.

    Returns:
      (TrainState, regime/* metrics, list of `Fired`).
    """
    labels = [task.label for task in tasks]
    stopping, fired = update_stopping(
        jax.device_get(state.stopping),
        c.stopping.to_dict(),
        variance_E=[sample_variance(return_GK).mean() for return_GK in returns],
        kept=metrics["filter/kept_ratio"],
        skipped=metrics.get("update/skipped", 0) + metrics.get("critic/skipped", 0),
        success=metrics.get("eval/success"),
        labels=labels,
    )
    regimes, found, alarms = update_regimes(
        jax.device_get(state.regimes), c.regimes.to_dict(), own_rows(tasks, metrics), labels
    )
    state = state.replace(
        stopping=place(stopping, state.step.sharding), regimes=place(regimes, state.step.sharding)
    )
    worst = {f"regime/{x}": max(one[f"regime/{x}"] for one in found) for x in ("signs", "alarm")}
    found = found[0] if len(tasks) == 1 else worst | apart(tasks, found)
    return state, found, fired + alarms


def played_returns(config, episodes):
    """return_GK of an environment's episodes, penalties included."""
    rewards = turn_rewards(
        episodes,
        format_penalty=config.env.format_penalty,
        max_length=config.rollout.max_new_tokens,
        overlong_buffer=config.reward.overlong_buffer,
    )
    return sum_turns(rewards, episodes[-1].group + 1)


def selected_metrics(episodes, return_GK):
    """collect/* figures of the groups that dynamic sampling selected."""
    return {
        "collect/success": np.mean([episode.success for episode in episodes]),
        "collect/return": return_GK.mean(),
    }


def rollout_metrics(episodes, return_GK):
    """rollout/* figures of all episodes that were played for a step, rates with their intervals."""
    groups = len(return_GK)

    def by_group(measure, of_turns=True):
        """Sums over the turns, or the episodes, of each group."""
        values = [
            sum(map(measure, episode.turns)) if of_turns else measure(episode)
            for episode in episodes
        ]
        return np.reshape(values, (groups, -1)).sum(1)

    turns_G = by_group(lambda turn: 1)
    episodes_G = by_group(lambda episode: 1, of_turns=False)
    of_turns = {
        "response_length": lambda turn: len(turn.sampled),
        "valid_rate": lambda turn: turn.valid,
        "valid_think_rate": lambda turn: turn.reasoning[1] > turn.reasoning[0],
    }
    success_G = by_group(lambda episode: episode.success, of_turns=False)
    metrics = rate_with_interval("rollout/success", success_G, episodes_G)
    for name, measure in of_turns.items():
        metrics |= rate_with_interval(f"rollout/{name}", by_group(measure), turns_G)
    reasoning_G = by_group(lambda turn: turn.reasoning[1] - turn.reasoning[0])
    return metrics | {
        "rollout/return": return_GK.mean(),
        "rollout/turns": turns_G.sum() / len(episodes),
        "rollout/replies": turns_G.sum(),
        "rollout/reasoning_length": reasoning_G.sum() / turns_G.sum(),
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
    with command.bad_input():
        if jax.process_count() > 1 and not WORKDIR.value:
            raise ValueError("several processes need --workdir, the same folder for all of them")
        if "://" in (WORKDIR.value or ""):
            raise ValueError(
                f"--workdir is {WORKDIR.value}; it must be a path (of a folder that all processes "
                "see, such as an NFS mount): metrics.jsonl grows by lines, which a bucket cannot"
            )
        config = CONFIG.value
        settle(config, jax.devices())
        check(config)
    line = warning(unread(config, command.overrides()))
    if line:
        console(line)
    name = time.strftime("%Y%m%d-%H%M%S")
    workdir = Path(WORKDIR.value or Path("runs") / f"{config.env.name}-{name}")
    sys.exit(train(config, workdir))


if __name__ == "__main__":
    CONFIG = command.define_config()
    WORKDIR = flags.DEFINE_string(
        "workdir", None, "Folder of the run; one of an earlier run is continued."
    )
    command.run_command(main)
