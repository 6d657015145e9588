"""Directories of Qwen2.5-VL: language model and tower, loaded here and in transformers."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from vision_model import arrange, forward, load, seen_by, shown, torch_logps

from ragen_jax.core.sharding import make_mesh
from ragen_jax.model import config_json, families, hf, qwen, rotary
from ragen_jax.model.families import known_shape
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.model.vision import images
from ragen_jax.model.vision import tower as vision
from ragen_jax.model.vision.config import ImageTokens, VisionConfig
from ragen_jax.storage.checksums import CHECKSUMS

pytestmark = pytest.mark.fast

TOKENIZER = build_tokenizer(())
IDS = len(TOKENIZER)
VISION = VisionConfig(
    depth=3,
    hidden_size=16,
    intermediate_size=12,
    num_heads=2,
    out_hidden_size=24,
    fullatt_block_indexes=(1,),
    window_size=16,
    patch_size=4,
    tokens_per_second=2,
)
CONFIG = qwen.ModelConfig(
    vocab_size=IDS + 6,
    width=24,
    layers=2,
    heads=3,
    kv_heads=1,
    head_dim=8,
    mlp_width=20,
    rope_theta=5e4,
    mrope_section=(1, 1, 2),
    vision=VISION,
    image_tokens=ImageTokens(start=IDS, pad=IDS + 2, end=IDS + 1, video=IDS + 3),
    norm_eps=1e-5,
    family="qwen2_5_vl",
    max_positions=96,
)
UNTIED = dataclasses.replace(CONFIG, tied=False)
IMAGES = images.ImageConfig(min_pixels=256, max_pixels=1600, patch_size=4)
each_config = pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])


def random_params(init, config, seed=0):
    """Return params with random leaves: default biases and norms are all 0 and 1 and would hide
    mix-ups."""
    shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: 0.3 * rng.standard_normal(x.shape, np.float32), shapes)


TOWER = vision.Tower(
    vision.VisionTower(VISION), random_params(vision.init_params, VISION, 1), IMAGES
)


def save(directory, config=CONFIG, **options):
    """Write a directory; return the language model's parameters."""
    params = random_params(qwen.init_params, config)
    hf.save(directory, qwen.Qwen(config), params, TOKENIZER, **{"tower": TOWER} | options)
    return params


@pytest.fixture
def saved(tmp_path):
    """Return a directory that may be changed."""
    save(tmp_path / "x")
    (tmp_path / "x" / CHECKSUMS).unlink()
    return tmp_path / "x"


def edit_json(file, **fields):
    """Set fields of a JSON file; None removes a field."""
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def edit_weights(directory, change):
    """Rewrite the weights after `change(dict of arrays)`."""
    tensors = load_file(directory / hf.WEIGHTS)
    change(tensors)
    save_file(tensors, directory / hf.WEIGHTS)


def assert_same(got, want):
    got, want = flatten_dict(got), flatten_dict(want)
    assert got.keys() == want.keys()
    for path in want:
        assert got[path].dtype == jnp.float32, path
        np.testing.assert_array_equal(got[path], want[path], err_msg="/".join(path))


# ---------------------------------------------------------------- saving and loading


@pytest.mark.medium
@each_config
@pytest.mark.parametrize("max_shard_bytes", [10**9, 10_000], ids=["one file", "shards"])
def test_round_trip(tmp_path, config, max_shard_bytes):
    want = save(tmp_path / "x", config, max_shard_bytes=max_shard_bytes)
    model, params, tokenizer = hf.load(tmp_path / "x")
    assert model == qwen.Qwen(config) and len(tokenizer) == IDS
    assert_same(params, want)
    tower = hf.load_tower(tmp_path / "x")
    assert (tower.model, tower.images) == (TOWER.model, TOWER.images)
    assert_same(tower.params, TOWER.params)
    files = [load_file(file) for file in (tmp_path / "x").glob("*.safetensors")]
    assert (len(files) > 2) == (max_shard_bytes < 10**9)
    names = [name for file in files for name in file]
    assert len(set(names)) == len(names) and ("lm_head.weight" in names) == (not config.tied)
    assert {name.split(".")[0] for name in names} - {"lm_head"} == {"model", "visual"}
    # Saved again, the directory is the same except for the tokenizer's files.
    hf.save(tmp_path / "y", model, params, tokenizer, tower=tower)
    for name in ("config.json", images.FILE):
        assert (tmp_path / "y" / name).read_bytes() == (tmp_path / "x" / name).read_bytes()


