"""Experiments of the laboratory (`python -m ragen_jax.lab`), as data: what is varied, how often.

An arm is a setting with a filter and a seed; each gives fields of the config and their values.
"""

from typing import Any

EXPERIMENTS: dict[str, dict[str, Any]] = {
    # Does strong regularisation or a large learning rate make reasoning lose its input before
    # success falls, and does filtering by reward variance prevent it (RAGEN-2, sections 4 and 5)?
    "collapse": {
        "settings": {
            "default": {},
            "entropy 0.1": {"algorithm.entropy_coef": 0.1},
            "lr 1e-3": {"optimizer.learning_rate": 1e-3},
            "lr 1e-3, entropy 0.05": {
                "optimizer.learning_rate": 1e-3,
                "algorithm.entropy_coef": 0.05,
            },
            "lr 1e-3, KL 0.1": {"optimizer.learning_rate": 1e-3, "algorithm.kl_coef": 0.1},
        },
        "filters": {
            "top-p 0.9": {"filter.strategy": "top_p", "filter.value": 0.9},
            "no filter": {"filter.strategy": "none"},
        },
        "seeds": (0, 1, 2),
        "always": {
            "steps": 60,
            "eval.every": 10,
            "eval.episodes": 512,
            "checkpoint.every": 30,
            "checkpoint.export": False,
            "rollout.save_every": 30,
            # A run that collapses is what is looked for.
            **{
                f"stopping.{rule}.action": "warn"
                for rule in ("variance", "success", "empty", "nonfinite")
            },
        },
    },
}
