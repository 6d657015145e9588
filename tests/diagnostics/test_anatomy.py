"""diagnostics/anatomy.py, by hand: classes of groups, strategies, undone moves and facts."""

import dataclasses
import math

import numpy as np
import pytest
from env_names import OURS

from ragen_jax.diagnostics.anatomy import (
    action_metrics,
    anatomy_metrics,
    reasoning_metrics,
    style_metrics,
)
from ragen_jax.diagnostics.intervals import proportion_interval
from ragen_jax.envs import ENVS
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.types import IMAGE, GroundedEnvironment, ReversibleEnvironment
from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.rollout.chat import ChatFormat, make_chat

pytestmark = pytest.mark.fast

UP, DOWN, LEFT, RIGHT = "Up", "Down", "Left", "Right"


@pytest.fixture
def play(make_turn, make_episode):
    """play(group, member, turns of actions, success) -> `Episode`."""

    def make(group, member, turns, success=False):
        made = [make_turn([1], [2], actions=actions) for actions in turns]
        return make_episode(group, member, made, success=success)

    return make


@pytest.mark.medium
def test_each_class_by_hand(play):
    # Two members per group: their returns, whether they succeeded, their turns of actions.
    groups = [
        ((1.0, 2.0), (True, True), ([UP], [DOWN])),  # mixed, though both succeeded
        ((9.0, 9.0), (True, True), ([UP], [DOWN])),  # solved, in two ways
        ((-1.0, -1.0), (False, False), ([UP], [UP])),  # failed, twice in the same way
        ((-1.0, -1.0), (False, False), ([UP], [DOWN])),  # failed, in two ways
        ((0.0, 0.0), (True, False), ([UP], [DOWN])),  # tied: the reward does not show the success
    ]
    episodes = [
        play(g, k, [did[k]], success[k])
        for g, (_, success, did) in enumerate(groups)
        for k in range(2)
    ]
    assert anatomy_metrics(episodes, np.array([returns for returns, _, _ in groups])) == {
        "anatomy/mixed": 0.2,
        "anatomy/solved": 0.2,
        "anatomy/failed": 0.4,
        "anatomy/tied": 0.2,
        "anatomy/mixed_count": 1,
        "anatomy/solved_count": 1,
        "anatomy/failed_count": 2,
        "anatomy/tied_count": 1,
        "anatomy/failed_differing": 0.2,
    }


@pytest.mark.medium
def test_rounding_is_no_variance(play):
    # Sums of -0.1 in different orders differ by less than the filter's tolerance of zero.
    episodes = [play(0, k, [[UP]], True) for k in range(3)]
    assert anatomy_metrics(episodes, np.array([[0.3, 0.1 + 0.2, 0.300001]]))["anatomy/solved"] == 1
    assert anatomy_metrics(episodes, np.array([[0.3, 0.3, 0.301]]))["anatomy/mixed"] == 1


@pytest.mark.medium
def test_classes_are_shares_that_sum_to_one(play):
    rng = np.random.default_rng(0)
    for _ in range(20):
        episodes = [
            play(g, k, [[str(rng.integers(2))]], bool(rng.integers(2)))
            for g in range(7)
            for k in range(2)
        ]
        found = anatomy_metrics(episodes, rng.integers(2, size=(7, 2)))
        names = ("mixed", "solved", "failed", "tied")
        assert sum(found[f"anatomy/{name}"] for name in names) == pytest.approx(1)
        assert sum(found[f"anatomy/{name}_count"] for name in names) == 7
        assert found["anatomy/failed_differing"] <= found["anatomy/failed"]


def test_episodes_and_returns_must_agree(play):
    with pytest.raises(ValueError, match=r"3 episodes, but return_GK is \(1, 2\)"):
        anatomy_metrics([play(0, k, [[UP]]) for k in range(3)], np.zeros((1, 2)))


