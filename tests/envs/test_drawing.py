"""envs/drawing.py and the sprites: pictures agree with the text and are equal on every machine."""

import hashlib
import itertools

import numpy as np
import pytest

from ragen_jax.envs import make_env
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.frozen_lake import sprites as lake_sprites
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.sokoban import sprites as room_sprites
from ragen_jax.envs.types import IMAGE, DrawingEnvironment, Environment, Observation

pytestmark = pytest.mark.fast

SIZES = (8, 12, 14, 28, 33, 64)
SPRITES = {"sokoban": room_sprites.SPRITES, "frozen_lake": lake_sprites.SPRITES}
ALL = {  # each symbol at least once, as far as one state allows
    "sokoban": ("#######\n#P_√O##\n#X_X__#\n#_O___#\n#######", "#####\n#SX_#\n#_###\n#####"),
    "frozen_lake": ("P_OG\n__O_", "__OG\n_XO_", "__O√\n__O_"),
}

# sha256 of the picture of each text of ALL, in two sizes. A different digest means
# different training images of agents that see them.
PICTURES = {
    "sokoban": "1c51197c5e2a1e16b56147d0811a37ed4f876c9ef32e90879e23ab6b9c330d37",
    "frozen_lake": "2c3c816d0c17a29cfaa3995ccf4e73559b90274c7b9ec110076a2c2149b92f79",
}


def images(name, tile, texts=None):
    """(text, picture) of states, each from `render`."""
    environment = make_env(name, observation="image", tile=tile)
    for text in texts or ALL[name]:
        shown = environment.render(environment.parse(text))
        assert isinstance(shown, Observation) and shown.text == IMAGE
        (picture,) = shown.images
        yield text, picture


def cells_of(picture, tile):
    """The cells of a picture: [rows, columns, tile, tile, 3]."""
    height, width, _ = picture.shape
    cells = picture.reshape(height // tile, tile, width // tile, tile, 3)
    return cells.transpose(0, 2, 1, 3, 4)


def read(name, picture, tile):
    """The text that a picture shows, found by comparing its cells with the sprites."""
    looks = {sprite(tile).tobytes(): symbol for symbol, sprite in SPRITES[name].items()}
    assert len(looks) == len(SPRITES[name])
    rows = cells_of(picture, tile)
    found = "\n".join("".join(looks[cell.tobytes()] for cell in row) for row in rows)
    assert make_env(name, observation="image", tile=tile).transcribe(picture) == found
    return found


@pytest.mark.parametrize("tile", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_a_picture_reads_back_as_its_text(name, tile):
    seen = set()
    for text, picture in images(name, tile):
        rows = text.split("\n")
        assert picture.shape == (len(rows) * tile, len(rows[0]) * tile, 3)
        assert picture.dtype == np.uint8 and picture.flags["C_CONTIGUOUS"]
        assert read(name, picture, tile) == text
        seen |= set(text) - {"\n"}
    assert seen == set(SPRITES[name])


@pytest.mark.medium
@pytest.mark.parametrize("tile", (8, 28))
@pytest.mark.parametrize("name", ALL)
def test_generated_problems_and_what_is_played_of_them(name, tile):
    """A move changes only the cells that the text changes."""
    environment = make_env(name, size=(6, 7), observation="image", tile=tile)
    rng = np.random.default_rng(0)
    moves = 0
    for seed in range(20):
        state = environment.reset(seed)
        before = environment.render(state).images[0]
        assert read(name, before, tile) == environment.grid_text(state)
        for action in rng.choice(environment.actions, 8):
            after_state = environment.step(state, str(action), rng).state
            after = environment.render(after_state).images[0]
            text, new = environment.grid_text(state), environment.grid_text(after_state)
            moved = [a != b for a, b in zip(text, new, strict=True) if a != "\n"]
            changed = (cells_of(before, tile) != cells_of(after, tile)).any((2, 3, 4))
            assert changed.ravel().tolist() == moved
            moves += any(moved)
            state, before = after_state, after
    assert moves > 60


@pytest.mark.parametrize("tile", (8, 28))
@pytest.mark.parametrize("name", ALL)
def test_any_two_sprites_differ_in_colour_and_much(name, tile):
    """For a model with patches of 14 x 14 pixels (quarters of a 28 tile) or 4 x 4 (quarters of an 8
    tile), at least one patch has another mean colour."""
    patch = {8: 4, 28: 14}[tile]

    def means(sprite):
        cell = sprite(tile).astype(float)
        return cell.reshape(tile // patch, patch, tile // patch, patch, 3).mean((1, 3))

    for one, other in itertools.combinations(SPRITES[name].values(), 2):
        where = (one(tile) != other(tile)).any(2)
        assert where.mean() > 0.2, (one.__name__, other.__name__)
        apart = abs(means(one) - means(other)).max()
        assert apart > 24, (one.__name__, other.__name__, apart)


@pytest.mark.parametrize("name", ALL)
def test_pictures_are_pinned(name):
    found = hashlib.sha256()
    for tile in (8, 28):
        for _, picture in images(name, tile):
            found.update(repr(picture.shape).encode() + picture.tobytes())
    assert found.hexdigest() == PICTURES[name]


@pytest.mark.parametrize("name", ALL)
def test_a_picture_is_nobodys_to_write_in(name):
    (_, first), *_ = images(name, 8)
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 0
    (_, again), *_ = images(name, 8)
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("build", [Sokoban, FrozenLake])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"tile": 7}, "tile must be a whole number of at least 8, got 7"),
        ({"tile": 65}, "tile must be a whole number of at most 64, got 65"),
        ({"tile": 28.0}, "tile must be a whole number of at least 8, got 28.0"),
        ({"tile": None}, "tile must be a whole number of at least 8, got None"),
        ({"tile": True}, "tile must be a whole number of at least 8, got True"),
        (
            {"tile": 14, "observation": "both"},
            "tile=14 is not read with observation='both': leave it out, or set observation='image'",
        ),
    ],
)
def test_bad_sizes_are_named(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**({"observation": "image"} | options))


