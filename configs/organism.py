"""An organism of template collapse: an agent that was taught two ways to think before it acts.

    python -m ragen_jax.train --config=configs/organism.py[:WORLD[+RECIPE...]]

Half of its demonstrations say where everything is (style "grounded"); the other half, of the same
rooms with the same actions, are a sentence about no room in particular (style "template", about as
long). Both solve about as much, so reward does not tell them apart, while the entropy bonus favours
the sentence that has more to choose from: reasoning that stays diverse, valid and successful and
no longer depends on the input. Every sentence tells which it is (reasoning/style/*), so that
whatever claims to see the drift can be held against it.

WORLD  sokoban (default) or frozen_lake.
RECIPE those of configs/recipes, such as no_filter.

    --config.warmstart.styles.template=0.2    a smaller share of templates
    --config.warmstart.styles.silent=0.5      and some without any reasoning
    --config.warmstart.plan_moves=0             the grounded text tells no plan, only positions
    --config.algorithm.entropy_coef=0.0         the drift's motor
"""

from ml_collections import ConfigDict

from ragen_jax.configs import frozen_lake, recipes, sokoban
from ragen_jax.envs.styles import UNGROUNDED

# World -> (config, success at which the warm start stops). At 0.4, FrozenLake's sentences are only
# half learnt and drift into neither style.
WORLDS = {"sokoban": (sokoban, 0.4), "frozen_lake": (frozen_lake, 0.6)}


def get_config(preset: str = "sokoban") -> ConfigDict:
    """The config of a world, changed by recipes: "sokoban+no_filter".

    Raises:
      ValueError: an unknown world or recipe.
    """
    world, *names = preset.split("+")
    if world not in WORLDS:
        raise ValueError(f"unknown world {world!r}; known: {', '.join(WORLDS)}")
    module, success = WORLDS[world]
    config = module.get_config("tiny")
    config.steps = 160
    config.warmstart.layers = 3
    config.warmstart.styles = dict.fromkeys(UNGROUNDED, 0.0) | dict(grounded=0.5, template=0.5)
    config.warmstart.success = success
    config.algorithm.name = "grpo"
    config.algorithm.entropy_coef = 0.05
    config.optimizer.learning_rate = 2e-4
    config.eval.temperature = (
        1.0  # at lower temperatures the single grounded opening beats eight templates
    )
    config.eval.episodes = 256
    config.diagnose.probe_every = 4
    for rule in ("variance", "success", "empty"):  # the run is meant to collapse
        config.stopping[rule].action = "warn"
    recipes.apply(config, names)
    return config
