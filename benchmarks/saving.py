"""What the checksums of a checkpoint cost: the save itself, and the training beside it."""

import itertools
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.measure import Row, compare, summarise
from ragen_jax.run import checkpoint
from ragen_jax.update.state import TrainState

ARRAYS, SIDE = 20, 2500  # of float32: 500 MB
PRODUCTS = 10  # of matrices of that side, which run beside a save


def saving(repeats, *, side=SIDE, products=PRODUCTS):
    """A save of 500 MB with checksums against one without, waited for and in the background."""
    key = jax.random.key(0)
    params = {str(i): jax.random.normal(key, (side, side)) for i in range(ARRAYS)}
    kl_scale = jnp.float32(1.0)
    state = TrainState(params, opt_state=(), step=jnp.int32(0), seed_cursor={}, kl_scale=kl_scale)
    product = jax.jit(lambda x: x @ x)
    steps = itertools.count(1)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = checkpoint.Checkpoints(folder, keep=1)
        row = compare(
            lambda: checkpoints.save(next(steps), state, wait=True),
            lambda: _without(lambda: checkpoints.save(next(steps), state, wait=True)),
            repeats=repeats,
        )
        waited, beside = [], []

        def work():
            """(seconds until the save goes on in the background, until the products are done)."""
            start = time.perf_counter()
            checkpoints.save(next(steps), state)
            middle = time.perf_counter()
            for _ in range(products):
                product(params["0"]).block_until_ready()
            end = time.perf_counter()
            checkpoints.manager.wait_until_finished()
            return middle - start, end - start

        for _ in range(1 + repeats):
            ours, other = work(), _without(work)
            waited.append((ours[0], other[0]))
            beside.append((ours[1], other[1]))
        checkpoints.close()
    return [
        Row("a save with checksums, to its end", **row, other_name="without"),
        Row("what the training waits for", **summarise(waited[1:]), other_name="without"),
        Row(
            f"and {products} products, the save beside them",
            **summarise(beside[1:]),
            other_name="without",
        ),
    ]


def _without(function):
    """What a function returns where saves have no checksums."""
    with mock.patch.object(checkpoint, "write_checksums", lambda folder: None):
        return function()
