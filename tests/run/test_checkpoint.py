"""checkpoint.py: a saved TrainState is restored bit for bit, and a torn save is ignored."""

import asyncio
import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ragen_jax.core.sharding import make_mesh
from ragen_jax.run.checkpoint import (
    ITEM,
    METADATA,
    Checkpoints,
    not_finite,
    set_damaged_aside,
)
from ragen_jax.update.state import TrainState

pytestmark = pytest.mark.fast


def state_of(seed):
    """A small state: odd values in several dtypes, and an optimizer's nested tuples."""
    rng = np.random.default_rng(seed)
    odd = np.array([0.1, -0.0, 1e-45, 3e38, np.inf, -np.inf, np.nan], np.float32)
    params = {
        "layer": {"kernel": jnp.asarray(rng.normal(size=(3, 5)), jnp.float32)},
        "half": jnp.asarray(rng.normal(size=4), jnp.bfloat16),
        "odd": jnp.asarray(odd),
    }
    opt_state = optax.adamw(1e-3).init(params)
    opt_state = jax.tree.map(lambda x: x + jnp.asarray(seed + 1, x.dtype), opt_state)
    return TrainState(
        params=params,
        opt_state=opt_state,
        step=jnp.int32(seed),
        seed_cursor=jnp.uint32(2**32 - 1 - seed),
        kl_scale=jnp.float32(seed + 0.5),
    )


def assert_same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(x, jax.Array)
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def opened(tmp_path):
    """opened(keep) -> Checkpoints of one shared folder; all are closed at the end."""
    made = []

    def open_(keep=2):
        made.append(Checkpoints(tmp_path / "checkpoints", keep=keep))
        return made[-1]

    yield open_
    for checkpoints in made:
        checkpoints.close()


def saved(checkpoints, *seeds):
    for seed in seeds:
        checkpoints.save(seed, state_of(seed))
    checkpoints.manager.wait_until_finished()


@pytest.mark.medium
def test_a_state_comes_back_bit_for_bit_in_another_session(opened):
    saved(opened(), 3)
    checkpoints = opened()
    assert checkpoints.latest_step() == 3
    found = checkpoints.restore(3, state_of(7))  # the values of `like` do not matter
    assert_same_bits(found, state_of(3))
    assert found.params["half"].dtype == ml_dtypes.bfloat16
    assert int(found.seed_cursor) == 2**32 - 4


