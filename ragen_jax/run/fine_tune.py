"""Supervised fine-tuning of a language model on an environment's demonstrations.

It is the same update as in RL: rows of demonstrated episodes, an advantage of 1 on every token of a
reply and the objective "reinforce", which is then the mean negative log-likelihood. So prefix
trees, micro-batches, LoRA, rematerialisation and meshes work as they do there.

workdir/  sft.json  metrics.jsonl  checkpoints/  policy/  report.html
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from ragen_jax.algorithm.batch import make_batch
from ragen_jax.config.build_environment import build_chat, environment_settings
from ragen_jax.config.build_learner import build_learner
from ragen_jax.config.build_model import build_meshes, build_model
from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs.base import Config, Reward
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.sharding import is_main_process
from ragen_jax.core.types import Metrics
from ragen_jax.model import hf, lora
from ragen_jax.model.dates import with_date
from ragen_jax.rollout.env_calls import EnvFailure
from ragen_jax.run import chat_files, datasets
from ragen_jax.run.checkpoint import Checkpoints
from ragen_jax.run.demonstrations import (
    as_episodes,
    expert_arguments,
    first_problems,
    from_file,
    hold_back,
    imitation_config,
    imitation_environment,
    imitation_settings,
    style_fractions,
    without_prompts,
)
from ragen_jax.run.fine_tune_updates import Examples, Task, train
from ragen_jax.run.log import MetricsLog
from ragen_jax.run.preemption import Preemption
from ragen_jax.storage.atomic_io import atomic_write
from ragen_jax.storage.cache import cache_directory, content_hash, lock_path
from ragen_jax.storage.console import console
from ragen_jax.storage.datasets import settings_hash
from ragen_jax.storage.heartbeat import heartbeat

RECIPE = 1  # raise it when a change of this file or of fine_tune_updates.py changes the result
SETTINGS = "sft.json"  # file with the settings that determine the result

# Fields of config.warmstart that the result depends on. How often it is checked decides when it
# stops.
_READ = (
    *("seed", "rooms", "batch", "learning_rate", "schedule", "warmup_updates"),
    *("check_every", "check_episodes", "success", "max_updates"),
)
_OPTIMIZER = ("b1", "b2", "eps", "weight_decay", "max_grad_norm")


def fine_tuned_model(config: Config, cache: str | Path | None = None) -> Path:
    """Return the directory of the config's fine-tuned model; make it on first use.

    It is cached by its settings and the content of the model that it starts from. If it is
    interrupted, the next call resumes after its last check.

    Args:
      config: a run's config with warmstart.fine_tune.
      cache: folder of generated models and data sets.

    Raises:
      ValueError: as in `fine_tune`, or there are several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"config.warmstart.fine_tune is True, but there are {jax.process_count()} processes; "
            "fine-tune on one host with `python -m ragen_jax.sft`, then pass its policy/ as "
            "--config.model.path with --config.warmstart.fine_tune=False"
        )
    cache = cache_directory() if cache is None else Path(cache)
    settings = settings_of(config)
    folder = cache / "models" / f"sft_{settings_hash(settings)}"
    if not (folder / "policy").exists():  # without a lock: the cache may be read-only
        with heartbeat(), lock_path(folder):
            console(f"warm start: fine-tuning {config.model.path} on demonstrations, in {folder}")
            fine_tune(config, folder, cache)
    return folder / "policy"


def settings_of(config: Config) -> dict[str, Any]:
    """Return the JSON-like settings that determine the fine-tuned model.

    Raises:
      ValueError: as in `imitation_config`, or the model or the file of demonstrations is missing.
    """
    config = imitation_config(config)
    w = config.warmstart
    if from_file(config) and not Path(w.demonstrations).is_file():
        raise ValueError(
            f"config.warmstart.demonstrations is {w.demonstrations!r}; expected 'solver' or a "
            "JSON Lines or Parquet file, and there is no such file"
        )
    lora_fields = dataclasses.asdict(config.model.lora) if config.model.lora.rank else {}
    path = hf.resolve(config.model.path)
    tokenizer = hf.load_tokenizer(path)
    writes_date = with_date(tokenizer, None) is not tokenizer
    return {
        "recipe": RECIPE,
        "model": content_hash(path),
        "dtype": config.model.dtype,
        **({"date": config.model.date} if writes_date else {}),
        **{f"lora.{name}": value for name, value in lora_fields.items()},
        **{f"warmstart.{name}": getattr(w, name) for name in _READ},
        **({"warmstart.styles": style_fractions(config)} if style_fractions(config) else {}),
        **{f"optimizer.{name}": getattr(config.optimizer, name) for name in _OPTIMIZER},
        **({"hidden_prompts": hidden} if (hidden := config.lab.hidden_prompts) else {}),
        **({"file": content_hash(w.demonstrations)} if from_file(config) else {}),
        "max_new_tokens": config.rollout.max_new_tokens,
        "stop": list(config.rollout.stop),
        "tasks": {name: imitation_settings(c) for name, c in per_task_configs(config).items()},
    }


