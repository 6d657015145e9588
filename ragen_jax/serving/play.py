"""Play the episodes of a harness: programs that ask the policy for replies through an endpoint.

The policy is served while the episodes of a rollout run, and no longer: whatever a program asks for
after its episode is refused, so that no request ever sees two sets of parameters.
"""

import contextlib
import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Sequence

import jax

from ragen_jax.core.progress import begin_count
from ragen_jax.core.types import LIMIT, Params
from ragen_jax.envs.types import HarnessEnvironment, HarnessResult, ModelAccess, Step
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.template import PromptError
from ragen_jax.rollout.env_calls import (
    NO_LIMIT,
    Clock,
    EnvFailure,
    attempt,
    checked_step,
    in_threads,
)
from ragen_jax.rollout.episode import PROMPT_ERROR, Play, PlaySettings
from ragen_jax.rollout.rows import Endings
from ragen_jax.serving.conversation import Message
from ragen_jax.serving.engine import FIRST_PROMPT, Engine, Ticket
from ragen_jax.serving.episodes import as_turns, with_rewards
from ragen_jax.serving.harness_chat import HarnessChat
from ragen_jax.serving.loopback import on_loopback
from ragen_jax.serving.recording import Call
from ragen_jax.serving.server import Served, make_app
from ragen_jax.serving.sessions import Budget, Session, Sessions

CUT_OFF = "max_new_tokens"  # the limit of a reply
NAME = "policy"  # of the model, as clients see it
_LISTED: set[str] = set()  # as in `Served`, for all rollouts of the process
NO_REQUEST = "the harness sent no request that could be answered"


class _Over:
    """Functions to call when an episode is over or given up."""

    def __init__(self) -> None:
        self._lock, self._over = threading.Lock(), False
        self._calls: list[Callable[[], object]] = []

    def register(self, call: Callable[[], object]) -> None:
        with self._lock:
            if not self._over:
                self._calls.append(call)
                return
        call()

    def end(self) -> None:
        with self._lock:
            self._over, calls, self._calls = True, self._calls, []
        for call in calls:
            call()


@dataclasses.dataclass
class _Running:
    """An episode and its session, which ends with it."""

    play: Play
    key: str
    session: Session
    over: _Over


def play_sessions(
    model: Qwen,
    params: Params,
    settings: PlaySettings,
    plays: Sequence[Play],
    *,
    key: jax.Array,
    clock: Clock | None,
) -> None:
    """Play every episode to its end; call it under the sampling mesh.

    A program that raises, ends with an error, exceeds the time limit or gives no usable result
    breaks its episode (`Play.error`). If its last request was refused for a limit of the session
    (env.max_turns, env.max_context), or the last reply was cut off, the agent has failed at a
    limit: the episode is sound, with reward 0, and the last turn's info has the limit and the
    failure (types.LIMIT).

    Args:
      settings: their environment is a `HarnessEnvironment` and their chat a `HarnessChat`.
      plays: newly started; those with an error are not run.
      The others: as in rollout.play.rollout.

    Raises:
      RuntimeError: sampling has failed.
    """
    chat, environment, budgets = settings.chat, settings.environment, settings.budgets
    assert isinstance(chat, HarnessChat) and isinstance(environment, HarnessEnvironment)
    limits = settings.limits
    if not limits.time_limit:
        limits = dataclasses.replace(limits, time_limit=NO_LIMIT)
    endings = Endings(chat.stop_ids, chat.stops)
    engine = Engine(
        model,
        params,
        mesh=jax.sharding.get_mesh(),
        slots=settings.slots or min(len(plays), limits.workers),
        longest_reply=budgets.max_new_tokens,
        first_prompt=settings.first_prompt or FIRST_PROMPT,
        sampling=settings.sampling,
        endings=endings,
        key=key,
    )
    sessions = Sessions(Budget(calls=budgets.max_turns), write=None)
    room = chat.format.max_prompt + budgets.max_new_tokens if chat.format.max_prompt else None
    served = Served(
        engine=engine,
        conversation=chat.conversation,
        sessions=sessions,
        name=NAME,
        positions=min(model.config.max_positions, room or model.config.max_positions),
        vocabulary=model.config.vocab_size,
        most=budgets.max_new_tokens,
        endings=endings,
        admin_key=secrets.token_urlsafe(24),
        listed=_LISTED,
    )
    running = [_begin(play, sessions) for play in plays if not play.error]
    count = begin_count(len(running), "episodes")
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(on_loopback(make_app(served)))
        stack.callback(engine.close)  # before the server, whose last requests it then refuses
        stack.callback(lambda: [each.over.end() for each in running])

        def run(each: _Running, tick: Callable[[], None]) -> HarnessResult | EnvFailure:
            access = ModelAccess(
                base_url=f"{url}/v1",
                api_key=each.key,
                posted=lambda: each.session.posted,
                when_over=each.over.register,
            )
            result = attempt(lambda: _checked(environment.play(each.play.state, access)))
            each.over.end()
            count(1)
            return result

        results = in_threads(run, running, limits, give_up=lambda each: each.over.end())
        for each, result in zip(running, results, strict=True):
            calls = list(each.session.calls)
            limit = each.session.refused or (
                CUT_OFF if calls and calls[-1].finish == "length" else ""
            )
            if isinstance(result, EnvFailure) and limit and not result.timed_out:
                result = HarnessResult(0.0, False, info={LIMIT: f"{limit}: {result.error}"})
            _finish(each.play, chat, calls, result)
        if engine.failure is None:
            _fill_empty(plays, chat, engine, served.positions)
        if clock is not None:
            clock.seconds += engine.idle_seconds
    if engine.failure is not None:
        raise RuntimeError("sampling for the harness has failed") from engine.failure