def flip(path, place=-1):
    """Flip the lowest bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def arrays_of(folder, step):
    """The largest file of a step's arrays."""
    files = [path for path in (folder / str(step) / ITEM).rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.medium
def test_a_damaged_checkpoint_is_refused_by_who_reads_it(opened, tmp_path):
    checkpoints = opened(keep=3)
    saved(checkpoints, 1, 2)
    checkpoints.check(2)
    flip(arrays_of(tmp_path / "checkpoints", 2), 7)
    damaged = r"step 2 is damaged: .* has changed since it was written; .*: 1$"
    with pytest.raises(ValueError, match=damaged):
        checkpoints.check(2)
    checkpoints.check(1)


@pytest.mark.medium
@pytest.mark.parametrize("content", ["[" * 200_000, "[1]", '{"init_timestamp_nsecs": "x"}'])
def test_what_orbax_says_of_a_step_may_be_damaged_and_deleted(opened, tmp_path, content):
    saved(opened(keep=3), 1, 2)
    about = tmp_path / "checkpoints" / "2" / METADATA
    about.write_text(content)
    for read_only in (True, False):
        with pytest.raises(ValueError, match=f"cannot be opened.*{METADATA}.* may be deleted"):
            Checkpoints(tmp_path / "checkpoints", read_only=read_only)
    about.unlink()
    assert_same_bits(opened(keep=3).restore(2, state_of(7)), state_of(2))


@pytest.mark.medium
def test_damaged_ones_are_set_aside_up_to_a_good_one(opened, tmp_path):
    folder = tmp_path / "checkpoints"
    first = opened(keep=4)
    saved(first, 1, 2, 5, 7)
    first.close()
    assert set_damaged_aside(folder) == []
    arrays_of(folder, 7).unlink()
    flip(arrays_of(folder, 5))
    flip(arrays_of(folder, 1))
    messages = set_damaged_aside(folder)
    assert len(messages) == 2 and "step 7 is damaged" in messages[0] and "is missing" in messages[0]
    assert all("resuming after step 2" in line for line in messages)
    assert sorted(path.name for path in (tmp_path / "damaged").iterdir()) == ["5-1", "7-1"]
    checkpoints = opened(keep=4)
    assert checkpoints.steps() == [1, 2]  # older checkpoints are not checked
    assert_same_bits(checkpoints.restore(2, state_of(0)), state_of(2))
    saved(checkpoints, 7)  # the step can be saved again, and be damaged again
    checkpoints.close()
    flip(arrays_of(folder, 7))
    assert len(set_damaged_aside(folder)) == 1
    assert (tmp_path / "damaged" / "7-2").is_dir()


def test_where_all_are_damaged_nothing_is_moved(opened, tmp_path):
    folder = tmp_path / "checkpoints"
    first = opened()
    saved(first, 1, 2)
    first.close()
    for step in (1, 2):
        flip(arrays_of(folder, step))
    with pytest.raises(ValueError, match="every checkpoint in .* is damaged"):
        set_damaged_aside(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    assert not (tmp_path / "damaged").exists()


@pytest.mark.slow
def test_200_flipped_bits_are_all_found(opened, tmp_path):
    checkpoints = opened()
    saved(checkpoints, 3)
    rng = np.random.default_rng(0)
    folder = tmp_path / "checkpoints" / "3" / ITEM
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    sizes = np.array([path.stat().st_size for path in files])
    for _ in range(200):
        path = files[rng.choice(len(files), p=sizes / sizes.sum())]
        place = int(rng.integers(path.stat().st_size))
        flip(path, place)
        with pytest.raises(ValueError, match="step 3 is damaged"):
            checkpoints.check(3)
        flip(path, place)
    checkpoints.check(3)


def test_a_checkpoint_of_an_older_version_is_read_unchecked(opened, tmp_path):
    checkpoints = opened()
    saved(checkpoints, 3)
    (tmp_path / "checkpoints" / "3" / ITEM / "checksums.json").unlink()
    checkpoints.check(3)
    assert_same_bits(opened().restore(3, state_of(0)), state_of(3))


def test_versions_that_compressed_are_read(opened, tmp_path):
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(3, args=ocp.args.StandardSave(state_of(3)))
    checkpoints = opened()
    assert_same_bits(checkpoints.restore(3, state_of(7)), state_of(3))
    saved(checkpoints, 4)
    assert_same_bits(opened().restore(4, state_of(7)), state_of(4))


def test_nothing_is_compressed(opened, tmp_path):
    even = dataclasses.replace(state_of(4), params={"even": jnp.zeros(2**18)})
    checkpoints = opened()
    checkpoints.save(4, even)
    checkpoints.manager.wait_until_finished()
    files = (tmp_path / "checkpoints" / "4").rglob("*")
    assert sum(file.stat().st_size for file in files if file.is_file()) > 4 * 2**18


def test_what_is_not_finite_is_named():
    plain = state_of(2)
    params = plain.params | {"odd": jnp.zeros(3)}
    opt_state = optax.adamw(1e-3).init(params)
    fine = plain.replace(params=params, opt_state=opt_state)
    assert not_finite(fine) is None
    assert not_finite(fine.replace(params=plain.params)) == "params/odd"
    scaled, *rest = opt_state
    broken = {**scaled.nu, "half": scaled.nu["half"].at[1].set(jnp.inf)}
    named = not_finite(fine.replace(opt_state=(scaled._replace(nu=broken), *rest)))
    assert named.startswith("opt_state/0/") and named.endswith("nu/half")


def test_a_state_of_other_arrays_is_refused_by_their_names(opened):
    checkpoints = opened()
    saved(checkpoints, 1)
    state = state_of(1)
    less = dataclasses.replace(state, params={"layer": state.params["layer"]})
    with pytest.raises(ValueError, match="version .*: it has params/half, has params/odd"):
        checkpoints.restore(1, less)
    more = dataclasses.replace(state, streak_P={"lake": jnp.zeros(3)})
    with pytest.raises(ValueError, match="it has no streak_P/lake$"):
        checkpoints.restore(1, more)


@pytest.mark.medium
def test_an_alarm_of_another_version_starts_again(opened, capsys):
    """Only its arrays differ."""
    checkpoints, state = opened(), state_of(2)
    checkpoints.save(2, state.replace(regimes={"level": jnp.ones(3), "old": jnp.ones(2)}))
    checkpoints.manager.wait_until_finished()
    like = state_of(0).replace(regimes={"level": jnp.zeros(4), "new": jnp.zeros(1)})
    found = checkpoints.restore(2, like)
    assert_same_bits(found, state.replace(regimes=like.regimes))
    assert "step 2 has the alarm state of another version" in capsys.readouterr().out
    with pytest.raises(ValueError, match="it has regimes/level, has regimes/old, has no streak_P"):
        checkpoints.restore(2, like.replace(streak_P={"lake": jnp.zeros(3)}, regimes=None))


def test_a_checkpoint_may_lack_a_field_that_is_empty(opened):
    """Of a version before the field."""
    checkpoints, state = opened(), state_of(2)
    saved = {name: value for name, value in vars(state).items() if name != "tally_P"}
    checkpoints.save(2, saved)
    checkpoints.manager.wait_until_finished()
    assert_same_bits(checkpoints.restore(2, state_of(0)), state)


def test_parameters_alone_come_back(opened):
    saved(opened(), 3)
    found = opened().restore_params(3, state_of(0).params)
    assert_same_bits(found, state_of(3).params)


@pytest.mark.medium
@pytest.mark.parametrize("part", ["state", "params"])
def test_arrays_come_back_where_like_has_them(opened, part):
    saved(opened(), 3)  # on the default device, without a mesh
    mesh = make_mesh(data=1, fsdp=1, tensor=-1)
    sharding = NamedSharding(mesh, PartitionSpec())
    like = jax.device_put(state_of(0), sharding)
    if part == "state":
        found = opened().restore(3, like)
    else:
        found = opened().restore_params(3, like.params)
    assert {x.sharding for x in jax.tree.leaves(found)} == {sharding}


def test_a_new_folder_has_no_step(opened):
    assert opened().latest_step() is None


def test_a_step_is_saved_once(opened):
    checkpoints = opened()
    saved(checkpoints, 3)
    with pytest.raises(RuntimeError, match="step 3 was not saved"):
        checkpoints.save(3, state_of(4))
    assert_same_bits(checkpoints.restore(3, state_of(0)), state_of(3))


@pytest.mark.medium
def test_the_newest_few_are_kept(opened, tmp_path):
    checkpoints = opened(keep=2)
    saved(checkpoints, 1, 2, 5)
    assert checkpoints.latest_step() == 5
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["2", "5"]
    assert_same_bits(checkpoints.restore(2, state_of(0)), state_of(2))


@pytest.mark.medium
def test_a_save_killed_half_way_is_not_seen_and_can_be_made_again(opened, tmp_path):
    first = opened()
    saved(first, 3)
    first.close()
    # Orbax writes here before it renames; see orbax atomicity_types.TMP_DIR_SUFFIX.
    torn = tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp"
    (torn / "default").mkdir(parents=True)
    (torn / "default" / "manifest.ocdbt").write_bytes(b"half")
    checkpoints = opened()
    assert checkpoints.latest_step() == 3
    assert_same_bits(checkpoints.restore(3, state_of(0)), state_of(3))
    saved(checkpoints, 7)
    assert checkpoints.latest_step() == 7
    assert_same_bits(opened().restore(7, state_of(0)), state_of(7))


@pytest.mark.medium
def test_what_is_saved_is_the_state_at_the_call(opened):
    # As in training: the next update overwrites the donated state during the write.
    @functools.partial(jax.jit, donate_argnums=0)
    def update(state):
        return jax.tree.map(lambda x: x + jnp.asarray(1, x.dtype), state)

    def large(value):
        return TrainState(
            params={"kernel": jnp.full((2000, 1000), value, jnp.float32)},
            opt_state=(jnp.full((2000, 1000), value, jnp.float32),),
            step=jnp.int32(value),
            seed_cursor=jnp.uint32(value),
            kl_scale=jnp.float32(value),
        )

    checkpoints, state = opened(), large(1)
    checkpoints.save(1, state)
    for _ in range(20):
        state = update(state)
    jax.block_until_ready(state)
    checkpoints.manager.wait_until_finished()
    assert_same_bits(checkpoints.restore(1, large(0)), large(1))


def test_what_tensorstore_prints_of_a_failed_save_is_left_out(opened, capfd):
    """A call to a closed loop from one of its threads is hidden; all other errors are shown."""
    opened()
    loop = asyncio.new_event_loop()
    loop.close()
    own = None
    try:
        loop.call_soon_threadsafe(print)
    except RuntimeError as error:
        own = error
    inner = own.__traceback__.tb_next  # only asyncio's frames, as in a call from C++
    sys.excepthook(RuntimeError, own, inner)
    assert capfd.readouterr().err == ""
    for error, trace in ((own, own.__traceback__), (ValueError("loop is closed"), inner)):
        sys.excepthook(type(error), error, trace)
        assert "loop is closed" in capfd.readouterr().err
    once = sys.excepthook
    opened()
    assert sys.excepthook is once
