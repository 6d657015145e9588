"""A model organism of template collapse: an agent that has imitated two reasoning styles.

    python -m ragen_jax.train --config=configs/organism.py[:WORLD[+RECIPE...]]

Half of its demonstrations state where everything is (style "grounded"). The other half have the
same rooms and actions, but their reasoning is a sentence of similar length that depends on no room
(style "template"). Both styles solve about the same number of rooms, so the reward does not
distinguish them, but the entropy bonus favours the template, which has more variants. The reasoning
thus stays diverse, valid and successful while it ceases to depend on the input. The style of every
reasoning is known (reasoning/style/*), so that detectors of collapse can be tested against it.

WORLD  sokoban (default) or frozen_lake.
RECIPE a recipe of configs/recipes, such as no_filter.

    --config.warmstart.styles.template=0.2      a smaller fraction of templates
    --config.warmstart.styles.silent=0.5        some demonstrations without any reasoning
    --config.warmstart.plan_moves=0             the grounded text has positions, but no plan
    --config.algorithm.entropy_coef=0.0         no entropy bonus, which drives the drift
"""

from ml_collections import ConfigDict

from ragen_jax.configs import frozen_lake, recipes, sokoban
from ragen_jax.envs.styles import UNGROUNDED

# World -> (config, success at which the warm start stops). At 0.4 in FrozenLake, the sentences are
# only half learnt, and the reasoning drifts to neither style.
WORLDS = {"sokoban": (sokoban, 0.4), "frozen_lake": (frozen_lake, 0.6)}


def get_config(preset: str = "sokoban") -> ConfigDict:
    """Return the config of a world with any recipes, such as "sokoban+no_filter".

    Raises:
      ValueError: the world or a recipe is unknown.
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
        1.0  # lower temperatures favour the single grounded opening over the eight templates
    )
    config.eval.episodes = 256
    config.diagnose.probe_every = 4
    for rule in ("variance", "success", "empty"):  # the run is meant to collapse
        config.stopping[rule].action = "warn"
    recipes.apply(config, names)
    return config
