"""model/vision/tensors.py: names, layouts, and conversion in both directions."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from load_weights_script import counted
from safetensors.numpy import load_file
from vision_model import read_tower

from ragen_jax.core.sharding import make_mesh
from ragen_jax.model import weights
from ragen_jax.model.vision import tensors as vision_tensors
from ragen_jax.model.vision import tower as vision
from ragen_jax.model.vision.config import VisionConfig

pytestmark = pytest.mark.fast

REFERENCE = Path(__file__).parents[1] / "reference" / "qwen2_5_vl"
CONFIG = VisionConfig(  # the reference model's
    depth=3,
    hidden_size=16,
    intermediate_size=20,
    num_heads=2,
    out_hidden_size=32,
    fullatt_block_indexes=(1,),
    window_size=16,
    patch_size=4,
)


@pytest.fixture
def tensors():
    """Return the tower's tensors from a file written by torch, in a dict that may be changed."""
    found = load_file(REFERENCE / "model.safetensors")
    return {name: x for name, x in found.items() if name.startswith("visual.")}


@pytest.fixture(scope="module")
def params():
    with weights.open_tensors(REFERENCE) as found:
        vision_tensors.check_tensors(REFERENCE, CONFIG, found)
        return vision_tensors.read(found, CONFIG)


@pytest.mark.medium
def test_a_torch_file_there_and_back(tmp_path, tensors, params):
    want = jax.eval_shape(lambda key: vision.init_params(CONFIG, key), jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, want)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    weights.write(
        tmp_path,
        vision_tensors.to_tensors(CONFIG, params),
        dtype="float32",
        max_shard_bytes=10**9,
        writer=True,
    )
    back = load_file(tmp_path / weights.WEIGHTS)
    assert back.keys() == tensors.keys()
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)


def test_layouts_by_hand(tensors, params):
    layers = params["layers"]
    qkv = tensors["visual.blocks.2.attn.qkv.weight"]  # [3 * heads * 8, inputs]
    assert layers["k"]["kernel"][2, 5, 1, 3] == qkv[16 + 8 + 3, 5]
    assert layers["v"]["bias"][2, 1, 3] == tensors["visual.blocks.2.attn.qkv.bias"][32 + 8 + 3]
    # In this matrix the heads are the inputs.
    proj = tensors["visual.blocks.0.attn.proj.weight"]
    assert layers["o"]["kernel"][0, 1, 3, 5] == proj[5, 8 + 3]
    patch = params["patch"]["kernel"]
    kernel = tensors["visual.patch_embed.proj.weight"]  # [outputs, colour, frame, row, column]
    assert patch[((2 * 2 + 1) * 4 + 3) * 4 + 2, 7] == kernel[7, 2, 1, 3, 2]


@pytest.mark.medium
def test_the_published_names():
    """Check all tensors of a tower of the published size."""
    config = VisionConfig(32, 1280, 3420, 16, 2048, (7, 15, 23, 31))
    leaves = vision_tensors.plan(config)
    shapes = {name: leaf.tensor_shape for leaf in leaves for name in leaf.names}
    assert len(shapes) == 32 * 12 + 1 + 1 + 4
    assert shapes["visual.patch_embed.proj.weight"] == (1280, 3, 2, 14, 14)
    assert shapes["visual.blocks.31.attn.qkv.weight"] == (3840, 1280)
    assert shapes["visual.blocks.31.mlp.down_proj.weight"] == (1280, 3420)
    assert shapes["visual.merger.mlp.2.weight"] == (2048, 5120)


def test_only_the_parts_of_a_mesh_are_read_and_only_once(tensors, params):
    mesh = make_mesh(data=1, fsdp=-1, tensor=1)
    shardings = vision.param_shardings(CONFIG, mesh)
    reads = []
    with weights.open_tensors(REFERENCE) as found:
        got = vision_tensors.read(counted(found, reads), CONFIG, shardings)
    assert sum(n for _, n in reads) == sum(x.nbytes for x in tensors.values())
    assert {name for name, _ in reads} == tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert jax.tree.map(lambda x: x.sharding, got) == shardings


def test_what_is_multiplied_in_a_dtype_is_held_in_it(params):
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    with weights.open_tensors(REFERENCE) as found:
        got = flatten_dict(vision_tensors.read(found, config))
    for path, x in flatten_dict(params).items():
        want = np.asarray(x)
        if path[-1] != "scale":
            want = want.astype(ml_dtypes.bfloat16)
        assert got[path].dtype == want.dtype, path
        np.testing.assert_array_equal(got[path], want, err_msg="/".join(path))


def test_other_dtypes_on_disk(tmp_path, tensors, params):
    tensors = {name: x.astype("float16") for name, x in tensors.items()}
    for path, x in flatten_dict(read_tower(tmp_path, tensors, CONFIG)).items():
        want = np.asarray(flatten_dict(params)[path]).astype("float16").astype("float32")
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, want)


# ---------------------------------------------------------------- bad input


def test_missing_and_unexpected(tmp_path, tensors):
    name = "visual.blocks.1.attn.qkv.bias"
    tensors["visual.more.weight"] = tensors.pop(name)
    with pytest.raises(ValueError, match=f"1 missing tensors: {name}$"):
        read_tower(tmp_path, tensors, CONFIG)
    tensors[name] = tensors["visual.more.weight"]
    with pytest.raises(ValueError, match="1 unexpected tensors: visual.more.weight$"):
        read_tower(tmp_path, tensors, CONFIG)


@pytest.mark.parametrize(
    "name, want",
    [
        ("visual.blocks.1.attn.qkv.weight", r"\(48, 16\)"),
        ("visual.merger.ln_q.weight", r"\(16,\)"),
        ("visual.patch_embed.proj.weight", r"\(16, 3, 2, 4, 4\)"),
    ],
)
def test_wrong_shapes(tmp_path, tensors, name, want):
    tensors[name] = np.zeros(7, np.float32)
    with pytest.raises(ValueError, match=rf"{name} has shape \(7,\); config.json needs {want}"):
        read_tower(tmp_path, tensors, CONFIG)


@pytest.mark.parametrize(
    "name", ["visual.patch_embed.proj.weight", "visual.blocks.2.attn.qkv.bias"]
)
def test_values_that_are_not_finite(tmp_path, tensors, name):
    tensors[name].reshape(-1)[-1] = np.nan
    with pytest.raises(ValueError, match=f"^tensor {name} holds NaN"):
        read_tower(tmp_path, tensors, CONFIG)


def test_parameters_that_are_not_the_towers(params):
    with pytest.raises(ValueError, match="not the tower's: patch/kernel"):
        vision_tensors.to_tensors(CONFIG, {k: x for k, x in params.items() if k != "patch"})
    wide = params | {"patch": {"kernel": np.zeros((96, 17))}}
    with pytest.raises(ValueError, match=r"patch/kernel has shape \(96, 17\), the tower's is \(96"):
        vision_tensors.to_tensors(CONFIG, wide)
