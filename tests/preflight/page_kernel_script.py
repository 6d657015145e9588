"""Compile a chunk of decoding with the kernel and without; print memory and the kernel's calls."""

import json
import os

for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):  # of the tests, for CPUs
    os.environ.pop(name, None)

from ragen_jax.preflight.__main__ import LIBTPU  # noqa: E402

os.environ.update(LIBTPU)

from ragen_jax.config.load import load_config  # noqa: E402
from ragen_jax.configs import sokoban  # noqa: E402
from ragen_jax.preflight.compile import compile_program, find_topology, quiet_stderr  # noqa: E402
from ragen_jax.preflight.report import report  # noqa: E402
from ragen_jax.programs.training import programs  # noqa: E402


def main():
    for kind in ("v5e", "v6e"):
        with quiet_stderr():
            devices, chip = find_topology(f"{kind}:1x1")
        for kernel in ("xla", "pages"):
            config = sokoban.get_config("qwen3-0.6b")
            config.rollout.slots, config.rollout.cache_kernel = 8, kernel
            config.optimizer.micro_batch = 4
            checked = load_config(config, devices=devices)
            plan = programs(checked, devices, [], prompt_tokens=800, observation_tokens=200)
            (decode,) = [program for program in plan if program.name == "decode_chunk"]
            found = compile_program(decode, chip)
            (line,) = report([found], chip, 1)["programs"]
            calls = decode.lower().as_text().count("tpu_custom_call")
            row = {"kind": kind, "kernel": kernel, "calls": calls} | line
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
