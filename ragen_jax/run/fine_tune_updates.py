"""The updates of supervised fine-tuning and their checks, from a state to the last one.

`fine_tune` (fine_tune.py) prepares the rows and the learner, and writes the model.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from ragen_jax.config.build_environment import build_budgets, build_limits
from ragen_jax.config.build_model import build_meshes
from ragen_jax.config.per_task import is_due
from ragen_jax.configs.base import Config
from ragen_jax.core.progress import duration, enter_phase
from ragen_jax.core.randomness import Purpose, generator, stream_key
from ragen_jax.core.sharding import is_main_process
from ragen_jax.core.types import Batch, Metrics, Params
from ragen_jax.envs.types import SolvableEnvironment
from ragen_jax.model.qwen import Qwen
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.episode import PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.run.checkpoint import Checkpoints, not_finite
from ragen_jax.run.heldout import summarise
from ragen_jax.run.log import MetricsLog
from ragen_jax.run.preemption import Preemption, exit_code
from ragen_jax.storage.console import console
from ragen_jax.update.learner import Learner, sampling_policy
from ragen_jax.update.optimize import MinibatchLayout
from ragen_jax.update.passes import over_rows, statistics
from ragen_jax.update.pieces import token_rows
from ragen_jax.update.policy import plan_policy, update_policy
from ragen_jax.update.state import TrainState


class Interrupted(Exception):
    """Fine-tuning was stopped by a signal; its last update is saved."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.exit_code = exit_code(signal)


class Task(NamedTuple):
    """An environment whose demonstrations are imitated, and problems to check the model on."""

    chat: Chat
    environment: SolvableEnvironment
    config: Config  # with this environment alone
    seeds: list[int]
    states: list[Any]


class Examples(NamedTuple):
    """What a model is fine-tuned on."""

    batch: Batch  # rows to imitate
    heldout: Batch  # rows of problems that are not imitated
    tasks: Mapping[str, Task]  # to check the model on


def train(
    config: Config,
    learner: Learner,
    state: TrainState,
    examples: Examples,
    log: MetricsLog,
    checkpoints: Checkpoints,
    preemption: Preemption | None,
) -> TrainState:
    """Return the state after the last update.

    Raises:
      Interrupted: `preemption` received a signal; the current update is saved.
      ValueError: an update left values that are not finite.
    """
    w, batch, first = config.warmstart, examples.batch, int(state.step)
    check = functools.partial(_check, config, learner, examples)
    if first == 0:
        log.write(0, check(state))
        console(_line(0, w.max_updates, log.last))
    elif log.last.get("eval/success", -1.0) >= w.success:
        return state
    bar = tqdm(
        range(first + 1, w.max_updates + 1),
        initial=first,
        total=w.max_updates,
        desc="fine-tuning",
        disable=None if is_main_process() else True,
        dynamic_ncols=True,
    )
    begin = time.monotonic()
    for update in bar:
        start = time.monotonic()
        left = (start - begin) / max(update - 1 - first, 1) * (w.max_updates - update + 1)
        about = f", at most {duration(left)} left" if update > first + 1 else ""
        enter_phase(f"fine-tuning, update {update} of {w.max_updates}{about}", since=start)
        rows = batch_rows(len(batch.tokens_BT), w.batch, w.seed, update - 1)
        state, metrics = _update(learner, state, _take(batch, rows), update)
        metrics["time/update"] = time.monotonic() - start
        last = update == w.max_updates
        if is_due(w.check_every, update) or last:
            metrics |= check(state)
        log.write(update, metrics)
        bar.set_postfix_str(f"loss {metrics['sft/loss']:.3f}")
        reached = metrics.get("eval/success", -1.0) >= w.success
        stop = preemption.signal if preemption is not None else 0
        if "eval/success" in metrics or stop:
            if broken := not_finite(state):
                raise ValueError(
                    f"update {update} left {broken} with NaN or infinity; lower "
                    f"config.warmstart.learning_rate={w.learning_rate:g}"
                )
            log.sync()
            checkpoints.save(update, state, wait=True)
        if "eval/success" in metrics:
            console(_line(update, w.max_updates, log.last))
        if reached:
            break
        if stop:
            raise Interrupted(stop)
    if log.last.get("eval/success", 0.0) < w.success < 1:
        console(
            f"warning: success {log.last.get('eval/success', 0.0):.2f} after {w.max_updates} "
            f"updates is below warmstart.success={w.success:g}; the model is used as it is"
        )
    return state


