"""Machine utilisation of updates with 16k tokens per micro-batch: measured, or planned.

    python -m benchmarks train-length [--shape=NAME] [--tokens=N] [--repeats=N] [--json]
    python -m benchmarks train-length --topology=v5e:4x4 --model=Qwen/Qwen2.5-3B [--tokens=N]

The first command measures the default device: model FLOPs per second (six per weight and token,
attention's causal half, no recomputation) as a fraction of the rate of matrix products on that
device. The second command compiles the update of a training run with libtpu's compiler and prints
the limits of the roofline.
"""

import argparse
import dataclasses
import json
import os

import jax

from benchmarks import llm, measure
from benchmarks.measure import Row, compare
from ragen_jax.config.command_line import bad_input
from ragen_jax.config.load import load_config
from ragen_jax.config.per_task import step_rows
from ragen_jax.configs import presets, sokoban
from ragen_jax.core.memory import keep_freed_memory
from ragen_jax.model.kernels import best_kernel
from ragen_jax.model.qwen import Qwen
from ragen_jax.preflight.__main__ import LIBTPU, OBSERVATION_TOKENS
from ragen_jax.preflight.compile import compile_program, find_topology, quiet_stderr
from ragen_jax.programs.shapes import describe
from ragen_jax.programs.training import programs

TOKENS = 16_384  # tokens of a micro-batch
LENGTHS = {"tiny": (512, 2048)}  # shape: tokens of a row; for larger shapes:
LONG = (1024, 4096)


def length_shape(name, dtype):
    """Return the `ModelConfig` for training on long rows: the device's kernel, and remat."""
    config = llm.shape(name, dtype)
    kernel = best_kernel(jax.default_backend(), dtype, config.head_dim)
    return dataclasses.replace(config, attention=kernel, remat=True)


def train_length(repeats, *, name, dtype, tokens=TOKENS, lengths=None):
    """Return the table rows of updates on one micro-batch.

    Args:
      tokens: tokens of the micro-batch.
      lengths: tokens of a row, several values; None: LENGTHS or LONG.
    """
    config = length_shape(name, dtype)
    found = []
    for length in lengths or LENGTHS.get(name, LONG):
        rows = max(1, tokens // length)
        run = llm.updater(Qwen(config), llm.random_params(config), rows=rows, length=length)
        found.append(
            Row(
                name=f"{name} update: {rows} x {length} tokens",
                work=rows * length,
                flops=llm.update_flops(config, rows=rows, length=length),
                **compare(run, repeats=repeats, warmup=1),
            )
        )
        del run  # free its parameters before the next are created
    return found


# ------------------------------------------------------------------------------ planned


def planned_config(model, rows, devices):
    """Return the complete config of a run with full history and micro-batches of `rows` rows."""
    config = sokoban.get_config("llm")
    config.model.path = model
    config.optimizer.minibatches = 1
    config.optimizer.micro_batch = rows
    config.rollout.groups = max(config.rollout.groups, rows // config.rollout.group_size)
    config.model.dtype = "bfloat16"
    return load_config(config, devices=devices)


def plan_update(model, devices, chip, *, tokens, length):
    """Return the preflight's figures for an update of `model`.

    Args:
      tokens: tokens per micro-batch and chip.
      length: tokens of a row.

    Returns:
      dict: rows of a micro-batch, memory of the fullest chip, seconds of the roofline, and two
      fractions of the chips' peak in that time: of all computed FLOPs, and of the model's FLOPs.

    Raises:
      ValueError: an unknown model, or rows that the run cannot have.
    """
    rows = max(1, tokens // length) * len(devices)
    config = planned_config(model, rows, devices)
    observations = (config.env.max_turns - 1) * OBSERVATION_TOKENS
    prompt = length - config.env.max_turns * config.rollout.max_new_tokens - observations
    lengths = dict(prompt_tokens=prompt, observation_tokens=OBSERVATION_TOKENS)
    run = describe(config, devices, *lengths.values())
    (update,) = [p for p in programs(config, devices, (), **lengths) if p.name == "update"]
    found = compile_program(update, chip)
    compute_s = update.cost.flops / chip.peak_flops
    peak = len(devices) * chip.peak_flops * found.roofline_s
    model_flops = llm.update_flops(run.model.config, rows=step_rows(config), length=run.row)
    return {
        "model": model,
        "micro_batch": f"{rows} x {run.row}",
        "tokens_a_chip": rows * run.row // len(devices),
        "peak_gib": round(found.peak_gib, 2),
        "fits": found.fits,
        "compile_s": round(found.compile_s, 1),
        "roofline_s": round(found.roofline_s, 3),
        "bound_by": "compute"
        if update.cost.flops / chip.peak_flops == found.roofline_s
        else "memory",
        "computed_share": round(compute_s / found.roofline_s, 3),
        "model_share": round(model_flops / peak, 3),
    }


# ------------------------------------------------------------------------------ command


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks train-length", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    shapes = ("tiny", *llm.SHAPES)
    parser.add_argument("--shape", default="tiny", choices=shapes, metavar="NAME")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="tokens per micro-batch (and chip)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--topology", help="plan for a TPU instead, such as v5e:4x4")
    parser.add_argument(
        "--model", default=presets.LLMS["qwen2.5-3b"], help="hub id of the planned model"
    )
    parser.add_argument("--length", type=int, default=4096, help="tokens of a planned row")
    options = parser.parse_args(argv)
    for name in ("tokens", "repeats", "length"):
        value = getattr(options, name)
        if value < 1:
            parser.error(f"--{name} is {value}; it must be at least 1")
    if options.topology:
        os.environ.update(LIBTPU)
        jax.config.update("jax_platforms", LIBTPU["JAX_PLATFORMS"])
        with bad_input():
            with quiet_stderr():
                devices, chip = find_topology(options.topology)
            sizes = dict(tokens=options.tokens, length=options.length)
            found = plan_update(options.model, devices, chip, **sizes)
        print(json.dumps(found) if options.json else _lines(found))
        return
    keep_freed_memory(one_arena=True)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    before = measure.limits(dtype)
    rows = train_length(options.repeats, name=options.shape, dtype=dtype, tokens=options.tokens)
    after = measure.limits(dtype)
    found = measure.report("train-length", rows, before, after, repeats=options.repeats)
    print(measure.as_json(found) if options.json else measure.as_table(found))


def _lines(found):
    """Return one line per figure."""
    return "\n".join(f"{name:<15} {value}" for name, value in found.items())
