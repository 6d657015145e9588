"""stages.py: reports of failed episodes, the batch of a step, the information bonus."""

import dataclasses
import math
import types

import numpy as np
import pytest

from ragen_jax.algorithm.rewards import Penalties
from ragen_jax.core.task_shares import Part
from ragen_jax.core.types import SUCCESS_UNDEFINED
from ragen_jax.model.vision.image_table import NO_IMAGES
from ragen_jax.run import stages
from ragen_jax.run.stages import errors
from ragen_jax.run.step import Played

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


def test_a_run_stops_above_its_fraction_of_broken_episodes(make_turn, make_episode):
    task = types.SimpleNamespace(name="env", max_error_share=0.5)
    plain = [make_episode(0, member, [make_turn([1], [2])]) for member in range(4)]
    broken = [dataclasses.replace(e, error="Traceback\n  x\nKeyError: 1") for e in plain]
    assert errors(task, plain) == []
    (fired,) = errors(task, [*broken[:2], *plain[2:]])  # exactly the fraction
    assert (fired.rule, fired.action) == ("errors", "warn")
    assert fired.reason == "2 of 4 episodes of env failed; the first: KeyError: 1"
    (fired,) = errors(task, [*broken[:3], plain[3]])
    assert (fired.rule, fired.action) == ("errors", "stop")
    assert fired.reason == (
        "more than env.max_error_share = 0.5: 3 of 4 episodes of env failed; the first: \n"
        "Traceback\n  x\nKeyError: 1"
    )


# ------------------------------------------------------------------------------ a step's batch

# Two groups of "a", then one of "b", with two members each; b's format penalty is five times a's.
PARTS = (Part("a", 2), Part("b", 1))


def task(label, groups, format_penalty, *, rounds=1, context="full", replay=False):
    return types.SimpleNamespace(
        **dict(name=label, label=label, groups=groups),
        penalties=Penalties(format_penalty, max_length=10, overlong_buffer=0),
        collecting=types.SimpleNamespace(max_rounds=rounds),
        settings=types.SimpleNamespace(
            chat=types.SimpleNamespace(
                format=types.SimpleNamespace(context=context), images=NO_IMAGES
            ),
            replay_experts=replay,
        ),
    )


def make_run(**settings):
    tasks = [task("a", 2, -0.1, **settings), task("b", 1, -0.5, **settings)]
    diagnosis = types.SimpleNamespace(micro_batch=4)
    return types.SimpleNamespace(tasks=tasks, step_rows=8, model="no model", diagnosis=diagnosis)


@pytest.fixture
def episodes(make_turn, make_episode):
    """Member 1 of each group breaks the answer format. Reasonings are the first two tokens."""
    found = []
    for group in range(3):
        for member in range(2):
            sampled = [3 + group, 4 + member, 5][: 2 + member]
            logp = [-(1.0 + group), -(0.5 + member), -0.25][: len(sampled)]
            reward, valid = group + 1.0, member == 0
            fields = dict(logp=logp, reasoning=(0, 2), reward=reward, valid=valid)
            turn = make_turn([1, 10 + group], sampled, **fields)
            found.append(make_episode(group, member, [turn], success=valid))
    return found


def played_of(episodes):
    return Played(episodes, [episodes[:4], episodes[4:]], [])


RETURN_GK = np.array([[1.0, 0.9], [2.0, 1.9], [3.0, 2.5]], np.float32)


def test_episodes_without_a_record_of_experts_are_counted(episodes):
    """Two of six have one; the others' tokens are left to the router."""
    for number in (1, 4):
        (turn,) = episodes[number].turns
        experts = np.full((len(turn.prompt) + len(turn.sampled) - 1, 2), number, np.int16)
        turns = (dataclasses.replace(turn, experts=experts),)
        episodes[number] = dataclasses.replace(episodes[number], turns=turns)
    batch, _, metrics = stages.make_batch(make_run(replay=True), played_of(episodes))
    assert metrics == {"rollout/not_replayed": 4}
    assert batch.experts_BTX[:, 0, 0].tolist() == [-1, 1, -1, -1, 4, -1, -1, -1]