def test_strategies_by_hand(play):
    members = [
        # Group 0: "Up Down" three times, in different divisions into turns, and "Left" once.
        [[[UP], [DOWN]], [[UP, DOWN]], [[], [UP, DOWN]], [[LEFT]]],
        # Group 1: the same strategy four times.
        [[[LEFT]]] * 4,
    ]
    episodes = [play(g, k, turns) for g, rows in enumerate(members) for k, turns in enumerate(rows)]
    found = action_metrics(episodes, 2)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found == {
        "action/strategies": 1.5,
        "action/strategy_entropy": pytest.approx(entropy / 2),
    }
    # Four different strategies: log K.
    apart = [play(0, k, [[move]]) for k, move in enumerate((UP, DOWN, LEFT, RIGHT))]
    assert action_metrics(apart, 1)["action/strategy_entropy"] == pytest.approx(math.log(4))


def test_oscillation_by_hand(play):
    episodes = [
        play(0, 0, [[UP, DOWN], [UP, LEFT]]),  # across turns as well: 2 of 3
        play(0, 1, [[UP], [UP]]),  # 0 of 1
        play(1, 0, [[RIGHT, LEFT]]),  # 1 of 1
        play(1, 1, [[], [UP]]),  # nothing to undo
    ]
    found = action_metrics(episodes, 2, opposites=Sokoban.opposites)
    assert found["action/oscillation_rate"] == pytest.approx(3 / 5)
    assert "action/oscillation_rate" not in action_metrics(episodes, 2)
    single = action_metrics(episodes[3:], 1, opposites=Sokoban.opposites)
    assert "action/oscillation_rate" not in single


def test_grounded_rate_by_hand(make_turn, make_episode):
    thoughts = ["right right wrong", "", "nothing", "wrong", "right right wrong"]
    turns = [
        make_turn([1], [i, 9], message="shown", reasoning=(0, 1) if thought else (0, 0))
        for i, thought in enumerate(thoughts)
    ]
    episodes = [make_episode(0, 0, turns[:2]), make_episode(0, 1, turns[2:])]

    def grounded(observation, thought):
        assert observation == "shown"
        words = thought.split()
        return words.count("right"), words.count("right") + words.count("wrong")

    def text(ids):
        (i,) = ids
        return thoughts[i]

    found = reasoning_metrics(episodes, grounded, text)
    assert found == {"reasoning/stated": 7 / 5, "reasoning/grounded_rate": 4 / 7}
    # Four groups: 2 of 3, 2 of 4, no facts, 1 of 1.
    said = {"a": "right right wrong", "b": "right wrong right wrong", "c": "", "d": "right"}
    thoughts[:] = said.values()
    turns = [
        make_turn([1], [i, 9], message="shown", reasoning=(0, 1) if thought else (0, 0))
        for i, thought in enumerate(thoughts)
    ]
    found = reasoning_metrics(
        [make_episode(g, 0, [t]) for g, t in enumerate(turns)], grounded, text
    )
    assert found["reasoning/grounded_rate"] == 5 / 8
    low, high = proportion_interval(np.array([2, 2, 1]), np.array([3, 4, 1]))
    assert found["reasoning/grounded_rate_ci95"] == pytest.approx(max(5 / 8 - low, high - 5 / 8))
    # A transcription of each image replaces its placeholder.
    pictures = [np.full((1, 1, 3), n, np.uint8) for n in (7, 8)]
    turn = make_turn([1], [0, 9], message=f"{IMAGE} and {IMAGE}", reasoning=(0, 1))
    turns = [dataclasses.replace(turn, images=tuple(pictures))]
    seen = []

    def grounded_in_words(observation, thought):
        seen.append(observation)
        return 1, 1

    reasoning_metrics([make_episode(0, 0, turns)], grounded_in_words, text)
    words = lambda image: f"picture {image[0, 0, 0]}"  # noqa: E731
    reasoning_metrics([make_episode(0, 0, turns)], grounded_in_words, text, transcribe=words)
    assert seen == [f"{IMAGE} and {IMAGE}", "picture 7 and picture 8"]
    # Replies without reasoning state no facts.
    turns = [make_turn([1], [2, 9], message="shown")] * 3
    silent = reasoning_metrics([make_episode(0, 0, turns[1:3])], grounded, text)
    assert silent == {"reasoning/stated": 0}


