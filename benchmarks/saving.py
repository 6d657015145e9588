"""Cost of a checkpoint's checksums: for the save, and for the training in parallel with it."""

import itertools
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.measure import Row, compare, summarise
from ragen_jax.run import checkpoint
from ragen_jax.update.state import TrainState

ARRAYS, SIDE = 20, 2500  # number and side of float32 matrices: 500 MB
PRODUCTS = 10  # number of products of such matrices that run in parallel with a save


def saving(repeats, *, side=SIDE, products=PRODUCTS):
    """A save of 500 MB with checksums against a save without: alone, and in the background."""
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
        wait_times, product_times = [], []

        def work():
            """Return seconds until the save is in the background, and until the products end."""
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
            wait_times.append((ours[0], other[0]))
            product_times.append((ours[1], other[1]))
        checkpoints.close()
    return [
        Row("a save with checksums, to its end", **row, other_name="without"),
        Row("waiting time of the training", **summarise(wait_times[1:]), other_name="without"),
        Row(
            f"and {products} products in parallel with the save",
            **summarise(product_times[1:]),
            other_name="without",
        ),
    ]


def _without(function):
    """Call a function while saves write no checksums, and return its result."""
    with mock.patch.object(checkpoint, "write_checksums", lambda folder: None):
        return function()
