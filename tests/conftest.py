"""For all tests: CPU, a thread pool that cannot hang, the tiny tokenizer, turns made by hand."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["NPROC"] = "32"  # XLA's threads; with fewer, programs of several CPU devices can hang

import numpy as np
import pytest

from ragen_jax.model.tokenizer import build_tokenizer
from ragen_jax.types import Episode, Turn


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def make_turn():
    """make_turn(prompt, sampled, ...) -> `Turn`; log-probs are -0.1, -0.2, ... unless given."""

    def make(prompt, sampled, *, logp=None, reasoning=(0, 0), actions=(), valid=True, reward=0.0):
        logp = [-0.1 * (i + 1) for i in range(len(sampled))] if logp is None else logp
        return Turn(
            prompt=np.array(prompt, np.int32),
            sampled=np.array(sampled, np.int32),
            logp=np.array(logp, np.float32),
            reasoning=reasoning,
            answer=(0, 0),
            actions=tuple(actions),
            valid=valid,
            reward=reward,
            info={},
        )

    return make


@pytest.fixture(scope="session")
def make_episode():
    """make_episode(group, member, turns) -> `Episode`."""

    def make(group, member, turns, *, success=False):
        return Episode(
            seed=100 + group, group=group, member=member, turns=tuple(turns), success=success
        )

    return make
