"""model/vision/positions.py: positions by hand, and against torch if installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.model import rotary
from ragen_jax.model.vision.positions import (
    NO_TOKEN,
    next_positions,
    splice,
    table,
    token_positions,
)

pytestmark = pytest.mark.fast

START, END, PAD = 50, 51, 52
V = 64  # size of the vocabulary
ROOM = 64


def show(grid):
    return [START, *[PAD] * (grid[1] * grid[2] // 4), END]


def numbered(tokens, grids):
    """Return (int32 row with image ids past the vocabulary, `Images`). As in an image table, an
    image that is shown twice has the same ids."""
    row, sides, first = np.array(tokens, np.int32), {}, V
    for _, h, w in grids:
        if (h, w) not in sides:
            sides[h, w] = first, h // 2, w // 2
            first += h * w // 4
    numbers = [sides[h, w][0] + np.arange(h * w // 4) for _, h, w in grids]
    if numbers:
        row[row == PAD] = np.concatenate(numbers)
    return row, table(list(sides.values()), np.zeros((first - V, 2), np.float32), ROOM)


def positions_of(row, images, start=0):
    """Return positions [3, T]."""
    return np.asarray(token_positions({"images": images}, row[None], np.array([start])))[:, 0]


def next_values(row, images, start=0):
    found = next_positions({"images": images}, row[None], np.array([len(row)]), np.array([start]))
    return int(found[0])


# ---------------------------------------------------------------- position ids by hand


@pytest.mark.medium
def test_text_counts_on():
    row, images = numbered(range(5), [])
    np.testing.assert_array_equal(positions_of(row, images), [[0, 1, 2, 3, 4]] * 3)
    np.testing.assert_array_equal(positions_of(row, images, 7), [[7, 8, 9, 10, 11]] * 3)
    assert positions_of(row, images).dtype == np.int32


def test_without_a_table_there_is_one_position():
    tokens_BT, start_B = np.ones((2, 3), np.int32), np.array([0, 7])
    np.testing.assert_array_equal(token_positions({}, tokens_BT), [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(token_positions({}, tokens_BT, start_B), [[0, 1, 2], [7, 8, 9]])
    count_B = np.array([3, 1])
    np.testing.assert_array_equal(next_positions({}, tokens_BT, count_B, start_B), [3, 8])


@pytest.mark.medium
def test_an_image_by_hand():
    """An image of 2 x 3 tokens follows two other tokens; the text continues at 2 + 3."""
    row, images = numbered([9, *show((1, 4, 6)), 8, 7], [(1, 4, 6)])
    np.testing.assert_array_equal(
        positions_of(row, images),
        [
            [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
        ],
    )
    assert next_values(row, images) == 8 and next_values(row, images, 5) == 13


@pytest.mark.medium
def test_two_images_by_hand():
    """An upright image of three rows and a square image, one after the other."""
    grids = [(1, 6, 2), (1, 4, 4)]
    row, images = numbered([*show(grids[0]), *show(grids[1])], grids)
    np.testing.assert_array_equal(
        positions_of(row, images),
        [
            [0, 1, 1, 1, 4, 5, 6, 6, 6, 6, 8],
            [0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 8],
            [0, 1, 1, 1, 4, 5, 6, 7, 6, 7, 8],
        ],
    )


@pytest.mark.medium
def test_an_image_shown_again_stands_at_another_place():
    row, images = numbered([*show((1, 4, 4)), 3, *show((1, 4, 4))], [(1, 4, 4)] * 2)
    np.testing.assert_array_equal(row[1:5], row[8:12])
    np.testing.assert_array_equal(
        positions_of(row, images)[1], [0, 1, 1, 2, 2, 3, 4, 5, 6, 6, 7, 7, 8]
    )
    assert next_values(row, images) == 9


@pytest.mark.medium
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_a_row_in_pieces_is_the_row(size):
    """Each piece starts after the previous piece, wherever the row is cut, even within an image."""
    grids = [(1, 4, 8), (1, 2, 2), (1, 8, 4)]
    row, images = numbered(
        [1, 2, *show(grids[0]), 3, 4, *show(grids[1]), 7, *show(grids[2]), 5], grids
    )
    start, found = 0, []
    for first in range(0, len(row), size):
        piece = row[first : first + size]
        found.append(positions_of(piece, images, start))
        start = next_values(piece, images, start)
    np.testing.assert_array_equal(np.concatenate(found, 1), positions_of(row, images))
    assert start == next_values(row, images)


@pytest.mark.medium
def test_what_a_policy_says_is_text():
    """Image tokens sampled by a policy are below the vocabulary's size and count as text."""
    said = [*show((1, 4, 4)), START, PAD, PAD, END]
    row, images = numbered(said[:6], [(1, 4, 4)])
    row = np.concatenate([row, np.array(said[6:], np.int32)])
    plain = np.where(row == PAD, 9, row)
    np.testing.assert_array_equal(positions_of(row, images), positions_of(plain, images))


# ---------------------------------------------------------------- against torch, if installed


