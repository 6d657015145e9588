"""A model organism of template collapse: an agent that has imitated two reasoning styles.

    python -m ragen_jax.train --config=configs/organism.py[:WORLD[+RECIPE...]]

Half of its demonstrations state where everything is (style "grounded"). The other half have the
same rooms and actions, but their reasoning is a sentence of similar length that depends on no room
(style "template"). Both styles solve about the same number of rooms, so the reward does not
distinguish them, but the entropy bonus favours the template, which has more variants. The reasoning
thus stays diverse, valid and successful while it ceases to depend on the input. The style of every
reasoning is known (reasoning/style/*), so that detectors of collapse can be tested against it.

WORLD  sokoban (default) or frozen_lake: the tiny agent; bandit: SmolLM2-135M, in sentences, with 32
       replies a step and 10 steps. It has no entropy bonus, under which a language model soon
       writes gibberish, but a penalty for long replies, which favours the template: it is shorter.
RECIPE a recipe of configs/recipes, such as no_filter.

    --config.warmstart.styles.template=0.2      a smaller fraction of templates
    --config.warmstart.styles.silent=0.5        some demonstrations without any reasoning
    --config.warmstart.plan_moves=0             the grounded text has positions, but no plan
    --config.algorithm.entropy_coef=0.0         no entropy bonus, which drives the drift
"""

from types import ModuleType

from ml_collections import ConfigDict

from ragen_jax.configs import bandit, frozen_lake, recipes, sokoban
from ragen_jax.envs.styles import UNGROUNDED

# World -> (config, success at which the warm start stops). At 0.4 in FrozenLake, the sentences are
# only half learnt, and the reasoning drifts to neither style.
WORLDS = {"sokoban": (sokoban, 0.4), "frozen_lake": (frozen_lake, 0.6)}
LANGUAGE = "bandit"  # the world of a language model


def get_config(preset: str = "sokoban") -> ConfigDict:
    """Return the config of a world with any recipes, such as "sokoban+no_filter".

    Raises:
      ValueError: the world or a recipe is unknown.
    """
    world, *names = preset.split("+")
    if world == LANGUAGE:
        config = _language_model()
    elif world in WORLDS:
        config = _tiny_agent(*WORLDS[world])
    else:
        raise ValueError(f"unknown world {world!r}; known: {', '.join([*WORLDS, LANGUAGE])}")
    config.warmstart.styles = dict.fromkeys(UNGROUNDED, 0.0) | dict(grounded=0.5, template=0.5)
    config.algorithm.name = "grpo"
    config.eval.temperature = (
        1.0  # lower temperatures favour the single grounded opening over the eight templates
    )
    for rule in ("variance", "success", "empty"):  # the run is meant to collapse
        config.stopping[rule].action = "warn"
    recipes.apply(config, names)
    return config


def _tiny_agent(world: ModuleType, success: float) -> ConfigDict:
    config = world.get_config("tiny")
    config.steps = 160
    config.warmstart.layers = 3
    config.warmstart.success = success
    config.optimizer.learning_rate = 2e-4
    config.algorithm.entropy_coef = 0.05
    config.eval.episodes = 256
    config.diagnose.probe_every = 4
    return config


def _language_model() -> ConfigDict:
    config = bandit.get_config("smollm2-135m")
    # Either arm can be the better one, and both styles can compare them.
    config.env.options.update(sure=(5, 95), chance=(5, 95))
    config.steps = 10
    config.rollout.update(groups=8, group_size=4)
    # Replies in the grounded style have about 70 tokens, in the template's 30: replies of more than
    # 32 pay, up to 1 at 96.
    config.reward.overlong_buffer = 64
    config.optimizer.learning_rate = 3e-5
    # After 40 or 100 updates, only 6 to 16 % of the texts were templates word by word.
    config.warmstart.update(check_every=100, max_updates=200, success=1.0)
    config.eval.episodes = 32
    # Prompts of a single turn have no trajectory scope, and a run is too short for a long baseline.
    config.diagnose.update(every=1, first_turn_samples=16, trajectory_samples=1, flow_every=0)
    config.diagnose.update(probe_every=3, probe_problems=16, probe_samples=2)
    config.regimes.baseline = 3
    return config
