"""Compiles the search over wiki-18's vectors for v5e:4x4, and prints its memory per chip.

test_preflight.py runs this in a separate process, because libtpu reads its variables once.
"""

import json
import os

from ragen_jax.preflight.__main__ import LIBTPU

os.environ.update(LIBTPU)

import jax  # noqa: E402

from ragen_jax.core.sharding import make_mesh  # noqa: E402
from ragen_jax.envs.search_qa.dense import resident  # noqa: E402
from ragen_jax.preflight.compile import GIB, compile_program, find_topology  # noqa: E402
from ragen_jax.programs.program import program  # noqa: E402
from ragen_jax.programs.roofline import Cost  # noqa: E402
from ragen_jax.programs.shapes import bytes_per_chip  # noqa: E402

ROWS, WIDTH = 21_015_324, 768  # passages of wiki-18, width of E5-base


def main():
    jax.config.update("jax_platforms", "cpu")
    devices, chip = find_topology("v5e:4x4")
    mesh = make_mesh(data=4, fsdp=4, tensor=1, devices=devices)
    kept = resident(ROWS, WIDTH, "bfloat16", mesh, k=5)
    matrix = kept.arguments[0]
    cost = Cost(kept.flops, bytes_per_chip(matrix))
    one = program(
        kept.name,
        mesh,
        kept.function,
        *kept.arguments,
        keywords=kept.keywords,
        resident=None,
        cost=cost,
        calls=1,
        helps=kept.helps,
    )
    found = compile_program(one, chip)
    print(
        json.dumps(
            {
                "matrix_gib": bytes_per_chip(matrix) / GIB,
                "peak_gib": found.peak_gib,
                "fits": found.fits,
                "compile_s": found.compile_s,
                "roofline_s": found.roofline_s,
            }
        )
    )


if __name__ == "__main__":
    main()
