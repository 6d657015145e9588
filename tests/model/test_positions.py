"""model/positions.py: ids by hand, and beside torch where it is there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.model import qwen
from ragen_jax.model.positions import Images, image_index, row_positions, splice

pytestmark = pytest.mark.fast

START, END, PAD = 50, 51, 52
IDS = dict(merge=2, vision_start=START, image_pad=PAD)


def show(grid):
    return [START, *[PAD] * (grid[1] * grid[2] // 4), END]


# ---------------------------------------------------------------- position ids by hand


def test_text_counts_on():
    np.testing.assert_array_equal(row_positions(np.arange(5), [], **IDS), [[0, 1, 2, 3, 4]] * 3)
    at = row_positions(np.arange(3), [], **IDS, start=7)
    np.testing.assert_array_equal(at, [[7, 8, 9]] * 3)
    assert at.dtype == np.int32
    assert row_positions(np.zeros(0, int), [], **IDS).shape == (3, 0)


def test_an_image_by_hand():
    """Two rows of three tokens behind two others: they are 2 x 3 places, text goes on at 2 + 3."""
    tokens_T = np.array([9, *show((1, 4, 6)), 8, 7])
    np.testing.assert_array_equal(
        row_positions(tokens_T, [(1, 4, 6)], **IDS),
        [
            [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
        ],
    )


def test_two_images_by_hand():
    """One upright, of three rows, and a square one; one behind the other."""
    tokens_T = np.array([*show((1, 6, 2)), *show((1, 4, 4))])
    np.testing.assert_array_equal(
        row_positions(tokens_T, [(1, 6, 2), (1, 4, 4)], **IDS),
        [
            [0, 1, 1, 1, 4, 5, 6, 6, 6, 6, 8],
            [0, 1, 2, 3, 4, 5, 6, 6, 7, 7, 8],
            [0, 1, 1, 1, 4, 5, 6, 7, 6, 7, 8],
        ],
    )


def test_a_later_turn_goes_on():
    """A row in pieces, each begun behind the largest position of those before, is the row."""
    grids = [(1, 4, 8), (1, 2, 2), (1, 8, 4)]
    pieces = [[1, 2, *show(grids[0]), 3], [4, 5], show(grids[1]), [6], [7, *show(grids[2])]]
    whole = row_positions(np.concatenate(pieces), grids, **IDS)
    start, found, left = 0, [], list(grids)
    for piece in pieces:
        mine = [left.pop(0)] if PAD in piece else []
        found.append(row_positions(np.array(piece), mine, **IDS, start=start))
        start = max(start, found[-1].max() + 1)
    np.testing.assert_array_equal(np.concatenate(found, 1), whole)


def test_sampled_tokens_are_text():
    """A policy that says the words of an image shows nothing."""
    tokens_T = np.array([*show((1, 4, 4)), START, PAD, PAD, END, *show((1, 2, 2))])
    sampled_T = np.zeros(len(tokens_T))
    sampled_T[6:10] = 1
    grids = [(1, 4, 4), (1, 2, 2)]
    same = np.where(sampled_T, 9, tokens_T)
    np.testing.assert_array_equal(
        row_positions(tokens_T, grids, **IDS, sampled_T=sampled_T),
        row_positions(same, grids, **IDS),
    )
    index_BT = image_index(tokens_T[None], PAD, sampled_T[None])
    np.testing.assert_array_equal(index_BT[0], [-1, 0, 1, 2, 3, -1, -1, -1, -1, -1, -1, 4, -1])
    with pytest.raises(ValueError, match="3 runs of image token 52 .* 2 image grids"):
        row_positions(tokens_T, grids, **IDS)


@pytest.mark.parametrize(
    "tokens, grids, message",
    [
        ([1, *show((1, 4, 4))], [], "1 runs of image token 52 in a row of 7 tokens, but 0 image"),
        ([1, 2], [(1, 4, 4)], "0 runs .* but 1 image grids"),
        (show((1, 4, 4)), [(1, 4, 6)], r"\(1, 4, 6\) takes .* tokens 1 to 5 .* are 4 of id 52"),
        (show((1, 4, 4)), [(2, 4, 2)], r"\(2, 4, 2\) takes 1 x 4 x 2"),
        (show((1, 4, 4)), [(1, 5, 4)], r"\(1, 5, 4\) takes"),
        ([7, PAD, END], [(1, 2, 2)], r"token 1 .* behind 7, expected <\|vision_start\|>, 50"),
        ([PAD, END], [(1, 2, 2)], "token 0 .* behind nothing"),
    ],
)
def test_images_that_do_not_fit_are_named(tokens, grids, message):
    with pytest.raises(ValueError, match=message) as raised:
        row_positions(np.array(tokens), grids, **IDS)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------- beside torch


def test_positions_match_torch():
    """Text alone, one image, two, one in a second turn; padded on the right."""
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
    got_3BT = np.zeros((3, len(rows), T), np.int64)
    for b, (tokens, grids) in enumerate(rows):
        tokens_BT[b, : len(tokens)], mask_BT[b, : len(tokens)] = tokens, 1
        got_3BT[:, b, : len(tokens)] = row_positions(np.array(tokens), grids, **IDS)
    want_3BT, delta_B1 = Qwen2_5_VLModel(config).get_rope_index(
        torch.tensor(tokens_BT),
        mm_token_type_ids=torch.tensor(tokens_BT == PAD).int(),
        image_grid_thw=torch.tensor([grid for _, grids in rows for grid in grids]),
        attention_mask=torch.tensor(mask_BT),
    )
    np.testing.assert_array_equal(got_3BT, want_3BT.numpy())
    # What comes next, too.
    np.testing.assert_array_equal(got_3BT.max((0, 2)) + 1, mask_BT.sum(1) + delta_B1[:, 0].numpy())


# ---------------------------------------------------------------- angles


def test_each_section_turns_with_its_own_position():
    """Frequencies 100^(-i/4): the first with time, two with the row, the last with the column."""
    positions = jnp.array([2, 3, 5])[:, None, None]
    cos, sin = qwen.rotary_angles(positions, 8, 100.0, section=(1, 2, 1))
    want = np.array([2, 3, 3, 5]) * np.array([1, 100**-0.25, 100**-0.5, 100**-0.75])
    assert cos.shape == (1, 1, 1, 4)
    np.testing.assert_allclose(cos[0, 0, 0], np.cos(want), rtol=1e-5)
    np.testing.assert_allclose(sin[0, 0, 0], np.sin(want), rtol=1e-5)


@pytest.mark.parametrize(
    "scaling", [None, qwen.RopeScaling("llama3", 8.0, original_max_positions=64)]
)
def test_three_equal_positions_are_one(scaling):
    positions_BT = np.random.default_rng(0).integers(0, 30_000, (3, 50))
    plain = qwen.rotary_angles(jnp.asarray(positions_BT), 128, 1e6, scaling)
    same = jnp.broadcast_to(jnp.asarray(positions_BT), (3, 3, 50))
    np.testing.assert_array_equal(qwen.rotary_angles(same, 128, 1e6, scaling, (16, 24, 24)), plain)


# ---------------------------------------------------------------- embeddings


def test_splice_by_hand():
    x_BTD = np.arange(2 * 5 * 2, dtype=np.float32).reshape(2, 5, 2)
    embed_BID = 100 + np.arange(2 * 3 * 2, dtype=np.float32).reshape(2, 3, 2)
    tokens_BT = np.array([[1, PAD, PAD, 2, PAD], [PAD, 3, 4, 5, 6]])
    index_BT = jax.jit(image_index, static_argnums=1)(tokens_BT, PAD)
    np.testing.assert_array_equal(index_BT, [[-1, 0, 1, -1, 2], [0, -1, -1, -1, -1]])
    got = jax.jit(splice)(x_BTD, Images(embed_BID, index_BT))
    want = x_BTD.copy()
    want[0, [1, 2, 4]], want[1, 0] = embed_BID[0], embed_BID[1, 0]
    np.testing.assert_array_equal(got, want)
    assert splice(jnp.asarray(x_BTD, jnp.bfloat16), Images(embed_BID, index_BT)).dtype == "bfloat16"


def test_more_image_tokens_than_embeddings_are_seen():
    """Not clipped to the last one: NaN goes through every layer behind it."""
    got = splice(jnp.ones((1, 3, 2)), Images(jnp.ones((1, 1, 2)), jnp.array([[-1, 0, 1]])))
    np.testing.assert_array_equal(np.isnan(got)[0, :, 0], [False, False, True])
