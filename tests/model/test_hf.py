"""model/hf.py: saved models load again, other writers' directories load, bad directories are
named."""

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import pickle
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from layer_kinds import hybrid, mixture, windowed
from safetensors.numpy import load_file, save_file

from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model import config_json, families, hf, qwen, rotary, weights
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.storage.checksums import CHECKSUMS

pytestmark = pytest.mark.fast

REFERENCE = Path(__file__).parent / "reference"
TOKENIZER = build_tokenizer(Sokoban.words)
TINY = qwen.ModelConfig(
    vocab_size=len(TOKENIZER) + 6,  # may exceed the tokenizer's size
    width=12,
    layers=2,
    heads=3,
    kv_heads=1,
    head_dim=8,  # not width / heads
    mlp_width=20,
    rope_theta=5e4,
    norm_eps=1e-5,
    max_positions=96,
)
UNTIED = dataclasses.replace(TINY, tied=False)
SCALED = rotary.RopeScaling("llama3", 8.0, 2.0, 5.0, original_max_positions=32)
LLAMA = dataclasses.replace(TINY, family="llama", qkv_bias=False, rope_scaling=SCALED)
STRETCHED = dataclasses.replace(LLAMA, tied=False, rope_scaling=rotary.RopeScaling("linear", 4.0))
QWEN3 = dataclasses.replace(TINY, family="qwen3", qkv_bias=False, qk_norm=True)
DEEP = dataclasses.replace(QWEN3, layers=qwen.UNROLLED_LAYERS + 1, tied=False)  # runs as a scan
CONFIGS = {
    **{"qwen2": TINY, "qwen2-untied": UNTIED, "llama": LLAMA, "llama-linear": STRETCHED},
    **{"qwen3": QWEN3, "qwen3-deep": DEEP},
    "gemma3": dataclasses.replace(TINY, **windowed(2)),
    "qwen3-moe": dataclasses.replace(TINY, **mixture(2)),
    "qwen3.5": dataclasses.replace(TINY, **hybrid(2, every=2)),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
# Composed and decomposed accents, symbols outside the BMP, a NUL, runs of blanks, special tokens.
ODD = "e\u0301é \u212b 漢字 🦊\x00\r\n\t  two  spaces <think>##_P_X√</think><|im_end|>\n Up||Up "


def random_params(config, seed=0):
    """Return params with random leaves: default biases and norms are all 0 and 1 and would hide
    mix-ups."""
    shapes = jax.eval_shape(functools.partial(qwen.init_params, config), jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [rng.normal(size=x.shape).astype(np.float32) for x in leaves])


def assert_same(got, want):
    got, want = flatten_dict(got), flatten_dict(want)
    assert got.keys() == want.keys()
    for path in want:
        assert isinstance(got[path], jax.Array) and got[path].dtype == jnp.float32, path
        np.testing.assert_array_equal(got[path], want[path], err_msg="/".join(path))


@pytest.fixture(scope="module")
def params():
    return random_params(TINY)


@pytest.fixture
def saved(tmp_path, params):
    """Return a model directory that may be changed; like other writers' directories it has no
    checksums."""
    hf.save(tmp_path / "tiny", qwen.Qwen(TINY), params, TOKENIZER)
    (tmp_path / "tiny" / CHECKSUMS).unlink()
    return tmp_path / "tiny"


def edit_json(file, **fields):
    """Set fields of a JSON file; None removes a field."""
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def edit_weights(directory, change):
    """Rewrite the weights after `change(dict of arrays)`."""
    tensors = load_file(directory / hf.WEIGHTS)
    change(tensors)
    save_file(tensors, directory / hf.WEIGHTS)
    (directory / CHECKSUMS).unlink(missing_ok=True)


# ---------------------------------------------------------------- saving and loading


@pytest.mark.medium
@each_config
def test_round_trip(tmp_path, config):
    want = random_params(config, seed=1)
    hf.save(tmp_path / "a" / "b", qwen.Qwen(config), jax.device_put(want), TOKENIZER)
    model, params, tokenizer = hf.load(tmp_path / "a" / "b")
    assert model == qwen.Qwen(config)
    assert_same(params, want)
    assert len(tokenizer) == len(TOKENIZER)
    assert ("lm_head.weight" in load_file(tmp_path / "a" / "b" / hf.WEIGHTS)) == (not config.tied)
    assert [x.name for x in (tmp_path / "a").iterdir()] == ["b"]  # no temporary directory left
    assert len({x.stat().st_mode for x in (tmp_path / "a" / "b").iterdir()}) == 1


@pytest.mark.medium
@pytest.mark.parametrize(
    "name",
    [
        *("qwen2_tied", "llama_scaled", "llama_linear", "qwen3_tied", "qwen3_deep"),
        *("gemma3_mixed", "gemma3_deep", "qwen3moe_eight", "qwen3_5_deep"),
    ],
)
def test_a_family_is_written_as_it_was_read(tmp_path, name):
    """A model of transformers, loaded and saved again, is the same kind of model."""
    model, _ = hf.load_weights(REFERENCE / name)
    tokenizer = build_tokenizer(())
    large = dataclasses.replace(model.config, vocab_size=len(tokenizer))
    shapes = jax.eval_shape(functools.partial(qwen.init_params, large), jax.random.key(0))
    hf.save(
        tmp_path / "x",
        qwen.Qwen(large),
        jax.tree.map(lambda x: np.zeros(x.shape), shapes),
        tokenizer,
    )
    want, got = (
        json.loads((d / "config.json").read_text()) for d in (REFERENCE / name, tmp_path / "x")
    )
    names = want.keys() & got.keys() - {"vocab_size", *config_json.TOKEN_IDS}
    assert {"architectures", "model_type", "rope_parameters", "tie_word_embeddings"} <= names
    assert {name: got[name] for name in names} == {name: want[name] for name in names}
    if name.startswith("qwen3") and not model.config.has_state:
        assert {"head_dim", "attention_bias", "use_sliding_window"} <= names
    assert hf.model_config(tmp_path / "x") == large


def test_an_unknown_family_is_refused(tmp_path, params):
    model = qwen.Qwen(dataclasses.replace(TINY, family="gpt2"))
    with pytest.raises(ValueError, match="family 'gpt2'; accepted: qwen2, llama"):
        hf.save(tmp_path / "x", model, params, TOKENIZER)
    assert not list(tmp_path.iterdir())


def test_tokenizer_round_trip(saved):
    # The model's config.json is in the same folder, as AutoTokenizer expects.
    tokenizer = hf.load_tokenizer(saved)
    ids = TOKENIZER(ODD)["input_ids"]
    assert tokenizer(ODD)["input_ids"] == ids
    assert tokenizer.decode(ids) == ODD
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        TOKENIZER.eos_token_id,
        TOKENIZER.pad_token_id,
    )
    messages = [{"role": "user", "content": "Up"}]
    chats = [
        t.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for t in (tokenizer, TOKENIZER)
    ]
    assert chats[0] == chats[1]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("named", "written"),
    [
        ("Qwen2Tokenizer", "Qwen2Tokenizer"),
        ("LlamaTokenizerFast", "LlamaTokenizerFast"),
        ("TokenizersBackend", "PreTrainedTokenizerFast"),  # exists only in transformers 5
        ("SomebodysTokenizer", "PreTrainedTokenizerFast"),
        (None, "PreTrainedTokenizerFast"),
    ],
)
def test_a_tokenizer_is_written_for_transformers_4_as_well(tmp_path, saved, named, written):
    file = saved / "tokenizer_config.json"
    fields = json.loads(file.read_text()) | {"tokenizer_class": named}
    fields["extra_special_tokens"] = ["<|im_start|>"]  # transformers 4 expects no list here
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    model, params = hf.load_weights(saved)
    hf.save(tmp_path / "out", model, params, hf.load_tokenizer(saved))
    found = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] == written
    assert isinstance(found.get("extra_special_tokens", {}), dict)
    assert found["additional_special_tokens"] == ["<|im_start|>"]
    assert not {"backend", "is_local", "local_files_only"} & found.keys()
    again = hf.load_tokenizer(tmp_path / "out")
    assert again(ODD)["input_ids"] == TOKENIZER(ODD)["input_ids"]
    assert set(again.all_special_tokens) == {*TOKENIZER.all_special_tokens, "<|im_start|>"}
    hf.save(tmp_path / "twice", model, params, again)
    second = json.loads((tmp_path / "twice" / "tokenizer_config.json").read_text())
    assert second == found


