"""The rules of brief prompts: short, complete under the options, and in the system message."""

import pytest
from env_names import OURS

from ragen_jax.envs import ENVS, make_env
from ragen_jax.envs.types import BriefEnvironment, BudgetEnvironment

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", OURS)
def test_every_environment_has_brief_rules(name):
    environment = ENVS[name](split="train")
    assert isinstance(environment, BriefEnvironment)
    brief = environment.brief
    assert len(brief) < 0.65 * len(environment.instructions)
    assert "{" not in brief and "<" not in brief
    assert brief == brief.strip() and len(brief.splitlines()) <= 4
    # The reply format lists the actions.
    if environment.actions and name != "rubik":
        assert not any(action in brief for action in environment.actions)


def test_the_actions_left_matter_in_some_tasks():
    built = {name: ENVS[name](split="train") for name in OURS}
    unimportant = {
        name
        for name, environment in built.items()
        if isinstance(environment, BudgetEnvironment) and not environment.budget_matters
    }
    assert unimportant == {"sokoban", "frozen_lake", "metamathqa", "sudoku", "rubik"}


@pytest.mark.parametrize(
    "name, options, said, unsaid",
    [
        ("sokoban", {}, ("# wall", "_ floor", "O target", "X box", "√ box", "P you", "S you"), ()),
        ("sokoban", {"observation": "coordinate"}, ("(row, column)",), ("# wall", "crate")),
        ("sokoban", {"observation": "both"}, ("(row, column)", "# wall"), ("crate",)),
        ("sokoban", {"observation": "image"}, ("crate", "red ring"), ("# wall", "(row")),
        (
            "frozen_lake",
            {"slip": 0.25},
            ("P you, _ ice, O hole, G goal", "probability of 0.25"),
            (),
        ),
        ("frozen_lake", {"slip": 0.0}, ("hole",), ("slip",)),
        ("frozen_lake", {"observation": "coordinate"}, ("(row, column)",), ("P you", "disc")),
        ("frozen_lake", {"observation": "image"}, ("dark disc", "golden diamond"), ("P you",)),
        ("countdown", {}, ("exactly once", "(44-19)+35"), ("at most",)),
        ("countdown", {"allow_subset": True}, ("at most once",), ("exactly",)),
        ("bandit", {}, ("name of one arm",), ("pulls", "hidden", "sound")),
        ("bandit", {"pulls": 3}, ("3 pulls", "listed"), ("hidden",)),
        ("bandit", {"pulls": 3, "told": False}, ("hidden.",), ("sound",)),
        ("bandit", {"told": False, "names": "fitting"}, ("sound risky are of risky",), ()),
        ("bandit", {"told": False, "names": "misleading"}, ("sound risky are of sure",), ()),
        ("bandit", {"names": "misleading"}, (), ("sound", "hidden")),
        ("sudoku", {}, ("2x2 box", "1 to 4", "up to 2 placements", "||", "(.)"), ()),
        ("sudoku", {"size": 9, "placements": 1}, ("3x3 box", "1 to 9", "one placement"), ("||",)),
        ("game_2048", {"size": 3, "goal": 64, "min_sum": None}, ("3 x 3", "tile of 64", "(_)"), ()),
        ("webshop", {}, ("search[words]", "click[buy now]"), ("Buttons",)),
        (
            "webshop",
            {"show_choices": False},
            ("Buttons: back to search, < prev, next >",),
            ("attr",),
        ),
        (
            "webshop",
            {"show_choices": False, "show_attributes": True},
            ("reviews, attributes, buy now.",),
            (),
        ),
        ("deepcoder", {"time_limit_s": 1.5, "memory_mb": 99}, ("1.5 seconds and 99 MiB",), ()),
        ("deepcoder", {"language": "expression"}, ("max(x,y)", "max(a+b,7)*2"), ("Python",)),
    ],
)
def test_brief_rules_follow_the_options(name, options, said, unsaid):
    brief = make_env(name, **options).brief
    assert all(part in brief for part in said)
    assert not any(part in brief for part in unsaid)


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake"])
def test_every_symbol_of_a_prompt_is_explained(name):
    environment = make_env(name)
    symbols = set("".join(environment.render(environment.reset(seed)) for seed in range(30)))
    explained = environment.brief.splitlines()[1]
    for symbol in symbols - {"\n"}:
        assert f"{symbol} " in explained
