"""Equality of the episodes of two rollouts, up to draws that rounding decided."""

import jax.numpy as jnp
import numpy as np

from ragen_jax.model.qwen import logits
from ragen_jax.rollout import drawing, sample


def near_tie(model, params, key, episode, turn, index):
    """Return whether the two largest perturbed logits of a token are within 1e-4."""
    one = episode.turns[turn]
    ids = np.concatenate([one.prompt, one.sampled[:index]])
    hidden, _ = model.apply({"params": params}, jnp.asarray(ids[None]))
    keys = sample.episode_keys(key, [episode.seed], [episode.member], turn)
    noise = drawing.noise(keys, index, model.config.vocab_size)[0]
    best = np.sort(np.asarray(logits(params, hidden[0, -1]) + noise))[-2:]
    return best[1] - best[0] < 1e-4


def assert_same_episode(model, params, key, a, b):
    """Assert that two episodes are equal up to the first token that rounding decided."""
    assert (a.seed, a.member) == (b.seed, b.member)
    for index, (s, t) in enumerate(zip(a.turns, b.turns, strict=False)):
        n = min(len(s.sampled), len(t.sampled))
        differs = np.flatnonzero(s.sampled[:n] != t.sampled[:n])
        if len(differs):
            where = (a.seed, a.member, index)
            assert near_tie(model, params, key, a, index, int(differs[0])), where
            return  # the episodes diverge from this token
        assert len(s.sampled) == len(t.sampled)
        assert np.array_equal(s.prompt, t.prompt) and s.message == t.message
        np.testing.assert_allclose(s.logp, t.logp, atol=1e-4)
        assert (s.actions, s.valid, s.reward) == (t.actions, t.valid, t.reward)
    assert len(a.turns) == len(b.turns) and a.success == b.success