@pytest.mark.parametrize("precision", ["exact", "int8"])
def test_episodes_are_sampled_with_rounded_weights_if_asked(precision, monkeypatch):
    run, seen = make_run(), []
    run.sampler_weights = precision

    def stop(run, policy, clock):
        seen.append(policy)
        raise StopIteration

    monkeypatch.setattr(stages, "episodes_of", stop)
    policy = {
        "kernel": np.array([[0.3, 1.0, -0.7]], np.float32),
        "norm": np.array([[0.3, 1.0]], "f4"),
    }
    with pytest.raises(StopIteration):
        stages.play(run, policy, None, 1)
    (sampled,) = seen
    if precision == "exact":
        assert sampled is policy
    else:
        np.testing.assert_allclose(sampled["kernel"], [[38 / 127, 1.0, -89 / 127]], rtol=1e-6)
        np.testing.assert_array_equal(sampled["norm"], policy["norm"])


def test_a_batch_by_hand(episodes):
    batch, outcomes, metrics = stages.make_batch(make_run(), played_of(episodes))
    np.testing.assert_allclose(outcomes.return_GK, RETURN_GK, rtol=1e-6)
    np.testing.assert_array_equal(outcomes.length_GK, [[2, 3]] * 3)
    np.testing.assert_array_equal(outcomes.success_GK, [[True, False]] * 3)
    assert not outcomes.broken_GK.any() and metrics == {}
    assert batch.tokens_BT.shape[0] == 8  # the fixed row count of a step; two rows are padding
    np.testing.assert_array_equal(batch.weight_B, [1] * 6 + [0] * 2)
    np.testing.assert_allclose(batch.reward_BT.sum(1), [*RETURN_GK.ravel(), 0, 0], rtol=1e-6)


def test_a_broken_episode_has_the_mean_of_its_group(episodes):
    episodes[3] = dataclasses.replace(episodes[3], error="KeyError: 1")
    _, outcomes, _ = stages.make_batch(make_run(), played_of(episodes))
    np.testing.assert_array_equal(outcomes.broken_GK, [[0, 0], [0, 1], [0, 0]])
    assert outcomes.return_GK[1].tolist() == [2.0, 2.0]


def test_success_needs_every_environment_to_define_it(episodes):
    turn = dataclasses.replace(episodes[4].turns[0], info={SUCCESS_UNDEFINED: "a demo"})
    episodes[4] = dataclasses.replace(episodes[4], turns=(turn,))
    _, outcomes, _ = stages.make_batch(make_run(), played_of(episodes))
    assert outcomes.success_GK is None


def test_figures_of_the_selected_groups_where_there_is_a_selection(episodes):
    _, _, metrics = stages.make_batch(make_run(rounds=2), played_of(episodes))
    assert metrics == pytest.approx(
        {
            **{"collect/return": RETURN_GK.mean(), "collect/success": 0.5},
            **{"collect/a/return": RETURN_GK[:2].mean(), "collect/a/success": 0.5},
            **{"collect/b/return": RETURN_GK[2].mean(), "collect/b/success": 0.5},
        }
    )


def test_returns_of_an_environment_include_its_penalties(episodes):
    found = stages.played_returns(episodes[:4], Penalties(-0.1, max_length=10, overlong_buffer=0))
    np.testing.assert_allclose(found, RETURN_GK[:2], rtol=1e-6)
    # From 1 to 3 tokens the penalty falls to -1; replies have two or three tokens.
    long = stages.played_returns(episodes[:4], Penalties(-0.1, max_length=3, overlong_buffer=2))
    np.testing.assert_allclose(long, RETURN_GK[:2] - [[0.5, 1.0]], rtol=1e-6)


