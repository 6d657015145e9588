"""model/gguf: the converted directory has the file's weights and shape, and is made once."""

import json
import shutil

import numpy as np
import pytest
from gguf_files import MODELS, TYPES, WIDE, make_config, permute, write_gguf
from safetensors.numpy import load_file, save_file

from ragen_jax.model import config_json, hf, rotary
from ragen_jax.model.gguf import tensors
from ragen_jax.model.gguf.reader import open_gguf
from ragen_jax.model.gguf.shape import read_shape
from ragen_jax.model.likelihood import token_logps
from ragen_jax.storage import confined

pytestmark = pytest.mark.fast
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ragen_jax" / "models"


@pytest.fixture(autouse=True)
def no_child(monkeypatch):
    """Skip the child process that checks a header, which takes a second (test_reader.py)."""
    monkeypatch.setattr(confined, "check_gguf", lambda *_: None)


def write(folder, name="llama", kind="Q8_0", **options):
    family, changes = MODELS[name]
    config = make_config(family, wide=kind in WIDE, **changes)
    return write_gguf(folder / "model.gguf", config, kind=kind, **options)


def save_reference(folder, written):
    """Write the Hugging Face directory of a written file's weights."""
    folder.mkdir()
    hf.write_json(folder / "config.json", config_json.from_config(written.config, "float32"))
    save_file(written.weights, folder / hf.WEIGHTS)
    return folder


def logps(directory, tokens_BT):
    model, params = hf.load_weights(directory)
    return np.asarray(token_logps(model, params, tokens_BT))


# ---------------------------------------------------------------- weights


@each_model
@pytest.mark.parametrize("kinds", [TYPES[:3], TYPES[3:]], ids=["whole", "quantised"])
def test_every_tensor_is_that_of_the_file(tmp_path, name, kinds):
    for kind in kinds:
        if kind in WIDE and name != "llama":  # of the same code, and 20 times as large
            continue
        written = write(tmp_path, name, kind)
        file = open_gguf(written.path)
        assert read_shape(file) == written.config
        for published, want in written.weights.items():
            stored = np.asarray(tensors.StoredArray(file, written.config, published))
            np.testing.assert_array_equal(stored, want, err_msg=f"{kind} {published}")


@pytest.mark.long
@each_model
@pytest.mark.parametrize("kind", WIDE)
def test_every_tensor_in_wide_blocks_is_that_of_the_file(tmp_path, name, kind):
    written = write(tmp_path, name, kind)
    converted = load_file(hf.resolve(written.path) / hf.WEIGHTS)
    assert converted.keys() == written.weights.keys()
    for published, want in written.weights.items():
        np.testing.assert_array_equal(converted[published], want, err_msg=published)


def compare_with_reference(tmp_path, name, kind):
    written = write(tmp_path, name, kind)
    reference = save_reference(tmp_path / "reference", written)
    rng = np.random.default_rng(1)
    tokens_BT = rng.integers(0, written.config.vocab_size, (2, 24)).astype(np.int32)
    converted = hf.resolve(written.path)
    found, want = (logps(directory, tokens_BT) for directory in (converted, reference))
    assert found.std() > 0.1
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)


@pytest.mark.medium
@each_model
def test_log_probs_are_those_of_the_dequantised_weights(tmp_path, name):
    compare_with_reference(tmp_path, name, "Q4_1")


@pytest.mark.long
@each_model
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in WIDE and kind != "Q4_1"])
def test_log_probs_of_other_types(tmp_path, name, kind):
    compare_with_reference(tmp_path, name, kind)


def test_the_order_of_rows_undoes_that_of_the_converter():
    rng = np.random.default_rng(0)
    for heads, head_dim, columns in ((1, 2, 3), (3, 8, 5), (2, 6, 1)):
        for shape in ((heads * head_dim, columns), (heads * head_dim,)):
            rows = rng.normal(size=shape)
            np.testing.assert_array_equal(
                tensors.order_by_halves(permute(rows, heads), heads), rows
            )


