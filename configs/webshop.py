"""WebShop (RAGEN-2, section 4.1): find a product that fits, choose its options and buy it.

    python -m ragen_jax.train --config=configs/webshop.py[:PRESET]
                              [--config.env.options.path=items_shuffle.json
                               --config.env.options.attributes_path=items_ins_v2.json]

tiny (default)
    A 0.2 M parameter agent that first imitates a scripted buyer. There are 4,000 generated products
    with at most one choice each, three per page of results, and prompts show only the current page.
    Hardware and time: 2 CPU cores; 11 minutes of CPU time, including 5 for the imitation (once).
    Expected: held-out success 0.55 -> 0.69 (mean of three seeds; docs/results/webshop_tiny.md).
llm
    As below, for any Qwen2.5, Qwen3 or Llama-3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The setting of the released code (config/_6_webshop.yaml, docs/experiment_webshop_release.md)
    with group-relative advantages: 9 turns of one action, 16 prompts of 8 episodes, 15,000 tokens
    of prompt and reply, 256 held-out goals. The released runs train Qwen2.5-3B-Instruct, with
    linear top-p filters of 0.9 (as here), 0.95 and 1 and a top-k filter of 0.25, all with
    include_zero=True, loss_scale=none and no KL term. Time and score: not measured yet.

Without files, `products` products are generated. `path` and `attributes_path` are files of the data
set (princeton-nlp/WebShop, setup.sh). `instructions_path` is its items_human_ins.json; without it,
goals are made from the attributes, as in the released runs. `nouns_path` is a file with the nouns
of titles, which the reward compares (docs/environments/webshop.md). The files are read once and
stored in the user's cache.

With `binary=True`, the reward is that of the released code: 1 for a purchase that is correct in all
respects, otherwise 0.
"""

from ml_collections import ConfigDict, config_dict

from ragen_jax.configs import base, presets, recipes


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    model, names = presets.split(preset)
    config = base.get_config()
    config.env.name = "webshop"
    config.env.max_turns = 9
    config.env.actions_per_turn = 1
    config.env.max_actions = 9
    config.env.max_context = 15_000
    config.env.options.products = 1000
    config.env.options.catalogue_seed = 0
    config.env.options.options = 2  # maximum choices (color, size, ...) of a generated product
    config.env.options.per_page = 10
    config.env.options.show_attributes = False
    config.env.options.show_choices = True
    config.env.options.show_clicked = False
    config.env.options.binary = False
    for name in ("path", "attributes_path", "instructions_path", "nouns_path"):
        config.env.options[name] = config_dict.placeholder(str)  # files to draw from instead
    config.rollout.groups = 16
    config.rollout.group_size = 8
    config.eval.episodes = 256
    presets.apply(config, model)
    if model == "tiny":
        config.env.max_turns = 6
        config.env.max_actions = 6
        config.env.max_context = 0
        config.env.options.products = 4000
        config.env.options.options = 1
        config.env.options.per_page = 3
        config.env.options.show_choices = False
        config.env.options.show_clicked = True
        config.rollout.groups = 8
        config.rollout.group_size = 16
        config.rollout.max_new_tokens = 40
        config.optimizer.learning_rate = 2e-4
        config.optimizer.schedule = "linear"
        config.diagnose.every = 5
        config.warmstart.rooms = 2600  # of 2,998 goals; the rest are for checks
        config.warmstart.plan_moves = 1
        config.warmstart.check_every = 25
        config.steps = 120
    recipes.apply(config, names)
    return config
