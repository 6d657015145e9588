"""Play G groups of K episodes: environments on the host, tokens on the device.

All episodes of a step run in one batch, turn by turn. Members of a group share their first
prompt, which is read once. Later turns either extend the cache (the prompt continues the row)
or read a fresh prompt; the prompts themselves tell which, so this file knows no context modes.
"""

import dataclasses

import jax
import numpy as np

from ragen_jax.sample import decode, episode_keys, extend, prefill
from ragen_jax.types import Episode, Turn


@dataclasses.dataclass(frozen=True)
class Budgets:
    """Limits of one episode; the environment itself knows none."""

    max_turns: int
    max_actions: int
    max_new_tokens: int  # of one reply


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Training uses the temperature alone (types.Turn.logp says why)."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclasses.dataclass
class _Play:
    """An episode under way."""

    seed: int
    group: int
    member: int
    state: object
    rng: np.random.Generator
    turns: list
    actions_used: int = 0
    success: bool = False
    over: bool = False


def rollout(
    model,
    params,
    chat,
    environment,
    seeds_G,
    states_G,
    *,
    group_size,
    key,
    budgets,
    sampling,
    compact=True,
):
    """Plays `group_size` episodes of each initial state.

    Args:
      model, params: the policy.
      chat: `chat.Chat`, which decides what a turn's prompt shows.
      environment: `envs.types.Environment`.
      seeds_G, states_G: environment seeds and their initial states.
      key: typed key of the run and purpose; draws fold in seed, member, turn and token index.
      compact: drop finished episodes from the batch (the episodes stay the same).

    Returns:
      list of `Episode`, group by group, member by member.

    Raises:
      ValueError: a prompt and its reply do not fit the model's positions.
    """
    # The environment's own noise (slips, say) is keyed like the policy's draws.
    salt = int(jax.random.key_data(key).ravel()[-1])
    plays = [
        _Play(
            seed=seed,
            group=group,
            member=member,
            state=state,
            rng=np.random.Generator(np.random.Philox(key=[seed, salt << 32 | member])),
            turns=[],
        )
        for group, (seed, state) in enumerate(zip(seeds_G, states_G, strict=True))
        for member in range(group_size)
    ]
    live = plays
    cache = None  # (segment, sampled) of the last turn, and which plays its rows were
    for turn in range(budgets.max_turns):
        prompts = [
            chat.prompt_ids(
                play.turns,
                chat.observe(
                    environment.render(play.state),
                    actions_used=play.actions_used,
                    last_valid=not play.turns or play.turns[-1].valid,
                ),
            )
            for play in live
        ]
        longest = max(len(prompt) for prompt in prompts) + budgets.max_new_tokens
        if longest > model.config.max_positions:
            raise ValueError(
                f"a prompt with its reply needs {longest} positions at turn {turn + 1}, but the "
                f"model has {model.config.max_positions}; lower rollout.max_new_tokens or "
                "env.max_turns, or set env.context to single_turn"
            )
        # The first turn has one cache row a group; its rows are never padded.
        rows = row_bucket(len(live), len(plays)) if compact and turn else len(plays)
        if turn == 0:
            segment, logits = _read(model, params, prompts[::group_size], len(seeds_G))
        elif _continues(live[0], prompts[0]):
            segment, logits = _continue(model, params, cache, live, prompts, rows)
        else:
            segment, logits = _read(model, params, prompts, rows)

        padding = rows - len(live)
        keys_B = episode_keys(
            key,
            [play.seed for play in live] + [0] * padding,
            [play.member for play in live] + [0] * padding,
            turn,
        )
        budget_B = np.zeros(rows, np.int32)
        budget_B[: len(live)] = budgets.max_new_tokens
        sampled = decode(
            model,
            params,
            segment,
            logits,
            keys_B,
            budget_B,
            np.float32(sampling.temperature),
            max_new_tokens=budgets.max_new_tokens,
            stop_ids=chat.stop_ids,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        tokens_BT, logp_BT, count_B = jax.device_get(
            (sampled.tokens_BT, sampled.logp_BT, sampled.count_B)
        )
        for row, (play, prompt) in enumerate(zip(live, prompts, strict=True)):
            count = count_B[row]
            _act(play, prompt, tokens_BT[row, :count], logp_BT[row, :count], environment, chat)
            play.over |= play.actions_used >= budgets.max_actions
        cache = segment, sampled.own, live
        live = [play for play in live if not play.over]
        if not live:
            break
    return [
        Episode(
            seed=play.seed,
            group=play.group,
            member=play.member,
            turns=tuple(play.turns),
            success=play.success,
        )
        for play in plays
    ]


def compile_ahead(model, params, chat, environment, seed, state, *, rows, key, budgets, sampling):
    """Compiles prefill and decode for every number of rows that compaction can leave.

    Plays one turn of one problem in as many copies; without this a program would be compiled in
    the middle of a run, when so few episodes are first left.

    Args:
      rows: episodes of a full batch. The others: as in `rollout`.
    """
    for size in sorted({row_bucket(live, rows) for live in range(1, rows + 1)}):
        rollout(
            model,
            params,
            chat,
            environment,
            [seed] * size,
            [state] * size,
            group_size=1,
            key=key,
            budgets=dataclasses.replace(budgets, max_turns=1),
            sampling=sampling,
        )


def _act(play, prompt, sampled, logp, environment, chat):
    """Reads a reply, runs its actions and adds the turn. An unreadable reply runs none."""
    reply = chat.read(sampled)
    reward, info, done, run = 0.0, {}, False, []
    for action in reply.actions[: chat.max_actions - play.actions_used]:
        step = environment.step(play.state, action, play.rng)
        play.state, info, done = step.state, step.info, step.done
        reward += step.reward
        run.append(action)
        if done:
            break
    play.actions_used += len(run)
    play.success |= bool(info.get("success", False))
    play.over = done
    play.turns.append(
        Turn(
            prompt=prompt,
            sampled=sampled,
            logp=logp,
            reasoning=reply.reasoning,
            answer=reply.answer,
            actions=tuple(run),
            valid=reply.valid,
            reward=reward,
            info=info,
        )
    )


def _continues(play, prompt):
    """Whether a prompt repeats the last turn's tokens and adds to them."""
    last = play.turns[-1]
    start = len(last.prompt) + len(last.sampled)
    return (
        len(prompt) > start
        and np.array_equal(prompt[: len(last.prompt)], last.prompt)
        and np.array_equal(prompt[len(last.prompt) : start], last.sampled)
    )


def _read(model, params, prompts, rows):
    """Prefill of prompts, padded to `rows` rows (padding repeats the first prompt)."""
    length_N = np.full(rows, len(prompts[0]), np.int32)
    length_N[: len(prompts)] = [len(prompt) for prompt in prompts]
    tokens_NP = np.zeros((rows, length_bucket(length_N.max())), np.int32)
    tokens_NP[:, : len(prompts[0])] = prompts[0]
    for row, prompt in enumerate(prompts):
        tokens_NP[row, : len(prompt)] = prompt
        tokens_NP[row, len(prompt) :] = 0
    return prefill(model, params, tokens_NP, length_N)


def _continue(model, params, cache, live, prompts, rows):
    """Extend of the last turn's cache for the episodes still live, padded to `rows` rows."""
    segment, own, before = cache
    row_of = {id(play): row for row, play in enumerate(before)}
    rows_B = np.zeros(rows, np.int32)  # padding rows follow the first episode
    rows_B[: len(live)] = [row_of[id(play)] for play in live]
    count_B = np.ones(rows, np.int32)
    news = []
    for row, (play, prompt) in enumerate(zip(live, prompts, strict=True)):
        last = play.turns[-1]
        news.append(prompt[len(last.prompt) + len(last.sampled) - 1 :])  # last sampled token first
        count_B[row] = len(news[row])
    width = length_bucket(count_B.max())
    tokens_BE = np.zeros((rows, width), np.int32)
    for row, new in enumerate(news):
        tokens_BE[row, : len(new)] = new
    capacity = length_bucket(max(len(prompt) for prompt in prompts))
    return extend(model, params, segment, own, rows_B, tokens_BE, count_B, capacity=capacity)


def length_bucket(length):
    """The padded length of a program: multiples of an eighth of the next power of two (>= 8)."""
    step = max(8, (1 << (int(length) - 1).bit_length()) // 8)
    return -(-int(length) // step) * step


def row_bucket(live, total):
    """The padded number of rows: quarters of the batch, at least 64.

    Below 64 rows XLA's float32 products on CPU round differently with the number of rows.
    """
    quarter = -(-total // 4)
    return min(max(-(-live // quarter) * quarter, 64), total)
