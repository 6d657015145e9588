"""The measurements. Run as a module, this measures a piece: its cases are read as JSON from stdin.

Each row is printed as a line of JSON as soon as it is measured: the case, and its figures in
seconds, bytes and FLOPs.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from benchmarks import llm, measure
from benchmarks.accelerator.pieces import MEAN, Case, step_config
from benchmarks.grpo_step import build_tokenizer
from benchmarks.lengths import length_shape
from ragen_jax import train
from ragen_jax.config.build_learner import build_optimizer
from ragen_jax.configs.base import Optimizer
from ragen_jax.model import hf
from ragen_jax.model.layout import sampling_params
from ragen_jax.model.lora import TARGETS, init_adapters
from ragen_jax.model.qwen import Qwen
from ragen_jax.storage.metrics_reader import read_metrics
from ragen_jax.update.policy import ForwardContext, init_state

DTYPE = "bfloat16"
REPEATS = 3


def probe() -> Case:
    """Return the device's name, its number, and the bytes that it lets a process use."""
    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")  # None on a CPU
    return dict(
        device=device.device_kind, platform=device.platform, count=len(jax.devices()), memory=memory
    )


def device(cases: list[Case]) -> Iterator[Case]:
    """Yield the bytes per second of copying and the FLOPs per second of a matrix product."""
    for case in cases:
        yield case | dataclasses.asdict(measure.limits(DTYPE))


def decode(cases: list[Case]) -> Iterator[Case]:
    """Yield the seconds of some decode steps, and the bytes and FLOPs that they need at least."""
    config = length_shape(cases[0]["shape"], DTYPE)
    params = sampling_params(llm.random_params(config), Qwen(config), llm.default_mesh())
    for case in cases:
        sizes = {name: case[name] for name in ("rows", "cached", "steps")}
        config = dataclasses.replace(config, cache_dtype=case["cache_dtype"])
        run = llm.decoder(Qwen(config), params, **sizes)
        yield case | {
            "seconds": measure.compare(run, repeats=REPEATS, warmup=1)["ours"],
            "bytes": llm.decode_bytes(config, **sizes),
            "flops": llm.decode_flops(config, **sizes),
        }
        del run  # its cache


def update(cases: list[Case]) -> Iterator[Case]:
    """Yield the seconds of an update by AdamW and its FLOPs: six per weight and token.

    All cases are compiled at the same time. With adapters, the frozen parameters are bfloat16.
    """
    config, rank = length_shape(cases[0]["shape"], DTYPE), cases[0]["rank"]
    model, mesh = Qwen(config), llm.default_mesh()
    params, frozen = llm.random_params(config), None
    if rank:
        frozen = ForwardContext(sampling_params(params, model, mesh), np.float32(1.0))
        params = init_adapters(config, jax.random.key(1), rank=rank, targets=TARGETS)
    optimizer = build_optimizer(Optimizer())
    states = [init_state(params, optimizer, mesh)]
    del params
    updates = [
        llm.Update(
            *(model, optimizer, states),
            *llm.make_rows(model, rows=case["rows"], length=case["length"]),
            frozen=frozen,
            rate=llm.LEARNING_RATE,
        )
        for case in cases
    ]
    with concurrent.futures.ThreadPoolExecutor(len(updates)) as pool:
        list(pool.map(llm.Update.compile, updates))
    for case, run in zip(cases, updates, strict=True):
        yield case | {
            "seconds": measure.compare(run, repeats=REPEATS, warmup=1)["ours"],
            "flops": llm.update_flops(config, rows=case["rows"], length=case["length"]),
        }


# ------------------------------------------------------------------------------ whole steps

PARTS = ("step", "rollout", "update", "diagnose")