# ------------------------------------------------------------------------ the information bonus


def informed(episodes, monkeypatch, *, mi_coef=2.0, score=lambda M, N: np.full((M, N), -3.0)):
    """(outcomes, metrics, [(prompts, reasonings)]) of `inform`; cross-scoring gives `score`."""
    run, calls = make_run(), []
    batch, outcomes, _ = stages.make_batch(run, played_of(episodes))

    def cross_score(model, params, prompts, reasonings, *, micro_batch):
        calls.append((prompts, reasonings))
        return score(len(reasonings), len(prompts)), None

    monkeypatch.setattr(stages, "cross_score", cross_score)
    learner = types.SimpleNamespace(
        **dict(zvp_coef=0.0, mi_coef=mi_coef),
        environment_G=np.array([0, 0, 1]),
    )
    step = stages.StepContext(run, learner, {}, played_of(episodes), batch, outcomes, 1)
    return *stages.inform(step), calls, batch


def test_nothing_is_scored_without_a_bonus(episodes, monkeypatch):
    outcomes, metrics, calls, _ = informed(episodes, monkeypatch, mi_coef=0.0)
    assert outcomes.bonus_BT is None and metrics == {} and calls == []


def test_the_bonus_on_information_by_hand(episodes, monkeypatch):
    """Only a's two groups can be compared. Reasonings have log p of -1.5, -2.5 under their own
    prompts in group 0 and -2.5, -3.5 in group 1; each has -3 under the other group's prompt."""
    outcomes, metrics, calls, batch = informed(episodes, monkeypatch)
    ((prompts, reasonings),) = calls
    assert [p.tolist() for p in prompts] == [[1, 10], [1, 11]]
    assert [z.tolist() for z in reasonings] == [[3, 4], [3, 5], [4, 4], [4, 5]]
    own = np.array([-1.5, -2.5, -2.5, -3.5])
    information = own - np.log((np.exp(own) + math.exp(-3.0)) / 2)
    assert metrics["bonus/mi"] == metrics["bonus/a/mi"] == pytest.approx(information.mean())
    assert "bonus/b/mi" not in metrics
    # the sum is zero, so thinking alone earns no reward
    paid = 2.0 * (information - information.mean())
    np.testing.assert_allclose(outcomes.bonus_BT[:4].max(1), np.maximum(paid, 0), atol=1e-6)
    np.testing.assert_allclose(outcomes.bonus_BT[:4].min(1), np.minimum(paid, 0), atol=1e-6)
    assert not outcomes.bonus_BT[4:].any()
    # Paid on the reasoning and the token that ends it, which only replies of three tokens have.
    assert (outcomes.bonus_BT[:4] != 0).sum(1).tolist() == [2, 3, 2, 3]
    assert not outcomes.bonus_BT[batch.mask_BT == 0].any()


def test_broken_episodes_and_empty_reasonings_get_no_bonus(episodes, monkeypatch):
    turn = dataclasses.replace(episodes[0].turns[0], reasoning=(0, 0))
    episodes[0] = dataclasses.replace(episodes[0], turns=(turn,))
    episodes[2] = dataclasses.replace(episodes[2], error="KeyError: 1")
    outcomes, _, ((prompts, reasonings),), _ = informed(episodes, monkeypatch)
    assert [z.tolist() for z in reasonings] == [[3, 5], [4, 5]] and len(prompts) == 2
    paid = outcomes.bonus_BT.any(1)
    assert paid.tolist() == [False, True, False, True] + [False] * 4


def test_reasonings_are_compared_with_another_prompt_or_not_at_all(episodes, monkeypatch):
    broken = [dataclasses.replace(e, error="KeyError: 1") for e in episodes[2:4]]
    episodes[2:4] = broken
    outcomes, metrics, calls, _ = informed(episodes, monkeypatch)
    assert calls == [] and metrics == {} and not outcomes.bonus_BT.any()