def test_a_tokenizer_made_here_names_a_class_of_transformers_4(saved):
    found = json.loads((saved / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_stop_ids(saved):
    assert hf.stop_ids(saved) == (TOKENIZER.eos_token_id,)
    edit_json(saved / "generation_config.json", eos_token_id=[7, 3])
    assert hf.stop_ids(saved) == (7, 3)
    edit_json(saved / "generation_config.json", eos_token_id=0)
    assert hf.stop_ids(saved) == (0,)
    edit_json(saved / "generation_config.json", eos_token_id=None)
    assert hf.stop_ids(saved) == ()
    (saved / "generation_config.json").unlink()
    assert hf.stop_ids(saved) == ()


def test_stop_ids_are_kept(tmp_path, params):
    model, own = qwen.Qwen(TINY), TOKENIZER.eos_token_id
    others = tuple(i for i in (7, 3) if i != own)
    for given, want in (((), (own,)), (others, (*others, own)), ((own, *others), (own, *others))):
        hf.save(tmp_path / "x", model, params, TOKENIZER, stop_ids=given)
        assert hf.stop_ids(tmp_path / "x") == want
        again = hf.stop_ids(tmp_path / "x")
        hf.save(tmp_path / "x", model, params, TOKENIZER, stop_ids=again)
        assert hf.stop_ids(tmp_path / "x") == want
    with pytest.raises(
        ValueError, match=rf"stop ids \[{TINY.vocab_size}\].* {TINY.vocab_size} ids"
    ):
        hf.save(tmp_path / "y", model, params, TOKENIZER, stop_ids=(1, TINY.vocab_size))
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("dtype", weights.SAVE_DTYPES)
def test_save_in_a_dtype(tmp_path, params, dtype):
    hf.save(tmp_path / "x", qwen.Qwen(TINY), jax.device_put(params), TOKENIZER, dtype=dtype)
    tensors = load_file(tmp_path / "x" / hf.WEIGHTS)
    assert {x.dtype for x in tensors.values()} == {jnp.dtype(dtype)}
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype
    want = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), params)
    assert_same(hf.load(tmp_path / "x")[1], want)


