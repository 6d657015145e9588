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
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from ragen_jax import config as cfg
from ragen_jax.advantage import GROUP_ADVANTAGES
from ragen_jax.batch import make_batch
from ragen_jax.checkpoint import Checkpoints
from ragen_jax.diagnostics.scopes import collapse_metrics
from ragen_jax.evaluate import evaluate, load_policy
from ragen_jax.filter import group_scores, loss_scales, select_groups
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
from ragen_jax.rewards import add_rewards, turn_reward
from ragen_jax.rollout import Sampling, compile_ahead, length_bucket, rollout
from ragen_jax.sharding import agree, is_first, sampling_params
from ragen_jax.update import Frozen, Loss, init_state, make_optimizer, update_policy

PREEMPTED = 143  # exit code after a SIGTERM whose checkpoint was saved


def train(config, workdir):
    """Runs or continues a training run in `workdir`; returns the exit code."""
    c = config
    with cfg.bad_input():
        # ---------------------------------------------------------------- check, mesh, model
        cfg.check(c)
        mesh, sampling_mesh = cfg.build_meshes(c)
        cfg.same_run(c, workdir)
        environment = cfg.build_environment(c, "train")
        model, params, chat, *evaluation = load_policy(c, workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    if is_first():
        (workdir / "config.json").write_text(json.dumps(c.to_dict(), indent=2) + "\n")

    # -------------------------------------------------------------------------- state
    optimizer = make_optimizer(
        learning_rate=c.optimizer.learning_rate,
        schedule=c.optimizer.schedule,
        warmup_updates=c.optimizer.warmup_updates,
        total_updates=c.steps * c.optimizer.minibatches,
        b1=c.optimizer.b1,
        b2=c.optimizer.b2,
        eps=c.optimizer.eps,
        weight_decay=c.optimizer.weight_decay,
        max_grad_norm=c.optimizer.max_grad_norm,
    )
    loss = Loss(
        temperature=c.rollout.temperature,
        clip_low=c.algorithm.clip_low,
        clip_high=c.algorithm.clip_high,
        clip_c=c.algorithm.clip_c,
        aggregation=c.algorithm.aggregation,
        kl_kind=c.algorithm.kl_kind,
        kl_coef=c.algorithm.kl_coef,
        entropy_coef=c.algorithm.entropy_coef,
    )
    frozen = reference = None
    if c.model.lora.rank:
        frozen = Frozen(params, np.float32(c.model.lora.alpha / c.model.lora.rank))
        base_policy = sampling_params(params, model, sampling_mesh)  # does not change
        trained = cfg.build_adapters(c, model, mesh)
    else:
        trained = params
        if loss.kl_coef:  # a copy, because the update donates the policy's parameters
            reference = jax.tree.map(jnp.copy, params)
    del params
    state = init_state(trained, optimizer, mesh)

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
    group_advantage = jax.jit(GROUP_ADVANTAGES[c.algorithm.name])
    score_and_select = jax.jit(functools.partial(score_groups, settings=c.filter.to_dict()))
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
    skipped_in_a_row = 0
    bar = None if is_first() else True  # None: on a terminal
    first = int(state.step) + 1
    for step in tqdm(range(first, c.steps + 1), initial=first - 1, total=c.steps, disable=bar):
        timer, started = Timers(), time.perf_counter()
        metrics = {}

        with timer("rollout"), jax.set_mesh(sampling_mesh):
            cursor = int(state.seed_cursor)
            seeds_G = [(c.seed << 32) + cursor + g for g in range(c.rollout.groups)]
            episodes = rollout(
                model,
                policy,
                chat,
                environment,
                seeds_G,
                [environment.reset(seed) for seed in seeds_G],
                group_size=c.rollout.group_size,
                key=rollout_key,
                budgets=budgets,
                sampling=sampling,
                compact=c.rollout.compact,
            )

        with timer("batch"):
            longest = max(len(t.prompt) + len(t.sampled) for e in episodes for t in e.turns)
            batch = make_batch(episodes, length=length_bucket(longest))
            batch, return_GK = add_rewards(batch, episodes, format_penalty=c.env.format_penalty)
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
            length_GK = episode_lengths(episodes).reshape(return_GK.shape)
            score_G, keep_G = jax.device_get(score_and_select(return_GK, length_GK))
            advantage_E = np.asarray(group_advantage(return_GK)).reshape(-1)
            loss_scale, advantage_scale = loss_scales(keep_G.mean(), c.filter.loss_scale)
            advantage_BT = advantage_scale * advantage_E[batch.episode_B][:, None] * batch.mask_BT
            kept_B = keep_G[batch.group_B]
            del policy  # the update replaces the parameters that it is, or is a copy of
            with jax.set_mesh(mesh):
                state, update = update_policy(
                    model,
                    optimizer,
                    loss,
                    state,
                    reference,
                    batch,
                    advantage_BT,
                    np.flatnonzero(kept_B),
                    mesh=mesh,
                    rng=np.random.Generator(np.random.Philox(key=[c.seed, step])),
                    minibatches=c.optimizer.minibatches,
                    micro_batch=c.optimizer.micro_batch,
                    minibatch_rows=cfg.minibatch_rows(c),
                    loss_scale=loss_scale,
                    frozen=frozen,
                )
            policy = policy_of(state)
            state = state.replace(step=state.step + 1, seed_cursor=state.seed_cursor + len(seeds_G))
            metrics |= filter_metrics(score_G, keep_G)
            metrics["rollout/logp_gap"] = update.pop("update/logp_gap", np.nan)
            metrics |= update
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
        skipped_in_a_row = skipped_in_a_row + 1 if row.get("update/skipped", 0) else 0
        if skipped_in_a_row >= c.optimizer.max_skipped:
            dump = workdir / f"nonfinite_step_{step}.npz"
            if is_first():
                np.savez_compressed(dump, advantage_BT=advantage_BT, **vars(batch))
            checkpoints.close()
            raise FloatingPointError(
                f"updates were not finite in {skipped_in_a_row} steps in a row, the last being "
                f"step {step}; its batch is in {dump}"
            )
        due = c.checkpoint.every and step % c.checkpoint.every == 0
        with jax.set_mesh(mesh):
            (stopping,) = agree(int(stop.requested))
        if due or step == c.steps or stopping:
            checkpoints.save(step, state)
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


def score_groups(return_GK, length_GK, settings):
    """(score_G, keep_G) of a step's groups; `settings` is the config's filter section."""
    s = settings
    score_G = group_scores(return_GK, s["metric"], length_GK=length_GK)
    keep_G = select_groups(
        score_G,
        strategy=s["strategy"],
        value=s["value"],
        mode=s["mode"],
        keep=s["keep"],
        include_zero=s["include_zero"],
        eps=s["eps"],
    )
    return score_G, keep_G


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


def filter_metrics(score_G, keep_G):
    """filter/* figures: what the groups scored and how many were kept."""
    return {
        "filter/kept_ratio": keep_G.mean(),
        "filter/score_mean": score_G.mean(),
        "filter/score_max": score_G.max(),
        "filter/zero_groups": (np.abs(score_G) <= 1e-10).mean(),
        "filter/empty": float(not keep_G.any()),
    }


def episode_lengths(episodes):
    """Sampled tokens of each episode, int."""
    return np.array([sum(len(turn.sampled) for turn in e.turns) for e in episodes])


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
