"""configs/recipes: every recipe gives a config that a run accepts, and describes its changes."""

import pytest

from ragen_jax.algorithm.algorithms import ALGORITHMS
from ragen_jax.config.check import check
from ragen_jax.config.fields import field
from ragen_jax.configs import (
    bandit,
    countdown,
    deepcoder,
    frozen_lake,
    game_2048,
    metamathqa,
    recipes,
    rubik,
    search_qa,
    sokoban,
    sudoku,
    webshop,
)
from ragen_jax.configs.recipes import RECIPES

pytestmark = pytest.mark.fast

FILES = {
    "bandit": bandit,
    "countdown": countdown,
    "deepcoder": deepcoder,
    "frozen_lake": frozen_lake,
    "game_2048": game_2048,
    "metamathqa": metamathqa,
    "rubik": rubik,
    "search_qa": search_qa,
    "sokoban": sokoban,
    "sudoku": sudoku,
    "webshop": webshop,
}


@pytest.mark.medium
@pytest.mark.parametrize("preset", ["tiny", "qwen2.5-3b"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_a_valid_config(name, preset):
    for file, module in FILES.items():
        if name.startswith("slip") and file != "frozen_lake":
            continue
        config = module.get_config(f"{preset}+{name}")
        if name == "groups-128x1":  # groups of one member need PPO without a filter
            config = module.get_config(f"{preset}+{name}+ppo+no_filter")
        if name == "distill":  # the teacher has no default
            config.algorithm.kl_reference = "DIR"
        check(config)
        for path, value in RECIPES[name].items():
            if not callable(value) and name != "groups-128x1":
                assert field(config, path) == value


def test_a_recipe_does_what_its_name_says():
    for name in ALGORITHMS:
        assert RECIPES[name]["algorithm.name"] == name
    for name, fields in RECIPES.items():
        kind, _, value = name.partition("-")
        if kind in ("top_p", "min_p", "top_k") and value:
            assert fields == {"filter.strategy": kind, "filter.value": float(value)}
        elif kind in ("kl", "entropy", "slip"):
            assert list(fields.values()) == [float(value)]
        elif kind.startswith("by_"):
            assert fields["filter.metric"] == kind.removeprefix("by_")


def test_recipes_apply_from_left_to_right():
    config = sokoban.get_config("tiny+dapo+kl-0.01+entropy-0.0")
    assert config.algorithm.kl_coef == 0.01 and config.algorithm.entropy_coef == 0.0
    assert config.collect.max_rounds == 3
    assert (config.reward.overlong_buffer, config.rollout.max_new_tokens) == (5, 22 + 5)


def test_unknown_recipes_are_refused_with_the_nearest_or_those_known():
    with pytest.raises(ValueError, match=r"^unknown recipe 'pppo'; did you mean ppo\? \(--help"):
        sokoban.get_config("tiny+pppo")
    with pytest.raises(ValueError, match="unknown recipe 'zzz'; known: ppo, bi_level_ppo, grpo"):
        sokoban.get_config("tiny+zzz")
    with pytest.raises(ValueError, match="sets env.options.slip, which sokoban has not"):
        sokoban.get_config("tiny+slip-0.5")


def test_no_recipe_changes_nothing():
    config = sokoban.get_config("tiny")
    recipes.apply(config, [])
    assert config.to_dict() == sokoban.get_config("tiny").to_dict()


def test_groups_of_one_need_tokens_to_learn_from():
    check(sokoban.get_config("tiny+groups-128x1+ppo+no_filter"))
    none = sokoban.get_config("tiny")
    none.rollout.group_size = 0
    with pytest.raises(ValueError, match="group_size is 0; it must be a whole number from 1"):
        check(none)
    for refused in ("tiny+groups-128x1+grpo+no_filter", "tiny+groups-128x1+ppo"):
        with pytest.raises(ValueError, match="config.rollout.group_size is 1"):
            check(sokoban.get_config(refused))