def test_the_order_of_rows_gives_the_attention_of_llama_cpp():
    """llama.cpp turns neighbouring values of a query and key, qwen.py values half a head apart."""
    rng, (heads, head_dim) = np.random.default_rng(0), (2, 8)
    q, k = rng.normal(size=(2, heads * head_dim, 1))
    frequency = np.asarray(rotary.rotary_frequencies(head_dim, 1e4, None))

    def turned(values, position, pairs):
        """Return the rows after the rotation; `pairs` gives the two rows of each frequency."""
        found = values.reshape(heads, head_dim).copy()
        for i, angle in enumerate(position * frequency):
            first, second = pairs(i)
            a, b = found[:, first].copy(), found[:, second].copy()
            found[:, first] = a * np.cos(angle) - b * np.sin(angle)
            found[:, second] = a * np.sin(angle) + b * np.cos(angle)
        return found

    def scores(q, k, pairs):
        return (turned(q, 7, pairs) * turned(k, 3, pairs)).sum(-1)

    stored = scores(q, k, lambda i: (2 * i, 2 * i + 1))
    ours = [tensors.order_by_halves(rows, heads) for rows in (q, k)]
    np.testing.assert_allclose(scores(*ours, lambda i: (i, i + head_dim // 2)), stored, rtol=1e-6)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(scores(q, k, lambda i: (i, i + head_dim // 2)), stored)


# ---------------------------------------------------------------- shape


def test_llama_3_1_is_recognised_by_its_divisors(tmp_path):
    file = open_gguf(write(tmp_path, "llama-3.1").path)
    assert read_shape(file).rope_scaling == rotary.RopeScaling("llama3", 8.0)
    divisors = np.asarray(file.tensors["rope_freqs.weight"].data)
    assert divisors.min() == 1 and divisors.max() == 8 and len(set(divisors)) > 2


def test_divisors_of_one_are_no_scaling(tmp_path):
    written = write(tmp_path, tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert read_shape(open_gguf(written.path)).rope_scaling is None


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scaling.factor": 4.0}, 4.0),  # llama.cpp's default type
        ({"llama.rope.scale_linear": 4.0}, 4.0),  # the name in old files
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.type": "linear"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
    ],
)
def test_linear_scaling(tmp_path, fields, scaling):
    found = read_shape(open_gguf(write(tmp_path, fields=fields).path)).rope_scaling
    assert found == (scaling and rotary.RopeScaling("linear", scaling))


def test_keys_that_files_leave_out(tmp_path):
    fields = dict.fromkeys(("llama.attention.head_count_kv", "llama.rope.freq_base"))
    config = read_shape(open_gguf(write(tmp_path, fields=fields).path))
    assert config.kv_heads == config.heads and config.rope_theta == 1e4


def test_float32_keys_are_read_as_they_were_written(tmp_path):
    fields = {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 130000.0}
    config = read_shape(open_gguf(write(tmp_path, fields=fields).path))
    assert config.norm_eps == 1e-5 and config.rope_theta == 130000


# ---------------------------------------------------------------- the directory


def test_the_directory_is_complete_and_made_once(tmp_path, cache, capsys):
    written = write(tmp_path, kind="Q4_1", fields={"llama.unheard_of\n": 3})
    directory = hf.resolve(written.path)
    assert directory.parent == cache and [*cache.glob(".*")] == []
    assert hf.model_config(written.path) == written.config
    end, further = (
        hf.load_tokenizer(directory).convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|eom|>")
    )
    assert hf.stop_ids(written.path) == (end, further)
    kinds = json.loads((directory / "gguf.json").read_text())["types"]
    assert kinds == {"F32": 5, "Q4_1": 15}
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "writing its weights in float32" in line]) == 1
    assert len([line for line in lines if "quantised to Q4_1: the policy" in line]) == 1
    assert len([line for line in lines if r"are ignored: 'unheard_of\n'" in line]) == 1
    before = {file.name: file.stat().st_mtime_ns for file in directory.iterdir()}
    moved = shutil.move(written.path, tmp_path / "other.gguf")
    assert hf.resolve(moved) == directory
    assert {file.name: file.stat().st_mtime_ns for file in directory.iterdir()} == before
