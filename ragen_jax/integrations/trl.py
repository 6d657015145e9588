"""The collapse diagnosis in TRL's GRPOTrainer and RLOOTrainer.

    trainer = GRPOTrainer(...)
    monitor_collapse(trainer)
    trainer.train()

TRL passes a reward function neither the prompts' token ids nor the mask of tool results, nor other
functions' rewards, and a callback sees no completions at all. So the monitor follows the method
that generates a batch, and reads what the update will read. It logs next to TRL's metrics.
"""

import dataclasses
import math
import time
from typing import Any

import jax

from ragen_jax.integrations.monitor import LOGGER, CollapseMonitor, MonitorSettings, Rollout
from ragen_jax.integrations.torch_model import torch_logprob

TRIED = "1.16.0"  # the version of TRL that the tests run
NEEDED = (
    "_generate_and_score_completions",
    "_metrics",
    "_logs",
    "accelerator",
    "args",
    "model",
    "num_generations",
    "processing_class",
    "reward_func_names",
    "reward_weights",
    "state",
)


def monitor_collapse(
    trainer: Any,
    settings: MonitorSettings | None = None,
    *,
    share: float = 0.1,
    every: int = 0,
    success_reward: float | None = None,
) -> CollapseMonitor:
    """Log collapse figures at every generation batch of a trainer, scored by its model.

    rollout/*, anatomy/* and regime/* are logged for each batch, collapse/* when it is scored. The
    first batch is scored. After a scoring of t seconds (time/monitor), the next is that of the
    first batch after t / share seconds at which time/monitor_share, the monitor's fraction of the
    time since the first batch began, is at most `share`. A resumed run continues the alarm from the
    trainer's log history.

    JAX, which computes some figures, is kept on the CPU unless JAX_PLATFORMS is set.

    Args:
      trainer: GRPOTrainer or RLOOTrainer, before `train`.
      settings: the samples, and the tags of the reasoning.
      share: largest fraction of the time before a scoring; above 0 and at most 1.
      every: score each n-th batch instead, whatever it costs; 0: as `share` allows.
      success_reward: reward from which a rollout counts as solved, for anatomy/solved and failed;
        None: rewards do not say so.

    Returns:
      the monitor.

    Raises:
      ValueError: unusable arguments, another tokenizer than a byte-level one, or a trainer without
        the needed attributes (a version of TRL that was not tried).
    """
    missing = [name for name in NEEDED if not hasattr(trainer, name)]
    if missing:
        raise ValueError(
            f"{type(trainer).__name__} has no {', '.join(missing)}; expected GRPOTrainer or "
            f"RLOOTrainer of TRL (tried with TRL {TRIED})"
        )
    if not 0 < share <= 1:
        raise ValueError(f"share is {share!r}; it must be a fraction above 0 and at most 1")
    if type(every) is not int or every < 0:
        raise ValueError(f"every is {every!r}; it must be a whole number from 0")
    # ty: ignore[missing-attribute] options of JAX are made at run time
    if not jax.config.jax_platforms:  # otherwise JAX might claim the memory of a GPU
        jax.config.update("jax_platforms", "cpu")
    LOGGER.disabled = not trainer.accelerator.is_main_process  # one line, not one per process
    monitor = CollapseMonitor(_tokenizer(trainer), settings)
    logger = _BatchLogger(trainer, monitor, share, every, success_reward)
    generate = trainer._generate_and_score_completions

    def generate_and_log(inputs: Any) -> dict[str, Any]:
        training = trainer.model.training  # else an evaluation
        if training:
            logger.begin()
        batch = generate(inputs)
        if training:
            logger.log(batch)
        return batch

    trainer._generate_and_score_completions = generate_and_log
    return monitor


