"""The encoder: torch's vectors of a small BERT, all kinds of text, unusable files."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from ragen_jax.core.sharding import make_mesh
from ragen_jax.envs.search_qa import e5
from ragen_jax.envs.search_qa.e5 import E5, PASSAGE, QUERY

pytestmark = pytest.mark.fast

REFERENCE = Path(__file__).with_name("reference") / "bert"
MESH = make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


@pytest.mark.medium
def test_vectors_are_those_of_torch():
    rows = json.loads((REFERENCE / "vectors.json").read_text())
    assert any(len(row["text"]) > 200 for row in rows)  # longer than the model's positions allow
    vectors = E5(REFERENCE, MESH, prefix="")([row["text"] for row in rows])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [row["vector"] for row in rows], atol=2e-6)


@pytest.mark.medium
def test_a_prefix_is_put_in_front():
    plain, query, passage = (E5(REFERENCE, MESH, prefix=p) for p in ("", QUERY, PASSAGE))
    assert query.width == 16
    (a,), (b,), (c,) = query(["who?"]), plain(["query: who?"]), passage(["who?"])
    assert a.tobytes() == b.tobytes() and not np.allclose(a, c, atol=1e-2)


@pytest.mark.medium
def test_a_text_has_its_vector_whatever_comes_with_it():
    encode = E5(REFERENCE, MESH, prefix=QUERY)
    texts = ["who?", "x" * 50, "", "\ud800\x00", "[SEP] [PAD]", *["many words " * 9] * 40]
    together = encode(texts)
    assert together.shape == (45, 16)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
    for text, vector in zip(texts[:6], together, strict=False):
        assert encode([text])[0].tobytes() == vector.tobytes()
    assert encode([]).shape == (0, 16)


@pytest.mark.medium
def test_lengths_share_programs():
    encode = E5(REFERENCE, MESH, prefix=QUERY)
    before = e5.encode._cache_size()
    for length in range(1, 90, 3):
        encode(["a " * length] * 3)
    assert e5.encode._cache_size() <= before + 3  # for 32, 64 and 96 tokens


@pytest.fixture
def model(tmp_path):
    """A copy of the reference model."""
    return Path(shutil.copytree(REFERENCE, tmp_path / "bert"))


@pytest.mark.parametrize(
    "field, value, reason",
    [
        ("model_type", "qwen2", "model_type is 'qwen2'; E5 is a bert"),
        ("hidden_act", "relu", "hidden_act is 'relu'; accepted: gelu"),
        ("position_embedding_type", "relative_key", "position_embedding_type is 'relative_key'"),
        ("layer_norm_eps", None, r"config\.json lacks layer_norm_eps"),
        ("vocab_size", 99, r"tensor embeddings.word_embeddings.weight has shape \[62, 16\]"),
        ("num_hidden_layers", 3, r"has no tensor encoder\.layer\.2\.attention"),
    ],
)
def test_a_model_that_is_no_encoder(model, field, value, reason):
    fields = json.loads((model / "config.json").read_text())
    fields = {k: v for k, v in (fields | {field: value}).items() if v is not None}
    (model / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"{model}.*{reason}"):
        E5(model, MESH, prefix=QUERY)


def test_files_that_are_missing(model):
    file = model / "tokenizer.json"
    for content in (b"{}", b""):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{file} is not a tokenizer"):
            E5(model, MESH, prefix=QUERY)
    file.unlink()
    with pytest.raises(ValueError, match=f"no {file}"):
        E5(model, MESH, prefix=QUERY)
    (model / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="cannot read .*model.safetensors"):
        E5(model, MESH, prefix=QUERY)
    with pytest.raises(ValueError, match="no model directory ./nowhere"):
        E5("./nowhere", MESH, prefix=QUERY)