def test_save_rejects_what_a_dtype_cannot_hold(saved, params):
    model = qwen.Qwen(TINY)
    large = params | {"embed": params["embed"] * 1e5}
    with pytest.raises(ValueError, match="model.embed_tokens.weight.*float16.*bfloat16"):
        hf.save(saved, model, large, TOKENIZER, dtype="float16")
    for dtype in ("float64", "int8"):
        with pytest.raises(ValueError, match=f"{dtype}.*accepted: float32, bfloat16, float16"):
            hf.save(saved, model, params, TOKENIZER, dtype=dtype)
    assert_same(hf.load(saved)[1], params)  # the earlier save is intact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_in_shards(tmp_path, params, dtype):
    model, path = qwen.Qwen(TINY), tmp_path / "x"
    limit = 2000 * jnp.dtype(dtype).itemsize
    hf.save(path, model, params, TOKENIZER, dtype=dtype, max_shard_bytes=limit)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(files) > 2 and not (path / hf.WEIGHTS).exists()
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    held = {file: load_file(path / file) for file in files}
    sizes = [sum(x.nbytes for x in held[file].values()) for file in files]
    assert sizes[0] > limit and list(held[files[0]]) == ["model.embed_tokens.weight"]
    assert max(sizes[1:]) <= limit < min(a + b for a, b in zip(sizes, sizes[1:], strict=False))
    index = json.loads((path / hf.INDEX).read_text())
    assert index["weight_map"] == {name: file for file in files for name in held[file]}
    assert index["metadata"]["total_size"] == sum(sizes)
    assert len({x.stat().st_mode for x in path.iterdir()}) == 1
    want = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), params)
    assert_same(hf.load(path)[1], want)
    hf.save(path, model, params, TOKENIZER)  # a single file replaces the shards and the index
    assert [file.name for file in path.glob("model*")] == [hf.WEIGHTS]
    assert_same(hf.load(path)[1], params)
    with pytest.raises(ValueError, match="max_shard_bytes 0"):
        hf.save(path, model, params, TOKENIZER, max_shard_bytes=0)


def test_a_directory_that_is_not_what_was_written_is_refused(tmp_path, params):
    directory = tmp_path / "policy"
    hf.save(directory, qwen.Qwen(TINY), params, TOKENIZER)
    (directory / "README.md").write_text("added since")
    hf.load(directory)
    for name in (hf.WEIGHTS, "config.json", "tokenizer.json"):
        plain = (directory / name).read_bytes()
        (directory / name).write_bytes(plain[:-2] + bytes([plain[-2] ^ 1]) + plain[-1:])
        with pytest.raises(
            ValueError, match=f"the model is damaged: .*{name} has changed since it was wri"
        ):
            hf.load(directory)
        (directory / name).write_bytes(plain)
    edit_json(directory / "config.json", rms_norm_eps=0.5)
    (directory / CHECKSUMS).unlink()  # as the error message says
    assert hf.load(directory)[0].config.norm_eps == 0.5