@pytest.mark.medium
def test_checksums_cover_the_tower_and_its_pictures(tmp_path):
    save(tmp_path / "x")
    sums = json.loads((tmp_path / "x" / CHECKSUMS).read_text())["crc32"]
    assert {images.FILE, hf.WEIGHTS, "config.json"} <= sums.keys()
    edit_json(tmp_path / "x" / images.FILE, max_pixels=4000)
    with pytest.raises(
        ValueError, match=f"damaged: .*{images.FILE} has changed since it was written"
    ):
        hf.load(tmp_path / "x")


@pytest.mark.medium
def test_a_tower_on_a_mesh_and_in_a_dtype(saved):
    mesh = make_mesh(data=1, fsdp=-1, tensor=1)
    tower = hf.load_tower(saved, mesh=mesh)
    assert_same(tower.params, TOWER.params)
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(tower.params))
    half = hf.load_tower(saved, dtype="bfloat16")
    assert half.model.config == dataclasses.replace(VISION, dtype="bfloat16")
    pixels, grid = images.preprocess(np.zeros((20, 30, 3), np.uint8), IMAGES)
    got, want = (vision.see(x.model, x.params, pixels[None], grid) for x in (half, tower))
    assert got.dtype == jnp.bfloat16 and want.dtype == jnp.float32
    assert 0 < np.abs(got - want).max() < 0.1 * np.abs(want).max()
    with pytest.raises(ValueError, match="dtype 'int8'; accepted: float32, bfloat16"):
        hf.load_tower(saved, dtype="int8")


def test_a_model_that_does_not_see_has_no_tower(language_model):
    assert hf.load_tower(language_model) is None
    model, params, tokenizer = hf.load(language_model)
    with pytest.raises(ValueError, match="tower was passed, but models of family 'qwen2' have no"):
        hf.save(language_model, model, params, tokenizer, tower=TOWER)


@pytest.mark.medium
def test_a_model_that_sees_is_saved_with_its_tower(tmp_path):
    with pytest.raises(ValueError, match="'qwen2_5_vl' is saved with its vision tower; pass tower"):
        save(tmp_path / "x", tower=None)
    deeper = dataclasses.replace(VISION, depth=4)
    with pytest.raises(ValueError, match=r"tower has config .*depth=4.* model expects .*depth=3"):
        save(tmp_path / "x", tower=dataclasses.replace(TOWER, model=vision.VisionTower(deeper)))
    with pytest.raises(ValueError, match="missing or not the tower's: patch/kernel"):
        less = {name: x for name, x in TOWER.params.items() if name != "patch"}
        save(tmp_path / "x", tower=dataclasses.replace(TOWER, params=less))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- config.json

PUBLISHED = {  # config.json of Qwen/Qwen2.5-VL-3B-Instruct
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
SEVEN = PUBLISHED | {  # config.json of Qwen/Qwen2.5-VL-7B-Instruct
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vision_config": PUBLISHED["vision_config"] | {"out_hidden_size": 3584},
    "vocab_size": 152064,
}
# The same config written by transformers 4.57, which omits the class defaults.
NESTED = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 151655,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "mrope_section": [16, 24, 24],
            "rope_type": "default",
            "type": "default",
        },
        "sliding_window": None,
    },
    "vision_config": {"hidden_size": 1280, "in_chans": 3, "tokens_per_second": 2},
}
# The same config written by transformers 5.
FIVE = NESTED | {
    "text_config": {
        name: value for name, value in NESTED["text_config"].items() if name != "rope_scaling"
    }
    | {
        "layer_types": ["full_attention"] * 28,
        "rope_parameters": {
            "mrope_section": [16, 24, 24],
            "rope_theta": 1000000.0,
            "rope_type": "default",
        },
    },
    "vision_config": NESTED["vision_config"]
    | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}},
}


@pytest.mark.parametrize(
    "fields, name",
    [
        (PUBLISHED, "qwen2.5-vl-3b"),
        (SEVEN, "qwen2.5-vl-7b"),
        (NESTED, "qwen2.5-vl-7b"),
        (FIVE, "qwen2.5-vl-7b"),
    ],
    ids=["3b", "7b", "transformers 4.57", "transformers 5"],
)
def test_published_models(fields, name):
    shape = config_json.to_config(fields, "config.json")
    assert shape == families.SHAPES[name]
    written = config_json.from_config(shape, "bfloat16")
    assert config_json.to_config(json.loads(json.dumps(written)), "config.json") == shape
    if fields in (PUBLISHED, SEVEN):  # written fields equal the published ones
        assert written.pop("dtype") == written["torch_dtype"]
        assert written["vision_config"].pop("in_channels") == 3
        for got, want in (
            (written.pop("vision_config"), fields["vision_config"]),
            (written, fields),
        ):
            assert got == {name: want[name] for name in got}


