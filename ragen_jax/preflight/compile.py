"""Compile a program with libtpu and measure its memory on a chip and the compile time."""

import contextlib
import dataclasses
import importlib.util
import os
import re
import sys
import time
from collections.abc import Generator
from typing import Any

import jax
from jax.experimental import topologies

from ragen_jax.programs.roofline import CHIPS, Chip
from ragen_jax.programs.shapes import bytes_per_chip
from ragen_jax.programs.training import Program
from ragen_jax.storage.atomic_io import writing

GIB = 2**30


# XLA's message: "the total memory required for HLO temporaries (16.74G) exceeds available HBM". The
# number is all the memory that the program needs, including its arguments.
OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED.*?\(([\d.]+)([KMGT]?)\) exceeds available HBM", re.S
)


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def find_topology(name: str) -> tuple[list[jax.Device], Chip]:
    """Return (devices, chip) of a topology such as "v5e:4x4".

    Raises:
      ValueError: libtpu is missing, or it does not know the topology.
    """
    kind, _, _ = name.partition(":")
    known = "; ".join(f"{k}:{{{','.join(chip.topologies)}}}" for k, chip in CHIPS.items())
    if kind not in CHIPS or not re.fullmatch(r"\w+:\d+(x\d+){1,2}", name):
        raise ValueError(f"--topology is {name!r}; accepted, among others: {known}")
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("the TPU compiler is not installed: pip install ragen_jax[tpu]")
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"--topology is {name!r}: {reason}; accepted, among others: {known}"
        ) from None
    return topology.devices, CHIPS[kind]


@dataclasses.dataclass(frozen=True)
class CompileResult:
    """The measurements of a compiled program."""

    program: Program
    compile_s: float
    peak_gib: float  # peak memory of a chip, including `held_gib`
    held_gib: float  # memory of a chip that other arrays of the run take during a call
    roofline_s: float  # lower bound on the time of a call
    fits: bool


def compile_program(program: Program, chip: Chip) -> CompileResult:
    """Compile a program; return a result even if the program does not fit."""
    resident_bytes = bytes_per_chip(program.resident)
    start = time.perf_counter()
    with quiet_stderr():
        try:
            # Typed Any: backends without memory analysis return None.
            memory: Any = program.lower().compile().memory_analysis()
            own_bytes = memory.peak_memory_in_bytes or (
                memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                + memory.temp_size_in_bytes
                - memory.alias_size_in_bytes
            )
        except jax.errors.JaxRuntimeError as error:
            match = OUT_OF_MEMORY.search(str(error))
            if not match:
                raise
            own_bytes = float(match[1]) * UNITS[match[2]]
    seconds = time.perf_counter() - start
    peak = (own_bytes + resident_bytes) / GIB
    return CompileResult(
        program=program,
        compile_s=seconds,
        peak_gib=peak,
        held_gib=resident_bytes / GIB,
        roofline_s=program.cost.seconds(chip),
        fits=peak <= chip.hbm_gib,
    )


@contextlib.contextmanager
def quiet_stderr() -> Generator[None]:
    """Discard text that libtpu writes to file descriptor 2; exceptions are not affected."""
    sys.stderr.flush()
    kept = os.dup(2)
    with writing(os.devnull), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
