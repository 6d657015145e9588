"""The diagnostics of a step, which compute metrics of the policy from its episodes.

They are computed for each environment separately. To add a diagnostic, write a function
(StepContext, TrainState, metrics so far) -> (TrainState, metrics) and add it to DIAGNOSTICS with
the interval at which it is due.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ragen_jax.algorithm.rewards import broken_episodes
from ragen_jax.config.per_task import is_due
from ragen_jax.configs.base import Diagnose
from ragen_jax.core.compilation import struct_of
from ragen_jax.core.randomness import Purpose
from ragen_jax.core.sharding import place
from ragen_jax.core.task_shares import combine_metrics
from ragen_jax.core.types import Batch, Episode, Metrics, Params
from ragen_jax.diagnostics.anatomy import (
    action_metrics,
    anatomy_metrics,
    reasoning_metrics,
    style_metrics,
)
from ragen_jax.diagnostics.cross_scoring import only_compiling
from ragen_jax.diagnostics.drift import log_odds_gradient, openings
from ragen_jax.diagnostics.faithfulness import faithfulness_metrics, grounded_by_style
from ragen_jax.diagnostics.gradients import gradient_report
from ragen_jax.diagnostics.mediation import mediation_metrics
from ragen_jax.diagnostics.scopes import ScopeKey, ScopeSizes, Scores, collapse_metrics
from ragen_jax.diagnostics.symptoms import symptom_metrics
from ragen_jax.diagnostics.tags import tag_metrics
from ragen_jax.diagnostics.zscores import update_zscores
from ragen_jax.envs.types import DrawingEnvironment, GroundedEnvironment, ReversibleEnvironment
from ragen_jax.model.qwen import Qwen
from ragen_jax.programs.diagnostics import gradient_programs, mediation_programs, scoring_programs
from ragen_jax.programs.precompile import PlannedProgram
from ragen_jax.programs.training import Planner
from ragen_jax.rollout.task import Task
from ragen_jax.run.heldout import play_heldout
from ragen_jax.run.log import write_scores
from ragen_jax.run.stages import StepContext, rewarded_batch
from ragen_jax.update.learner import Learner, sampling_policy
from ragen_jax.update.state import AheadState, TrainState


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """A function that measures something in a step, and the interval at which it is due."""

    every: Callable[[Diagnose], int]  # steps between two measurements; 0: never
    # (StepContext, TrainState, metrics so far) -> (TrainState, metrics)
    measure: Callable[[StepContext, Any, Metrics], tuple[Any, Metrics]]
    # The programs that it compiles, for preflight; None: none larger than those of the others.
    programs: Planner | None = None
    first: bool = False  # whether it is due in the first step, before any update, as well
    # Whether it reads the training state. The others get None: they run as soon as the episodes are
    # played, in parallel with earlier updates if rollouts run ahead.
    reads_state: bool = False
    on_host: bool = False  # whether it computes on the host only

    def is_due(self, settings: Diagnose, step: int) -> bool:
        """Return whether it is due in a step."""
        every = self.every(settings)
        return is_due(every, step) or bool(self.first and every and step == 1)


def diagnose(step: StepContext) -> Metrics:
    """Run those of DIAGNOSTICS that are due and do not read the training state."""
    metrics: Metrics = {}
    for diagnostic in DIAGNOSTICS.values():
        if not diagnostic.reads_state and diagnostic.is_due(step.run.diagnosis, step.number):
            _, figures = diagnostic.measure(step, None, metrics)
            metrics |= figures
    return metrics


def diagnose_state(
    step: StepContext, state: TrainState, metrics: Metrics
) -> tuple[TrainState, Metrics]:
    """Run those of DIAGNOSTICS that are due and read the training state.

    Args:
      metrics: of the step so far, with those of `diagnose`.

    Returns:
      (TrainState with the moving averages updated, metrics of these diagnostics).
    """
    found: Metrics = {}
    for diagnostic in DIAGNOSTICS.values():
        if diagnostic.reads_state and diagnostic.is_due(step.run.diagnosis, step.number):
            state, figures = diagnostic.measure(step, state, metrics | found)
            found |= figures
    return state, found


def needs_sampling_devices(settings: Diagnose, step: int) -> bool:
    """Return whether `diagnose_state` runs programs on the sampling devices in a step."""
    return any(
        diagnostic.reads_state and not diagnostic.on_host and diagnostic.is_due(settings, step)
        for diagnostic in DIAGNOSTICS.values()
    )


def measure_each_task(
    step: StepContext, measure: Callable[[int, "Task", list[Episode], np.ndarray], Metrics]
) -> Metrics:
    """Return the combined metrics of measure(index, task, episodes, return_GK) for each task."""
    listed = zip(step.run.tasks, step.played.episodes_E, step.played.returns_E, strict=True)
    return combine_metrics(step.run.tasks, [measure(i, *each) for i, each in enumerate(listed)])


def collapse(step: StepContext, state: None, metrics: Metrics) -> tuple[None, Metrics]:
    """Return the state and collapse/* metrics, with flow/* metrics if they are due."""
    settings = step.run.diagnosis
    flow = is_due(settings.flow_every, step.number)
    every, schedule = settings.scores_every, step.run.schedule
    shown = step.number in (1, schedule.steps) or is_due(schedule.evaluate, step.number)
    scores = is_due(every, step.number) or every > 0 and shown

    def measure(index, task, episodes, return_GK):
        keep = None
        if scores:
            folder = step.run.workdir / "diagnostics" / task.label
            keep = functools.partial(write_scores, folder, step.number)
        return _score(step, index, task, episodes, flow=flow, keep=keep)

    if flow:
        step.run.precompiler.wait()
    elif (
        0 < step.number < settings.flow_every
        and jax.process_count() == 1
        and not shows_images(step)
    ):
        # The lengths of reasoning differ from step to step, so each step needs other programs.
        shapes = dataclasses.replace(step, policy=jax.tree.map(struct_of, step.policy))
        compile = functools.partial(compile_scoring, shapes)
        step.run.precompiler.begin(PlannedProgram("scoring", compile))
    with jax.set_mesh(step.run.sampling_mesh):
        return state, measure_each_task(step, measure)


def shows_images(step: StepContext) -> bool:
    """Return whether the step's episodes may show images.

    The run may forget images while programs are still compiling.
    """
    return any(task.settings.chat.images.tower is not None for task in step.run.tasks)


def compile_scoring(step: StepContext) -> None:
    """Compile the programs that score steps like this one, with and without flow/* metrics.

    Args:
      step: its policy may consist of shapes.
    """
    tasks = enumerate(zip(step.run.tasks, step.played.episodes_E, strict=True))
    with jax.set_mesh(step.run.sampling_mesh), only_compiling():
        for (index, (task, episodes)), flow in itertools.product(tasks, (True, False)):
            _score(step, index, task, episodes, flow=flow)


def _score(
    step: StepContext,
    index: int,
    task: "Task",
    episodes: list[Episode],
    *,
    flow: bool,
    keep: Callable[[Scores], None] | None = None,
) -> Metrics:
    """Return `collapse_metrics` of a task's episodes."""
    settings = step.run.diagnosis
    return collapse_metrics(
        step.run.model,
        task.seen(step.policy, episodes),
        episodes,
        ScopeSizes(
            first_turn_samples=settings.first_turn_samples,
            trajectory_samples=settings.trajectory_samples,
            micro_batch=settings.micro_batch,
        ),
        ScopeKey(seed=step.run.seed, step=step.number, environment=index),
        flow=flow,
        chat=task.settings.chat if flow else None,
        keep=keep,
    )


def behaviour(step: StepContext, state: None, metrics: Metrics) -> tuple[None, Metrics]:
    """Return the state and the anatomy/*, action/*, symptoms/* and reasoning/* metrics.

    Some of them need checks that only some environments have.
    """

    def measure(index, task, episodes, return_GK):
        environment = task.settings.environment
        reversible = isinstance(environment, ReversibleEnvironment)
        figures = anatomy_metrics(episodes, return_GK)
        figures |= action_metrics(
            episodes, len(return_GK), opposites=environment.opposites if reversible else None
        )
        figures |= symptom_metrics(episodes, task.settings.chat.text)
        if isinstance(environment, GroundedEnvironment):
            draws = isinstance(environment, DrawingEnvironment)
            figures |= reasoning_metrics(
                episodes,
                environment.count_grounded,
                task.settings.chat.text,
                transcribe=environment.transcribe if draws else None,
            )
        if task.styles:
            figures |= style_metrics(episodes, task.styles, task.settings.chat.text)
        return figures

    return state, measure_each_task(step, measure)


def tags(step: StepContext, state: None, metrics: Metrics) -> tuple[None, Metrics]:
    """Return the state and the tags/* metrics."""

    def measure(index, task, episodes, return_GK):
        return tag_metrics(episodes, task.settings.chat.token_bytes)

    return state, measure_each_task(step, measure)


def probe(step: StepContext, state: None, metrics: Metrics) -> tuple[None, Metrics]:
    """Return the state and the probe/* metrics.

    These are the collapse/first_turn/* and style metrics on held-out problems. A step has few
    prompts, and mutual information is at most the logarithm of their number. The problems and the
    random noise are always the same, so differences between two policies come from the policies.
    """
    settings, policy = step.run.diagnosis, step.policy

    def measure(index, task, *_):
        one_turn = dataclasses.replace(
            task.settings, budgets=dataclasses.replace(task.settings.budgets, max_turns=1)
        )
        episodes = play_heldout(
            step.run.model,
            policy,
            dataclasses.replace(task, settings=one_turn),
            Purpose.PROBE,
            sampling=task.settings.sampling,
            problems=slice(settings.probe_problems),
            samples=settings.probe_samples,
        )
        seen = task.seen(policy, episodes)
        figures = collapse_metrics(
            step.run.model,
            seen,
            episodes,
            ScopeSizes(
                first_turn_samples=len(episodes),
                trajectory_samples=1,
                micro_batch=settings.micro_batch,
            ),
            ScopeKey(seed=task.eval_seed, step=0, environment=index),
        )
        figures |= (
            style_metrics(episodes, task.styles, task.settings.chat.text) if task.styles else {}
        )
        if settings.probe_mediation:
            figures |= mediation_metrics(
                step.run.model,
                seen,
                episodes,
                filler=int(task.settings.chat.template.plain(".")[0]),
                micro_batch=settings.micro_batch,
            )
        if settings.probe_faithfulness and task.styles:
            figures |= faithfulness_metrics(
                step.run.model,
                seen,
                episodes,
                grounded_by_style(task.styles, task.settings.chat.text),
                micro_batch=settings.micro_batch,
            )
        valid = [e.turns[0].valid for e in episodes if not e.error]
        if valid:
            figures["probe/valid_rate"] = float(np.mean(valid))
        short = {
            "collapse/first_turn/": "probe/",
            "reasoning/style/": "probe/style/",
            "mediation/": "probe/mediation/",
            "faithfulness/": "probe/faithfulness/",
        }
        for long, name in short.items():
            figures = {key.replace(long, name): value for key, value in figures.items()}
        return figures

    with jax.set_mesh(step.run.sampling_mesh):
        return state, measure_each_task(step, measure)


def zscores(step: StepContext, state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """Return the state and collapse/*/mi_zscore*_ema.

    They are the step's mutual information divided by moving averages of its standard deviation.
    """
    averages, figures = update_zscores(jax.device_get(state.zscores), metrics)
    averages = place(averages, state.step.sharding)
    return dataclasses.replace(state, zscores=averages), figures


def gradients(step: StepContext, state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """Return the state and the gradient/* metrics by reward variance."""
    run, settings = step.run, step.run.diagnosis
    if settings.gradients_groups:
        policy = step.policy
        if isinstance(state, AheadState):  # step.policy is an older policy
            with jax.set_mesh(run.mesh):
                policy = sampling_policy(step.learner, state)
        return state, heldout_gradients(step.learner, state, policy, run.tasks, settings)
    (task,) = run.tasks  # config/check.py refuses several environments here
    with jax.set_mesh(run.mesh):
        found = step.outcomes
        sound_GK = None if found.broken_GK is None else ~found.broken_GK
        return state, task_gradients(
            *(step.learner, state, step.batch, found.return_GK, task, settings), sound_GK=sound_GK
        )


DIAGNOSTICS = {
    "collapse": Diagnostic(lambda d: d.every, collapse, scoring_programs),
    "behaviour": Diagnostic(lambda d: d.every, behaviour),
    "probe": Diagnostic(lambda d: d.probe_every, probe, mediation_programs, first=True),
    "tags": Diagnostic(lambda d: d.tags_every, tags),
    # It reads the metrics of "collapse".
    "zscores": Diagnostic(lambda d: d.every, zscores, reads_state=True, on_host=True),
    "gradients": Diagnostic(
        lambda d: d.gradients_every, gradients, gradient_programs, reads_state=True
    ),
}


# ------------------------------------------------------------------------------ gradients


def task_gradients(
    learner: Learner,
    state: TrainState,
    batch: Batch,
    return_GK: np.ndarray,
    task: "Task",
    settings: Diagnose,
    *,
    sound_GK: np.ndarray | None = None,
) -> Metrics:
    """Return the gradient/* metrics of a batch of one task; call it under the training mesh.

    Args:
      sound_GK: as in `gradient_report`.
    """
    direction, odds = None, {}
    if sound_GK is not None:
        inside_B = sound_GK.reshape(-1)[batch.episode_B]
        batch = dataclasses.replace(batch, weight_B=batch.weight_B * inside_B)
    ids = openings(task.styles, task.settings.chat) if task.styles else None
    if ids:
        direction, odds["gradient/log_odds_grounded"] = log_odds_gradient(
            learner.model,
            state.params,
            batch,
            ids,
            mesh=learner.mesh,
            micro_batch=learner.micro_batch,
            frozen=learner.forward_context(state.params, batch.tokens_BT),
        )
    return odds | gradient_report(
        learner,
        state,
        batch,
        return_GK,
        group_rows=task.group_rows,
        buckets=settings.gradients_buckets,
        edges=settings.gradients_edges,
        direction=direction,
        sound_GK=sound_GK,
    )


def play_groups(
    model: Qwen, params: Params, task: "Task", groups: int
) -> tuple[Batch, np.ndarray, np.ndarray]:
    """Play groups on held-out problems, sampled as in training.

    They are the first `groups` held-out problems (or all, if there are fewer), with the same random
    noise every time. The buckets of two policies can therefore be compared.

    Args:
      params: parameters in the form that sampling needs.

    Returns:
      (`Batch` with rewards, return_GK, sound_GK: bool, whether the environment did not break).
    """
    episodes = play_heldout(
        model,
        params,
        task,
        Purpose.GRADIENTS,
        sampling=task.settings.sampling,
        problems=slice(groups),
        samples=task.group_size,
    )
    return *rewarded_batch(episodes, task.penalties), ~broken_episodes(episodes)


def heldout_gradients(
    learner: Learner,
    state: TrainState,
    params: Params,
    tasks: Sequence["Task"],
    settings: Diagnose,
) -> Metrics:
    """Return the gradient/* metrics of the policy on the held-out groups of each task.

    Args:
      params: parameters in the form that sampling needs.
    """
    metrics_E = []
    for task in tasks:
        with jax.set_mesh(learner.sampling_mesh):
            groups = settings.gradients_groups or task.groups
            batch, return_GK, sound_GK = play_groups(learner.model, params, task, groups)
        with jax.set_mesh(learner.mesh):
            metrics_E.append(
                task_gradients(learner, state, batch, return_GK, task, settings, sound_GK=sound_GK)
            )
    return combine_metrics(tasks, metrics_E)
