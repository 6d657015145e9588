"""wire.py: episodes survive the round trip through bytes, and no code in the bytes is run."""

import dataclasses
import pickle

import numpy as np
import pytest

from ragen_jax.core.types import Episode, Turn
from ragen_jax.rollout.wire import from_bytes, to_bytes

pytestmark = pytest.mark.fast


def random_images(rng, most):
    """Up to `most` images of different shapes; some are equal."""
    shapes = [(1, 1, 3), (3, 2, 3), (2, 3, 3), (40, 56, 3)]
    drawn = [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]
    again = np.zeros((2, 3, 3), np.uint8)  # the same bytes as an image of another shape
    images = [*drawn, again, again.reshape(3, 2, 3).copy(), again.transpose(1, 0, 2)]
    return tuple(images[i] for i in rng.integers(len(images), size=int(rng.integers(most + 1))))


def random_episodes(rng, count, images=0):
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
            images=random_images(rng, images),
            messages=({"role": "user", "content": "x"},) * int(rng.integers(3)),
            tools=({"function": {"name": "f", "parameters": {}}},) * int(rng.integers(2)),
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
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for x, y in zip(found, expected, strict=True):
            assert_same(x, y)
    else:
        assert found == expected


@pytest.mark.parametrize("images", [0, 1, 5])
@pytest.mark.parametrize("count", [0, 1, 64])
def test_episodes_come_out_as_they_went_in(count, images):
    episodes = random_episodes(np.random.default_rng(count), count, images)
    shown = [image for episode in episodes for turn in episode.turns for image in turn.images]
    assert bool(shown) == (images > 0 and count > 0)
    assert_same(from_bytes(to_bytes(episodes)), episodes)


def test_an_image_that_many_have_seen_is_there_once(make_turn, make_episode):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (168, 168, 3), dtype=np.uint8)
    others = [rng.integers(0, 256, (28, 28, 3), dtype=np.uint8) for _ in range(3)]

    def seen(images):
        turns = [dataclasses.replace(make_turn([1], [2]), images=images)] * 4
        return [make_episode(0, member, turns) for member in range(16)]

    plain, one = len(to_bytes(seen(()))), len(to_bytes(seen((image,))))
    assert 0 < one - plain - image.size < 3000
    copies = seen((image.copy(), *others, image))
    assert_same(from_bytes(to_bytes(copies)), copies)
    assert len(to_bytes(copies)) - one < 3 * others[0].size + 6000


def test_a_pickle_is_not_read():
    with pytest.raises(ValueError, match="pickle"):
        from_bytes(pickle.dumps([1]))