@pytest.mark.parametrize("build", [Sokoban, FrozenLake])
def test_the_size_that_nothing_reads_may_be_the_one_that_is_left_out(build):
    assert build(tile=28).tile == build(observation="image").tile == 28
    assert isinstance(build().render(build().reset(0)), str)
    assert isinstance(build(observation="image"), Environment)


@pytest.mark.parametrize("build", [Sokoban, FrozenLake])
def test_what_is_said_of_a_picture_is_checked_by_what_it_shows(build):
    seeing, reading = build(observation="image", tile=8), build()
    assert isinstance(seeing, DrawingEnvironment)
    rng = np.random.default_rng(0)
    for seed in (0, 1, 2**31, 2**63 - 1):
        state = seeing.reset(seed)
        for _ in range(4):
            (picture,) = seeing.render(state).images
            assert seeing.transcribe(picture) == seeing.grid_text(state)
            message = f"Your last reply had no valid action.\n{seeing.transcribe(picture)}\nYou"
            for thought in (seeing.explain(state, ["Up"]), "player 22 box 33 hole 11 goal 33"):
                found = seeing.count_grounded(message, thought)
                assert (
                    found == reading.count_grounded(reading.render(state), thought) and found[1] > 0
                )
            state = seeing.step(state, str(rng.choice(["Up", "Down", "Left", "Right"])), rng).state


@pytest.mark.parametrize("build", [Sokoban, FrozenLake])
def test_a_picture_of_another_kind_is_not_transcribed(build):
    environment = build(observation="image", tile=8)
    picture = environment.render(environment.reset(0)).images[0].copy()
    with pytest.raises(ValueError, match="no cells of 8 pixels"):
        environment.transcribe(picture[:-1])
    picture[9, 17] ^= 1
    with pytest.raises(ValueError, match="row 1, column 2 of a picture is not a known sprite"):
        environment.transcribe(picture)


@pytest.mark.parametrize("build", [Sokoban, FrozenLake])
def test_of_a_picture_without_a_transcript_no_fact_is_checked(build):
    environment = build(observation="image")
    for message in (IMAGE, f"Your last reply had no valid action.\n{IMAGE}\nYou have 3 action(s)."):
        assert environment.count_grounded(message, "player 22 box 33 hole 11 goal 33") == (0, 0)


@pytest.mark.parametrize(
    "build, looks",
    [
        (Sokoban, "grey bricks, sand, red ring, brown crate, green crate, blue disc"),
        (FrozenLake, "pale blue, dark disc, golden diamond, red coat, red cross"),
    ],
)
def test_instructions_tell_the_look_of_each_cell(build, looks):
    told, plain = build(observation="image").instructions, build().instructions
    for look in looks.split(", "):
        assert look in told and look not in plain
    assert "symbols" not in told and "(row, column)" not in told and "<" not in told
    assert told.split("\n")[:3] == plain.split("\n")[:3]  # the rules are the same
