"""Log-probs of ragged rows of token ids, with positions that rows share computed once."""

from collections.abc import Sequence

import jax
import numpy as np

from ragen_jax.core.sharding import row_shards, shard_micro_batches
from ragen_jax.core.types import Params
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.vision.positions import of_params
from ragen_jax.update.micro_batches import build_arrays
from ragen_jax.update.pieces import PLAIN, Grouping, Piece, Sizes, TokenRows, padded_reads
from ragen_jax.update.reading import read_micro_batches, statistics
from ragen_jax.update.trees import fill_bins, pack_trees

POSITIONS = 4096  # of a call on each device, or those of the longest row


def row_logps(
    model: Qwen,
    params: Params,
    rows: Sequence[Sequence[int] | np.ndarray],
    *,
    temperature: float = 1.0,
) -> list[np.ndarray]:
    """Return the log-probabilities of the tokens of each row given those before them.

    The result is that of `token_logps` on padded rows. Rows may have any lengths and any number:
    they are packed into sequences of few lengths, so that new shapes rarely need a new program.

    Args:
      model, params: as `load_model` returns them.
      rows: token ids, at least one in each row.
      temperature: divisor of the logits.

    Returns:
      float32 [T] for each row of T tokens; entry 0 is 0.

    Raises:
      ValueError: a row without tokens, with an id that is not in the vocabulary, or longer than the
        model's positions.
    """
    found = [_checked(model, params, index, row) for index, row in enumerate(rows)]
    logps = [np.zeros(len(row), np.float32) for row in found]
    longest = max(map(len, found), default=0)
    if longest < 2:
        return logps
    tokens_BT = np.zeros((len(found), longest), np.int32)
    for tokens_T, row in zip(tokens_BT, found, strict=True):
        tokens_T[: len(row)] = row
    inside_BT = np.arange(longest) < np.array([len(row) for row in found])[:, None]
    inside_BT[:, 0] = False
    whole = TokenRows(tokens_BT, inside_BT, parts=1)
    shards, _ = row_shards()
    micro_batch = shards * max(1, POSITIONS // whole.width)
    grouping = Grouping(micro_batch, shards, micro_batch, model.config.row_form)
    logp_BT = np.zeros(tokens_BT.shape, np.float32)
    mesh = jax.sharding.get_mesh()
    for piece in _pieces(whole, grouping):
        arrays = build_arrays(piece, whole, grouping)
        packed = arrays.packed if mesh.empty else shard_micro_batches(arrays.packed, mesh)
        logp_APE, _ = read_micro_batches(
            statistics, model, params, packed, arrays.count, np.float32(temperature)
        )
        arrays.to_rows(jax.device_get(logp_APE), logp_BT)
    for logp_T, row in zip(logp_BT, logps, strict=True):
        row[:] = logp_T[: len(row)]
    return logps


def _pieces(rows: TokenRows, grouping: Grouping) -> list[Piece]:
    """Return pieces of all rows, with few lengths."""
    everything = np.arange(len(rows.count_B))
    if grouping.attention == PLAIN:
        order, pieces = np.argsort(-rows.count_B, kind="stable"), []
        for i in everything[:: grouping.micro_batch]:
            part = order[i : i + grouping.micro_batch]
            half = (rows.width + 1) // 2
            length = half if rows.count_B[part].max() <= half else rows.width
            reads = grouping.shard_rows * length
            pieces.append(Piece(part, Sizes(length, padded_reads(reads, reads))))
        return pieces
    bins = fill_bins([everything], rows, grouping, parts=(1.0, 0.5))
    return pack_trees(bins, rows, grouping, int(rows.count_B.sum())).pieces[0]


def _checked(
    model: Qwen, params: Params, index: int, row: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Return a row as an array; raise ValueError as in `row_logps`."""
    tokens = np.asarray(row)
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"row {index} must be a sequence of at least one token id, got shape {tokens.shape} of "
            f"{tokens.dtype}"
        )
    most, vocabulary = model.config.max_positions, model.config.vocab_size
    if len(tokens) > most:
        raise ValueError(
            f"row {index} has {len(tokens)} tokens, but the model has {most} positions"
        )
    highest = np.iinfo(np.int32).max if of_params(params) is not None else vocabulary - 1
    wrong = tokens[(tokens < 0) | (tokens > highest)]
    if len(wrong):
        raise ValueError(
            f"row {index} has the token id {int(wrong[0])}; the vocabulary has {vocabulary} tokens"
        )
    return tokens
