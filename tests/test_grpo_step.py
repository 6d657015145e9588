"""The comparison with TRL: both sides read the same prompts, and its summary of the runs."""

import sys
import types

import pytest

from benchmarks import grpo_step
from benchmarks.llm import TINY
from ragen_jax.model import hf


@pytest.mark.medium
def test_both_sides_read_the_same_prompts(tmp_path, monkeypatch):
    """TRL tokenizes texts; ours are rendered from the rows."""
    monkeypatch.setattr(grpo_step, "MODEL", TINY)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder is added to it
    prompts = grpo_step.write_files(tmp_path, steps=2)
    assert len(set(prompts)) == 2 * grpo_step.PROMPTS
    tokenizer = hf.load_tokenizer(tmp_path / "model")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    assert {len(row) for row in ids} == {grpo_step.PROMPT}
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(prompts)


@pytest.mark.medium
def test_ratios_are_of_pairs_of_processes(monkeypatch):
    runs = {
        "train": iter([{"step": [1.0, 3.0], "memory": 2.0}, {"step": [4.0], "memory": 4.0}]),
        "trl": iter([{"step": [6.0], "memory": 3.0}, {"step": [4.0, 8.0], "memory": 4.0}]),
    }
    monkeypatch.setattr(grpo_step, "write_files", lambda *_: [])
    monkeypatch.setattr(grpo_step, "run_train", lambda *_: next(runs["train"]))
    monkeypatch.setattr(grpo_step, "run_trl", lambda *_: next(runs["trl"]))
    found = grpo_step.compare(types.SimpleNamespace(pairs=2, steps=3, trl="python"))
    assert found["train"] == {"step": 3.0, "memory": 3.0}
    assert found["trl"] == {"step": 6.0, "memory": 3.5}
    assert found["ratio"] == {"step": (3.0 + 1.5) / 2, "memory": 1.25}