@pytest.mark.medium
def test_save_replaces_a_save_and_nothing_else(saved):
    newer = random_params(TINY, seed=2)
    hf.save(saved, qwen.Qwen(TINY), newer, TOKENIZER)
    assert_same(hf.load(saved)[1], newer)
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="notes.txt"):
        hf.save(saved, qwen.Qwen(TINY), random_params(TINY, seed=3), TOKENIZER)
    assert_same(hf.load(saved)[1], newer)
    assert [x.name for x in saved.parent.iterdir()] == ["tiny"]


def test_failed_save_leaves_the_earlier_one(saved, params, monkeypatch):
    def full_disk(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(weights, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        hf.save(saved, qwen.Qwen(TINY), random_params(TINY, seed=4), TOKENIZER)
    assert_same(hf.load(saved)[1], params)
    assert [x.name for x in saved.parent.iterdir()] == ["tiny"]


def test_save_rejects_other_parameters(tmp_path, params):
    model = qwen.Qwen(TINY)
    short = params | {"embed": params["embed"][:-1]}
    with pytest.raises(ValueError, match=r"embed has shape \(\d+, 12\), the model's is \(\d+, 12"):
        hf.save(tmp_path / "x", model, short, TOKENIZER)
    with pytest.raises(ValueError, match="final_norm/scale"):
        less = {k: v for k, v in params.items() if k != "final_norm"}
        hf.save(tmp_path / "x", model, less, TOKENIZER)
    with pytest.raises(ValueError, match="not the model's: layers/k/bias, layers/q/bias"):
        plain = qwen.Qwen(dataclasses.replace(TINY, family="llama", qkv_bias=False))
        hf.save(tmp_path / "x", plain, params, TOKENIZER)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- directories of other writers


def test_sharded_index(saved, params):
    tensors = load_file(saved / hf.WEIGHTS)
    (saved / hf.WEIGHTS).unlink()
    weight_map = {
        name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        save_file({n: x for n, x in tensors.items() if weight_map[n] == file}, saved / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (saved / hf.INDEX).write_text(json.dumps(index))
    assert_same(hf.load(saved)[1], params)
    (saved / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00003"):
        hf.load(saved)


@pytest.mark.parametrize("disk", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_dtypes_on_disk(saved, params, disk):
    edit_weights(saved, lambda t: t.update({name: x.astype(disk) for name, x in t.items()}))
    want = jax.tree.map(lambda x: x.astype(disk).astype(np.float32), params)
    assert_same(hf.load(saved)[1], want)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")], ids=str)
def test_compute_dtype(saved, params, dtype):
    model, got, _ = hf.load(saved, dtype=dtype)
    assert model.config == dataclasses.replace(TINY, dtype="bfloat16")
    assert_same(got, params)  # parameters stay float32


@pytest.mark.parametrize("dtype", ["bf17", "int8"])
def test_bad_compute_dtype(saved, dtype):
    with pytest.raises(ValueError, match=f"{dtype}.*accepted: float32, bfloat16"):
        hf.load(saved, dtype=dtype)


def test_load_on_a_mesh(saved, params):
    mesh = make_mesh(data=1, fsdp=-1, tensor=1)
    _, got, _ = hf.load(saved, mesh=mesh)
    assert_same(got, params)
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(got))


def test_config_before_transformers_5(saved):
    file = saved / "config.json"
    assert hf.model_config(saved) == TINY
    edit_json(file, rope_theta=None, dtype=None)  # only the new style
    assert hf.model_config(saved) == TINY
    edit_json(file, rope_parameters=None, dtype=None, rope_theta=5e4, rope_scaling={})
    assert hf.model_config(saved) == TINY
    edit_json(file, head_dim=None, num_key_value_heads=None, tie_word_embeddings=None)
    edit_json(file, rope_theta=None, architectures=None)
    assert hf.model_config(saved) == dataclasses.replace(
        TINY, head_dim=4, kv_heads=3, tied=False, rope_theta=1e4
    )


def test_llama_config_before_transformers_5(tmp_path):
    hf.save(tmp_path, qwen.Qwen(LLAMA), random_params(LLAMA), TOKENIZER)
    file = tmp_path / "config.json"
    assert hf.model_config(tmp_path) == LLAMA
    new = json.loads(file.read_text())
    edit_json(file, rope_theta=None, rope_scaling=None, dtype=None)  # only the new style
    assert hf.model_config(tmp_path) == LLAMA
    old = {"type" if k == "rope_type" else k: v for k, v in new["rope_scaling"].items()}
    assert "rope_theta" not in old
    edit_json(file, rope_parameters=None, rope_theta=5e4, rope_scaling=old, dtype=None)
    assert hf.model_config(tmp_path) == LLAMA
    edit_json(file, rope_scaling=None, attention_bias=None, head_dim=None, architectures=None)
    assert hf.model_config(tmp_path) == dataclasses.replace(LLAMA, rope_scaling=None, head_dim=4)


@pytest.mark.medium
def test_qwen3_config_before_transformers_5(tmp_path):
    hf.save(tmp_path, qwen.Qwen(DEEP), random_params(DEEP), TOKENIZER)
    file = tmp_path / "config.json"
    assert hf.model_config(tmp_path) == DEEP
    edit_json(file, rope_parameters=None, attention_bias=None, dtype=None, architectures=None)
    assert hf.model_config(tmp_path) == DEEP
    edit_json(file, head_dim=None)  # the default is not width / heads
    assert hf.model_config(tmp_path) == dataclasses.replace(DEEP, head_dim=128)


@pytest.mark.parametrize("name", families.SHAPES)
def test_published_shapes_as_config_json(name):
    config = families.SHAPES[name]
    fields = json.loads(json.dumps(config_json.from_config(config, "bfloat16")))
    assert config_json.to_config(fields, "config.json") == config
    kinds = {"qwen2.5-vl": "qwen2_5_vl", "qwen2.5": "qwen2", "qwen3-30b": "qwen3_moe"}
    kinds |= {"qwen3.5": "qwen3_5_text"}
    kinds |= {"qwen3": "qwen3", "llama": "llama", "smollm2": "llama", "gemma-3": "gemma3_text"}
    assert fields["model_type"] == next(kinds[start] for start in kinds if name.startswith(start))


def test_old_llama_constants_are_ignored(tmp_path):
    params = random_params(LLAMA)
    hf.save(tmp_path, qwen.Qwen(LLAMA), params, TOKENIZER)
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4) for i in range(2)}
    edit_weights(tmp_path, lambda t: t.update(extra))
    assert_same(hf.load(tmp_path)[1], params)


def test_tied_head_in_the_file(saved, params):
    name, embed = "lm_head.weight", "model.embed_tokens.weight"
    edit_weights(saved, lambda t: t.update({name: t[embed]}))
    assert_same(hf.load(saved)[1], params)
    edit_weights(saved, lambda t: t.update({name: t[embed] + 1}))
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        hf.load(saved)


@pytest.mark.medium
def test_written_by_transformers():
    for name, tied, hd in (
        ("qwen2_tied", True, 8),
        ("qwen2_untied", False, 8),
        ("llama_scaled", True, 16),
    ):
        model, params = hf.load_weights(REFERENCE / name)
        assert model.config.tied == tied == ("head" not in params)
        assert model.config.family == name.split("_")[0]
        assert ("bias" in params["layers"]["q"]) == name.startswith("qwen2")
        tensors = load_file(REFERENCE / name / hf.WEIGHTS)
        q = tensors["model.layers.1.self_attn.q_proj.weight"]  # [heads * head_dim, width]
        np.testing.assert_array_equal(params["layers"]["q"]["kernel"][1, :, 2, 3], q[2 * hd + 3])
        o = tensors["model.layers.0.self_attn.o_proj.weight"]  # [width, heads * head_dim]
        np.testing.assert_array_equal(params["layers"]["o"]["kernel"][0, 2, 3], o[:, 2 * hd + 3])


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "name", ["/no/such/model", "./model", "~/no-model", "a/b/c", "model", "m/"]
)
def test_missing_directory(name):
    with pytest.raises(ValueError, match=f"no model directory {name}.*config.json.*safetensors"):
        hf.load(name)


def test_file_for_a_directory(saved):
    with pytest.raises(ValueError, match="config.json is a file"):
        hf.load(saved / "config.json")


@pytest.mark.parametrize("error", [None, ConnectionError("no route")])
def test_hub_id_without_network(monkeypatch, tmp_path, error):
    import huggingface_hub

    if error:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: throw(error))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    with pytest.raises(ValueError) as raised:
        hf.load(name)
    text = str(raised.value)
    assert f"the model {name} could not be downloaded" in text and "\n" not in text
    assert f"`hf download {name} --local-dir DIR`" in text and "--config.model.path=DIR" in text
    assert "no route" in text or not error


def throw(error):
    raise error


def test_hub_id_downloads(monkeypatch, saved, params):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns):
        asked.append(name)
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert_same(hf.load("org/tiny")[1], params)
    assert hf.stop_ids("org/tiny") == (TOKENIZER.eos_token_id,)
    assert hf.model_config("org/tiny") == TINY
    assert asked == ["org/tiny"] * 3


