"""The README.md of an exported policy: what it is, how it was trained, what was measured."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from ragen_jax.config.per_task import per_task_configs
from ragen_jax.configs.base import Config
from ragen_jax.core.types import Metrics
from ragen_jax.diagnostics.answers import answer_questions
from ragen_jax.storage.metrics_reader import read_metrics

PACKAGES = ("ragen_jax", "jax", "flax", "transformers")
FIGURES = (  # metric, what it is
    ("eval/success", "held-out success"),
    ("rollout/success", "success in training"),
    ("collapse/first_turn/own_margin", "information of the reasoning about its prompt, nats"),
    ("collapse/first_turn/retrieval_acc", "reasoning that is likeliest under its own prompt"),
    ("collapse/first_turn/retrieval_chance", "the same by chance"),
    ("collapse/first_turn/h_cond", "entropy of the reasoning given its prompt, nats per token"),
    ("flow/first_turn/za_swap", "effect of the reasoning on the action, nats"),
    ("reasoning/grounded_rate", "true statements in the reasoning"),
    ("rollout/valid_rate", "valid replies"),
    ("regime/alarm", "collapse alarm (1: on)"),
)


def card_of_run(config: Config, workdir: Path, step: int) -> str:
    """Return the card of a run's policy at a step; its rows are in the run's folder."""
    rows = [row for row in read_metrics(workdir / "metrics.jsonl") if row["step"] <= step]
    return model_card(config, rows, step)


def model_card(config: Config, rows: Sequence[Metrics], step: int) -> str:
    """Return the card as Markdown with the header that the Hugging Face hub reads.

    Args:
      rows: rows of metrics.jsonl up to the step.
    """
    base = config.model.path
    hub = base != "tiny" and not Path(base).exists()
    header = ["---", "library_name: transformers", "tags: [reinforcement-learning, ragen_jax]"]
    header += [f"base_model: {json.dumps(base)}"] if hub else []
    name = "a tiny agent trained by imitation" if base == "tiny" else f"`{base}`"
    kl = f"{config.algorithm.kl_coef:g}" if config.algorithm.kl_coef else "none"
    facts = {
        "base model": name if hub or base == "tiny" else f"`{Path(base).name}` (a local directory)",
        "environments": ", ".join(part.env.name for part in per_task_configs(config).values()),
        "algorithm": f"{config.algorithm.name}, objective {config.algorithm.objective}",
        "KL coefficient, entropy coefficient": f"{kl}, {config.algorithm.entropy_coef:g}",
        "filter": f"{config.filter.strategy} {config.filter.value:g} of {config.filter.metric}",
        "steps": f"{step} of {config.rollout.groups} x {config.rollout.group_size} episodes",
        "LoRA": f"rank {config.model.lora.rank}" if config.model.lora.rank else "no",
        "seed": str(config.seed),
        "versions": ", ".join(f"{package} {version(package)}" for package in PACKAGES),
    }
    lines = [
        *header,
        "---",
        "",
        f"# A policy trained with ragen_jax on {facts['environments']}",
        "",
    ]
    lines += ["| | |", "| --- | --- |", *(f"| {k} | {x} |" for k, x in facts.items()), ""]
    lines += ["## What was measured", "", *answer_questions(rows), ""]
    lines += ["| figure | last value | at step |", "| --- | --- | --- |"]
    for metric, words in FIGURES:
        row = next((row for row in reversed(rows) if metric in row), None)
        if row is not None:
            half = row.get(f"{metric}_ci95")
            interval = "" if half is None else f" ± {half:.3g}"
            value = f"{row[metric]:.4g}{interval}"
            lines.append(f"| {words} (`{metric}`) | {value} | {row['step']:.0f} |")
    return "\n".join(lines) + "\n"
