"""diagnostics/tags.py: the structure of replies, by hand."""

import dataclasses

import numpy as np
import pytest

from ragen_jax.diagnostics.tags import read_tags, tag_metrics

pytestmark = pytest.mark.fast
TOKENS = (b"</think>", b"<answer>", b"</answer>", b"up", b" x", b"</th", b"ink>", b"", b"<think>")


@pytest.mark.parametrize(
    "text, valid, state, in_place, others",
    [
        (b"go</think><answer>up</answer>", True, "healthy", 3, 0),
        (b"go</think>\n<answer>fly</answer>", False, "no_action", 3, 0),
        (b"go</think>so<answer>up</answer>", False, "polluted", 3, 0),
        (b"<answer>go</think><answer>up</answer>", True, "polluted", 3, 1),
        (b"go</think><think></think><answer>up</answer>", False, "polluted", 3, 2),
        (b"go</think><answer>up", False, "collapsed", 2, 0),
        (b"go up</answer>", False, "collapsed", 0, 1),
        (b"", False, "collapsed", 0, 0),
    ],
)
def test_states(text, valid, state, in_place, others):
    found = read_tags(text, valid=valid)
    assert (found[0], len(found[1]), len(found[2])) == (state, in_place, others)


def reply(make_turn, ids, valid=True):
    turn = make_turn([1], ids)
    logp = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return dataclasses.replace(turn, sampled=np.array(ids, np.int32), logp=logp, valid=valid)


def test_log_probs_and_counts_by_hand(make_turn, make_episode):
    turns = [
        reply(make_turn, [4, 0, 1, 3, 2]),  # tags at -2, -3, -5
        # A tag of two tokens, an id without bytes, an id beyond the tokenizer.
        reply(make_turn, [5, 6, 7, 1, 99, 2, 2], valid=False),  # tags at -1 - 2, -4, -6; one more
    ]
    broken = dataclasses.replace(make_episode(1, 0, turns[:1]), error="x")
    found = tag_metrics([make_episode(0, 0, turns), broken], TOKENS)
    assert found == {
        **{"tags/healthy": 0.5, "tags/no_action": 0.0, "tags/polluted": 0.5},
        **{"tags/collapsed": 0.0, "tags/misplaced": 0.5},
        "tags/logp": pytest.approx(-(2 + 3 + 5 + 3 + 4 + 6) / 6),
        "tags/other_logp": pytest.approx(-(1 + 4 + 3 + 5) / 4),
    }
    assert tag_metrics([broken], TOKENS) == {}
    (cut,) = [reply(make_turn, [8], valid=False)]
    assert "tags/logp" not in tag_metrics([make_episode(0, 0, [cut])], TOKENS)
