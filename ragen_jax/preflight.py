"""Compile a run's programs for a TPU pod, on a CPU machine, before the pod is rented.

    python -m ragen_jax.preflight --config=configs/sokoban.py:qwen2.5-3b --topology=v5e:4x4
                                  [--json] [--config.FIELD=VALUE ...]

Compiles with libtpu's own compiler what a training run would compile, at its largest shapes
(programs.py), and says what each program holds in a chip's memory and how long it takes at least
(roofline.py). Reads no weights, no tokenizer and no network. Exit code 1 if something does not
fit.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import sys
import time

import jax
from absl import flags
from jax.experimental import topologies

from ragen_jax import command
from ragen_jax.check import check
from ragen_jax.programs import programs
from ragen_jax.roofline import CHIPS
from ragen_jax.run_shapes import bytes_per_chip, model_shape
from ragen_jax.settle import is_open, need_path, settle

DOES_NOT_FIT = 1  # exit code
GIB = 2**30
# Tokens of a prompt, unless the flags say otherwise. With them the paper's setting, five turns of
# 400 sampled tokens, ends at 800 + 5 * 400 + 4 * 200 = 3,600.
PROMPT_TOKENS = 800  # the first: rules, format, one observation
OBSERVATION_TOKENS = 200  # what a later turn adds to the reply before it
LIBTPU = {  # only the compiler is wanted: no device, no metadata server, no lock
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# As XLA says it: "the total memory required for HLO temporaries (16.74G) exceeds available HBM".
OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED.*?\(([\d.]+)([KMGT]?)\) exceeds available HBM", re.S
)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def find_topology(name):
    """(devices, `Chip`) of a topology such as "v5e:4x4".

    Raises:
      ValueError: libtpu is missing, or it has no such topology.
    """
    kind, _, _ = name.partition(":")
    known = "; ".join(f"{k}:{{{','.join(chip.topologies)}}}" for k, chip in CHIPS.items())
    if kind not in CHIPS or not re.fullmatch(r"\w+:\d+(x\d+){1,2}", name):
        raise ValueError(f"--topology is {name!r}; accepted, among others: {known}")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("the TPU compiler is not installed: pip install ragen_jax[tpu]")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--topology is {name!r}: {reason}; accepted, among others: {known}"
        ) from None
    return found.devices, CHIPS[kind]


@dataclasses.dataclass(frozen=True)
class Result:
    """What compiling a program told."""

    program: object  # programs.Program
    compile_s: float
    peak_gib: float  # of a chip, everything that is in memory then
    held_gib: float  # of that, what is not the program's own
    roofline_s: float  # of a call
    fits: bool


def compile_program(program, chip):
    """The `Result` of one program; one that does not fit is a result, too."""
    held = bytes_per_chip(program.held)
    start = time.perf_counter()
    with quiet_stderr():
        try:
            memory = program.lower().compile().memory_analysis()
            own = memory.peak_memory_in_bytes or (
                memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                + memory.temp_size_in_bytes
                - memory.alias_size_in_bytes
            )
        except jax.errors.JaxRuntimeError as error:
            found = OUT_OF_MEMORY.search(str(error))
            if not found:
                raise
            own = float(found[1]) * UNITS[found[2]] + bytes_per_chip(program.arguments)
    seconds = time.perf_counter() - start
    peak = (own + held) / GIB
    return Result(
        program=program,
        compile_s=seconds,
        peak_gib=peak,
        held_gib=held / GIB,
        roofline_s=program.cost.seconds(chip),
        fits=peak <= chip.hbm_gib,
    )


@contextlib.contextmanager
def quiet_stderr():
    """Drops what libtpu writes to file descriptor 2; exceptions pass."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


# ------------------------------------------------------------------------------ report


def report(results, chip, devices):
    """The object of --json."""
    return {
        "programs": [
            {
                "name": r.program.name,
                "compile_s": round(r.compile_s, 2),
                "peak_hbm_gib": round(r.peak_gib, 3),
                "hbm_gib": chip.hbm_gib,
                "fits": r.fits,
                "flops": r.program.cost.flops * devices,
                "bytes": r.program.cost.bytes,
                "roofline_s": r.roofline_s,
            }
            for r in results
        ],
        "step_s": sum(r.program.calls * r.roofline_s for r in results),
        "fits": all(r.fits for r in results),
    }


HEADER = "program        calls  compile s  peak GiB  of it held  fits  TFLOP/call  GB/chip  least s"


def table(results, chip, found):
    """The report for people."""
    lines = [HEADER]
    for r, shown in zip(results, found["programs"], strict=True):
        lines.append(
            f"{r.program.name:<14} {r.program.calls:>5.3g} {r.compile_s:>10.1f} {r.peak_gib:>9.2f} "
            f"{r.held_gib:>11.2f}  {'yes' if r.fits else 'NO':<4} {shown['flops'] / 1e12:>11.1f} "
            f"{shown['bytes'] / 1e9:>8.1f} {r.roofline_s:>8.3f}"
        )
    lines.append(
        f"HBM of a chip: {chip.hbm_gib} GiB. A step takes at least {found['step_s']:.1f} s."
    )
    return "\n".join(lines)


def complaints(results, chip):
    """One line for each program that does not fit."""
    for r in results:
        if not r.fits:
            yield (
                f"{r.program.name} does not fit: {r.peak_gib:.2f} GiB, "
                f"{r.peak_gib - chip.hbm_gib:.2f} more than the chip's {chip.hbm_gib}; "
                f"what helps: {', '.join(r.program.helps)}"
            )


def main(argv):
    del argv
    config = CONFIG.value
    with command.bad_input():
        need_path(config)
        if not is_open(config):
            check(config)
        model_shape(config)  # before the compiler is looked for
        with quiet_stderr():
            devices, chip = find_topology(TOPOLOGY.value)
        settle(config, devices)
        check(config)
        plan = programs(
            config,
            devices,
            prompt_tokens=PROMPT.value,
            observation_tokens=OBSERVATION.value,
        )
    results = [compile_program(program, chip) for program in plan]
    found = report(results, chip, len(devices))
    print(json.dumps(found) if JSON.value else table(results, chip, found), flush=True)
    for line in complaints(results, chip):
        print(line, file=sys.stderr)
    sys.exit(0 if found["fits"] else DOES_NOT_FIT)


if __name__ == "__main__":
    # libtpu reads its variables when JAX starts it, JAX has read its own when it was imported.
    os.environ.update(LIBTPU)
    jax.config.update("jax_platforms", LIBTPU["JAX_PLATFORMS"])
    CONFIG = command.define_config()
    TOPOLOGY = flags.DEFINE_string("topology", "v5e:4x4", "TPU type and shape of the slice.")
    JSON = flags.DEFINE_bool("json", False, "Print one JSON object and nothing else.")
    PROMPT = flags.DEFINE_integer(
        "prompt_tokens", PROMPT_TOKENS, "Tokens of an episode's first prompt."
    )
    OBSERVATION = flags.DEFINE_integer(
        "observation_tokens", OBSERVATION_TOKENS, "Tokens that each further turn's prompt adds."
    )
    command.run_command(main)
