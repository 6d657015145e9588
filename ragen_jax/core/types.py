"""The objects that travel between the stages of a step.

Axis letters, used at the end of names everywhere:

    B rows      T tokens of a row     G groups (prompts)    K episodes of a group
    M scored reasonings               N scoring prompts     V vocabulary
    L layers    D width               H heads               S positions of a cache

Entry t of every `_BT` array is about token t of the row (entry 0 is masked); the only shift
between logits and tokens is in `likelihood.token_statistics`.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import numpy as np

Array = jax.Array | np.ndarray  # for functions that accept and return either
Params = dict[str, Any]  # nested, by module and parameter: arrays or their placeholders
Metrics = dict[str, float]  # metric name -> value; part of a row of metrics.jsonl


@dataclasses.dataclass(frozen=True)
class Turn:
    """A prompt and the response sampled for it, as token ids: training uses the sampled tokens.
    The prompt ends with the tokens of `<think>`, so the reply begins inside the reasoning.
    """

    prompt: np.ndarray  # int32 [P], the full context, earlier turns included
    message: str  # last user message of the prompt; IMAGE in place of each image
    sampled: np.ndarray  # int32 [n], with the stop token if one was sampled
    logp: np.ndarray  # float32 [n], log-probability under the sampled distribution
    reasoning: tuple[int, int]  # token span of `sampled` before </think>; (0, 0): unclosed or empty
    answer: tuple[int, int]  # token span of `sampled` inside <answer>...</answer>
    actions: tuple[str, ...]  # executed actions
    valid: bool  # well formed, and every action known
    reward: float  # the environment's reward, without the format penalty
    info: dict[str, Any]
    # The message's images, uint8 [height, width, 3] each; its text has envs.types.IMAGE for each.
    images: tuple[np.ndarray, ...] = ()
    # (first, count) of the ids that replace an image's tokens in the prompt (image_table.py)
    spans: tuple[tuple[int, int], ...] = ()
    # int16 [m, X], the experts that sampling used for m consecutive tokens up to the one before the
    # last, without those that the turn before has (rollout/routes.py); None: no record.
    experts: np.ndarray | None = None
    # If a client wrote the prompt: its messages with the reply, and its tools, in OpenAI's format.
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode of an environment seed."""

    seed: int
    group: int  # index of the seed within the step
    member: int  # index of the episode within its group
    turns: tuple[Turn, ...]
    success: bool
    error: str = ""  # traceback of its environment's failure; "" if it did not fail
    left_out: int = 0  # tokens that were sampled for it and are in no turn (retries, side calls)


REASONING, ACTION = 1, 2


@flax.struct.dataclass
class Batch:
    """Episodes as rows of tokens. A row holds one or more turns of one episode.

    NumPy arrays on the host; padding rows have weight 0 and an empty mask.
    """

    tokens_BT: np.ndarray  # int32, right-padded
    mask_BT: np.ndarray  # float32, 1 where the token was sampled by the policy
    logp_BT: np.ndarray  # float32, the sampler's log-probability, 0 where mask is 0
    turn_BT: np.ndarray  # int32, the turn a sampled token belongs to, -1 elsewhere
    turn_end_BT: np.ndarray  # bool, the last sampled token of each turn
    span_BT: np.ndarray  # int8, kind of a sampled token: REASONING, ACTION, or 0
    reward_BT: np.ndarray  # float32, on turn ends; zero until rewards.add_rewards
    episode_B: np.ndarray  # int32, index into the list of episodes; -1 on padding rows
    group_B: np.ndarray  # int32, index of the episode's group; -1 on padding rows
    weight_B: np.ndarray  # float32, 1 for a real row, 0 for padding
    # int16, the experts that sampling used for each token, -1 where there is no record
    # (rollout/routes.py); None: no token has a record.
    experts_BTX: np.ndarray | None = None

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by the names of their fields."""
        return {name: x for name, x in vars(self).items() if x is not None}


LIMIT = "limit"  # key of an info: the limit at which an agent's program failed
SUCCESS_UNDEFINED = "success_undefined"  # key of an info: True if success is not defined
