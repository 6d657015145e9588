"""Folders of simulated runs: metrics with the levels and the noise of the tiny Sokoban agent."""

import json

import numpy as np

from ragen_jax.configs import sokoban

# metric -> (level, standard deviation between steps, logged 95 % half-width or None)
LEVELS = {
    "collapse/first_turn/own_margin": (33.0, 3.0, 6.0),
    "collapse/trajectory/own_margin": (30.0, 3.0, 6.0),
    "collapse/first_turn/mi_upper_bound": (np.log(8), 0.0, None),
    "collapse/first_turn/h_cond": (0.25, 0.02, 0.04),
    "collapse/first_turn/retrieval_acc": (0.95, 0.02, 0.05),
    "collapse/first_turn/retrieval_chance": (0.125, 0.0, None),
    "rollout/valid_rate": (0.97, 0.01, 0.015),
    "rollout/valid_think_rate": (0.985, 0.005, 0.01),
    "rollout/response_length": (19.8, 0.2, 0.5),
    "rollout/success": (0.4, 0.08, 0.2),
    "rollout/return": (3.0, 0.8, None),
    "rollout/logp_gap": (8e-6, 2e-6, None),
    "reasoning/grounded_rate": (0.93, 0.02, 0.04),
    "filter/kept_ratio": (0.7, 0.1, None),
    "filter/zero_groups": (0.02, 0.01, None),
    "update/entropy": (0.17, 0.01, None),
    "time/step": (3.0, 0.2, None),
    "time/rollout": (1.0, 0.1, None),
}
PROBLEMS = 256  # number of held-out problems


def write_run(
    folder,
    *,
    steps=100,
    changes=None,
    levels=None,
    success=(0.4, 0.55),
    seed=0,
    fields=None,
    episodes=(),
    first=None,
):
    """Write config.json, metrics.jsonl, eval/ and rollouts/; return the folder.

    Args:
      changes: metric -> (first step, final fraction of its level, number of steps to get there).
      levels: metric -> (level, standard deviation, logged 95 % half-width) or None for no metric,
        instead of LEVELS.
      success: first and last held-out success.
      fields: dotted config fields.
      episodes: (step, [record of rollouts/*.jsonl]).
      first: further metrics of row 0.
    """
    rng, config = np.random.default_rng(seed), sokoban.get_config()
    config.update(seed=seed, steps=steps)
    for name, value in (fields or {}).items():
        section, last = name.rsplit(".", 1)
        node = config
        for part in section.split("."):
            node = node[part]
        node[last] = value
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    solved_at = rng.random(PROBLEMS)  # a problem is solved where success exceeds this value
    lines = []
    for step in range(steps + 1):
        row = {"step": step} | (first or {} if step == 0 else {})
        if step % 20 == 0:
            rate = success[0] + (success[1] - success[0]) * step / steps
            outcome = [[i, int(x < rate)] for i, x in enumerate(solved_at)]
            path = folder / "eval" / f"step_{step:06d}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(outcome))
            row["eval/success"] = float(np.mean([s for _, s in outcome]))
            row["eval/success_ci95"] = 0.06
        known = {k: x for k, x in (LEVELS | (levels or {})).items() if x is not None}
        for name, (level, deviation, half) in known.items() if step else ():
            start, share, over = (changes or {}).get(name, (steps + 1, 1.0, 1))
            moved = min(max((step - start) / over, 0), 1)
            factor = 1 + (share - 1) * moved
            row[name] = level * factor + deviation * rng.standard_normal()
            if half is not None:
                row[f"{name}_ci95"] = half
        lines.append(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    for step, records in episodes:
        path = folder / "rollouts" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def episode(tokenizer, replies, *, group=0, member=0, success=False, kept=True, valid=True):
    """Return a record of rollouts/*.jsonl; each reply is a text."""
    turns = []
    for reply in replies:
        prompt = "<|im_start|>user\n#P#\n#X#<|im_end|>\n<|im_start|>assistant\n<think>"
        sampled = tokenizer.encode(reply, add_special_tokens=False)
        turns.append(
            {
                "messages": [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": reply},
                ],
                "prompt_ids": tokenizer.encode(prompt, add_special_tokens=False),
                "sampled_ids": sampled,
                "logps": [-0.1 * (i % 30) for i in range(len(sampled))],
                "actions": ["Up"],
                "valid": valid,
                "reward": 1.0,
            }
        )
    return {
        "seed": 40 + group,
        "group": group,
        "member": member,
        "success": success,
        "kept": kept,
        "turns": turns,
    }