@pytest.mark.medium
@pytest.mark.parametrize(
    "fields, message",
    [
        ({"architectures": ["MistralForCausalLM"]}, "Mistral.*Qwen2ForCausalLM, LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gemma"}, "gemma.*Qwen2ForCausalLM"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic'.*'default', 'linear'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type 'linear' needs factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "rope_type 'llama3' needs high_freq_factor, original_max_position_embeddings",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": "x"}}, "config.json: .*'str'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 2}, "3 attention heads cannot share 2 key heads"),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "bias on o_proj"),
        ({"architectures": ["LlamaForCausalLM"], "mlp_bias": True}, "mlp_bias True"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "bias on o_proj"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}
            | {"sliding_window": 8, "max_window_layers": 1},
            "layer 1: layer_types 'sliding_attention' is not supported; accepted: 'full_attention'",
        ),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2Moe.*; accepted: .*Qwen3ForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "field 'num_local_experts' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'.*'silu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_attention",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "field 'hidden_size' is missing"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else x.split(".")[0],
)
def test_unsupported_config(saved, fields, message):
    edit_json(saved / "config.json", **fields)
    with pytest.raises(ValueError, match=message) as raised:
        hf.load(saved)
    assert "\n" not in str(raised.value)


def test_another_architecture_is_seen_in_the_tensors(saved):
    edit_json(saved / "config.json", architectures=["LlamaForCausalLM"], attention_bias=False)
    with pytest.raises(ValueError, match="6 unexpected tensors: .*k_proj.bias"):
        hf.load(saved)
    edit_json(saved / "config.json", architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ValueError, match="4 missing tensors: .*k_norm.weight, .*q_norm.weight"):
        hf.load(saved)