def _begin(play: Play, sessions: Sessions) -> _Running:
    """Open the session of an episode."""
    key, over = sessions.open(draw=(play.seed, play.member)), _Over()
    over.register(functools.partial(sessions.end, key))
    return _Running(play, key, sessions.find(key), over)


def _checked(result: object) -> HarnessResult:
    """Return a result whose rewards and facts are usable (env_calls.checked_step).

    Raises:
      TypeError, ValueError: they are not.
    """
    if not isinstance(result, HarnessResult):
        raise TypeError(f"play must return a HarnessResult, got {type(result).__name__}")
    for reward in result.rewards:
        checked_step(Step(None, reward, True, {}))
    step = checked_step(Step(None, result.reward, True, dict(result.info)))
    return dataclasses.replace(result, reward=step.reward, info=step.info)


def _finish(
    play: Play, chat: HarnessChat, calls: Sequence[Call], result: HarnessResult | EnvFailure
) -> None:
    """Give a play the turns, rewards and outcome of its session."""
    turns, order, play.left_out = as_turns(chat, calls)
    play.turns, play.over = turns, True
    if isinstance(result, EnvFailure):
        play.error = result.traceback
    elif turns:
        try:
            play.turns = list(with_rewards(turns, order, len(calls), result))
            play.success = result.success
        except ValueError as error:
            play.error = f"ValueError: {error}"
    else:
        limit = f" ({result.info[LIMIT]})" if LIMIT in result.info else ""
        play.error = f"{PROMPT_ERROR}: {NO_REQUEST}{limit}"


def _fill_empty(plays: Sequence[Play], chat: HarnessChat, engine: Engine, positions: int) -> None:
    """Give plays without a turn, which have an error, one token in reply to their problem, so that
    every episode has a turn.

    Args:
      positions: for a prompt and its reply.
    """
    empty = [play for play in plays if not play.turns]
    prompts = []
    for play in empty:
        try:
            prompt = chat.conversation.prompt([Message("user", str(play.observation))])
            too_long = len(prompt) >= positions
        except PromptError:
            too_long = True
        prompts.append(chat.conversation.prompt([Message("user", "")]) if too_long else prompt)
    futures = [
        engine.submit(Ticket(prompt, 1, (play.seed, play.member, 0)))
        for play, prompt in zip(empty, prompts, strict=True)
    ]
    for play, prompt, future in zip(empty, prompts, futures, strict=True):
        sampled = future.result()
        call = Call(None, (), (Message("user", ""), Message("assistant", "")), prompt, *sampled, "")
        play.turns, _, _ = as_turns(chat, [call])
