"""WebShop (RAGEN-2, section 4.1): find a product that fits, choose its options and buy it.

    python -m ragen_jax.train --config=configs/webshop.py[:PRESET]
                              [--config.env.options.path=items_shuffle.json
                               --config.env.options.attributes_path=items_ins_v2.json]

tiny (default)
    A 0.2 M parameter agent that first imitates a buyer: 4,000 generated products with one choice or
    none, three on a page of results, one page in sight. Hardware and time: 2 CPU cores; 11
    minutes of CPU time, of them 5 for the imitation (once). Held-out success, mean of three seeds:
    0.55 -> 0.69 (docs/results/webshop_tiny.md).
llm
    The same as below for any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path; dtype,
    micro-batch, mesh and rematerialisation follow from its size and from the devices
    (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    The released setting (config/_6_webshop.yaml, docs/experiment_webshop_release.md): 9 turns of
    one action, 16 prompts of 8 episodes, 15,000 tokens of prompt and reply, 256 held-out goals,
    with group-relative advantages; its model is Qwen2.5-3B-Instruct. Filters of its runs: linear
    top-p of 0.9 (as here), 0.95 and 1, and top-k of 0.25, all with include_zero=True,
    loss_scale=none and no KL term. Time and score: not measured yet.

Without files there are `products` generated ones. `path` and `attributes_path` are the data set's
(princeton-nlp/WebShop, setup.sh), `instructions_path` its items_human_ins.json, without which goals
are made of the attributes, as in the released runs; `nouns_path` tells the nouns of titles, which
the reward compares (docs/environments/webshop.md). They are read once, and kept in the user's
cache.
`binary=True` pays as the released code does: 1 for a purchase that is right in all, and 0 else.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="webshop", max_turns=9, actions_per_turn=1, max_actions=9, max_context=15_000),
        dict(
            products=1000,
            catalogue_seed=0,
            options=2,  # most choices of a generated product
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
            "warmstart.rooms": 2600,  # of 2,998 goals; the others are for checks
        },
    )