# ---- environments -------------------------------------------------------------------------------


# deepcoder is left out: its solver's reasoning is the steps of a program, not facts.
@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name in OURS if name != "deepcoder"])
@pytest.mark.parametrize("prompt", ["full", "terse"])
def test_a_solvers_reasoning_is_grounded_and_a_strangers_is_not(
    name, prompt, make_turn, make_episode
):
    environment = ENVS[name]()
    assert isinstance(environment, GroundedEnvironment)
    tokenizer = build_tokenizer(environment.words)
    chat = make_chat(
        tokenizer,
        environment,
        ChatFormat(context="single_turn", prompt=prompt, actions_per_turn=2, max_actions=10),
    )

    def turn(shown, thought):
        message = chat.observe(environment.render(shown), actions_used=1, last_valid=False)
        ids = tokenizer.encode(thought)
        return make_turn([1], ids, message=message, reasoning=(0, len(ids)))

    states = [environment.reset(seed) for seed in range(20)]
    if name == "search_qa":  # nothing is known before a search
        states = [environment.step(state, environment.solve(state)[0]).state for state in states]
    thoughts = [environment.explain(state, environment.solve(state)) for state in states]
    own = [turn(*pair) for pair in zip(states, thoughts, strict=True)]
    found = reasoning_metrics([make_episode(0, 0, own)], environment.count_grounded, chat.text)
    assert found["reasoning/grounded_rate"] == 1
    # SearchQA's solver states only the fact that it follows; it is true of 1 in 20 other boards.
    assert found["reasoning/stated"] >= (1 if name == "search_qa" else 2)
    # One reasoning for all states, like a template, is right only by chance.
    template = [turn(state, thoughts[0]) for state in states]
    found = reasoning_metrics([make_episode(0, 0, template)], environment.count_grounded, chat.text)
    grounded = found["reasoning/grounded_rate"]
    assert grounded < 0.5
    assert grounded > 1 / 20 or (name == "search_qa" and grounded == 1 / 20)


@pytest.mark.medium
@pytest.mark.parametrize("name", OURS)
def test_opposites_are_pairs_of_actions(name):
    environment = ENVS[name]()
    assert isinstance(environment, ReversibleEnvironment) == bool(environment.actions)
    if environment.actions:
        assert set(environment.opposites) == set(environment.actions)
        for action, back in environment.opposites.items():
            assert environment.opposites[back] == action
            assert back != action or name == "rubik"  # a half turn is its own opposite


def test_styles_by_hand(make_turn, make_episode):
    styles = Sokoban().styles
    tokenizer = build_tokenizer((*Sokoban.words, *styles["template"].words))
    chat = make_chat(
        tokenizer,
        Sokoban(),
        ChatFormat(context="single_turn", prompt="terse", actions_per_turn=2, max_actions=10),
    )

    def turn(reply):
        ids = chat.reply_ids(reply)
        read = chat.read(ids)
        return make_turn([1], ids, reasoning=read.reasoning, valid=read.valid)

    end = "</think><answer>Up</answer>"
    grounded = turn(f"player 11 box 22 target 33 plan Up{end}")
    template = turn(
        f"So I must look boldly and clear the neat room to win without mistakes now{end}"
    )
    hybrid = turn(f"player 11 box 22 to win without mistakes now{end}")
    silent, endless = turn(end), turn("player 11 box 22 target 33 plan Up")
    episodes = [
        make_episode(0, 0, [grounded, grounded]),
        make_episode(0, 1, [template]),
        make_episode(1, 0, [template, template, hybrid]),
        make_episode(1, 1, [silent, endless]),
    ]
    taught = {name: styles[name] for name in ("grounded", "template")}
    assert style_metrics(episodes, taught, chat.text) == {
        "reasoning/style/grounded": 2 / 8,
        "reasoning/style/template": 3 / 8,
        "reasoning/style/other": 3 / 8,
    }
    found = style_metrics(episodes, styles, chat.text)
    assert found["reasoning/style/silent"] == 1 / 8
    assert found["reasoning/style/other"] == 2 / 8
    assert sum(found.values()) == 1
