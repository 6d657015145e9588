"""List every program that rollouts in slots can need, from the sizes alone.

All of them can therefore be compiled before the first is called.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.stages import Lowered, Wrapped
from jax.typing import DTypeLike

from ragen_jax.core.sharding import row_shards, row_spec, spec
from ragen_jax.core.types import Params, Turn
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.template import PromptError
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.chunks import DecodeBatch, decode_chunk, empty_page, fold, keep_rows, read
from ragen_jax.rollout.episode import Budgets, Play, Sampling
from ragen_jax.rollout.pages import Sizes
from ragen_jax.rollout.rows import NOTHING, common
from ragen_jax.rollout.stops import Stops
from ragen_jax.rollout.tails import empty_tail, fold_tail, has_tail, keep_tokens


@dataclasses.dataclass(frozen=True)
class ExpectedProgram:
    """A program: a jitted function with the shapes of its arguments."""

    name: str
    function: Wrapped
    args: tuple[Any, ...]
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)

    def lower(self) -> Lowered:
        return self.function.lower(*self.args, **self.keywords)


@dataclasses.dataclass(frozen=True)
class ProgramLengths:
    """Lengths of prompts in tokens, if every reply has the maximum length."""

    prompts: tuple[int, ...]  # longest prompt of each turn
    news: tuple[int, ...]  # numbers of tokens that a prompt can add to its cached row, > 0


def expected_lengths(chat: Chat, plays: Sequence[Play], budgets: Budgets) -> ProgramLengths:
    """Return the `ProgramLengths` if every observation is as long as the longest in `plays`.

    Args:
      plays: plays of a few problems, with their first turns begun.
    """
    longest = budgets.max_new_tokens
    play = max(plays, key=lambda play: len(play.prompt))
    firsts = [play.prompt[:-1] for play in plays]
    news = [len(b) - common(a, b) for a, b in itertools.permutations(firsts, 2)]
    turns: list[Turn] = []
    prompts = []
    for number in range(budgets.max_turns):
        used = min(number, budgets.max_actions - 1)
        prompt = None
        # The last reply may have a stop token or be truncated, and it may be valid or not.
        for end, valid in itertools.product((chat.close_id, -1), (True, False)):
            if turns:
                reply = turns[-1].sampled.copy()
                reply[-1] = end
                turns[-1] = dataclasses.replace(turns[-1], sampled=reply)
            message = chat.observe(play.observation, actions_used=used, last_valid=valid)
            try:
                prompt = chat.prompt_ids(turns, message, play.spans)
            except PromptError:  # near the limit, the notice or a longer number is too long
                continue
            cached = np.append(turns[-1].prompt, turns[-1].sampled[:-1]) if turns else NOTHING
            news.append(len(prompt) - 1 - common(cached, prompt[:-1]))
        if prompt is None:
            break
        prompts.append(len(prompt))
        turns.append(
            Turn(
                prompt=prompt,
                message=message,
                sampled=np.full(longest, -1, np.int32),
                logp=np.zeros(longest, np.float32),
                reasoning=(0, 0),
                answer=(0, 0),
                actions=(),
                valid=True,
                reward=0.0,
                info={},
                spans=play.spans,
            )
        )
    return ProgramLengths(tuple(prompts), tuple(sorted({n for n in news if n})))


def expected_programs(
    model: Qwen,
    params: Params,
    sizes: Sizes,
    lengths: ProgramLengths,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    stops: Stops | None = None,
) -> list[ExpectedProgram]:
    """List the programs that `play_in_slots` can need on the mesh in use.

    The list is complete if no prompt or reply is longer than expected.

    Args:
      params: parameters or their shapes.
      sizes: `cache_sizes` of the rollout. The others: as in `play_in_slots`.
    """
    count, _ = row_shards()
    R, prompts = count * sizes.at_a_time, lengths.prompts
    pages = pages_of(sizes, max(prompts) + max_new_tokens - 1)
    ends = list(itertools.accumulate(pages))

    tailed = has_tail(model.config)

    def reading(rows, cached, piece):
        name = f"read {R} x {piece} after {len(cached)} pages of {rows} rows"
        tails = {"count_R": _ints(R)} if tailed else {}
        if tailed and cached:
            tails["tail"] = _tail(model, params, rows)
        args = model, params, cached, _ints(R), _ints(R), _ints(R, piece)
        return ExpectedProgram(name, read, args, tails)

    # First prompts are read in the largest piece that they need; later reads have any new length.
    alone = {sizes.piece(prompts[0]), sizes.piece(prompts[0] - 1)}
    pieces = sorted(alone | {sizes.piece(n) for n in lengths.news})
    found = [reading(0, [], piece) for piece in sorted(alone)]
    cut = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
    settings = {"settings": sampling.decode_settings(stop_ids, sizes.chunk, stops)}
    number, heat = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    for rows in sizes.rows[::-1]:
        B = count * rows
        of = {size: _page(model, params, B, size) for size in dict.fromkeys(pages)}
        keys = _rows((B,), jax.random.key(0).dtype)
        for used, before in enumerate([0, *ends[:-1]], 1):
            cached = [of[size] for size in pages[:used]]
            stop_B = None if stops is None else _ints(B)
            batch = DecodeBatch(*[_ints(B)] * 4, keys_B=keys, stop_B=stop_B)
            args = model, params, cached, batch, heat
            name = f"decode_chunk of {B} rows after {used} pages, {cut}"
            tails = {"tail": _tail(model, params, B)} if tailed else {}
            found.append(ExpectedProgram(name, decode_chunk, args, settings | tails))
            if before < max(prompts):
                found += [reading(B, cached, piece) for piece in pieces]
        if tailed:
            tail = _tail(model, params, B)
            found.append(ExpectedProgram(f"{B} tails", empty_tail, (model, params), {"rows": B}))
            for n, length in [*((R, piece) for piece in pieces), (B, sizes.chunk)]:
                new = _new_tail(model, params, n, length)
                args = model.config, tail, new, _ints(n), _ints(n), _ints(B)
                name = f"fold the ends of {n} x {length} into {B} tails"
                found.append(ExpectedProgram(name, fold_tail, args))
            for less in (count * less for less in sizes.rows if less < rows):
                found.append(
                    ExpectedProgram(f"keep {less} of {B} tails", keep_rows, (tail, _ints(less)))
                )
        for size, page in of.items():
            room = {"rows": B, "positions": size}
            found.append(
                ExpectedProgram(f"room for {B} x {size}", empty_page, (model, params), room)
            )
            for n, length in [*((R, piece) for piece in pieces), (B, sizes.chunk)]:
                new = _page(model, params, n, length)
                args = page, new, number, _ints(n), _ints(n), _ints(B)
                found.append(ExpectedProgram(f"fold {n} x {length} into {B} x {size}", fold, args))
            for less in (count * less for less in sizes.rows if less < rows):
                name = f"keep {less} of {B} rows of {size}"
                found.append(ExpectedProgram(name, keep_rows, (page, _ints(less))))
    return found


def pages_of(sizes: Sizes, positions: int) -> list[int]:
    """Return the number of positions of each page in a cache with room for `positions`."""
    lengths: list[int] = []
    for size in sizes.pages():
        lengths.append(size)
        if sum(lengths) >= positions:
            break
    return lengths


def _page(model: Qwen, params: Params, rows: int, positions: int) -> Any:
    page = functools.partial(empty_page, model, rows=rows, positions=positions)
    return _by_row(jax.eval_shape(page, params))


def _tail(model: Qwen, params: Params, rows: int) -> Any:
    return _by_row(jax.eval_shape(functools.partial(empty_tail, model, rows=rows), params))


def _new_tail(model: Qwen, params: Params, rows: int, tokens: int) -> Any:
    """Return the shapes of the tail of new tokens."""
    keep = functools.partial(keep_tokens, model, rows=rows, positions=tokens)
    return _by_row(jax.eval_shape(keep, params)[1])


def _by_row(shapes: Any) -> Any:
    """Return the shapes of a cache, laid out on the mesh in use."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return shapes

    def laid_out(x):
        axes = (*(None,) * (x.ndim - 4), "rows", "kv_heads", None, None)
        sharding = NamedSharding(mesh, spec(axes, x.shape, mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(laid_out, shapes)


def _ints(*shape: int) -> Any:
    return _rows(shape, jnp.int32)


def _rows(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Return the shape of an array of rows, with the sharding that place_rows uses."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, row_spec(mesh)))
