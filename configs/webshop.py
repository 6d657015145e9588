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
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts. Not trained here yet.
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
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

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="webshop", max_turns=9, actions_per_turn=1, max_actions=9, max_context=15_000),
        dict(
            products=1000,
            catalogue_seed=0,
            options=2,  # maximum choices (color, size, ...) of a generated product
            per_page=10,
            show_attributes=False,
            show_choices=True,
            show_clicked=False,
            binary=False,
            path=placeholder(str),  # this and the next three: files to draw from instead
            attributes_path=placeholder(str),
            instructions_path=placeholder(str),
            nouns_path=placeholder(str),
        ),
        fields={"rollout.groups": 16, "rollout.group_size": 8, "eval.episodes": 256},
        tiny={
            **TINY_REPLIES,
            "env.max_turns": 6,
            "env.max_actions": 6,
            "env.max_context": 0,
            "env.options.products": 4000,
            "env.options.options": 1,
            "env.options.per_page": 3,
            "env.options.show_choices": False,
            "env.options.show_clicked": True,
            "rollout.groups": 8,
            "rollout.group_size": 16,
            "optimizer.learning_rate": 2e-4,
            "warmstart.rooms": 2600,  # of 2,998 goals; the rest are for checks
        },
    )
