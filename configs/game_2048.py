"""2048: make a tile of 128 from a board that is under way, in ten replies of two moves.

    python -m ragen_jax.train --config=configs/game_2048.py[:PRESET]

Not an environment of the paper. New tiles appear at random, so that the expert is a scripted
player and its moves are good ones, not the best. In 20 moves it makes the tile on 86 of 100 boards,
random moves on 17.

tiny (default)
    A 0.2 M parameter agent that first imitates that player, in single-turn context.
    Hardware and time: 2 CPU cores; one run took about 9 minutes, its warm start (once) one.
    Hardly within its reach: that run gained 5.6 points of held-out success (95 % +-2.4), 0.20 ->
    0.26, where the player that it imitated makes the tile on 0.86 of the boards. In ten minutes of
    CPU time imitation did not get to 0.35.
    Departs from configs/base.py: as presets.py does; learning rate 4e-4, falling to 0; diagnosis
    every fifth step; imitation ends early, for that reason, and has half the boards, since each
    takes up to ten replies, not five; its reasoning spells out the moves of the reply alone.
llm
    The same as below for any Qwen2.5, Qwen3 or Llama-3 that is given by --config.model.path; dtype,
    micro-batch, mesh and rematerialisation follow from its size and from the devices
    (configs/presets.py).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b
    Group-relative advantages, full history, 400 new tokens a reply. Time and score: not measured
    yet.
"""

from ml_collections import ConfigDict

from ragen_jax.configs.presets import build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """The config of a preset: one of presets.PRESETS, then recipes: "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="game_2048", max_turns=10, max_actions=20),
        dict(
            size=4,
            goal=128,
            start_tiles=8,
            min_sum=112,  # within reach of the budget of actions
        ),
        tiny={
            "rollout.max_new_tokens": 40,
            "optimizer.learning_rate": 4e-4,
            "optimizer.schedule": "linear",
            "diagnose.every": 5,
            "warmstart.rooms": 4096,
            "warmstart.success": 0.2,  # random moves have 0.17
            "warmstart.plan_moves": 2,  # those of a reply: later ones depend on the new tiles
            "steps": 120,
        },
    )
