"""Episodes that a tiny agent could have written."""

import numpy as np

from ragen_jax.core.types import Episode, Turn
from ragen_jax.rollout.chat import ChatFormat

FORM = ChatFormat(context="full", prompt="terse", actions_per_turn=2, max_actions=10)
WORDS = ("Left", "Up", "Down", "Right")


def episodes_of(chat, environment, turns, groups, members):
    """Replies as an agent writes them, some cut off, in rooms of the environment."""
    rng, episodes = np.random.default_rng(0), []
    for group in range(groups):
        message = environment.render(environment.reset(group))
        for member in range(members):
            done = []
            for _ in range(turns):
                plan = " ".join(rng.choice(WORDS, rng.integers(1, 4)))
                text = f"player {group}{member} plan {plan}</think><answer>{plan[:4]}</answer>"
                if rng.random() < 0.2:
                    text = text[: len(text) // 3]
                prompt, sampled = chat.prompt_ids(done, message), chat.reply_ids(text)
                said = chat.read(sampled)
                logp = np.zeros(len(sampled), np.float32)
                reward = float(rng.integers(2))
                spans = said.reasoning, said.answer, said.actions, said.valid
                done.append(Turn(prompt, message, sampled, logp, *spans, reward, {}))
            episodes.append(Episode(group, group, member, tuple(done), bool(rng.integers(2))))
    return episodes