def test_a_norm_of_heads_that_is_missing_or_of_another_width(tmp_path):
    hf.save(tmp_path, qwen.Qwen(QWEN3), random_params(QWEN3), TOKENIZER)
    name = "model.layers.1.self_attn.q_norm.weight"
    edit_weights(tmp_path, lambda t: t.update({name: np.ones(4, np.float32)}))
    with pytest.raises(ValueError, match=rf"{name} has shape \(4,\); config.json needs \(8,\)"):
        hf.load(tmp_path)
    edit_weights(tmp_path, lambda t: t.pop(name))
    with pytest.raises(ValueError, match=f"1 missing tensors: {name}$"):
        hf.load(tmp_path)


def test_wrong_shape(saved):
    name = "model.layers.1.mlp.down_proj.weight"
    edit_weights(saved, lambda t: t.update({name: t[name][:, :-1].copy()}))
    with pytest.raises(ValueError, match=rf"{name} has shape \(12, 19\).* needs \(12, 20\)"):
        hf.load(saved)


def test_wrong_tensor_dtype(saved):
    name = "model.norm.weight"
    edit_weights(saved, lambda t: t.update({name: t[name].astype(np.int8)}))
    with pytest.raises(ValueError, match=f"{name} is I8; accepted: F32, BF16"):
        hf.load(saved)


@pytest.mark.medium
@pytest.mark.parametrize(
    "disk, value",
    [
        *(("float32", value) for value in (np.nan, np.inf, -np.inf)),
        *((disk, np.nan) for disk in ("bfloat16", "float16", "float64")),
        ("float64", 1e300),  # becomes infinity in float32
    ],
)
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.bias"]
    + ["model.layers.0.mlp.down_proj.weight"],
)
def test_values_that_are_not_finite_are_refused(saved, name, disk, value):
    def spoil(tensors):
        tensors |= {n: x.astype(disk) for n, x in tensors.items()}
        tensors[name].reshape(-1)[-3] = value

    edit_weights(saved, spoil)
    with pytest.raises(ValueError, match=f"^tensor {name} holds NaN, infinity or values"):
        hf.load(saved)


def test_missing_and_unexpected_tensors(saved):
    name = "model.layers.0.self_attn.k_proj.bias"
    edit_weights(saved, lambda t: t.update({"more.weight": t.pop(name)}))
    with pytest.raises(ValueError, match=f"1 missing tensors: {name}"):
        hf.load(saved)
    edit_weights(saved, lambda t: t.update({name: t["more.weight"]}))
    with pytest.raises(ValueError, match="1 unexpected tensors: more.weight"):
        hf.load(saved)


