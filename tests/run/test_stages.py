"""stages.py: what is reported of broken episodes."""

import dataclasses
import types

import pytest

from ragen_jax.run.stages import errors

pytestmark = pytest.mark.fast


def test_unusable_prompts_never_stop_a_run_and_broken_environments_do(make_turn, make_episode):
    task = types.SimpleNamespace(name="env", max_error_share=0.1)
    turns = [make_turn([1], [2])]
    plain = [make_episode(0, member, turns) for member in range(4)]
    unusable = [dataclasses.replace(e, error="PromptError: environment seed 7: x") for e in plain]
    (fired,) = errors(task, unusable)
    assert (fired.rule, fired.action) == ("prompts", "warn")
    assert fired.reason == (
        "all 4 episodes of env were left out, so there is nothing to learn from; the first: "
        "PromptError: environment seed 7: x"
    )
    (fired,) = errors(task, [plain[0], *unusable[1:]])
    assert fired.reason.startswith("3 of 4 episodes of env left out; the first: PromptError: ")
    raised = dataclasses.replace(plain[0], error="Traceback\nKeyError: 1")
    found = errors(task, [raised, *unusable[1:]])
    assert [(f.rule, f.action) for f in found] == [("prompts", "warn"), ("errors", "stop")]
