"""Compiles a program that the compiler refuses for a v5e chip, and prints its estimated size.

test_preflight.py runs this in a separate process, because libtpu reads its variables once.
"""

import os

from ragen_jax.preflight.__main__ import LIBTPU

os.environ.update(LIBTPU)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from ragen_jax.core.sharding import make_mesh  # noqa: E402
from ragen_jax.preflight.compile import compile_program, find_topology  # noqa: E402
from ragen_jax.programs.program import program  # noqa: E402
from ragen_jax.programs.roofline import Cost  # noqa: E402
from ragen_jax.programs.shapes import struct  # noqa: E402


def main():
    jax.config.update("jax_platforms", "cpu")
    devices, chip = find_topology("v5e:2x2")
    mesh = make_mesh(data=1, fsdp=1, tensor=1, devices=devices[:1])

    def whole(gib):
        return struct(mesh, (gib * 2**18, 1024), jnp.float32)

    # It has no temporary memory; the resident memory counts as well.
    one = program(
        "sum",
        mesh,
        jax.jit(jnp.sum),
        whole(17),
        resident=whole(2),
        cost=Cost(0, 0),
        calls=1,
        helps=(),
    )
    found = compile_program(one, chip)
    print(found.peak_gib, found.held_gib, found.fits)


if __name__ == "__main__":
    main()
