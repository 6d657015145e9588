"""Episodes played through the endpoint, by an agent with the `openai` package, against lock step.

The agent writes the same prompts as the built-in environment and the draws have the same keys, so
both sides play the same episodes; the tokens are compared. The lengths of replies are planted
(slots.py).
"""

import functools
import statistics
import threading
import time

import jax
import openai

from benchmarks.episodes import MOVES
from benchmarks.measure import Row, compare
from benchmarks.slots import _check_same, planted_setting
from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.types import HarnessResult
from ragen_jax.rollout.env_calls import Limits
from ragen_jax.rollout.episode import PlaySettings, Sampling
from ragen_jax.rollout.play import rollout
from ragen_jax.serving.conversation import make_conversation
from ragen_jax.serving.harness_chat import harness_chat

TURNS = 5
SESSIONS = 64


class Agent:
    """An environment that an agent plays over HTTP; `waits` are seconds of its requests."""

    actions, instructions, thinks = (), "", True

    def __init__(self, environment, chat):
        self.environment, self.chat, self.waits = environment, chat, []
        self._lock = threading.Lock()

    def reset(self, seed):
        return self.environment.reset(seed)

    def render(self, state):
        return self.environment.render(state)

    def identity(self, state):
        return self.render(state)

    def step(self, state, action, rng):
        raise TypeError("the agent plays")

    def play(self, state, access):
        client = openai.OpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)
        chat, waits = self.chat, []
        messages = [] if chat.system is None else [{"role": "system", "content": chat.system}]
        used, done = 0, False
        while not done:
            shown = chat.observe(self.render(state), actions_used=used, last_valid=True)
            messages.append({"role": "user", "content": shown})
            start = time.perf_counter()
            answer = client.chat.completions.create(model="any", messages=messages)
            waits.append(time.perf_counter() - start)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))
            for move in MOVES:
                step = self.environment.step(state, move, None)
                state, done = step.state, step.done
            used += len(MOVES)
        with self._lock:
            self.waits += waits
        return HarnessResult(0.0, False)


def _play(setting, agent, tokenizer, seeds, members):
    chat = harness_chat(setting.chat, make_conversation(tokenizer, thinks=True))
    settings = PlaySettings(
        chat,
        agent,
        budgets=setting.budgets,
        sampling=Sampling(temperature=1.0),
        limits=Limits(600.0, SESSIONS),
        first_prompt=len(
            setting.chat.prompt_ids(
                (),
                setting.chat.observe(
                    setting.environment.render(setting.environment.reset(seeds[0])),
                    actions_used=0,
                    last_valid=True,
                ),
            )
        ),
    )
    with jax.set_mesh(make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])):
        episodes = rollout(
            setting.model,
            setting.params,
            settings,
            seeds,
            [agent.reset(seed) for seed in seeds],
            group_size=members,
            key=jax.random.key(0),
        )
    for episode in episodes:
        if episode.error:
            raise RuntimeError(episode.error)
    return episodes


def endpoint(repeats, *, heavy=(True, False), **sizes):
    """64 sessions of five turns at once, 10 M parameters; heavy-tailed and equal lengths."""
    rows = []
    for kind in heavy:
        with planted_setting(heavy=kind, turns=(TURNS,) * 8, members=8, **sizes) as setting:
            agent = Agent(setting.environment, setting.chat)
            tokenizer = setting.chat.template.tokenizer
            ours = functools.partial(
                _play, setting, agent, tokenizer, setting.seeds, setting.members
            )
            episodes = ours()
            _check_same(episodes, setting.play())
            rows.append(
                Row(
                    name=f"{'heavy-tailed' if kind else 'equally long'} replies by the endpoint",
                    other_name="lock step",
                    target=0.8,
                    work=sum(len(turn.sampled) for e in episodes for turn in e.turns),
                    unit="new tokens",
                    **compare(ours, setting.play, repeats=repeats, warmup=0),
                )
            )
    return rows


def latency(repeats, *, sessions=(1, 8, 64), **sizes):
    """Median seconds of a request, by the number of sessions at once; equal lengths."""
    rows = []
    with planted_setting(heavy=False, turns=(TURNS,) * 64, members=1, **sizes) as setting:
        tokenizer = setting.chat.template.tokenizer
        for count in sessions:
            waits = []
            for repeat in range(repeats + 1):
                agent = Agent(setting.environment, setting.chat)
                _play(setting, agent, tokenizer, setting.seeds[:count], 1)
                if repeat:  # the first compiles
                    waits += agent.waits
            middle, slow = statistics.median(waits), statistics.quantiles(waits, n=20)[-1]
            tokens = setting.budgets.max_new_tokens
            rows.append(
                Row(
                    name=f"a request of {count} session(s), 95 % below {slow:.2f} s",
                    ours=middle,
                    work=tokens,
                    unit="new tokens",
                )
            )
    return rows
