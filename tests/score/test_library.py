"""The diagnostics as a library: what `import ragen_jax` offers."""

import subprocess
import sys

import numpy as np
import pytest

import ragen_jax
from ragen_jax.diagnostics.cross_scoring import cross_score
from ragen_jax.diagnostics.information import information_metrics

ROOM = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def test_a_light_import():
    code = (
        "import sys, ragen_jax; assert 'jax' not in sys.modules and 'numpy' not in sys.modules;"
        "assert ragen_jax.__version__; assert 'mutual_information' in dir(ragen_jax);"
        "assert not hasattr(ragen_jax, 'nothing'); ragen_jax.group_scores;"
        "assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ragen_jax.EXPORTS)
def test_what_is_listed_is_there_and_explained(name):
    assert name in dir(ragen_jax)
    assert getattr(ragen_jax, name).__doc__


def test_mutual_information_is_that_of_the_cross_scores(agent):
    rooms = ["##_", "_P#", "#O_"]
    told = [[{"role": "user", "content": room}] for room in rooms for _ in range(2)]
    thoughts = [f"player {i} box 2{i}" for i in range(6)]
    found = ragen_jax.mutual_information(
        agent.model, agent.params, agent.tokenizer, told, thoughts, micro_batch=16
    )

    def ids(text):
        return agent.tokenizer(text, add_special_tokens=False)["input_ids"]

    prompts = [ids(ROOM.format(room) + "<think>") for room in rooms]
    scores = cross_score(
        agent.model, agent.params, prompts, [ids(z) for z in thoughts], micro_batch=16
    )
    own = np.repeat(np.arange(3), 2)
    for key, value in information_metrics(*scores, own).items():
        assert found[key] == pytest.approx(value, abs=1e-6), key
    assert "mi_ci95" in found and 0 < found["retrieval_p"] <= 1
    texts = [ROOM.format(room) for room in rooms for _ in range(2)]  # a prompt per reasoning
    again = ragen_jax.mutual_information(
        agent.model, agent.params, agent.tokenizer, texts, thoughts, micro_batch=16
    )
    assert again == found


def test_mutual_information_names_what_does_not_fit(agent):
    parts = agent.model, agent.params, agent.tokenizer
    with pytest.raises(ValueError, match="2 prompts, but 1 reasonings"):
        ragen_jax.mutual_information(*parts, ["a", "b"], ["x"])
    with pytest.raises(ValueError, match="reasoning 1 is empty"):
        ragen_jax.mutual_information(*parts, ["a", "b"], ["x", ""])