def fine_tune(
    config: Config,
    workdir: Path,
    cache: Path,
    *,
    preemption: Preemption | None = None,
    on_row: Callable[[Metrics], None] | None = None,
) -> Path:
    """Fine-tune the config's model in `workdir`, or resume there; return the model's directory.

    It ends when the success rate on new problems, played at temperature 1, reaches
    `warmstart.success` in every environment, or after `warmstart.max_updates` updates. A row of
    metrics.jsonl is written for every update: sft/loss in nats per token, and at checks also
    sft/heldout_loss, eval/success, eval/valid_rate and eval/response_length.

    Args:
      preemption: if it receives a signal, the current update is saved and `Interrupted` raised.
      on_row: called with each row.

    Raises:
      ValueError: an environment or the model is unusable, no demonstration fits, or `workdir`
        holds a fine-tuning with other settings.
    """
    settings, config = settings_of(config), imitation_config(config)
    _claim(workdir, settings)
    policy = workdir / "policy"
    if policy.exists():
        return policy
    stage = stage_config(config)
    mesh, sampling_mesh = build_meshes(stage)
    path = hf.resolve(config.model.path)
    enter_phase(f"loading {path}")
    model, params, tokenizer = hf.load(path, mesh=mesh, dtype=config.model.dtype)
    model = build_model(config.model, model.config, mesh)
    positions = model.config.max_positions
    examples = _examples(config, tokenizer, path, cache, positions)
    learner, state = build_learner(stage, model, params, mesh, sampling_mesh)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
    latest = checkpoints.latest_step()
    if latest is not None:
        state = checkpoints.restore(latest, state)
        console(f"resuming the fine-tuning in {workdir} after update {latest}")
    log = MetricsLog(
        workdir / "metrics.jsonl", last_step=-1 if latest is None else latest, on_row=on_row
    )
    if preemption is not None:
        preemption.saves = True
    state = train(config, learner, state, examples, log, checkpoints, preemption)
    enter_phase(f"writing {policy}")
    if learner.frozen is not None and learner.frozen.params is not None:
        base = params
        if config.model.dtype != "float32":  # too imprecise for the merged model
            _, base, _ = hf.load(path, mesh=mesh, dtype=config.model.dtype)
        scale = config.model.lora.alpha / config.model.lora.rank
        trained = lora.merge(base, state.params, scale=scale)
    else:
        trained = state.params
    hf.save(policy, model, trained, tokenizer, stop_ids=hf.stop_ids(path))
    log.close()
    checkpoints.close()
    if is_main_process():
        shutil.rmtree(workdir / "checkpoints", ignore_errors=True)
    return policy


def stage_config(config: Config) -> Config:
    """Return the config of the updates: likelihood of demonstrations, with warmstart's rates."""
    w = config.warmstart
    return dataclasses.replace(
        config,
        steps=w.max_updates,
        reward=Reward(),
        filter=dataclasses.replace(config.filter, strategy="none"),
        algorithm=dataclasses.replace(
            config.algorithm,
            **{"name": "grpo", "objective": "reinforce", "aggregation": "token-mean"},
            **{"clip_c": 0.0, "kl_coef": 0.0, "kl_target": 0.0, "entropy_coef": 0.0},
            **{"mi_coef": 0.0, "zvp_coef": 0.0, "mismatch_cap": 0.0},
        ),
        optimizer=dataclasses.replace(
            config.optimizer,
            learning_rate=w.learning_rate,
            schedule=w.schedule,
            warmup_updates=w.warmup_updates,
            minibatches=1,
        ),
        rollout=dataclasses.replace(config.rollout, temperature=1.0, ahead=False),
    )


def _claim(workdir: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings into the folder, or compare them with those of an earlier start.

    Raises:
      ValueError: the folder is that of another fine-tuning.
    """
    file, now = workdir / SETTINGS, json.loads(json.dumps(settings))
    if file.exists():
        before = hf.read_json(file)
        changed = [name for name in now if before.get(name) != now[name]]
        if changed:
            name = changed[0]
            raise ValueError(
                f"{workdir} holds a fine-tuning with other settings: {name} was "
                f"{before.get(name)!r:.80} and is {now[name]!r:.80}; use another --workdir"
            )
    elif is_main_process():
        atomic_write(file, json.dumps(now, indent=2) + "\n")


def _examples(config: Config, tokenizer: Any, path: Path, cache: Path, positions: int) -> Examples:
    """Return (rows to imitate, rows of held-out problems, tasks to check).

    Raises:
      ValueError: there are fewer rows than warmstart.batch, or none can be used.
    """
    w, episodes, others, tasks = config.warmstart, [], [], {}
    hidden = config.lab.hidden_prompts
    if from_file(config):
        environment = imitation_environment(config)
        chat = build_chat(config, tokenizer, environment, hf.stop_ids(path))
        episodes, others = chat_files.hold_back_conversations(
            chat_files.read_episodes(w.demonstrations, chat, positions), w.check_episodes
        )
        episodes += without_prompts(episodes, chat, hidden)
    for name, c in per_task_configs(config).items():
        environment = imitation_environment(c)
        chat = build_chat(c, tokenizer, environment, hf.stop_ids(path))
        if from_file(config):
            tasks[name] = Task(chat, environment, c, *first_problems(environment, c))
            continue
        examples = datasets.demonstrations(
            environment,
            rooms=w.rooms,
            settings=environment_settings(c.env),
            directory=cache / "datasets",
            **expert_arguments(c),
        )
        examples, seeds, states = hold_back(environment, examples, c)
        enter_phase("reading the demonstrations")
        imitated = as_episodes(examples, chat, positions)
        episodes += imitated + without_prompts(imitated, chat, hidden)
        shown = [
            datasets.imitated_turns(environment, seed, **expert_arguments(c)) for seed in seeds
        ]
        later = [turn for turns in shown if not isinstance(turns, EnvFailure) for turn in turns]
        others += as_episodes(later, chat, positions) if later else []
        tasks[name] = Task(chat, environment, c, seeds, states)
    batch = make_batch(episodes)
    if len(batch.tokens_BT) < w.batch:
        raise ValueError(
            f"only {len(batch.tokens_BT)} rows can be imitated, fewer than "
            f"config.warmstart.batch={w.batch}; lower it"
            + ("" if from_file(config) else f", or raise config.warmstart.rooms={w.rooms}")
        )
    return Examples(batch, make_batch(others or episodes[:1]), tasks)