@pytest.mark.medium
@pytest.mark.parametrize(
    "file, message",
    [
        ("config.json", "no .*config.json"),
        (hf.WEIGHTS, f"neither {hf.WEIGHTS} nor {hf.INDEX}"),
        ("tokenizer.json", "neither tokenizer.json nor"),
    ],
)
def test_missing_file(saved, file, message):
    (saved / file).unlink()
    with pytest.raises(ValueError, match=message):
        hf.load(saved)


@pytest.mark.medium
@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", marks=pytest.mark.slow),
        "null",
        pytest.param("[1]", marks=pytest.mark.slow),
        "[" * 200_000,
        pytest.param('{"model": 5}', marks=pytest.mark.slow),
        pytest.param("\0" * 9, marks=pytest.mark.slow),
    ],
)
def test_a_damaged_tokenizer_is_named(saved, content):
    (saved / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="the tokenizer of .* cannot be read"):
        hf.load_tokenizer(saved)


@pytest.mark.parametrize("file", ["config.json", hf.WEIGHTS])
def test_torn_file(saved, file):
    content = (saved / file).read_bytes()
    for length in (len(content) // 2, len(content) - 1, 5, 0):
        if file == "config.json" and length == len(content) - 1:
            continue  # only the last newline is missing
        (saved / file).write_bytes(content[:length])
        with pytest.raises(ValueError, match=file) as raised:
            hf.load(saved)
        assert "\n" not in str(raised.value)


def test_config_that_is_no_object(saved):
    (saved / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json is not a JSON object"):
        hf.load(saved)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": ["x"]}'])
def test_bad_index(saved, text):
    (saved / hf.WEIGHTS).unlink()
    (saved / hf.INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"{hf.INDEX} is not an index of weights"):
        hf.load(saved)


def stored_as_the_hub_does(model, cache):
    """Return a model directory in which all files are links to ../../blobs."""
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in model.iterdir():
        shutil.move(file, cache / "blobs" / f"{file.name}.blob")
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}.blob")
    return snapshot


def test_an_index_names_files_of_its_own_folder_alone(saved, params, tmp_path):
    elsewhere = tmp_path / "elsewhere.safetensors"
    shutil.move(saved / hf.WEIGHTS, elsewhere)
    weight_map = dict.fromkeys(load_file(elsewhere))
    for name in (f"../{elsewhere.name}", str(elsewhere), f"part/../../{elsewhere.name}", "", 3):
        index = {"weight_map": {tensor: name for tensor in weight_map}}
        (saved / hf.INDEX).write_text(json.dumps(index))
        with pytest.raises(ValueError, match=f"{hf.INDEX} names .*, which is outside its fol"):
            hf.load(saved)
    # Links are allowed: the owner of the folder made them, or the hub's cache, in which all files
    # are links.
    shutil.copy(elsewhere, saved / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(weight_map, "model-00001-of-00001.safetensors")}
    (saved / hf.INDEX).write_text(json.dumps(index))
    snapshot = stored_as_the_hub_does(saved, tmp_path / "hub")
    assert_same(hf.load(snapshot)[1], params)


def test_weights_that_are_pickles_are_not_read(saved, tmp_path):
    class Planted:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "ran",)

    (saved / hf.WEIGHTS).unlink()
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Planted()))
    with pytest.raises(ValueError, match=f"neither {hf.WEIGHTS} nor {hf.INDEX}"):
        hf.load(saved)
    (saved / hf.WEIGHTS).write_bytes(pickle.dumps(Planted()))  # the safe format's file name
    with pytest.raises(ValueError, match=f"cannot read .*{hf.WEIGHTS}"):
        hf.load(saved)
    assert not (tmp_path / "ran").exists()


ASKING = """
import os, pathlib
pathlib.Path(os.environ["PLANTED"]).touch()
from transformers import PreTrainedTokenizerFast as Planted
"""


