"""Every program that rollouts in slots can ask to be compiled, listed from the sizes alone."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax.rollout.chunks import decode_chunk, empty_page, fold, read
from ragen_jax.rollout.episode import next_prompt
from ragen_jax.rollout.pages import cache_sizes
from ragen_jax.rollout.slots import NOTHING, _common
from ragen_jax.sharding import ROWS, row_shards, spec
from ragen_jax.types import Turn


def expected_programs(
    model, params, chat, plays, *, episodes, slots, chunk, budgets, sampling, compact
):
    """What `play_in_slots` will compile, on the mesh in use: `f.lower(*args, **kwargs)` each.

    Where all observations are as long as those of `plays`, and replies as they may be.

    Args:
      params: or their shapes.
      plays: of a few problems, that have just been started.
      episodes: of a rollout. The others: as in `play_in_slots`.
    """
    longest = budgets.max_new_tokens
    play = max(plays, key=lambda play: len(play.observation))
    firsts = [next_prompt(play, chat)[1][:-1] for play in plays]
    news = [len(b) - _common(a, b) for a, b in itertools.permutations(firsts, 2)]
    turns = []
    lengths = []
    for number in range(budgets.max_turns):
        used = min(number, budgets.max_actions - 1)
        # The last reply may have ended by itself or not, and may have been valid or not.
        for end, valid in itertools.product((chat.close_id, -1), (True, False)):
            if turns:
                reply = turns[-1].sampled.copy()
                reply[-1] = end
                turns[-1] = dataclasses.replace(turns[-1], sampled=reply)
            message = chat.observe(play.observation, actions_used=used, last_valid=valid)
            prompt = chat.prompt_ids(turns, message)
            held = np.append(turns[-1].prompt, turns[-1].sampled[:-1]) if turns else NOTHING
            news.append(len(prompt) - 1 - _common(held, prompt[:-1]))
        lengths.append(len(prompt))
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
            )
        )
    sizes = cache_sizes(
        slots=slots,
        chunk=chunk,
        episodes=episodes,
        prompt=lengths[0],
        max_new_tokens=budgets.max_new_tokens,
        compact=compact,
    )
    return programs(
        model,
        params,
        sizes,
        positions=max(lengths) + longest - 1,
        news=[n for n in news if n],
        sampling=sampling,
        stop_ids=chat.stop_ids,
    )


def programs(model, params, sizes, *, positions, news, sampling, stop_ids):
    """What a rollout on the mesh in use can ask to be compiled: `f.lower(*args, **kwargs)` each.

    Args:
      params: or their shapes.
      positions: of the longest row, its reply included.
      news: how many new tokens rows have at a time: those of first prompts, of later turns.
    """
    count, _ = row_shards()
    lengths = []
    for size in sizes.pages():
        lengths.append(size)
        if sum(lengths) >= positions:
            break
    pieces = sorted({sizes.piece(min(n, sizes.pieces[-1])) for n in news})
    R = count * sizes.at_a_time
    found = [
        (read, (model, params, [], _ints(R), _ints(R), _ints(R, piece)), {}) for piece in pieces
    ]
    settings = {
        "chunk": sizes.chunk,
        "stop_ids": stop_ids,
        **{name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")},
    }
    for rows in sizes.rows:
        B = count * rows
        pages = [_page(model, params, B, size) for size in lengths]
        keys = _rows((B,), jax.random.key(0).dtype)
        heat = jax.ShapeDtypeStruct((), jnp.float32)
        columns = [_ints(B) for _ in range(4)]
        for used in range(1, len(pages) + 1):
            held = pages[:used]
            found.append((decode_chunk, (model, params, held, *columns, keys, heat), settings))
            for piece in pieces:
                found.append((read, (model, params, held, _ints(R), _ints(R), _ints(R, piece)), {}))
        first = jax.ShapeDtypeStruct((), jnp.int32)
        for size in dict.fromkeys(lengths):
            page = _page(model, params, B, size)
            for n, length in [*((R, piece) for piece in pieces), (B, sizes.chunk)]:
                new = _page(model, params, n, length)
                found.append((fold, (page, new, first, _ints(n), _ints(n), _ints(B)), {}))
    return found


def _page(model, params, rows, positions):
    shapes = jax.eval_shape(
        lambda params: empty_page(model, params, rows=rows, positions=positions), params
    )
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return shapes

    def laid_out(x):
        axes = (*(None,) * (x.ndim - 4), "rows", "kv_heads", None, None)
        sharding = NamedSharding(mesh, spec(axes, x.shape, mesh))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(laid_out, shapes)


def _ints(*shape):
    return _rows(shape, jnp.int32)


def _rows(shape, dtype):
    """Shape of an array of rows, placed as place_rows does."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(ROWS)))
