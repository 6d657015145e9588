"""Commands with a GGUF file as their model."""

import json

import pytest
from cli_commands import call
from gguf_files import CHATML, make_config, tokenizer_fields, write_gguf

import ragen_jax
from ragen_jax.config.load import load_config
from ragen_jax.configs import sokoban
from ragen_jax.model import hf
from ragen_jax.programs import shapes
from ragen_jax.run import provenance

pytestmark = pytest.mark.fast
ANSWER = "<think>up</think><answer>Up</answer>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small GGUF file, named like a model whose shape is known."""
    folder = tmp_path_factory.mktemp("gguf")
    config = make_config("qwen2", max_positions=8192)
    return write_gguf(folder / "Qwen2.5-72B-Instruct.gguf", config, tokenizer=tokenizer_fields())


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """One cache for all tests of this file."""
    folder = tmp_path_factory.getbasetemp() / "cache_of_commands"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.mark.medium
def test_the_shape_and_the_open_fields_are_those_of_the_file(model):
    config = sokoban.get_config("llm")
    config.model.path = str(model.path)
    assert shapes.model_shape(config) == model.config
    assert load_config(config).optimizer.micro_batch > 1  # of the smallest models
    config.model.path = str(model.path.with_name("none.gguf"))
    with pytest.raises(ValueError, match="none.gguf': no model directory, no GGUF file and no mod"):
        shapes.model_shape(config)


@pytest.mark.medium
def test_the_record_of_a_run_has_the_hash_of_the_file(model):
    config = sokoban.get_config("llm")
    config.model.path = str(model.path)
    found = provenance.provenance_of(load_config(config), "3")["files of model.path"]
    config.model.path = str(hf.resolve(model.path))
    assert found == provenance.provenance_of(load_config(config), "3")["files of model.path"]


@pytest.mark.medium
def test_check_data_shows_what_the_model_reads(model):
    words = ["--config=sokoban:llm", f"--config.model.path={model.path}", "--plays=2", "--rows=1"]
    code, out, err = call("ragen_jax.check_data", *words)
    assert code == 0, err
    assert f"  the first problem as {model.path} reads it:" in out.splitlines()
    assert "<|im_start|>user" in out


@pytest.mark.long
def test_evaluation_and_scoring(model, tmp_path):
    words = [
        "--config=sokoban:llm",
        "--config.env.max_turns=1",
        "--config.rollout.max_new_tokens=4",
    ]
    words += [f"--model={model.path}", "--config.eval.episodes=4", f"--out={tmp_path / 'e.json'}"]
    code, _, err = call("ragen_jax.evaluate", *words)
    assert code == 0, err
    assert json.loads((tmp_path / "e.json").read_text())["model"] == str(model.path)
    rows = [{"prompt": f"box {i // 2}", "response": ANSWER} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"--model={model.path}", f"--rollouts={tmp_path / 'rows.jsonl'}"]
    code, out, err = call("ragen_jax.score", *words, f"--out={tmp_path / 'score.json'}")
    assert code == 0 and "retrieval" in out, err


@pytest.mark.medium
def test_load_model(model):
    loaded, _, tokenizer = ragen_jax.load_model(str(model.path))
    assert loaded.config == model.config and tokenizer.chat_template == CHATML
