"""stops.py: stop strings found in token bytes as in the joined text."""

import numpy as np
import pytest

from ragen_jax.rollout.stops import Stops, find_end

pytestmark = pytest.mark.fast

PIECES = (
    *(bytes([b]) for b in b"<>/thinkaswerx "),
    *(
        b"</think>",
        b"</",
        b"think",
        b"</answer>",
        b"></answer",
        b"ans",
        b"wer>\n",
        b"</answ",
        b"er>.",
    ),
    *("é".encode()[:1], "é".encode()[1:], b""),
)
TEXTS = (("</answer>",), ("</answer>", "x x"), ("aa", "a<"))


@pytest.mark.parametrize("texts", TEXTS)
def test_states_end_where_the_text_has_a_stop_string(texts):
    """Random replies against a search in the text: state, and the token at which it ends."""
    stops, rng = Stops(PIECES, texts), np.random.default_rng(0)
    ended = 0
    for _ in range(3000):
        ids = rng.integers(0, len(PIECES), rng.integers(1, 14))
        if rng.random() < 0.8:
            ids[0] = PIECES.index(b"</think>")
        text = b"".join(PIECES[i] for i in ids)
        assert stops.have_ended(ids) == (find_end(text, texts) is not None), text
        if not stops.have_ended(ids):
            continue
        ended += 1
        state, count = 0, 0
        while state != stops.ended:
            state, count = stops.advance(state, ids[count : count + 1]), count + 1
        before = b"".join(PIECES[i] for i in ids[: count - 1])
        assert find_end(before, texts) is None
        assert stops.advance(state, ids[count:]) == stops.ended  # it stays there
    assert ended > 100


def test_only_after_the_reasoning():
    stops = Stops(PIECES, ("</answer>",))
    quoted = [PIECES.index(b"</answer>")]
    end = [PIECES.index(b"</think>")]
    assert not stops.have_ended(quoted) and not stops.have_ended([*quoted, *end])
    assert stops.have_ended([*quoted, *end, *quoted])
    assert find_end(b"a</answer>b</think>c</answer>d", ("</answer>",)) == 29
    assert find_end(b"a</answer>b", ("</answer>",)) is None


def test_ids_beyond_the_tokenizer_have_no_text():
    stops = Stops(PIECES, ("</answer>",))
    table = stops.table(len(PIECES) + 5)
    assert table.shape == (stops.ended + 1, len(PIECES) + 5) and table.dtype == np.uint8
    half = [PIECES.index(b"</think>"), PIECES.index(b"</answ"), len(PIECES) + 3]
    assert not stops.have_ended([*half, PIECES.index(b"er>.")])
    np.testing.assert_array_equal(table[:, len(PIECES) + 1], table[:, -1])


@pytest.mark.parametrize("texts", [("",), ("x" * 201,)])
def test_unusable_texts_are_refused(texts):
    with pytest.raises(ValueError, match="rollout.stop is"):
        Stops(PIECES, texts)