def step(cases: list[Case]) -> Iterator[Case]:
    """Yield the seconds of a step of `train` and of its parts, without compilation.

    The model has random weights. Replies stop at ids outside of the tokenizer's. Their number makes
    lengths about geometric, with a mean of MEAN times the limit before the limit cuts them.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, cases[0]["shape"], cases[0]["limit"])
        for index, case in enumerate(cases):
            config = step_config(**case)
            config.model.path = str(model)
            workdir = Path(folder) / f"run_{index}"
            with contextlib.redirect_stdout(sys.stderr):
                train.train(config, workdir)
            rows = [row for row in read_metrics(workdir / "metrics.jsonl") if row["step"] > 1]
            clean = [row for row in rows if not row["time/compile"]]
            row = (clean or rows)[-1]
            yield case | {
                **{part: row.get(f"time/{part}", 0.0) for part in PARTS},
                "compile": row["time/compile"],
                "devices": len(jax.devices()),
                "replies": row["rollout/replies"],
                "reply": row["rollout/response_length"],
            }


def write_model(path: Path, shape: str, limit: int) -> None:
    """Write a model with random weights and a tokenizer, whose replies have planted lengths."""
    config, tokenizer = llm.shape(shape, "float32"), build_tokenizer()
    if config.vocab_size < len(tokenizer):  # the toy shape
        config = dataclasses.replace(config, vocab_size=2 * len(tokenizer))
    stops = max(1, round(config.vocab_size / (MEAN * limit)))
    ids = range(
        config.vocab_size - min(stops, config.vocab_size - len(tokenizer)), config.vocab_size
    )
    params = llm.random_params(config)
    hf.save(path, Qwen(config), params, tokenizer, stop_ids=ids, dtype=DTYPE)


# ------------------------------------------------------------------------------ learning


def learning(cases: list[Case]) -> Iterator[Case]:
    """Yield held-out success before and after a short run of the tiny agent, here and on the CPU.

    Both runs include the warm start and play the same held-out problems. They run at the same time,
    so their seconds say nothing.
    """
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            runs = {name: Path(folder) / name for name in ("here", "cpu")}
            processes = [_start_learning(runs[name], name, case) for name in runs]
            try:
                codes = [process.wait() for process in processes]
            finally:
                for process in processes:
                    process.kill()
            if any(codes):
                raise RuntimeError(f"the runs ended with exit codes {codes}")
            yield case | compare_runs(*runs.values(), case["steps"])


def _start_learning(run: Path, name: str, case: Case) -> subprocess.Popen:
    """Start a run of the tiny agent."""
    fields = {
        "steps": case["steps"],
        "eval.every": case["steps"],
        "eval.episodes": case["episodes"],
        "checkpoint.every": 0,
        "checkpoint.export": False,
        "report.every": 0,
        "log.trackers": "()",
        **{f"warmstart.{name}": value for name, value in case["warmstart"].items()},
    }
    return subprocess.Popen(
        [sys.executable, "-m", "ragen_jax.train", "--config=sokoban", f"--workdir={run}"]
        + [f"--config.{field}={value}" for field, value in fields.items()],
        env=os.environ | ({"JAX_PLATFORMS": "cpu"} if name == "cpu" else {}),
        stdout=sys.stderr,
    )


def compare_runs(here: Path, cpu: Path, steps: int) -> Case:
    """Return held-out success of two runs, and their paired differences with 95 % intervals."""
    found = {}
    for moment, number in (("before", 0), ("after", steps)):
        solved = [
            dict(json.loads((run / "eval" / f"step_{number:06d}.json").read_text()))
            for run in (here, cpu)
        ]
        difference = np.array([solved[0][seed] - solved[1][seed] for seed in solved[1]], float)
        found[moment] = [statistics.mean(one.values()) for one in solved]
        found[f"{moment}_difference"] = difference.mean()
        found[f"{moment}_ci95"] = 1.96 * difference.std(ddof=1) / len(difference) ** 0.5
    rows = [read_metrics(run / "metrics.jsonl")[1:] for run in (here, cpu)]
    for name in ("rollout/success", "rollout/response_length"):
        found[name] = [statistics.mean(row[name] for row in one) for one in rows]
    return found


KINDS = {one.__name__: one for one in (device, decode, update, step, learning)}


def main() -> None:
    """Measure the piece on stdin, or print the device if nothing is there."""
    given = json.loads(sys.stdin.read() or "null")
    if given is None:
        print(json.dumps(probe()), flush=True)
        return
    for row in KINDS[given["kind"]](given["cases"]):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
