"""Ten thousand episodes of each environment, by players that say anything (pytest -m slow).

Through what a rollout does with a reply: read by the chat, run by rollout/acting.py.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from listed import OURS

from ragen_jax.configs import base
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.randomness import Purpose, generator
from ragen_jax.rollout.acting import Asked, Broken, Limits, act, begin
from ragen_jax.run.build import build_chat, build_environment

EPISODES, TURNS, AT_ONCE = 10_000, 3, 100
GROWTH = 1.05  # of resident memory behind the first fifth
HOSTILE = (
    *("", " ", "</think>", "<answer></answer>", "\n" * 50, "||" * 50, "0", "-1", "1e400", "nan"),
    *("Up || Up || Up", "[1]", "(" * 500, "9**9**9", "\u202e\u0000\U0001f600", "½ ٣ 一"),
    *("__import__('os').system('true')", "x" * 1_000_000),
)


def resident():
    """Bytes of this process's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def answer(environment, rng):
    """What a player says: an action that there is, or anything."""
    words = environment.actions or ("1", "1+1", "A", "r1c1=1", "1,1,1")
    kind = rng.random()
    if kind < 0.6:
        return " || ".join(words[int(rng.integers(len(words)))] for _ in range(2))
    if kind < 0.9 or rng.random() > 0.002:  # a megabyte is rare: it takes a while to be read
        return HOSTILE[int(rng.integers(len(HOSTILE) - 1))]
    return HOSTILE[-1]


def digest(name, episodes):
    """SHA-256 of all that is shown and paid, and memory behind a fifth and at the end."""
    config = base.get_config()
    config.env.name = name
    environment = build_environment(single(config), "train")
    chat = build_chat(config, build_tokenizer(getattr(environment, "words", ())), environment)
    found, middle = hashlib.sha256(), 0
    for start in range(0, episodes, AT_ONCE):
        seeds = range(start, start + AT_ONCE)
        states = begin(environment, seeds, Limits())
        rngs = [generator(Purpose.ENVIRONMENT, seed, 0, 0) for seed in seeds]
        for _ in range(TURNS):
            replies = [
                chat.read(chat.reply_ids(f"so</think><answer>{answer(environment, rng)}</answer>"))
                for rng in rngs
            ]
            asked = [
                Asked(state, reply.actions, rng, 10)
                for state, reply, rng in zip(states, replies, rngs, strict=True)
            ]
            acted = act(environment, asked, Limits())
            broken = [x.traceback for x in acted if isinstance(x, Broken)]
            assert not broken, broken[0]
            for x in acted:
                found.update(repr((x.observation, x.reward, x.done, x.info)).encode())
            live = [i for i, x in enumerate(acted) if not x.done]
            states, rngs = [acted[i].state for i in live], [rngs[i] for i in live]
        if start == episodes // 5:
            middle = resident()
    return found.hexdigest(), middle, resident()


def single(config):
    """A config of one action a turn where an action is any text."""
    config.env.actions_per_turn = 1
    return config


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_ten_thousand_episodes(name):
    found, middle, end = digest(name, EPISODES)
    assert end < GROWTH * middle, f"{middle / 2**20:.0f} -> {end / 2**20:.0f} MiB"
    script = f"import test_soak; print(test_soak.digest({name!r}, {EPISODES // 10})[0])"
    other = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
    )
    assert other.returncode == 0, other.stderr
    assert other.stdout.split()[-1] == digest(name, EPISODES // 10)[0] != found


def test_a_player_says_anything():
    """What is said above is read as actions now and then, and as nothing now and then."""
    config = single(base.get_config())
    environment = build_environment(config, "train")
    chat = build_chat(config, build_tokenizer(environment.words), environment)
    rng = np.random.default_rng(0)
    read = [
        chat.read(chat.reply_ids(f"so</think><answer>{answer(environment, rng)}</answer>"))
        for _ in range(200)
    ]
    assert 0.4 < np.mean([reply.valid for reply in read]) < 0.8
