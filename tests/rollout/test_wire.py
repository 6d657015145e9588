"""wire.py: episodes come out of the bytes as they went in, and nothing in the bytes is run."""

import dataclasses
import pickle

import numpy as np
import pytest

from ragen_jax.rollout.wire import from_bytes, to_bytes
from ragen_jax.types import Episode, Turn

pytestmark = pytest.mark.fast


def random_episodes(rng, count):
    def turn():
        length = int(rng.integers(0, 40))
        return Turn(
            prompt=rng.integers(0, 2**31, int(rng.integers(1, 90)), dtype=np.int32),
            message="naïve \x00 \u202e 漢字\r\n" * int(rng.integers(3)),
            sampled=rng.integers(0, 2**31, length, dtype=np.int32),
            logp=-rng.random(length).astype(np.float32) * np.float32(1e-3),
            reasoning=(0, length // 2),
            answer=(length // 2, length),
            actions=("Up", "||", "")[: int(rng.integers(4))],
            valid=bool(rng.integers(2)),
            reward=float(rng.normal()),
            info={"success": bool(rng.integers(2)), "cost": 1e-17, "big": 1 << 80, "why": "\ud83d"},
        )

    return [
        Episode(
            seed=(1 << 62) + index,
            group=index // 4,
            member=index % 4,
            turns=tuple(turn() for _ in range(int(rng.integers(0, 6)))),
            success=bool(rng.integers(2)),
            error="Traceback:\n  ValueError" if index % 5 == 0 else "",
        )
        for index in range(count)
    ]


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            assert_same(x, y)
    else:
        assert found == expected


@pytest.mark.parametrize("count", [0, 1, 64])
def test_episodes_come_out_as_they_went_in(count):
    episodes = random_episodes(np.random.default_rng(count), count)
    assert_same(from_bytes(to_bytes(episodes)), episodes)


def test_a_pickle_is_not_read():
    with pytest.raises(ValueError, match="pickle"):
        from_bytes(pickle.dumps([1]))
