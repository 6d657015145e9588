"""Simulated batches of the trajectory scope: several turns of each room, one per episode.

Each batch draws new rooms, turns, reasonings and actions; scores are the true log-likelihoods of
the simulated policy. If rooms `differ`, the turns of a room resemble each other, its episodes begin
with the same prompt, and each room has its own effects: how strongly reasonings depend on the
state, how easily its turns are confused with each other. Otherwise all turns are drawn from one
distribution, whatever their room.
"""

import dataclasses

import numpy as np

from ragen_jax.diagnostics.flow import PANEL, Panel, draw_panels

DEPTHS = 5
EFFECT = 0.6  # standard deviation of a room's effects, in logarithms
SYMBOLS = 20


@dataclasses.dataclass(frozen=True)
class Turns:
    """M turns; each reasoning has its own prompt, so N = M."""

    score_MN: np.ndarray
    length_M: np.ndarray
    id_N: np.ndarray  # equal for equal prompts
    room_N: np.ndarray
    depth_N: np.ndarray

    @property
    def own_M(self):
        return np.arange(len(self.length_M))


def lay_out(rng, rooms, turns, *, differ):
    """(room, depth, prompt id) of each turn. If rooms differ, a room has one first prompt."""
    room_N = np.repeat(np.arange(rooms), turns)
    depth_N = rng.integers(0, DEPTHS, len(room_N))
    id_N = rooms + np.arange(len(room_N))
    return room_N, depth_N, np.where((depth_N == 0) & differ, room_N, id_N)


def effect(rng, rooms, *, differ):
    """A positive factor for each room; 1 if rooms do not differ."""
    return np.exp(EFFECT * differ * rng.normal(size=rooms))


def states(rng, room_N, depth_N, *, differ):
    """A point in 3-space for each turn, float64 [N, 3]; a first turn is its room's centre."""
    rooms = room_N[-1] + 1
    if not differ:
        return rng.normal(size=(len(room_N), 3))
    spread_N = 0.7 * effect(rng, rooms, differ=True)[room_N] * (depth_N > 0)
    centre_N3 = rng.normal(size=(rooms, 3))[room_N]
    return centre_N3 + spread_N[:, None] * rng.normal(size=(len(room_N), 3))


def channel(rng, rooms, turns, strength, *, differ):
    """Reasonings that are their state plus noise, whose size depends on the room."""
    room_N, depth_N, id_N = lay_out(rng, rooms, turns, differ=differ)
    state_N3 = states(rng, room_N, depth_N, differ=differ)
    noise_N = effect(rng, rooms, differ=differ)[room_N] / strength
    seen_M3 = state_N3 + noise_N[:, None] * rng.normal(size=state_N3.shape)
    distance_MN = np.sum((seen_M3[:, None] - state_N3) ** 2, axis=2)
    score_MN = -distance_MN / 2 / noise_N**2 - 3 * np.log(noise_N)
    return Turns(score_MN, rng.integers(5, 16, len(room_N)), id_N, room_N, depth_N)


def symbols(rng, rooms, turns, strength, *, differ):
    """Reasonings of 5 to 15 symbols, drawn from the turn's own distribution."""
    room_N, depth_N, id_N = lay_out(rng, rooms, turns, differ=differ)
    spread_G = effect(rng, rooms, differ=differ) / strength
    if differ:
        base_GV = rng.gamma(np.repeat(spread_G[:, None], SYMBOLS, axis=1)) + 1e-9
        base_NV = (base_GV / base_GV.sum(axis=1, keepdims=True))[room_N]
        alike_N1 = 2 * SYMBOLS * effect(rng, rooms, differ=True)[room_N][:, None]
        p_NV = np.where((depth_N > 0)[:, None], rng.gamma(alike_N1 * base_NV), base_NV)
    else:
        p_NV = rng.gamma(np.repeat(spread_G[room_N][:, None], SYMBOLS, axis=1))
    p_NV /= p_NV.sum(axis=1, keepdims=True)
    p_NV = (p_NV + 1e-6) / (1 + SYMBOLS * 1e-6)
    length_M = rng.integers(5, 16, len(room_N))
    score_MN = rng.multinomial(length_M, p_NV) @ np.log(p_NV).T
    return Turns(score_MN, length_M, id_N, room_N, depth_N)


def actors(rng, rooms, turns, strength_z, strength_x, *, differ, reasonings=6, actions=4):
    """The positional arguments of `flow_metrics` (score_AN, action_AN, own_A, id_N) and its
    keywords.

    The same policy acts in all batches: its reasonings depend on the state, and its actions on the
    reasoning and the state. The strength of each effect depends on the room.
    """
    policy = np.random.default_rng(5)
    think, read = policy.normal(size=(3, reasonings)), policy.normal(size=(3, actions))
    follow = 1.5 * policy.normal(size=(reasonings, actions))
    room_N, depth_N, id_N = lay_out(rng, rooms, turns, differ=differ)
    state_N3 = states(rng, room_N, depth_N, differ=differ)
    size_N, z_N, x_N = (effect(rng, rooms, differ=differ)[room_N] for _ in range(3))
    thinker_NZ = _softmax(1.5 * size_N[:, None] * (state_N3 @ think))
    read_N1A = strength_x * x_N[:, None, None] * (state_N3 @ read)[:, None]
    actor_NZA = _softmax(strength_z * z_N[:, None, None] * follow + read_N1A)
    own_A = np.arange(len(room_N))
    z_A = _draw(rng, thinker_NZ)
    action_A = _draw(rng, actor_NZA[own_A, z_A])
    log = np.log(actor_NZA)
    panel_AJ = np.full((len(own_A), PANEL), -1)
    for a, found in enumerate(draw_panels(rng, id_N, np.ones(len(own_A), bool), same=False)):
        panel_AJ[a, : 1 + len(found)] = [a, *found]
    others = Panel(log[own_A[:, None], z_A[panel_AJ], action_A[:, None]], panel_AJ)
    scores = np.log(thinker_NZ[:, z_A]).T, log[:, z_A, action_A].T
    return (*scores, own_A, id_N), dict(others=others, group_N=room_N)


def _softmax(x):
    p = np.exp(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def _draw(rng, p):
    """Samples an index from each row of probabilities."""
    return np.sum(rng.random((len(p), 1)) > np.cumsum(p, axis=1)[:, :-1], axis=1)


def styles(rng, rooms, turns, *, style, scene, signal=0.0, missing=0.0, sizes=6):
    """(score_MN, room_N, depth_N) of reasonings with a style and prompts with a scene.

    Args:
      style, scene: fractions of the variance that come from the room.
      signal: how strongly a reasoning follows its prompt. missing: fraction of turns left out.
    """
    room_N = np.repeat(np.arange(rooms), turns)[rng.random(rooms * turns) >= missing]
    N = len(room_N)

    def features(share):
        of_room = rng.normal(size=(rooms, sizes))[room_N]
        return np.sqrt(share) * of_room + np.sqrt(1 - share) * rng.normal(size=(N, sizes))

    z_M, x_N = features(style), features(scene)
    score_MN = (z_M + signal * x_N) @ x_N.T - rng.exponential(40, size=(N, 1))
    return score_MN, room_N, rng.integers(0, DEPTHS, N)
