"""The padded sizes of the micro-batches that updates and passes read, before a run has any rows.

Axes: A micro-batches, R rows of a micro-batch, P shards of rows; the others as in
update/micro_batches.py.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.algorithm.losses import Weights
from ragen_jax.config.per_task import minibatch_rows, per_task_configs, row_tokens, step_rows
from ragen_jax.configs.base import Config
from ragen_jax.core import sharding
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.model.likelihood import PackedRows
from ragen_jax.model.tree_attention import Tree
from ragen_jax.programs.shapes import RowLengths, RunShapes
from ragen_jax.update.micro_batches import split_rows
from ragen_jax.update.pieces import (
    Grouping,
    Piece,
    Sizes,
    TokenRows,
    padded_reads,
    padded_row,
)


@dataclasses.dataclass(frozen=True)
class MicroBatchShapes:
    """The sizes of the micro-batches of a minibatch, or of a pass over all rows."""

    grouping: Grouping
    sizes: Sizes
    block: int  # positions per block of a tree's attention; 0: plain rows
    count: float  # micro-batches that hold rows; shorter ones count less

    @property
    def positions(self) -> int:
        """Positions of a micro-batch on a shard."""
        return self.sizes.length * (1 if self.block else self.grouping.shard_rows)

    @property
    def keys(self) -> float:
        """Positions that those of a micro-batch on a shard attend to."""
        sizes, plain = self.sizes, self.grouping.attention == "xla"
        if self.block and plain:
            return sizes.length * sizes.keys * self.block
        length = sizes.width if self.block else sizes.length
        rows = self.grouping.tree_rows if self.block else self.grouping.shard_rows
        # The plain form also computes the masked half.
        return rows * (length * length if plain else length * (length + 1) / 2)


def grouping_of(run: RunShapes, rows: int) -> Grouping:
    """Return how `rows` rows are divided over the run's micro-batches and devices."""
    shards = sharding.data_shards(run.mesh)
    return Grouping(run.config.optimizer.micro_batch, shards, rows, run.model.config.row_form)


def plain_shapes(run: RunShapes, length: int, rows: int) -> MicroBatchShapes:
    """Return the shapes of up to `rows` plain rows of `length` tokens."""
    grouping, positions = grouping_of(run, rows), padded_row(length - 1)
    most = grouping.shard_rows * min(row_tokens(run.config), length - 1)
    sizes = Sizes(positions, padded_reads(most, grouping.shard_rows * positions))
    return MicroBatchShapes(grouping, sizes, 0, grouping.micro_batches)


def expected_shapes(run: RunShapes) -> tuple[MicroBatchShapes, MicroBatchShapes]:
    """Return the largest shapes of (an update, a pass over all rows) if all rows are the longest.

    The first rows of a group's episodes share its first prompt.
    """
    parts = per_task_configs(run.config)
    rows = _join([_expected_rows(c, run.at[name]) for name, c in parts.items()])
    update = _deal(run, rows)
    return (
        _largest(update, rows, grouping_of(run, minibatch_rows(run.config))),
        _largest([np.concatenate(update)], rows, grouping_of(run, step_rows(run.config))),
    )


def expects_trees(run: RunShapes, tasks: Sequence[tuple[Config, int, int]]) -> bool:
    """Return whether updates pack rows as trees, if prompts have the length of a first prompt.

    Args:
      tasks: (config, tokens of a first prompt, tokens that all prompts begin with) of each
        environment.
    """
    rows = _join([_rows(c, first, common=common) for c, first, common in tasks])
    split = split_rows(_deal(run, rows), rows, grouping_of(run, minibatch_rows(run.config)))
    return any(piece.trees is not None for pieces in split.pieces for piece in pieces)


def _deal(run: RunShapes, rows: TokenRows) -> list[np.ndarray]:
    """Return the indices of the rows of each minibatch, in the order of the first step."""
    rng = generator(Purpose.POLICY_ORDER, run.config.seed, 1)
    order = rng.permutation(len(rows.tokens_BT))
    dealt = np.array_split(order, run.config.optimizer.minibatches)
    return [some for some in dealt if len(some)]


def group_shapes(run: RunShapes, config: Config, at: RowLengths) -> MicroBatchShapes:
    """Return the shapes of the rows of one group of an environment's config."""
    rows = step_rows(config) // config.rollout.groups
    expected = _expected_rows(config, at)
    chosen = np.arange(len(expected.tokens_BT))[:: config.rollout.groups][:rows]
    return _largest([chosen], expected, grouping_of(run, rows))