def batch_rows(rows: int, batch: int, seed: int, update: int) -> np.ndarray:
    """Return the indices of the rows of an update (0-based): each epoch shows every row once.

    Rows left over at the end of an epoch, fewer than `batch`, wait for the next one.
    """
    epoch, place = divmod(update, rows // batch)
    order = generator(Purpose.WARMSTART_ORDER, seed, epoch).permutation(rows)
    return order[place * batch : (place + 1) * batch]


def _take(batch: Batch, rows: np.ndarray) -> Batch:
    return dataclasses.replace(batch, **{name: x[rows] for name, x in batch.arrays.items()})


def _update(
    learner: Learner, state: TrainState, batch: Batch, update: int
) -> tuple[TrainState, Metrics]:
    """Take an optimizer step on the mean negative log-likelihood of the replies' tokens."""
    rows_B = np.arange(len(batch.tokens_BT))
    with jax.set_mesh(learner.mesh):
        plan = plan_policy(
            learner.loss,
            batch,
            np.ones_like(batch.mask_BT),
            rows_B,
            _layout(learner, len(rows_B)),
            rng=generator(Purpose.POLICY_ORDER, learner.seed, update),
        )
        rates, _ = learner.rates(update)
        state, found = update_policy(
            learner.model,
            learner.optimizer,
            learner.loss,
            state,
            plan,
            rates=rates,
            loss_scale=1.0,
            frozen=learner.frozen,
        )
    names = ("grad_norm", "update_norm", "learning_rate", "skipped", "positions", "shared")
    metrics: Metrics = {f"sft/{name}": found[f"update/{name}"] for name in names}
    metrics["sft/loss"] = found["update/policy_loss"]
    metrics["sft/entropy"] = found["update/entropy"]
    return dataclasses.replace(state, step=state.step + 1), metrics


def _layout(learner: Learner, rows: int) -> MinibatchLayout:
    attention = learner.model.config.row_form
    return MinibatchLayout(learner.mesh, 1, learner.micro_batch, rows, attention)


def _check(config: Config, learner: Learner, examples: Examples, state: TrainState) -> Metrics:
    """Return the loss on held-out demonstrations, and success and validity on their problems."""
    start, heldout, tasks = time.monotonic(), examples.heldout, examples.tasks
    enter_phase("computing the loss on held-out demonstrations")
    with jax.set_mesh(learner.mesh):
        params = state.params if learner.frozen is None else learner.frozen.attach(state.params)
        rows_B = np.arange(len(heldout.tokens_BT))
        logp_BT, _ = over_rows(
            statistics,
            learner.model,
            params,
            token_rows(heldout),
            rows_B,
            np.float32(1.0),
            _layout(learner, len(rows_B)),
        )
    metrics: Metrics = {
        "sft/heldout_loss": float(-(logp_BT * heldout.mask_BT).sum() / heldout.mask_BT.sum())
    }
    policy = sampling_policy(learner, state)
    episodes = sum(len(task.seeds) for task in tasks.values())
    enter_phase("playing new problems", total=episodes, unit="episodes")
    found = [_play(learner.model, policy, task) for task in tasks.values()]
    for name in ("eval/valid_rate", "eval/response_length", "eval/return"):
        values = [row[name] for row in found if name in row]
        metrics |= {name: float(np.mean(values))} if values else {}
    metrics["eval/success"] = min(row.get("eval/success", 0.0) for row in found)
    if len(found) == 1 and "eval/success_ci95" in found[0]:
        metrics["eval/success_ci95"] = found[0]["eval/success_ci95"]
    return metrics | {"time/check": time.monotonic() - start}


def _play(model: Qwen, policy: Params, task: Task) -> Metrics:
    """Return eval/* metrics of the task's problems, each played once at temperature 1."""
    c = task.config
    _, mesh = build_meshes(c)
    with jax.set_mesh(mesh):
        episodes = rollout(
            model,
            policy,
            PlaySettings(
                task.chat,
                task.environment,
                budgets=build_budgets(c),
                sampling=Sampling(temperature=1.0),
                limits=build_limits(c.env),
            ),
            task.seeds,
            task.states,
            group_size=1,
            rows=c.rollout.groups * c.rollout.group_size,
            key=stream_key(Purpose.WARMSTART_CHECK, c.warmstart.seed),
        )
    return summarise(episodes, samples=1, format_penalty=c.env.format_penalty)


def _line(update: int, total: int, row: Metrics) -> str:
    """Return the console line of a check."""
    half = row.get("eval/success_ci95")
    interval = "" if half is None else f" ± {half:.2f}"
    loss = f"loss {row['sft/loss']:.3f}, " if "sft/loss" in row else ""
    return (
        f"fine-tuning, update {update} of at most {total}: {loss}held-out loss "
        f"{row['sft/heldout_loss']:.3f}, success {row['eval/success']:.2f}{interval}, valid "
        f"{row.get('eval/valid_rate', 0.0):.2f}"
    )