@pytest.mark.medium
def test_positions_match_torch():
    """Rows with text only, one image, two images, and an image in a second turn; padded on the
    right."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=64,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            bos_token_id=0,
            eos_token_id=1,
        ),
        vision_config=dict(
            depth=1, hidden_size=8, intermediate_size=8, num_heads=2, out_hidden_size=8
        ),
        image_token_id=PAD,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    rng = np.random.default_rng(0)

    def text(count):
        return rng.integers(0, START, count).tolist()

    a, b, c = (1, 4, 6), (1, 10, 4), (1, 2, 2)
    rows = [
        (text(12), []),
        ([*text(3), *show(a), *text(4)], [a]),
        ([*show(b), *text(2), *show(c), *text(1)], [b, c]),
        ([*text(5), *show(c), *text(9), *show(a), *show(b)], [c, a, b]),
    ]
    T = max(len(tokens) for tokens, _ in rows) + 3
    tokens_BT, mask_BT = np.zeros((2, len(rows), T), np.int64)
    got_3BT, next_B = np.zeros((3, len(rows), T), np.int64), []
    for b, (tokens, grids) in enumerate(rows):
        tokens_BT[b, : len(tokens)], mask_BT[b, : len(tokens)] = tokens, 1
        row, images = numbered(tokens, grids)
        got_3BT[:, b, : len(tokens)] = positions_of(row, images)
        next_B.append(next_values(row, images))
    want_3BT, delta_B1 = Qwen2_5_VLModel(config).get_rope_index(
        torch.tensor(tokens_BT),
        mm_token_type_ids=torch.tensor(tokens_BT == PAD).int(),
        image_grid_thw=torch.tensor([grid for _, grids in rows for grid in grids]),
        attention_mask=torch.tensor(mask_BT),
    )
    np.testing.assert_array_equal(got_3BT, want_3BT.numpy())
    # The next position agrees as well.
    np.testing.assert_array_equal(next_B, mask_BT.sum(1) + delta_B1[:, 0].numpy())


# ---------------------------------------------------------------- angles


@pytest.mark.medium
def test_each_section_turns_with_its_own_position():
    """Frequencies 100^(-i/4): the first uses time, the next two use the row, the last uses the
    column."""
    positions = jnp.array([2, 3, 5])[:, None, None]
    cos, sin = rotary.rotary_angles(positions, 8, 100.0, section=(1, 2, 1))
    want = np.array([2, 3, 3, 5]) * np.array([1, 100**-0.25, 100**-0.5, 100**-0.75])
    assert cos.shape == (1, 1, 1, 4)
    np.testing.assert_allclose(cos[0, 0, 0], np.cos(want), rtol=1e-5)
    np.testing.assert_allclose(sin[0, 0, 0], np.sin(want), rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    "scaling", [None, rotary.RopeScaling("llama3", 8.0, original_max_positions=64)]
)
def test_three_equal_positions_are_one(scaling):
    positions_BT = np.random.default_rng(0).integers(0, 30_000, (3, 50))
    plain = rotary.rotary_angles(jnp.asarray(positions_BT), 128, 1e6, scaling)
    same = jnp.broadcast_to(jnp.asarray(positions_BT), (3, 3, 50))
    np.testing.assert_array_equal(
        rotary.rotary_angles(same, 128, 1e6, scaling, (16, 24, 24)), plain
    )


# ---------------------------------------------------------------- embeddings


@pytest.mark.medium
def test_splice_by_hand():
    """Two images, of one and of two tokens; the table has room for more."""
    x_BTD = np.arange(2 * 5 * 2, dtype=np.float32).reshape(2, 5, 2)
    embed_ID = 100 + np.arange(3 * 2, dtype=np.float32).reshape(3, 2)
    images = table([(V + 4, 1, 1), (V + 9, 1, 2)], embed_ID, 8)
    np.testing.assert_array_equal(images.token_I, [V + 4, V + 9, V + 10, *[NO_TOKEN] * 5])
    np.testing.assert_array_equal(images.step_I, [1, 0, 2, *[0] * 5])
    tokens_BT = np.array([[1, V + 9, V + 10, 2, V + 4], [V + 4, 3, 4, 5, 63]], np.int32)
    got = jax.jit(splice, static_argnums=3)(x_BTD, tokens_BT, images, V)
    want = x_BTD.copy()
    want[0, [1, 2, 4]], want[1, 0] = embed_ID[[1, 2, 0]], embed_ID[0]
    np.testing.assert_array_equal(got, want)
    assert splice(jnp.asarray(x_BTD, jnp.bfloat16), tokens_BT, images, V).dtype == "bfloat16"


@pytest.mark.medium
def test_numbers_that_stand_for_nothing_are_seen():
    """Ids below, between and above those of the table give NaN, not the nearest embedding."""
    images = table([(V + 4, 1, 1), (V + 9, 1, 2)], np.ones((3, 2), np.float32), 4)
    tokens_BT = np.array([[V + 3, V + 4, V + 5, V + 8, V + 11, 5]], np.int32)
    got = splice(jnp.ones((1, 6, 2)), tokens_BT, images, V)
    np.testing.assert_array_equal(np.isnan(got)[0, :, 0], [True, False, True, True, True, False])