@pytest.mark.medium
def test_code_in_a_model_directory_is_not_run_and_nobody_is_asked(saved, tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    monkeypatch.setenv("PLANTED", str(ran))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    (saved / "planted.py").write_text(ASKING)
    planted = {
        "AutoTokenizer": ["planted.Planted", "planted.Planted"],
        **dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "planted.Planted"),
    }
    file = saved / "tokenizer_config.json"
    fields = json.loads(file.read_text()) | {"auto_map": planted}
    file.write_text(json.dumps(fields | {"tokenizer_class": "Planted"}))
    config = json.loads((saved / "config.json").read_text()) | {"auto_map": planted}
    (saved / "config.json").write_text(json.dumps(config))
    hf.load(saved)  # tokenizer.json is sufficient
    words = json.loads((saved / "tokenizer.json").read_text())["model"]["vocab"]
    (saved / "tokenizer.json").unlink()
    (saved / "vocab.json").write_text(json.dumps(words))
    (saved / "merges.txt").write_text("")
    for kind in ("qwen2", "planted"):
        (saved / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        with contextlib.suppress(ValueError):
            hf.load_tokenizer(saved)
        assert not ran.exists() and len(sys.stdin.getvalue()) - sys.stdin.tell() == 18


def test_tokenizer_larger_than_the_model(tmp_path):
    shutil.copytree(REFERENCE / "qwen2_tied", tmp_path / "small")
    TOKENIZER.save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=f"{len(TOKENIZER)} ids.* 64 rows"):
        hf.load(tmp_path / "small")


# ---------------------------------------------------------------- against torch, if installed


@pytest.mark.medium
@each_config
@pytest.mark.parametrize("shards", [1, 3])
def test_transformers_opens_it(tmp_path, config, shards):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, GenerationConfig

    params = jax.tree.map(lambda x: x * 0.3, random_params(config, seed=5))
    hf.save(
        tmp_path / "tiny",
        qwen.Qwen(config),
        params,
        TOKENIZER,
        stop_ids=(5,),
        max_shard_bytes=10**9 if shards == 1 else 10_000,
    )
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "tiny", output_loading_info=True, dtype="auto"
    )
    assert not any(info.values())
    assert type(theirs).__name__ == families.family_of(config).architecture
    assert theirs.dtype == torch.float32
    stops = GenerationConfig.from_pretrained(tmp_path / "tiny").eos_token_id
    assert stops == [5, TOKENIZER.eos_token_id]
    tokens_BT = np.random.default_rng(0).integers(0, config.vocab_size, (2, 40))
    with torch.no_grad():
        want = theirs(torch.tensor(tokens_BT)).logits.log_softmax(-1).numpy()
    hidden, _ = qwen.Qwen(config).apply({"params": params}, tokens_BT)
    got = jax.nn.log_softmax(qwen.logits(params, hidden))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-5)  # 40 tokens: larger angles


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(4))
def test_random_qwen3_models_of_transformers(tmp_path, seed):
    """Models of transformers give the same log-probs here, and our copies of them the same
    there."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, Qwen3Config

    draw = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kv_heads, share = draw.integers(1, 4, 2).tolist()
    fields = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=(2, qwen.UNROLLED_LAYERS + 2)[seed % 2],
        num_attention_heads=kv_heads * share,
        num_key_value_heads=kv_heads,
        head_dim=int(draw.choice([10, 16])),  # differs from 24 / heads
        rms_norm_eps=float(draw.choice([1e-6, 1e-3])),
        tie_word_embeddings=seed < 2,
        rope_parameters={"rope_type": "default", "rope_theta": float(draw.choice([1e4, 1e6]))},
    )
    theirs = AutoModelForCausalLM.from_config(fields).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():  # norms differ from 1
            p.normal_(1.0 if "norm" in name else 0.0, 0.3 if p.ndim == 1 else 0.15)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens_BT = draw.integers(0, fields.vocab_size, (3, 33))

    def logps(model):
        with torch.no_grad():
            return model(torch.tensor(tokens_BT)).logits.log_softmax(-1).numpy()

    want = logps(theirs)
    model, params = hf.load_weights(tmp_path / "theirs")
    hidden, _ = qwen.Qwen(model.config).apply({"params": params}, tokens_BT)
    got = jax.nn.log_softmax(qwen.logits(params, hidden))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    hf.save(tmp_path / "ours", model, params, TOKENIZER)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert type(again) is type(theirs)
    np.testing.assert_array_equal(logps(again), want)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_transformers_opens_a_dtype(tmp_path, params, dtype):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    hf.save(tmp_path / "tiny", qwen.Qwen(TINY), params, TOKENIZER, dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype="auto")
    assert theirs.dtype == getattr(torch, dtype)
    got = theirs.get_input_embeddings().weight.float().detach().numpy()
    np.testing.assert_array_equal(got, params["embed"].astype(dtype).astype(np.float32))
