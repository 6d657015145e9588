"""model_card.py: the README.md of an exported policy."""

import dataclasses

import pytest
import yaml

from ragen_jax.configs.base import Config
from ragen_jax.run.model_card import model_card

pytestmark = pytest.mark.fast
ROWS = [
    {"step": 0, "eval/success": 0.25, "eval/success_ci95": 0.05},
    {
        "step": 7,
        "rollout/valid_rate": 0.97,
        "collapse/first_turn/retrieval_acc": 0.9,
        "collapse/first_turn/retrieval_acc_ci95": 0.1,
        "collapse/first_turn/retrieval_chance": 0.125,
    },
]


def card(path):
    config = Config()
    model = dataclasses.replace(config.model, path=path)
    return model_card(dataclasses.replace(config, model=model, seed=5), ROWS, 7)


def test_a_card_has_the_run_s_figures():
    text = card("tiny")
    assert "| held-out success (`eval/success`) | 0.25 ± 0.05 | 0 |" in text
    assert "| valid replies (`rollout/valid_rate`) | 0.97 | 7 |" in text
    assert "The reasoning depends on its prompt: 90% ± 10 of it" in text
    assert "| base model | a tiny agent trained by imitation |" in text
    assert "| seed | 5 |" in text and "za_swap" not in text
    assert "ragen_jax 0." in text and "transformers " in text


@pytest.mark.parametrize("path", ["tiny", "Qwen/Qwen2.5-0.5B", "/", 'a": b'])
def test_the_header_is_what_the_hub_reads(path):
    _, header, _ = card(path).split("---\n", 2)
    read = yaml.safe_load(header)
    assert read["library_name"] == "transformers" and "ragen_jax" in read["tags"]
    assert read.get("base_model") == (None if path in ("tiny", "/") else path)


def test_a_local_directory_is_not_named_by_its_path(tmp_path):
    folder = tmp_path / "my_model"
    folder.mkdir()
    text = card(str(folder))
    assert "`my_model` (a local directory)" in text and str(tmp_path) not in text
