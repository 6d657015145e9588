"""Every random stream of the project, by purpose.

A stream is named by a purpose and by words: the seed of the run or of a problem, and the values
that distinguish it from other streams of its purpose (member, step, epoch, ...). NumPy's streams
are Philox generators, JAX's are typed keys; neither depends on where or in which order it is used.
"""

import enum
import operator
from collections.abc import Callable, Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.core.stored_programs import stored
from ragen_jax.core.types import Array

WORDS = 5  # the most words of a NumPy stream


class Purpose(enum.IntEnum):
    """The purpose of a stream. A number is never reused, so that runs stay reproducible.

    The purposes of the environments' problems are in `envs` (their TAGs), far above these.
    """

    # NumPy
    ENVIRONMENT = 1  # noise inside an episode: problem's seed, member, key of the rollout
    POOL = 2  # order of an epoch of env.pool: run's seed, epoch
    POLICY_ORDER = 3  # rows over minibatches: run's seed, step
    CRITIC_ORDER = 4
    TRAJECTORY = 5  # turns scored in the trajectory scope: run's seed, step, environment
    PANELS = 6  # reasonings that precede a scored action: run's seed, step, environment, scope
    PERMUTATIONS = 7  # permutation test of retrieval: run's seed, step, environment, scope
    DEMONSTRATION = 8  # noise while a demonstration is played: problem's seed
    RANDOM_GROUPS = 10  # groups that the filter's control keeps: run's seed, step, environment
    THOUGHTS = 9  # reasoning of the expert: problem's seed, number of the style
    NOISE_DETECTORS = 11  # the laboratory's control: 0 for white noise, 1 for drifting noise
    RANK_ORDERS = 12  # the laboratory's permutation test
    CHANCE_ANSWERS = 13  # noise while a problem is played with another's answer: eval.seed, problem
    CHECK_PLAYS = 14  # random actions and noise of check_data's episodes: number of the problem
    CHECK_STEPS = 15  # noise of the steps that check_data compares
    SAMPLER_NOISE = 25  # noise of lab.sampler_noise: run's seed, step
    IMITATED = 26  # demonstrations of algorithm.imitate_every: run's seed, step
    # JAX
    PLAY = 16  # training episodes: run's seed, environment
    EVALUATE = 17  # held-out episodes: eval.seed
    GRADIENTS = 18  # held-out groups of the gradient report: eval.seed
    ADAPTERS = 19  # initial values of LoRA adapters: run's seed
    WARMSTART_PARAMETERS = 20  # initial values of the tiny agent: warmstart.seed
    WARMSTART_ORDER = 21  # order of the demonstrations: warmstart.seed, epoch
    WARMSTART_CHECK = 22  # episodes that decide whether the warm start is done: warmstart.seed
    PROBE = 23  # first turns of held-out problems: eval.seed
    SERVE = 24  # replies to requests: eval.seed


def philox(purpose: int, *words: int) -> np.random.Philox:
    """Return the Philox bit generator of a stream; its output is the same in every NumPy version.

    The purpose and all words fill separate bits of Philox's 128-bit key and of the upper 192 bits
    of its 256-bit counter, so different streams never share a state. The words are checked and
    converted to uint64 separately: NumPy would turn a list of Python ints into float64, and round
    them, if one of them needed its 64th bit.

    Args:
      purpose: a `Purpose` or the TAG of an environment, below 2**32.
      words: up to five ints >= 0: the second below 2**32, the others below 2**64; missing words
        are 0.

    Raises:
      ValueError: too many words, or a word outside its range.
    """
    key, counter = _philox_state(purpose, words)
    return np.random.Philox(
        key=np.array(key, np.uint64),
        counter=np.array(counter, np.uint64),
    )


def restarts(bits: np.random.Philox, purpose: int, first: int) -> Callable[[int], None]:
    """Return a function that sets a generator to the start of a stream, given its second word.

    It takes a fifth of the time that a new generator takes.

    Args:
      bits: made by `philox`.
      purpose, first: see `philox`; the stream has two words.

    Raises:
      ValueError: as in `philox`; also raised by the returned function.
    """
    key, counter = _philox_state(purpose, (first,))
    state = bits.state
    state["state"]["key"][:], state["state"]["counter"][:] = key, counter
    state["buffer_pos"] = len(state["buffer"])  # nothing is left of the last block
    state["has_uint32"] = 0

    def restart(second):
        state["state"]["key"][1] = key[1] | _second_word(second)
        bits.state = state

    return restart


def _philox_state(purpose: int, words: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (key, counter) of the start of a stream."""
    if len(words) > WORDS:
        raise ValueError(f"a stream has at most {WORDS} words, got {len(words)}: {words}")
    first, second, *rest = (*map(_word, words), *(0,) * (WORDS - len(words)))
    # The lowest word of the counter counts the drawn blocks.
    return [first, _half_word("purpose", purpose) << 32 | _second_word(second)], [0, *rest]


def generator(purpose: int, *words: int) -> np.random.Generator:
    """Return the generator of a stream; see `philox`."""
    return np.random.Generator(philox(purpose, *words))


def stream_key(purpose: Purpose, seed: int, *words: int) -> jax.Array:
    """Return the typed JAX key of a stream.

    Args:
      seed: in [0, 2**64); all bits count (jax.random.key drops the upper half).
      words: in [0, 2**32).

    Raises:
      ValueError: seed or a word out of its range.
    """
    seed = _word(seed)
    halves = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    for word in words:
        if _word(word) >= 1 << 32:
            raise ValueError(f"a word of a JAX key must be below 2**32, got {word}")
    data = _fold_in(halves, np.array([purpose, *words], np.uint32))
    return jax.random.wrap_key_data(data, impl="threefry2x32")


@stored()
def _fold_in(halves: Array, words: Array) -> jax.Array:
    """Return the uint32 [2] data of a key into which `words` are folded, one after the other."""
    key = jax.random.wrap_key_data(jnp.asarray(halves), impl="threefry2x32")
    for word in words:
        key = jax.random.fold_in(key, word)
    return jax.random.key_data(key)


def key_word(key: jax.Array) -> int:
    """Return all 64 bits of a typed key as an int: a word of a NumPy stream."""
    high, low = np.asarray(jax.random.key_data(key), np.uint64).ravel()
    return int(high) << 32 | int(low)


def _second_word(value: SupportsIndex) -> int:
    return _half_word("the second word", value)


def _half_word(name: str, value: SupportsIndex) -> int:
    value = _word(value)
    if value >= 1 << 32:
        raise ValueError(f"{name} of a stream must be below 2**32, got {value}")
    return value


def _word(value: SupportsIndex) -> int:
    value = operator.index(value)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"a word of a stream must be from 0, below 2**64, got {value}")
    return value