@dataclasses.dataclass
class _BatchLogger:
    """Passes each generation batch to the monitor, and logs its figures."""

    trainer: Any
    monitor: CollapseMonitor
    share: float
    every: int
    success_reward: float | None
    batches: int = 0  # number of batches of training
    began: float = math.nan  # when the first batch began, in seconds
    spent: float = 0.0  # seconds of the monitor since then
    next_scoring: float = -math.inf  # earliest time of the next scoring, in seconds

    def begin(self) -> None:
        if math.isnan(self.began):
            self.began = time.perf_counter()
            self.monitor.replay(self.trainer.state.log_history)

    def log(self, batch: dict[str, Any]) -> None:
        if "num_images" in batch or "pixel_values" in batch:
            self.monitor.report("images", "prompts with images are not scored: only text is read")
            return
        start = time.perf_counter()
        self.batches += 1
        # Clocks differ: the main process decides for all.
        due = _gather([self._is_due(start)], self.trainer.accelerator)[0]
        logprob = None
        if due:
            logprob = torch_logprob(
                self.trainer.model,
                rows=self.trainer.args.per_device_train_batch_size,
                accelerator=self.trainer.accelerator,
            )
        step = self.trainer.state.global_step + 1
        metrics = self.monitor.update(step, self._rollouts(batch), logprob)
        now = time.perf_counter()
        self.spent += now - start
        if due:
            self.next_scoring = now + (now - start) / self.share
            metrics["time/monitor"] = now - start
        metrics["time/monitor_share"] = self.spent / (now - self.began)
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)

    def _is_due(self, now: float) -> bool:
        if self.every:
            return (self.batches - 1) % self.every == 0
        # Batches that are not scored take time as well.
        return now >= self.next_scoring and self.spent <= self.share * (now - self.began)

    def _rollouts(self, batch: dict[str, Any]) -> list[Rollout]:
        """Return the rollouts of all processes."""
        trainer = self.trainer
        rows = _gather(_rows(batch, _tokenizer(trainer).pad_token_id), trainer.accelerator)
        rewards = _rewards(trainer, len(rows))
        rollouts = []
        for index, ((prompt, reply, mask), reward) in enumerate(zip(rows, rewards, strict=True)):
            success = None
            if self.success_reward is not None and reward is not None:
                success = reward >= self.success_reward
            group = index // trainer.num_generations
            rollouts.append(Rollout(prompt, reply, mask, group, reward, success))
        return rollouts


def _tokenizer(trainer: Any) -> Any:
    """Return the tokenizer, which a processor of texts and images contains."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


def _gather(items: list[Any], accelerator: Any) -> list[Any]:
    """Return the items of all processes, in their order."""
    if accelerator.num_processes == 1:
        return items
    from accelerate.utils import gather_object

    return gather_object(items)


def _rows(batch: dict[str, Any], pad: int) -> list[tuple[list[int], list[int], list[int] | None]]:
    """Return (prompt, completion, mask of sampled tokens or None) of each row of a batch."""
    padded = [
        batch[name].tolist()
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    ]
    tool_masks = batch["tool_mask"].tolist() if "tool_mask" in batch else [None] * len(padded[0])
    rows = []
    for prompt, shown, completion, counted, tools in zip(*padded, tool_masks, strict=True):
        length = sum(counted)
        if not length:  # cut off, and masked for that (mask_truncated_completions)
            length = len(completion)
            while length and completion[length - 1] == pad:
                length -= 1
        prompt = [i for i, inside in zip(prompt, shown, strict=True) if inside]
        rows.append((prompt, completion[:length], None if tools is None else tools[:length]))
    return rows


def _rewards(trainer: Any, rows: int) -> list[float | None]:
    """Return the weighted sum of the rewards of each of the batch's rows; None without any.

    TRL logs the rewards of all processes before the batch is returned.
    """
    columns = [list(trainer._logs["rewards"][name])[-rows:] for name in trainer.reward_func_names]
    weights = trainer.reward_weights.tolist()
    rewards = []
    for values in zip(*columns, strict=True):
        given = [w * x for w, x in zip(weights, values, strict=True) if not math.isnan(x)]
        rewards.append(sum(given) if given else None)
    return rewards
