"""The language model with images: against torch, cached forms against the full one, gradients.

reference/qwen2_5_vl comes from reference/make_qwen2_5_vl.py (torch, float32).
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import on_devices
from seeing import arrange, embed, forward, load, picked, shown, torch_logps

from ragen_jax.model import images, positions, qwen
from ragen_jax.model.attention import Segment, append

pytestmark = pytest.mark.fast

REFERENCE = Path(__file__).parent / "reference" / "qwen2_5_vl"
CLOSE = dict(rtol=0, atol=2e-5)  # of log-probs of order 1 to 10
WIDTH = 64


@pytest.fixture(scope="module")
def model():
    return load(REFERENCE)


@pytest.fixture(scope="module")
def stored():
    return dict(np.load(REFERENCE / "rows.npz"))


def rows_of(stored):
    """(tokens, pictures) of each row."""
    return [
        (tokens[:length].tolist(), [stored[f"picture_{k}"] for k in ks if k >= 0])
        for tokens, length, ks in zip(
            stored["tokens_BT"], stored["length_B"], stored["pictures_BK"], strict=True
        )
    ]


def run(s, rows):
    """Log-probs [B, T, V] of `Rows` in one forward pass."""
    logp_BTV, _ = forward(s.model, s.params, rows.tokens_BT, rows.positions_3BT, seen=rows.images)
    return np.asarray(logp_BTV)


# ---------------------------------------------------------------- against torch


def test_everything_matches_torch(model, stored):
    """Pixels, grids, positions and log-probs, of one picture, two, none, and three of two turns."""
    rows = arrange(model, rows_of(stored), stored["tokens_BT"].shape[1])
    for k in range(3):
        pixels, grid = images.preprocess(stored[f"picture_{k}"], model.image_config)
        assert grid == tuple(stored[f"grid_{k}"])
        np.testing.assert_allclose(pixels, stored[f"pixels_{k}"], rtol=0, atol=1e-5)
    real_BT = np.arange(rows.tokens_BT.shape[1]) < stored["length_B"][:, None]
    np.testing.assert_array_equal(rows.positions_3BT * real_BT, stored["positions_3BT"] * real_BT)
    got_BT = picked(run(model, rows), rows.tokens_BT) * real_BT
    np.testing.assert_allclose(got_BT, stored["logp_BT"], **CLOSE)


def test_what_is_shown_and_where_matters(model, stored):
    """The comparison above would notice pictures left out, exchanged, or plain positions."""
    T = stored["tokens_BT"].shape[1]
    rows = arrange(model, rows_of(stored), T)
    want_BT = picked(run(model, rows), rows.tokens_BT)
    embed_BID = rows.images.embed_BID
    for spoilt in (
        rows._replace(images=rows.images.replace(embed_BID=0 * embed_BID)),
        rows._replace(images=rows.images.replace(embed_BID=embed_BID[:, ::-1])),
        rows._replace(positions_3BT=np.broadcast_to(np.arange(T), rows.positions_3BT.shape)),
    ):
        off_B = np.abs(picked(run(model, spoilt), rows.tokens_BT) - want_BT).max(1)
        assert off_B[[0, 1, 3]].min() > 0.01


@pytest.mark.parametrize("seed", range(3))
def test_random_models_match_torch(tmp_path, seed):
    """Heads, widths, sections, windows and tied heads drawn at random; pictures of three sizes."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rng = np.random.default_rng(seed)
    heads, kv_heads, section = [(4, 2, (1, 1, 2)), (2, 2, (4, 1, 3)), (3, 1, (2, 3, 3))][seed]
    width = heads * sum(section) * 2
    config = Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=72,
            hidden_size=width,
            intermediate_size=40,
            num_hidden_layers=(2, 5, 3)[seed],  # one by one, and as a scan
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": section},
            bos_token_id=0,
            eos_token_id=1,
        ),
        vision_config=dict(
            depth=4,
            hidden_size=(16, 24, 32)[seed],
            intermediate_size=28,
            num_heads=(2, 3, 2)[seed],
            out_hidden_size=width,
            patch_size=(4, 6, 3)[seed],
            window_size=(24, 24, 18)[seed],
            fullatt_block_indexes=[[3], [0, 2], []][seed],
        ),
        image_token_id=70,
        video_token_id=71,
        vision_start_token_id=68,
        vision_end_token_id=69,
        tie_word_embeddings=seed == 1,
    )
    torch.manual_seed(seed)
    theirs = Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for key, p in theirs.named_parameters():
            norm = "norm" in key or "ln_q" in key
            p.normal_(1.0 if norm else 0.0, 0.3 if p.ndim == 1 else 0.15)
    theirs.save_pretrained(tmp_path)
    side = config.vision_config.patch_size * 2
    fields = {"patch_size": side // 2, "min_pixels": 4 * side**2, "max_pixels": 24 * side**2}
    (tmp_path / images.FILE).write_text(str(fields).replace("'", '"'))
    ours = load(tmp_path)

    def picture(rows, columns):
        size = round(rows * side), round(columns * side), 3
        return rng.integers(0, 256, size, dtype=np.uint8)

    a, b, c = picture(2, 3), picture(1, 1.2), picture(9, 5.3)

    def text(count):
        return rng.integers(2, 68, count).tolist()

    rows = arrange(
        ours,
        [
            ([*text(2), *shown(ours, a), *text(4)], [a]),
            ([*shown(ours, b), *shown(ours, c), *text(3)], [b, c]),
            (text(9), []),
            ([*text(1), *shown(ours, c), *text(5), *shown(ours, a), *text(2)], [c, a]),
        ],
        WIDTH,
    )
    want = torch_logps(theirs, rows, 70)
    got = run(ours, rows)
    real_BT1 = (np.arange(WIDTH) < rows.length_B[:, None])[..., None]
    np.testing.assert_allclose(got * real_BT1, want * real_BT1, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- text alone


def test_text_alone_is_bit_for_bit_the_plain_model(model):
    """Three equal position ids, and one, turn as in a model that knows no images."""
    plain = qwen.Qwen(dataclasses.replace(model.model.config, mrope_section=()))
    tokens_BT = np.random.default_rng(0).integers(0, 58, (3, 20)).astype(np.int32)
    at_BT = np.arange(20) + np.array([0, 7, 900])[:, None]
    want, _ = forward(plain, model.params, tokens_BT, at_BT)
    for at in (at_BT, np.broadcast_to(at_BT, (3, 3, 20))):
        got, _ = forward(model.model, model.params, tokens_BT, at)
        np.testing.assert_array_equal(got, want)


def test_three_positions_need_sections(model):
    plain = qwen.Qwen(dataclasses.replace(model.model.config, mrope_section=()))
    tokens = np.zeros((2, 5), np.int32)
    with pytest.raises(ValueError, match=r"\(3, 2, 5\).* no mrope_section: expected \(2, 5\)"):
        plain.apply({"params": model.params}, tokens, np.zeros((3, 2, 5), np.int32))


@pytest.mark.parametrize("section", [(8,), (2, 3, 4), (4, 4), (16, 24, 24)])
def test_sections_must_fill_a_head(model, section):
    with pytest.raises(ValueError, match=r"mrope_section \(.*head_dim / 2 = 8"):
        dataclasses.replace(model.model.config, mrope_section=section)


# ---------------------------------------------------------------- from the cache


def segment(kv, length_B):
    return Segment(k=kv[0], v=kv[1], length_N=jnp.asarray(length_B))


@pytest.mark.parametrize("later", ["text", "image"])
def test_turns_from_the_cache_match_the_full_forward(model, stored, later):
    """Prefill with images, extend with what `later` says, decode token by token: rows of their own
    lengths, each with its own pictures."""
    s = model
    a, b, c = (stored[f"picture_{k}"] for k in range(3))
    rng = np.random.default_rng(3)

    def text(count):
        return rng.integers(2, 58, count).tolist()

    shows = {"text": [[], []], "image": [[c], [a]]}[later]
    first = [([*text(2), *shown(s, a), *text(3)], [a]), ([*text(1), *shown(s, b), *text(2)], [b])]
    second = [
        ([*text(3), *(t for x in pictures for t in shown(s, x)), *text(k)], pictures)
        for k, pictures in zip((2, 4), shows, strict=True)
    ]
    reply = [text(3), text(3)]
    whole = [
        ([*t1, *t2, *r], [*p1, *p2])
        for (t1, p1), (t2, p2), r in zip(first, second, reply, strict=True)
    ]
    full = arrange(s, whole, WIDTH)
    want_BTV = run(s, full)

    start = arrange(s, first, 32)
    logp, kv = forward(s.model, s.params, start.tokens_BT, start.positions_3BT, seen=start.images)
    history = segment(kv, start.length_B)
    for b in range(2):
        n = start.length_B[b]
        np.testing.assert_allclose(logp[b, :n], want_BTV[b, :n], **CLOSE)

    # The second turn: its own images, counted from its own first; positions go on.
    tokens_BT, at_3BT = np.zeros((2, 32), np.int32), np.zeros((3, 2, 32), np.int32)
    embed_BID = np.zeros((2, 32, s.model.config.width), np.float32)
    count_B = np.array([len(tokens) for tokens, _ in second])
    for b, (tokens, pictures) in enumerate(second):
        made = [images.preprocess(x, s.image_config) for x in pictures]
        tokens_BT[b, : len(tokens)] = tokens
        at_3BT[:, b, : len(tokens)] = positions.row_positions(
            np.array(tokens),
            [grid for _, grid in made],
            merge=2,
            vision_start=s.vision_start,
            image_pad=s.image_pad,
            start=start.positions_3BT[:, b].max() + 1,
        )
        for x, grid in made:
            found = embed(s.tower, s.tower_params, x[None], grid)[0]
            embed_BID[b, : len(found)] = found
    seen = positions.Images(embed_BID, positions.image_index(tokens_BT, s.image_pad))
    logp, kv = forward(s.model, s.params, tokens_BT, at_3BT, (history,), seen=seen)
    history = append(history, *kv, jnp.asarray(count_B), capacity=WIDTH)
    for b in range(2):
        n, m = start.length_B[b], count_B[b]
        np.testing.assert_allclose(logp[b, :m], want_BTV[b, n : n + m], **CLOSE)

    # Decoding: text, whose three positions are one.
    at_B = at_3BT.max((0, 2)) + 1
    for t in range(3):
        token_B1 = np.array([[r[t]] for r in reply], np.int32)
        at_31B = np.broadcast_to((at_B + t)[:, None], (3, 2, 1))
        logp, kv = forward(s.model, s.params, token_B1, at_31B, (history,))
        history = append(history, *kv, jnp.ones(2, jnp.int32), capacity=WIDTH)
        for b in range(2):
            at = start.length_B[b] + count_B[b] + t
            np.testing.assert_allclose(logp[b, 0], want_BTV[b, at], **CLOSE)
            np.testing.assert_array_equal(full.positions_3BT[:, b, at], at_B[b] + t)


# ---------------------------------------------------------------- several devices


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["1,2,2", pytest.param("4,1,1", marks=pytest.mark.slow)])
def test_four_devices_see_what_one_sees(mesh):
    command = [Path(__file__).with_name("seeing_check.py"), REFERENCE, mesh]
    process = on_devices(4, command)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    found = json.loads(out.splitlines()[-1])
    assert found["devices"] == 4
    assert (found["split"] > 0.5) == (mesh != "4,1,1")  # of the tower's parameters
    assert found["embeddings"] < 1e-5 and found["log-probs"] < 2e-5


# ---------------------------------------------------------------- learning


def test_gradients_reach_the_language_model_and_not_a_frozen_tower(model, stored):
    s = model
    rows = arrange(s, rows_of(stored)[:1], 24)
    pixels, grid = rows.pixels[0]

    def loss(params, tower_params, frozen):
        found = s.tower.apply({"params": tower_params}, pixels[None], grid)
        found = jax.lax.stop_gradient(found) if frozen else found
        seen = positions.Images(found, rows.images.index_BT)
        hidden, _ = s.model.apply(
            {"params": params}, rows.tokens_BT, rows.positions_3BT, images=seen
        )
        return jax.nn.log_softmax(qwen.logits(params, hidden))[0, 15, 3]

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    largest = {}
    for frozen in (False, True):
        text, tower = grad(s.params, s.tower_params, frozen)
        assert min(np.abs(x).max() for x in jax.tree.leaves(text["layers"])) > 0
        largest[frozen] = np.array([np.abs(x).max() for x in jax.tree.leaves(tower)])
        # The embedding of the image token itself is not read.
        assert np.abs(text["embed"][s.image_pad]).max() == 0
        assert np.abs(text["embed"][s.vision_start]).max() > 0
    assert largest[False].min() > 0 and largest[True].max() == 0
