"""model/vision_tensors.py: names, layouts, and both directions."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

from ragen_jax.model import vision, vision_tensors
from ragen_jax.model.vision import VisionConfig

pytestmark = pytest.mark.fast

REFERENCE = Path(__file__).parent / "reference" / "qwen2_5_vl"
CONFIG = VisionConfig(  # of the reference
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
    """The tower's of a file that torch wrote, in a dict that may be changed."""
    return load_file(REFERENCE / "model.safetensors")


def test_a_torch_file_there_and_back(tensors):
    params = vision_tensors.to_params(tensors, CONFIG)
    want = jax.eval_shape(lambda key: vision.init_params(CONFIG, key), jax.random.key(0))
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda x: x.shape, want)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}
    back = vision_tensors.to_tensors(params, CONFIG)
    assert back.keys() == {name for name in tensors if name.startswith("visual.")}
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)


def test_layouts_by_hand(tensors):
    layers = vision_tensors.to_params(tensors, CONFIG)["layers"]
    qkv = tensors["visual.blocks.2.attn.qkv.weight"]  # [3 * heads * 8, inputs]
    assert layers["k"]["kernel"][2, 5, 1, 3] == qkv[16 + 8 + 3, 5]
    assert layers["v"]["bias"][2, 1, 3] == tensors["visual.blocks.2.attn.qkv.bias"][32 + 8 + 3]
    # The other way round the heads are the inputs.
    proj = tensors["visual.blocks.0.attn.proj.weight"]
    assert layers["o"]["kernel"][0, 1, 3, 5] == proj[5, 8 + 3]
    patch = vision_tensors.to_params(tensors, CONFIG)["patch"]["kernel"]
    kernel = tensors["visual.patch_embed.proj.weight"]  # [outputs, colour, frame, row, column]
    assert patch[((2 * 2 + 1) * 4 + 3) * 4 + 2, 7] == kernel[7, 2, 1, 3, 2]


def test_the_published_names():
    """All tensors of the tower of a tower of the published size."""
    config = VisionConfig(32, 1280, 3420, 16, 2048, (7, 15, 23, 31))
    leaves = vision_tensors.plan(config)
    shapes = {name: leaf.tensor_shape for leaf in leaves for name in leaf.names}
    assert len(shapes) == 32 * 12 + 1 + 1 + 4
    assert shapes["visual.patch_embed.proj.weight"] == (1280, 3, 2, 14, 14)
    assert shapes["visual.blocks.31.attn.qkv.weight"] == (3840, 1280)
    assert shapes["visual.blocks.31.mlp.down_proj.weight"] == (1280, 3420)
    assert shapes["visual.merger.mlp.2.weight"] == (2048, 5120)


def test_other_dtypes(tensors):
    tensors = {name: x.astype("float16") for name, x in tensors.items()}
    for leaf in flatten_dict(vision_tensors.to_params(tensors, CONFIG)).values():
        assert leaf.dtype == np.float32


def test_missing_and_unexpected(tensors):
    name = "visual.blocks.1.attn.qkv.bias"
    tensors["visual.more.weight"] = tensors.pop(name)
    with pytest.raises(ValueError, match=f"vision tower: 1 missing tensors: {name}$"):
        vision_tensors.to_params(tensors, CONFIG)
    tensors[name] = tensors["visual.more.weight"]
    with pytest.raises(ValueError, match="1 unexpected tensors: visual.more.weight$"):
        vision_tensors.to_params(tensors, CONFIG)


@pytest.mark.parametrize(
    "name, want",
    [
        ("visual.blocks.1.attn.qkv.weight", r"\(48, 16\)"),
        ("visual.merger.ln_q.weight", r"\(16,\)"),
        ("visual.patch_embed.proj.weight", r"\(16, 3, 2, 4, 4\)"),
    ],
)
def test_wrong_shapes(tensors, name, want):
    tensors[name] = np.zeros(7, np.float32)
    with pytest.raises(
        ValueError, match=rf"{name} has shape \(7,\), vision_config asks for {want}"
    ):
        vision_tensors.to_params(tensors, CONFIG)
