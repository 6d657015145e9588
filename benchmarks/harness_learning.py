"""Learning through a harness: the tiny Bandit agent by an agent program, and as built in.

    python -m benchmarks harness-learning [--seeds 0 1 2] [--steps=125] [--workdir=runs/harness]

Both sides start from the same imitated agent and have the settings of configs/bandit.py with half
the problems and steps. The program writes the prompts of the built-in environment with the `openai`
package and computes the rewards itself. The held-out problems are drawn from the same distribution,
but differ.
"""

import argparse
import functools
import json
import re
import threading
from pathlib import Path

import numpy as np
import openai

import ragen_jax
from benchmarks import gain
from ragen_jax.config.build_environment import build_chat, build_environment
from ragen_jax.config.load import load_config
from ragen_jax.configs import bandit, harness
from ragen_jax.model import hf
from ragen_jax.run.imitate import tiny_model

PROBLEMS = {"train": 20_000, "eval": 1024}
_LOCK = threading.Lock()


def config_of_bandit():
    """Return the config of the built-in side, still with the model "tiny"."""
    config = bandit.get_config("tiny")
    config.rollout.groups = 16
    config.eval.episodes = 512
    config.checkpoint.export = False
    return config


@functools.cache
def _side(split, model):
    """Return (environment, chat) of a split."""
    config = load_config(config_of_bandit())
    environment = build_environment(config.env, split)
    return environment, build_chat(config, hf.load_tokenizer(Path(model)), environment)


@functools.cache
def _client(base_url):
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def play(problem, base_url, api_key):
    """Play a problem of Bandit with the prompts of the built-in environment."""
    with _LOCK:
        environment, chat = _side(problem["split"], problem["model"])
        client = _client(base_url)
    state = environment.reset(problem["seed"])
    shown = chat.observe(environment.render(state), actions_used=0, last_valid=True)
    messages = [{"role": "system", "content": chat.system}] if chat.system else []
    messages.append({"role": "user", "content": shown})
    answer = client.with_options(api_key=api_key).chat.completions.create(
        model="policy", messages=messages
    )
    found = re.fullmatch(r"\s*<answer>(.+?)</answer>\s*", answer.choices[0].message.content or "")
    if not found:
        return {"reward": -0.1, "success": False}
    step = environment.step(state, found[1].strip(), np.random.default_rng())
    return {"reward": step.reward, "success": bool(step.info["success"])}


def config_of_harness(problems):
    """Return the config of the other side, with the same training."""
    config = config_of_bandit()
    config.env = harness.get_config("llm").env
    config.env.update(max_turns=1, max_context=512)
    config.env.options.update(
        function="benchmarks.harness_learning:play",
        problems=str(problems),
        thinks=True,
        split_field="split",
    )
    return config


def main(argv):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks harness-learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=125)
    parser.add_argument("--workdir", type=Path, default=Path("runs/harness"))
    options = parser.parse_args(argv)
    options.workdir.mkdir(parents=True, exist_ok=True)
    model = tiny_model(config_of_bandit())
    problems = options.workdir / "problems.jsonl"
    rows = (
        {"seed": seed, "split": split, "model": str(model)}
        for split, count in PROBLEMS.items()
        for seed in range(count)
    )
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"model.path": str(model), "steps": options.steps}
    sides = {"built in": config_of_bandit(), "harness": config_of_harness(problems)}
    folders = {name: [] for name in sides}
    for seed in options.seeds:
        for name, config in sides.items():
            folder = options.workdir / f"{name.replace(' ', '_')}{seed}"
            folders[name].append(folder)
            ragen_jax.train(config, workdir=folder, overrides=common | {"seed": seed})
    for name, found in folders.items():
        print(f"{name}:")
        gain.compare(found)
