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
from device_processes import on_devices
from vision_model import album_of, arrange, forward, load, picked, seen_by, shown, torch_logps

from ragen_jax.model import qwen
from ragen_jax.model.likelihood import token_logps
from ragen_jax.model.segments import Segment, append
from ragen_jax.model.vision import images, positions
from ragen_jax.rollout.sample import empty_reply, extend, prefill

pytestmark = pytest.mark.fast

REFERENCE = Path(__file__).parent / "reference" / "qwen2_5_vl"
CLOSE = dict(rtol=0, atol=2e-5)  # for log-probs of order 1 to 10
WIDTH = 64


@pytest.fixture(scope="module")
def model():
    return load(REFERENCE)


@pytest.fixture(scope="module")
def stored():
    return dict(np.load(REFERENCE / "rows.npz"))


def rows_of(stored):
    """Return (tokens, pictures) of each row."""
    return [
        (tokens[:length].tolist(), [stored[f"picture_{k}"] for k in ks if k >= 0])
        for tokens, length, ks in zip(
            stored["tokens_BT"], stored["length_B"], stored["pictures_BK"], strict=True
        )
    ]


def run(s, rows):
    """Return log-probs [B, T, V] of `Rows` in one forward pass."""
    logp_BTV, _ = forward(s.model, seen_by(s.params, rows.images), rows.tokens_BT)
    return np.asarray(logp_BTV)


# ---------------------------------------------------------------- against torch


@pytest.mark.medium
def test_everything_matches_torch(model, stored):
    """Pixels, grids, positions and log-probs of rows with one picture, two, none, and three in two
    turns."""
    rows = arrange(model, rows_of(stored), stored["tokens_BT"].shape[1])
    for k in range(3):
        pixels, grid = images.preprocess(stored[f"picture_{k}"], model.image_config)
        assert grid == tuple(stored[f"grid_{k}"])
        np.testing.assert_allclose(pixels, stored[f"pixels_{k}"], rtol=0, atol=1e-5)
    real_BT = np.arange(rows.tokens_BT.shape[1]) < stored["length_B"][:, None]
    np.testing.assert_array_equal(rows.positions_3BT * real_BT, stored["positions_3BT"] * real_BT)
    got_BT = picked(run(model, rows), rows.ids_BT) * real_BT
    np.testing.assert_allclose(got_BT, stored["logp_BT"], **CLOSE)


@pytest.mark.medium
def test_log_probs_of_training_match_torch(model, stored):
    """likelihood.token_logps gives torch's log-probs of all text tokens; image tokens are not
    trained."""
    rows = arrange(model, rows_of(stored), stored["tokens_BT"].shape[1])
    got_BT = token_logps(model.model, seen_by(model.params, rows.images), rows.tokens_BT)
    text_BT = rows.ids_BT != model.image_pad
    text_BT &= np.arange(rows.tokens_BT.shape[1]) < stored["length_B"][:, None]
    np.testing.assert_allclose(got_BT * text_BT, stored["logp_BT"] * text_BT, **CLOSE)
    assert np.isfinite(got_BT).all()


@pytest.mark.medium
def test_what_is_shown_and_where_matters(model, stored):
    """The comparison with torch would detect missing or exchanged pictures and plain positions."""
    T = stored["tokens_BT"].shape[1]
    rows = arrange(model, rows_of(stored), T)
    want_BT = picked(run(model, rows), rows.ids_BT)
    table = rows.images
    real = table.token_I < positions.NO_TOKEN
    turned = table.embed_ID.copy()
    turned[real] = turned[real][::-1]
    for spoilt in (
        table.replace(embed_ID=0 * table.embed_ID),
        table.replace(embed_ID=turned),
        table.replace(place_I2=0 * table.place_I2, step_I=np.ones_like(table.step_I)),
    ):
        off_B = np.abs(picked(run(model, rows._replace(images=spoilt)), rows.ids_BT) - want_BT)
        assert off_B.max(1)[[0, 1, 3]].min() > 0.01


def test_a_number_that_stands_for_nothing_is_seen(model, stored):
    """An unregistered image id gives NaN, which passes through every layer: the whole row is
    NaN."""
    rows = arrange(model, rows_of(stored), stored["tokens_BT"].shape[1])
    tokens_BT = rows.tokens_BT.copy()
    tokens_BT[2, 4] = 10**9
    bad_BT = np.isnan(run(model, rows._replace(tokens_BT=tokens_BT))).any(-1)
    assert not bad_BT[[0, 1, 3]].any() and bad_BT[2].all()


@pytest.mark.medium
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
            num_hidden_layers=(2, 5, 3)[seed],  # unrolled or as a scan
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


# ---------------------------------------------------------------- text only


@pytest.mark.medium
def test_text_alone_is_bit_for_bit_the_plain_model(model):
    """Three equal position ids, or a single one, rotate as in a model without images."""
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