def test_published_ids():
    for name in ("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"):
        shape = known_shape(name)
        assert shape.family == "qwen2_5_vl" and shape.vision.out_hidden_size == shape.width
        assert (shape.image_tokens.start, shape.image_tokens.pad) == (151652, 151655)
    assert known_shape("Qwen/Qwen2.5-3B-Instruct").vision is None


def test_a_tied_head_is_said_in_either_place():
    """transformers 4 wrote the field where it differs from the default, which is False for a text
    config."""
    plain = NESTED | {"text_config": NESTED["text_config"] | {"tie_word_embeddings": True}}
    assert config_json.to_config(plain, "config.json").tied
    assert config_json.to_config(NESTED | {"tie_word_embeddings": True}, "config.json").tied
    assert not config_json.to_config(NESTED, "config.json").tied


def text(**fields):
    return NESTED | {"text_config": NESTED["text_config"] | fields}


def seen(**fields):
    return NESTED | {"vision_config": NESTED["vision_config"] | fields}


@pytest.mark.parametrize(
    "fields, message",
    [
        (text(hidden_act="gelu"), "hidden_act 'gelu' is not supported; accepted: 'silu'"),
        (
            text(use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "layer_types 'sliding_attention' is not supported",
        ),
        (text(rope_scaling={"type": "yarn"}), "rope_type 'yarn' is not .*'default', 'mrope'"),
        (text(rope_scaling={"mrope_section": [1, 2]}), r"mrope_section \(1, 2\)"),
        (text(head_dim=64), "head_dim 64 of 28 attention heads must be .* = 128"),
        (text(num_attention_heads=24), "head_dim 149 of 24 attention heads must be"),
        (NESTED | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (seen(hidden_act="gelu"), "vision_config: hidden_act 'gelu' is not .*: 'silu'"),
        (seen(in_channels=1), "vision_config: in_channels 1 is not supported; accepted: 3"),
        (seen(rope_parameters={"rope_theta": 5.0}), "vision_config: rope_theta 5.0 is not"),
        (seen(patch_size=[14, 14]), r"vision_config: patch_size \[14, 14\] must be a whole num"),
        (seen(fullatt_block_indexes=3), "fullatt_block_indexes 3 must be a list"),
        (seen(fullatt_block_indexes=["a"]), "fullatt_block_indexes 'a' must be a whole number"),
        (seen(fullatt_block_indexes=[32]), r"\(32,\) must be layers from 0 to depth - 1 = 31"),
        (seen(out_hidden_size=64), "out_hidden_size 64 must equal the language model's .* 3584"),
        (NESTED | {"image_token_id": 152064}, "image_token_id 152064 .* below vocab_size 152064"),
        (NESTED | {"vision_config": None}, "vision_config None must be an object"),
        (
            {name: value for name, value in NESTED.items() if name != "vision_config"},
            "field 'vision_config' is missing",
        ),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x[:20],
)
def test_what_is_not_supported_is_named(fields, message):
    with pytest.raises(ValueError, match=f"^config.json: .*{message}") as raised:
        config_json.to_config(fields, "config.json")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vision": None, "image_tokens": None}, "has vision, image_tokens and mrope_section"),
        ({"mrope_section": ()}, "has vision, image_tokens and mrope_section"),
        ({"rope_scaling": rotary.RopeScaling("linear", 2.0)}, "no rope_scaling"),
        ({"heads": 4}, "head_dim 8 of 4 attention heads must be .* = 6"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x,
)
def test_what_others_could_not_open_is_not_written(changes, message):
    with pytest.raises(ValueError, match=message):
        config_json.from_config(dataclasses.replace(CONFIG, **changes), "float32")


# ---------------------------------------------------------------- files of other writers


def test_names_that_transformers_has_in_memory(saved):
    def rename(tensors):
        for name in list(tensors):
            start, _, rest = name.partition(".")
            new = {"model": "model.language_model", "visual": "model.visual"}[start]
            tensors[f"{new}.{rest}"] = tensors.pop(name)

    _, want = hf.load_weights(saved)
    edit_weights(saved, rename)
    assert "model.language_model.norm.weight" in load_file(saved / hf.WEIGHTS)
    _, got = hf.load_weights(saved)
    assert_same(got, want)
    assert_same(hf.load_tower(saved).params, TOWER.params)
    norm = load_file(saved / hf.WEIGHTS)["model.visual.merger.ln_q.weight"]
    edit_weights(saved, lambda t: t.update({"visual.merger.ln_q.weight": norm}))
    with pytest.raises(ValueError, match="tensor visual.merger.ln_q.weight is stored under two na"):
        hf.load_weights(saved)


def test_each_of_the_two_names_what_it_misses(saved):
    name = "visual.blocks.1.attn.proj.bias"
    edit_weights(saved, lambda t: t.update({"visual.more.weight": t.pop(name)}))
    hf.load_weights(saved)
    with pytest.raises(ValueError, match=f"1 missing tensors: {name}$"):
        hf.load_tower(saved)
    edit_weights(saved, lambda t: t.update({name: t["visual.more.weight"]}))
    with pytest.raises(ValueError, match="1 unexpected tensors: visual.more.weight$"):
        hf.load_tower(saved)
    edit_weights(saved, lambda t: t.update({"more.weight": t.pop("visual.more.weight")}))
    hf.load_tower(saved)
    with pytest.raises(ValueError, match="1 unexpected tensors: more.weight$"):
        hf.load_weights(saved)


def test_a_tower_is_no_part_of_other_families(saved):
    edit_json(saved / "config.json", architectures=["Qwen2ForCausalLM"], rope_scaling=None)
    with pytest.raises(ValueError, match=r"\d\d unexpected tensors: visual.blocks.0"):
        hf.load_weights(saved)


def test_a_directory_must_say_what_images_are_made_into(saved):
    fields = (saved / images.FILE).read_text()
    (saved / images.FILE).unlink()
    with pytest.raises(ValueError, match=f"no .*{images.FILE}; a model that reads images needs it"):
        hf.load_tower(saved)
    (saved / images.FILE).write_text("{}")
    with pytest.raises(ValueError, match=f"{images.FILE} has no image settings"):
        hf.load_tower(saved)
    (saved / images.FILE).write_text(fields)
    edit_json(saved / images.FILE, patch_size=14)
    with pytest.raises(ValueError, match="patch_size 14, but .*patch_size 4; expected the same"):
        hf.load_tower(saved)


# ---------------------------------------------------------------- against torch, if installed


def some_rows(ours):
    """Return rows of text only, of one picture, and of two pictures of other sizes."""
    rng = np.random.default_rng(0)

    def text(count):
        return rng.integers(2, IDS, count).tolist()

    a, b = (rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((20, 30), (60, 33)))
    rows = [
        (text(21), []),
        ([*text(3), *shown(ours, a), *text(5)], [a]),
        ([*text(1), *shown(ours, b), *text(2), *shown(ours, a), *text(4)], [b, a]),
    ]
    return arrange(ours, rows, 64)


@pytest.mark.medium
@each_config
def test_transformers_opens_it_and_writes_it_again(tmp_path, config):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText, GenerationConfig
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as processing

    save(tmp_path / "ours", config, stop_ids=(5,), max_shard_bytes=20_000)
    theirs, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype="auto"
    )
    assert not any(info.values())
    assert type(theirs).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert theirs.dtype == torch.float32
    assert theirs.config.vision_config.tokens_per_second == 2
    assert theirs.config.video_token_id == IDS + 3
    stops = GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id
    assert stops == [5, TOKENIZER.eos_token_id]
    processor = processing.Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "ours")

    def logps(folder):
        ours = load(folder)
        rows = some_rows(ours)
        got = forward(ours.model, seen_by(ours.params, rows.images), rows.tokens_BT)
        real_BT1 = (np.arange(64) < rows.length_B[:, None])[..., None]
        return real_BT1 * got[0], real_BT1 * torch_logps(theirs, rows, ours.image_pad)

    got, want = logps(tmp_path / "ours")
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)

    theirs.save_pretrained(tmp_path / "theirs")
    processor.save_pretrained(tmp_path / "theirs")
    again, _ = logps(tmp_path / "theirs")
    np.testing.assert_array_equal(again, got)
    model, params = hf.load_weights(tmp_path / "theirs")
    tower = hf.load_tower(tmp_path / "theirs")
    assert (model, tower.images) == (qwen.Qwen(config), IMAGES)
    hf.save(tmp_path / "again", model, params, TOKENIZER, tower=tower, stop_ids=(5,))
    for name in ("config.json", images.FILE):
        fields = [(tmp_path / folder / name).read_bytes() for folder in ("ours", "again")]
        assert fields[0] == fields[1]


def test_a_processor_of_transformers_opens_it(tmp_path):
    pytest.importorskip("torchvision")  # transformers' video processor requires it
    from transformers import AutoProcessor

    save(tmp_path / "x")
    found = AutoProcessor.from_pretrained(tmp_path / "x")
    assert type(found).__name__ == "Qwen2_5_VLProcessor"
    assert found.image_processor.patch_size == 4
    found.save_pretrained(tmp_path / "theirs")  # writes a single file for all processors
    assert images.read_config(tmp_path / "theirs") == IMAGES