def _expected_rows(config: Config, at: RowLengths) -> TokenRows:
    """Return `_rows` of whole episodes."""
    first, sampled = min(at.first, at.row - 1), at.shown * config.rollout.max_new_tokens
    return _rows(config, first, row=at.row, sampled=min(sampled, at.row - first))


def _rows(
    config: Config, first: int, *, row: int = 0, sampled: int = 0, common: int = 0
) -> TokenRows:
    """Return rows of distinct tokens; row i is of group i % groups.

    Args:
      first: tokens of the first prompt, which the first rows of a group's episodes share.
      row: tokens of a row; 0: a prompt and the longest reply.
      sampled: tokens at the end of a row that are sampled; 0: the longest reply.
      common: tokens that all rows begin with.
    """
    groups, members = config.rollout.groups, config.rollout.group_size
    sampled = sampled or config.rollout.max_new_tokens
    B, T = step_rows(config), row or first + sampled
    tokens_BT = groups * first + np.arange(B * T, dtype=np.int32).reshape(B, T)
    prompts = np.arange(groups * first, dtype=np.int32).reshape(groups, first)
    starts = groups * members  # rows with the first turn of an episode
    tokens_BT[:starts, :first] = np.tile(prompts, (members, 1))
    tokens_BT[:, :common] = prompts[0, :common]
    read_BT = np.zeros(tokens_BT.shape, bool)
    read_BT[:, T - sampled :] = True
    return TokenRows(tokens_BT, read_BT)


def _join(parts: list[TokenRows]) -> TokenRows:
    """Return the rows of several environments as one batch, in which they share nothing."""
    T, tokens, read, after = max(part.tokens_BT.shape[1] for part in parts), [], [], 0
    for part in parts:
        padding = ((0, 0), (0, T - part.tokens_BT.shape[1]))
        tokens.append(np.pad(part.tokens_BT + np.int32(after), padding))
        read.append(np.pad(part.read_BT, padding))
        after += int(part.tokens_BT.max()) + 1
    return TokenRows(np.concatenate(tokens), np.concatenate(read))


def _largest(
    minibatches: list[np.ndarray], rows: TokenRows, grouping: Grouping
) -> MicroBatchShapes:
    cuts = split_rows(minibatches, rows, grouping).pieces

    def positions(piece: Piece) -> int:
        return piece.positions(grouping) // piece.micro_batches(grouping)

    largest = max((piece for cut in cuts for piece in cut), key=positions)
    most = max(sum(piece.positions(grouping) for piece in cut) for cut in cuts)
    block = rows.block if largest.trees else 0
    return MicroBatchShapes(grouping, largest.sizes, block, most / positions(largest))


def micro_batch_structs(
    run: RunShapes, shapes: MicroBatchShapes, *leading: int, replay: bool, **types: str
) -> dict[str, Any]:
    """Return `Struct`s of micro-batches: `packed`, `entry` and rows' arrays of the given dtypes.

    With the mask among them, they include "weights" of the tokens.

    Args:
      leading: sizes of the axes in front; default: the maximum number of micro-batches.
      replay: whether the rows hold the experts that sampling used, if the run keeps them.
    """
    sizes, grouping = shapes.sizes, shapes.grouping
    leading = leading or (grouping.micro_batches,)
    P, L, E = grouping.shards, sizes.length, sizes.reads
    R = P * grouping.tree_rows if shapes.block else grouping.micro_batch
    layout = sharding.micro_batch_layout(run.mesh, axis=len(leading))

    def struct(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct((*leading, *shape), jnp.dtype(dtype), sharding=layout)

    tree = None
    if shapes.block:
        if grouping.attention == "xla":
            keys = struct(P, L // shapes.block - sizes.trunk, sizes.keys)
            tree = Tree(struct(P, L), keys, block=shapes.block, trunk=sizes.trunk)
        else:
            path = struct(P, grouping.tree_rows, sizes.width)
            tree = Tree(struct(P, L), path_BRU=path, owner_BT=struct(P, L))
    tokens = struct(P, L) if shapes.block else struct(R, L)
    width = (sizes.width if shapes.block else L) + 1
    arrays = {name: struct(R, width, dtype=dtype) for name, dtype in types.items()}
    if "mask" in arrays:
        arrays["weights"] = Weights(arrays["mask"], arrays["mask"])
    experts, of = None, run.sampler.config
    if replay and of.keep_experts and of.experts is not None:
        experts = struct(*tokens.shape[-2:], of.layers * of.experts.chosen, dtype="int16")
    packed = PackedRows(tokens, struct(P, E), struct(P, E), tree, experts)
    return {"packed": packed, "entry": struct(R, width), **arrays}
