"""Compile a run's programs for a TPU pod, on a CPU machine, before the pod is rented.

    python -m ragen_jax.preflight --config=configs/sokoban.py:qwen2.5-3b --topology=v5e:4x4
                                  [--json] [--config.FIELD=VALUE ...]

Compiles the programs of a training run with libtpu's compiler, at their largest shapes
(programs/training.py). Prints the memory of a chip that each program needs and a lower bound on its
time (programs/roofline.py). Reads no weights and no tokenizer, and does not use the network. The
exit code is 1 if a program does not fit.
"""

import json
import os
import sys

import jax
from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.config.auto_fields import has_open_fields, need_path
from ragen_jax.config.check import check
from ragen_jax.config.load import load_config
from ragen_jax.configs.base import Config
from ragen_jax.core.domains import freeze
from ragen_jax.preflight.compile import compile_program, find_topology, quiet_stderr
from ragen_jax.preflight.report import complaints, report, table
from ragen_jax.programs.shapes import model_shape
from ragen_jax.programs.training import programs
from ragen_jax.run.diagnose import DIAGNOSTICS
from ragen_jax.storage.console_streams import show

DOES_NOT_FIT = 1  # exit code
# Default lengths of prompts in tokens. With them the paper's setting, five turns of 400 sampled
# tokens, ends at 800 + 5 * 400 + 4 * 200 = 3,600 tokens.
PROMPT_TOKENS = 800  # the first prompt: rules, format, one observation
OBSERVATION_TOKENS = 200  # tokens that a later turn adds after the previous reply
LIBTPU = {  # only the compiler is needed: no device, no metadata server, no lock
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def main(argv: list[str]) -> None:
    del argv
    given = CONFIG.value
    with command.bad_input():
        need_path(given)
        # Report a bad model before looking for the compiler.
        model_shape(freeze(Config, given) if has_open_fields(given) else check(given))
        with quiet_stderr():
            devices, chip = find_topology(TOPOLOGY.value)
        config = load_config(given, devices=devices)
        plan = programs(
            config,
            devices,
            [d.programs for d in DIAGNOSTICS.values() if d.programs],
            prompt_tokens=PROMPT.value,
            observation_tokens=OBSERVATION.value,
        )
    results = [compile_program(program, chip) for program in plan]
    summary = report(results, chip, len(devices))
    print(json.dumps(summary) if JSON.value else table(results, chip, summary), flush=True)
    for line in complaints(results, chip):
        show(line, error=True)
    sys.exit(0 if summary["fits"] else DOES_NOT_FIT)


if __name__ == "__main__":
    # libtpu reads its variables when JAX starts it. JAX read its variables when it was imported.
    os.environ.update(LIBTPU)
    jax.config.update("jax_platforms", LIBTPU["JAX_PLATFORMS"])
    CONFIG = command.define_config()
    TOPOLOGY = flags.DEFINE_string("topology", "v5e:4x4", "TPU type and topology of the slice.")
    JSON = flags.DEFINE_bool("json", False, "Print only one JSON object.")
    PROMPT = flags.DEFINE_integer(
        "prompt_tokens", PROMPT_TOKENS, "Tokens of an episode's first prompt."
    )
    OBSERVATION = flags.DEFINE_integer(
        "observation_tokens",
        OBSERVATION_TOKENS,
        "Tokens that each further turn adds to the prompt.",
    )
    command.run_command(main)