@pytest.mark.medium
@pytest.mark.parametrize("later", ["text", "image"])
def test_turns_from_the_cache_match_the_full_forward(model, stored, later):
    """Prefill with images, extend with the contents that `later` names, decode token by token. Rows
    have different lengths and different pictures."""
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
    book = album_of(s)
    full = arrange(s, whole, WIDTH, book)
    want_BTV = run(s, full)
    n_B = np.array([len(tokens) for tokens, _ in first])
    m_B = np.array([len(tokens) for tokens, _ in second])

    def cut(start_B, count_B, width):
        """Return parts of the rows, with the same image ids as in the whole rows."""
        tokens_BT = np.zeros((2, width), np.int32)
        for row, whole, start, count in zip(
            tokens_BT, full.tokens_BT, start_B, count_B, strict=True
        ):
            row[:count] = whole[start : start + count]
        return tokens_BT

    # Each call has a table with only its images.
    tokens_BT = cut([0, 0], n_B, 32)
    segment, logits_BV = prefill(s.model, seen_by(s.params, book.table(tokens_BT)), tokens_BT, n_B)
    for b in range(2):
        got = jax.nn.log_softmax(logits_BV[b])
        np.testing.assert_allclose(got, want_BTV[b, n_B[b] - 1], **CLOSE)
        assert segment.next_N[b] == full.positions_3BT[:, b, : n_B[b]].max() + 1 < n_B[b]

    # The second turn follows an empty reply; its first token takes the place of the last sampled
    # token.
    nothing = Segment(
        k=empty_reply(segment.k, 2, 1), v=empty_reply(segment.v, 2, 1), length_N=jnp.zeros(2, int)
    )
    tokens_BE = cut(n_B, m_B, 32)
    seen = seen_by(s.params, book.table(tokens_BE))
    segment, logits_BV = extend(
        s.model, seen, segment, nothing, np.arange(2), tokens_BE, m_B, capacity=WIDTH
    )
    for b in range(2):
        got = jax.nn.log_softmax(logits_BV[b])
        np.testing.assert_allclose(got, want_BTV[b, n_B[b] + m_B[b] - 1], **CLOSE)

    # Decoding: the three positions of a text token are equal.
    at_B = np.asarray(segment.next_N)
    for t in range(3):
        token_B1 = np.array([[r[t]] for r in reply], np.int32)
        logp, kv = forward(s.model, s.params, token_B1, (at_B + t)[:, None], (segment,))
        segment = append(segment, *kv, jnp.ones(2, jnp.int32), capacity=WIDTH)
        for b in range(2):
            at = n_B[b] + m_B[b] + t
            np.testing.assert_allclose(logp[b, 0], want_BTV[b, at], **CLOSE)
            np.testing.assert_array_equal(full.positions_3BT[:, b, at], at_B[b] + t)


# ---------------------------------------------------------------- several devices


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["1,2,2", pytest.param("4,1,1", marks=pytest.mark.slow)])
def test_four_devices_see_what_one_sees(mesh):
    command = [Path(__file__).with_name("vision_on_mesh_script.py"), REFERENCE, mesh]
    process = on_devices(4, command)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    found = json.loads(out.splitlines()[-1])
    assert found["devices"] == 4
    assert (found["split"] > 0.5) == (mesh != "4,1,1")  # fraction of the tower's parameters
    assert found["embeddings"] < 1e-5 and found["log-probs"] < 2e-5


# ---------------------------------------------------------------- gradients


@pytest.mark.medium
def test_gradients_reach_the_language_model_and_not_a_frozen_tower(model, stored):
    s = model
    rows = arrange(s, rows_of(stored)[:1], 24)
    pixels, grid = rows.pixels[0]
    room = len(rows.images.embed_ID)

    def loss(params, tower_params, frozen):
        found = s.tower.apply({"params": tower_params}, pixels[None], grid)[0]
        found = jax.lax.stop_gradient(found) if frozen else found
        found = jnp.pad(found, ((0, room - len(found)), (0, 0)))
        seen = seen_by(params, rows.images.replace(embed_ID=found))
        hidden, _ = s.model.apply({"params": seen}, rows.tokens_BT)
        return jax.nn.log_softmax(qwen.logits(params, hidden))[0, 15, 3]

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    largest = {}
    for frozen in (False, True):
        text, tower = grad(s.params, s.tower_params, frozen)
        assert min(np.abs(x).max() for x in jax.tree.leaves(text["layers"])) > 0
        largest[frozen] = np.array([np.abs(x).max() for x in jax.tree.leaves(tower)])
        # Neither the embedding of image_pad nor the vocabulary's last row is read for image tokens.
        assert np.abs(text["embed"][s.image_pad]).max() == np.abs(text["embed"][-1]).max() == 0
        assert np.abs(text["embed"][s.vision_start]).max() > 0
    assert largest[False].min() > 0 and largest[True].max() == 0
