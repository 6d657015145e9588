"""The expected time of a long scoring."""

import json
import re

import numpy as np
import pytest
from cli_commands import call

from ragen_jax.core.types import Turn
from ragen_jax.diagnostics.scopes import Sample
from ragen_jax.model import hf
from ragen_jax.score import estimate


def turn(sampled, reasoning, answer):
    prompt, sampled = np.arange(3, dtype=np.int32), np.array(sampled, np.int32)
    logp = np.zeros(len(sampled), np.float32)
    return Turn(prompt, "", sampled, logp, reasoning, answer, ("Up",), True, 0.0, {})


def test_the_tokens_are_those_of_the_forward_passes():
    sample = Sample(
        prompts=[np.arange(n, dtype=np.int32) for n in (3, 5, 5)],
        # A reasoning of two tokens up to an answer at 4 and 5, twice, and three without an answer.
        turns=[turn(range(6), (1, 3), (4, 6))] * 2 + [turn(range(9), (0, 3), (0, 0))],
        prompt_M=np.array([0, 1, 2]),
        group_N=np.array([0, 1, 2]),
        before_N=[()] * 3,
    )
    # Two distinct prompts; under each the 5 and 3 tokens of two distinct turns; each answered turn
    # again after three others of its own prompt and three of other prompts.
    assert estimate.count_tokens(sample) == (3 + 5) + 2 * (5 + 3) + 6 * (5 + 5)


def rows_of_rooms(environment):
    rows = []
    for seed in range(4):
        room = environment.reset(seed)
        plan = environment.solve(room)
        reply = f"<think>{environment.explain(room, plan)}</think><answer>{plan[0]}</answer>"
        prompt = [{"role": "user", "content": environment.render(room)}]
        rows += [{"prompt": prompt, "response": reply, "group": seed}] * 2
    return rows


@pytest.mark.parametrize("long", [True, False])
def test_a_long_scoring_tells_its_time_before_it_begins(agent, tmp_path, monkeypatch, long):
    hf.save(tmp_path / "model", agent.model, agent.params, agent.tokenizer)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of_rooms(agent.environment)))
    if long:
        monkeypatch.setattr(estimate, "LEAST_OPERATIONS", 0)
    words = f"--model={tmp_path / 'model'}", f"--rollouts={rows}", f"--out={tmp_path / 's.json'}"
    code, printed, errors = call("ragen_jax.score", *words)
    assert code == 0, errors
    line = r"scoring 32 pairs of a prompt and a reasoning, [\d,]+ tokens: about \d+ s \([\d,]+ tok"
    found = re.search(line, printed)
    assert bool(found) == long
    if long:
        assert found.start() < printed.index("information")
