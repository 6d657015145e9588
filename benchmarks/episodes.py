"""Episodes with a fixed amount of work, and the tiny agent that plays them.

The rooms, prompts and token counts are those of Sokoban, but no token ends a reply, every reply is
read as the same two moves, and the seed of an episode determines its length. So this program and a
peer read and sample the same numbers of tokens, regardless of their random generators.
"""

import contextlib
import dataclasses
import tempfile

import jax
import numpy as np

from ragen_jax.config.build_environment import build_chat, build_environment
from ragen_jax.config.build_model import tiny_shape
from ragen_jax.configs import sokoban
from ragen_jax.model import hf
from ragen_jax.model.qwen import Qwen, init_params
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.rollout.chat import Chat, Reply
from ragen_jax.rollout.episode import Budgets, PlaySettings, Sampling
from ragen_jax.rollout.play import rollout

ROOM_SIZE = (8, 7)  # a first prompt of 72 tokens
MOVES = ("Up", "Left")


class FixedChat(Chat):
    """Chat that reads every reply as the same moves; no token ends a reply."""

    @classmethod
    def from_chat(cls, chat):
        fields = {field.name: getattr(chat, field.name) for field in dataclasses.fields(chat)}
        return cls(**fields | {"stop_ids": (), "close_id": -1})

    def read(self, sampled):
        return Reply((0, 0), (0, 0), MOVES, True)


class ReadAgainChat(FixedChat):
    """Chat that changes the first token of every prompt, so that no cached row is continued."""

    def prompt_ids(self, turns, message, spans=()):
        ids = super().prompt_ids(turns, message, spans).copy()
        ids[0] = len(turns)
        return ids


@dataclasses.dataclass(frozen=True)
class Clock:
    """State of a room and the number of turns left in its episode."""

    room: object
    turns: int


class FixedLength:
    """Sokoban whose episodes have `turns[seed % len(turns)]` turns."""

    def __init__(self, environment, turns):
        self.environment, self.turns = environment, turns
        self.actions, self.instructions = environment.actions, environment.instructions

    def reset(self, seed):
        return Clock(self.environment.reset(seed), self.turns[seed % len(self.turns)])

    def render(self, state):
        return self.environment.render(state.room)

    def step(self, state, action, rng):
        step = self.environment.step(state.room, action, rng)
        last = action == MOVES[-1]
        state = Clock(step.state, state.turns - last)
        return dataclasses.replace(step, state=state, done=last and state.turns == 0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """All inputs of a rollout."""

    model: object
    params: dict
    chat: Chat
    environment: object
    seeds: tuple[int, ...]
    members: int
    budgets: Budgets
    directory: str  # the model in Hugging Face format; a temporary directory

    def play(self, *, read_again=False, slots=0, chunk=0):
        """Play this program's rollout and return its episodes."""
        return rollout(
            self.model,
            self.params,
            PlaySettings(
                ReadAgainChat.from_chat(self.chat) if read_again else self.chat,
                self.environment,
                budgets=self.budgets,
                sampling=Sampling(temperature=1.0),
                slots=slots,
                chunk=chunk,
            ),
            self.seeds,
            [self.environment.reset(seed) for seed in self.seeds],
            group_size=self.members,
            key=jax.random.key(0),
        )

    def play_with(self, generate):
        """Play the same episodes with a peer's `generate` (peers.py).

        Returns:
          (prompts, replies), each a list over turns.
        """
        rng = np.random.default_rng(0)
        plays = [
            [self.environment.reset(seed), [], False]
            for seed in self.seeds
            for _ in range(self.members)
        ]  # state, turns, over
        prompts_by_turn, replies_by_turn = [], []
        for turn in range(self.budgets.max_turns):
            live = [play for play in plays if not play[2]]
            if not live:
                break
            prompts = []
            for state, turns, _ in live:
                message = self.chat.observe(
                    self.environment.render(state),
                    actions_used=turn * len(MOVES),
                    last_valid=True,
                )
                prompts.append(self.chat.prompt_ids(turns, message))
            replies = generate(prompts, self.budgets.max_new_tokens)
            replies = [np.asarray(reply, np.int32) for reply in replies]
            for play, prompt, sampled in zip(live, prompts, replies, strict=True):
                for action in self.chat.read(sampled).actions:
                    step = self.environment.step(play[0], action, rng)
                    play[0], play[2] = step.state, step.done
                play[1].append(_PlayedTurn(prompt, sampled))
            prompts_by_turn.append(prompts)
            replies_by_turn.append(replies)
        return prompts_by_turn, replies_by_turn


@dataclasses.dataclass(frozen=True)
class _PlayedTurn:
    prompt: np.ndarray
    sampled: np.ndarray


@contextlib.contextmanager
def tiny_setting(*, context, turns, members=16, new_tokens=24, seed=0, shape=None, prompt=None):
    """Yield (`Setting` of the tiny agent with random weights, its directory).

    Args:
      context: "full" or "single_turn".
      turns: number of turns of the episodes of each group.
      shape: `ModelConfig` instead of the tiny agent's, with at least the same vocabulary size.
      prompt: config.env.prompt instead of the tiny agent's.
    """
    config = sokoban.get_config()
    config.env.context = context
    config.env.prompt = prompt or config.env.prompt
    config.env.options.size = ROOM_SIZE
    environment = build_environment(config.env, "train")
    tokenizer = build_tokenizer(environment.words)
    model = Qwen(shape or tiny_shape(config, tokenizer))
    params = init_params(model.config, jax.random.key(seed))
    chat = build_chat(config, tokenizer, environment)
    with tempfile.TemporaryDirectory() as directory:
        hf.save(f"{directory}/tiny", model, params, tokenizer)
        yield (
            Setting(
                model=model,
                params=params,
                chat=FixedChat.from_chat(chat),
                environment=FixedLength(environment, tuple(turns)),
                seeds=tuple(range(len(turns))),
                members=members,
                budgets=Budgets(
                    max_turns=max(turns),
                    max_actions=len(MOVES) * max(turns),
                    max_new_tokens=new_tokens,
                ),
                directory=f"{directory}/tiny",
            ),
            f"{directory}/tiny",
        )
