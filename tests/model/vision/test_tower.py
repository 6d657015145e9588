"""model/vision/tower.py: windows by properties, attention against a mask, the tower against torch.

test_seeing.py also compares the whole tower with stored numbers of torch, without torch installed.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vision_model import read_tower

from ragen_jax.model.vision import images
from ragen_jax.model.vision import tower as vision
from ragen_jax.model.vision.config import VisionConfig
from ragen_jax.model.vision.tower import VisionTower, patch_positions, windows

pytestmark = pytest.mark.fast

GRIDS = [(1, 2, 2), (1, 4, 4), (1, 6, 10), (1, 14, 8), (1, 2, 12)]
CONFIG = VisionConfig(
    depth=3,
    hidden_size=24,
    intermediate_size=20,
    num_heads=3,
    out_hidden_size=12,
    fullatt_block_indexes=(1,),
    window_size=16,  # 2 x 2 tokens
    patch_size=4,
)
each_grid = pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"{g[1]}x{g[2]}")


def random_params(config, seed=0):
    """Return params with random values, including biases and scales."""
    params = vision.init_params(config, jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: 0.3 * rng.standard_normal(x.shape, np.float32), params)


@functools.partial(jax.jit, static_argnums=(0, 3))
def run(tower, params, pixels_NPC, grid):
    return tower.apply({"params": params}, pixels_NPC, grid)


def pixels(config, grid, count=2, seed=0):
    shape = count, grid[1] * grid[2], config.patch_numbers
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


# ---------------------------------------------------------------- tables


def test_patch_order_by_hand():
    want = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    want += [(y + 2, x) for y, x in want]
    np.testing.assert_array_equal(patch_positions((1, 4, 4), 2), want)
    np.testing.assert_array_equal(patch_positions((1, 2, 3), 1), np.argwhere(np.ones((2, 3))))


def test_windows_by_hand():
    """3 x 2 tokens in windows of 2 x 2: a window of four tokens, and one of the remaining two."""
    patch_WS, real_WS, place_P = windows((1, 6, 4), 2, 2)
    np.testing.assert_array_equal(patch_WS[0], np.arange(16))
    np.testing.assert_array_equal(patch_WS[1][real_WS[1]], np.arange(16, 24))
    np.testing.assert_array_equal(real_WS.sum(1), [16, 8])
    np.testing.assert_array_equal(place_P, np.arange(24))


@each_grid
@pytest.mark.parametrize("side", [1, 2, 3, 9])
def test_windows_divide_the_patches(grid, side):
    patch_WS, real_WS, place_P = windows(grid, 2, side)
    P = grid[1] * grid[2]
    np.testing.assert_array_equal(np.sort(patch_WS[real_WS]), np.arange(P))  # each patch once
    np.testing.assert_array_equal(patch_WS.ravel()[place_P], np.arange(P))
    assert real_WS.ravel()[place_P].all() and real_WS.any(1).all() and real_WS.any(0).all()
    square = patch_positions(grid, 2) // (2 * side)
    of_window = [square[patches[real]] for patches, real in zip(patch_WS, real_WS, strict=True)]
    assert all((x == x[0]).all() for x in of_window)  # within one square of the image
    assert len({tuple(x[0]) for x in of_window}) == len(of_window)  # no square has two windows


# ---------------------------------------------------------------- attention


@pytest.mark.medium
@each_grid
def test_attention_in_windows_is_masked_attention(grid):
    P = grid[1] * grid[2]
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, P, 3, 8), np.float32)
    window_P2 = patch_positions(grid, 2) // 4
    same_PP = (window_P2[:, None] == window_P2).all(-1)
    score = np.einsum("nqhd,nkhd->nhqk", q, k) / np.sqrt(8)
    weight = np.where(same_PP, np.exp(score), 0)
    want = np.einsum("nhqk,nkhd->nqhd", weight / weight.sum(-1, keepdims=True), v)
    got = vision.attend_in_windows(q, k, v, *windows(grid, 2, 2))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.medium
def test_queries_in_pieces_are_all_queries(monkeypatch):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 3, 8), np.float32)
    want = vision.attend_to_all(q, k, v)
    monkeypatch.setattr(vision, "QUERIES", 16)  # does not divide 40
    got = vision.attend_to_all(q, k, v)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- the tower


@pytest.mark.medium
def test_images_do_not_see_each_other():
    params, tower, grid = random_params(CONFIG), VisionTower(CONFIG), (1, 6, 10)
    both = pixels(CONFIG, grid)
    want = run(tower, params, both, grid)
    assert want.shape == (2, 15, 12)
    for i in range(2):
        got = run(tower, params, both[i : i + 1], grid)
        np.testing.assert_allclose(got[0], want[i], rtol=0, atol=1e-5)


@pytest.mark.medium
def test_who_reads_whom():
    """Without a layer that reads the whole image, a patch changes only the tokens of its window;
    with such a layer it changes all tokens."""
    grid = (1, 6, 10)  # tokens 3 x 5: windows of columns 0-1, 2-3 and 4, rows 0-1 and 2
    base, changed = pixels(CONFIG, grid, 1), pixels(CONFIG, grid, 1)
    changed[0, 2 * 4] += 1  # a patch of the token at row 0, column 2
    for layers, seen in ((), {2, 3, 7, 8}), ((1,), set(range(15))):
        config = dataclasses.replace(CONFIG, fullatt_block_indexes=layers)
        params, tower = random_params(config), VisionTower(config)
        off = np.abs(run(tower, params, base, grid) - run(tower, params, changed, grid)).max((0, 2))
        assert set(np.flatnonzero(off > 1e-4)) == seen
        assert not off[[i for i in range(15) if i not in seen]].any()


@pytest.mark.medium
def test_a_window_as_large_as_the_image_is_the_whole_image():
    grid, params = (1, 6, 10), random_params(CONFIG)
    large = dataclasses.replace(CONFIG, window_size=8 * 5)
    whole = dataclasses.replace(CONFIG, fullatt_block_indexes=(0, 1, 2))
    x = pixels(CONFIG, grid)
    got, want = (run(VisionTower(c), params, x, grid) for c in (large, whole))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert np.abs(run(VisionTower(CONFIG), params, x, grid) - want).max() > 0.01


@pytest.mark.medium
def test_places_matter():
    """The same patches at other places are a different picture: half of the rotary angles depend
    on the row, the other half on the column."""
    params, tower = random_params(CONFIG), VisionTower(CONFIG)
    x = pixels(CONFIG, (1, 4, 4), 1)
    wide, tall = (run(tower, params, x, grid) for grid in ((1, 2, 8), (1, 8, 2)))
    square = run(tower, params, x, (1, 4, 4))
    for a, b in ((wide, tall), (wide, square), (tall, square)):
        assert np.abs(a - b).max() > 0.01


@pytest.mark.medium
def test_dtype():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    params, x = random_params(CONFIG), pixels(CONFIG, (1, 6, 10))
    got = run(VisionTower(config), params, x, (1, 6, 10))
    want = run(VisionTower(CONFIG), params, x, (1, 6, 10))
    assert got.dtype == jnp.bfloat16 and want.dtype == jnp.float32
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()


@pytest.mark.medium
@each_grid
def test_one_program_a_grid(grid):
    """No shape depends on the image's content."""
    tower = VisionTower(CONFIG)
    traced = jax.jit(lambda p, x: tower.apply({"params": p}, x, grid)).lower(
        jax.eval_shape(functools.partial(vision.init_params, CONFIG), jax.random.key(0)),
        jax.ShapeDtypeStruct((3, grid[1] * grid[2], CONFIG.patch_numbers), jnp.float32),
    )
    assert traced.out_info.shape == (3, grid[1] * grid[2] // 4, 12)


def test_every_parameter_says_how_it_is_split():
    """Splits follow the table of sharding.py; larger matrices use both parameter axes."""
    from jax.sharding import AbstractMesh

    from ragen_jax.core.sharding import MESH_AXES, spec

    config = dataclasses.replace(CONFIG, hidden_size=32, num_heads=2)
    shapes = jax.eval_shape(
        lambda key: VisionTower(config).init(
            key, jnp.zeros((1, 4, config.patch_numbers)), (1, 2, 2)
        ),
        jax.random.key(0),
    )["params"]
    leaves = jax.tree_util.tree_leaves_with_path(
        shapes, is_leaf=lambda x: isinstance(x, nn.Partitioned)
    )
    mesh = AbstractMesh((2, 2, 2), MESH_AXES)
    for path, leaf in leaves:
        assert isinstance(leaf, nn.Partitioned), path
        used = [axis for axis in spec(leaf.names, leaf.value.shape, mesh) if axis]
        kernel = path[-1].key == "kernel" or path[-1].key == "value" and path[-2].key == "kernel"
        if kernel and "patch" not in str(path):
            assert sorted(used, key=str) == ["fsdp", "tensor"], path
    assert len(leaves) == 22


@pytest.mark.parametrize("name", ["patch_size", "temporal_patch_size", "merge_size"])
def test_a_tower_stands_beside_images_of_its_own_patches(name):
    fields = dict(patch_size=4, temporal_patch_size=2, merge_size=2)
    tower = VisionTower(CONFIG), {}
    vision.Tower(*tower, images.ImageConfig(**fields))
    with pytest.raises(ValueError, match=f"{name} 3, but .*{name} [24]; expected the same"):
        vision.Tower(*tower, images.ImageConfig(**fields | {name: 3}))


# ---------------------------------------------------------------- against torch, if installed


@pytest.mark.medium
@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(hidden_size=32, num_heads=2, window_size=24, fullatt_block_indexes=(0, 2)),
        dict(depth=2, fullatt_block_indexes=(), patch_size=3, window_size=7),
        dict(spatial_merge_size=1, window_size=12, temporal_patch_size=1, in_channels=1),
        dict(spatial_merge_size=3, window_size=24, out_hidden_size=40),
    ],
    ids=["plain", "windows of 3", "no whole", "merge 1", "merge 3"],
)
def test_tower_matches_torch(tmp_path, fields):
    """Several grids at once, some not divisible into windows, with two images each."""
    torch = pytest.importorskip("torch")
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

    config = dataclasses.replace(CONFIG, **fields)
    given = dataclasses.asdict(config)
    given.pop("dtype")
    torch.manual_seed(0)
    reference = theirs.Qwen2_5_VisionTransformerPretrainedModel._from_config(
        theirs.Qwen2_5_VLVisionConfig(**given)
    ).eval()
    with torch.no_grad():
        for p in reference.parameters():
            p.normal_(0, 0.3)
    tensors = {f"visual.{k}": x.numpy() for k, x in reference.state_dict().items()}
    params = read_tower(tmp_path, tensors, config)
    m = config.spatial_merge_size
    grids = [(1, m, m), (1, 3 * m, 5 * m), (1, 7 * m, 4 * m)]
    x = [pixels(config, grid, 2, seed) for seed, grid in enumerate(grids)]
    with torch.no_grad():
        want = reference(
            torch.tensor(np.concatenate([image for pair in x for image in pair])),
            torch.tensor([grid for grid in grids for _ in range(2)]),
        ).pooler_output.numpy()
    got = [run(VisionTower(config), params, *each) for each in zip(x, grids, strict=True)]
    got = np.concatenate([np.asarray(y).reshape(-1, config.out_hidden_size) for y in got])
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(num_heads=5), "hidden_size 24 / num_heads 5 must be a multiple of 4"),
        (dict(hidden_size=18), "hidden_size 18 / num_heads 3"),
        (dict(window_size=7), "window_size 7 must be at least .* = 8"),
        (dict(fullatt_block_indexes=(1, 3)), r"\(1, 3\) must be layers from 0 to depth - 1 = 2"),
    ],
)
def test_configs_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=f"vision_config: .*{message}"):
        dataclasses.replace(CONFIG, **fields)


@pytest.mark.parametrize("grid", [(2, 4, 4), (1, 3, 4), (1, 4, 5), (1, 0, 4)])
def test_grids_that_do_not_fit(grid):
    with pytest.raises(
        ValueError, match=rf"image grid \({grid[0]}, .*multiples of the merge size 2"
    ):
        windows(grid, 2, 2)
    with pytest.raises(ValueError, match="image grid"):
        run(VisionTower(CONFIG), {}, jnp.zeros((1, grid[1] * grid[2], 96)), grid)


@pytest.mark.parametrize("shape", [(16, 96), (1, 15, 96), (1, 16, 95)])
def test_patches_that_do_not_fit(shape):
    with pytest.raises(ValueError, match=r"have shape \(.* need \[images, 16, 96\]"):
        run(VisionTower(CONFIG), {}, jnp.zeros(shape), (1, 4, 4))
