"""Cost of a training step against each of its sizes, measured and predicted by counting.

    python -m benchmarks curves [--out=FOLDER] [--draw]

Each point is a short training run through `python -m ragen_jax.train`, in a separate process, so
that its peak memory can be measured. One size is varied at a time. A point's row is appended to
cost_curves.jsonl as soon as it is measured, and points with a row are not measured again. Then
cost_curves.png is drawn and the table is printed.

The agent has random weights and never draws its stop token, so that every reply has the maximum
length and every episode has all its turns. The complete history is in each prompt; nothing is
filtered, diagnosed or evaluated.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from ragen_jax.config.build_environment import build_environment
from ragen_jax.configs import sokoban
from ragen_jax.model import hf
from ragen_jax.model.qwen import ModelConfig, Qwen, init_params
from ragen_jax.model.tokenizer import SPECIAL, build_tokenizer
from ragen_jax.programs.roofline import Work

CONFIG = "configs/sokoban.py"
STEPS = 3  # number of steps of a run; the first compiles
GROUP_SIZE, MINIBATCHES, MICRO_BATCH = 16, 2, 16
LAYERS, HEADS = 2, 4
VOCABULARY = 281  # vocabulary size of the tiny Sokoban agent's tokenizer
OUT = Path("docs/results")


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a point's run."""

    episodes: int = 64  # episodes per step
    reply: int = 32  # tokens per reply
    turns: int = 2  # replies per episode
    width: int = 64  # width of the model
    devices: int = 1  # number of CPU devices, over which rows are split


VARIED_SIZES = {
    "episodes": (64, 128, 256, 512, 1024),
    "reply": (32, 64, 128, 256, 512),
    "turns": (1, 2, 4, 7, 10),
    "width": (32, 64, 128, 256, 512),
    "devices": (1, 2, 4, 8),
}
LABELS = {
    "episodes": "episodes a step",
    "reply": "tokens a reply",
    "turns": "turns an episode",
    "width": "model width",
    "devices": "CPU devices",
}


def points():
    """Return every `Size` once: the largest, middle and smallest of each curve, then the rest."""
    order = {name: _spread(values) for name, values in VARIED_SIZES.items()}
    found = [
        dataclasses.replace(Size(), **{name: values[index]})
        for index in range(max(map(len, order.values())))
        for name, values in order.items()
        if index < len(values)
    ]
    return list(dict.fromkeys([Size(), *found]))


def _spread(values):
    first = [values[-1], values[len(values) // 2], values[0]]
    return [*first, *(value for value in values if value not in first)]


# ------------------------------------------------------------------------------ measuring


def make_agent(folder, width):
    """Write a model of random weights that never draws a stop token."""
    tokenizer = build_tokenizer(build_environment(sokoban.get_config().env, "train").words)
    if len(tokenizer) != VOCABULARY:
        raise RuntimeError(f"the tokenizer has {len(tokenizer)} ids, VOCABULARY is {VOCABULARY}")
    config = shape(width, VOCABULARY)
    params = jax.tree.map(np.array, init_params(config, jax.random.key(0)))
    # One entry of the residual stream is large and constant. With the head's row of a stop id, it
    # gives a very low logit, so that the id is never drawn.
    params["embed"][:, 0] = 8.0
    params["head"][:, 0] = 0.0
    params["head"][tokenizer.convert_tokens_to_ids(list(SPECIAL)), 0] = -30.0
    hf.save(folder, Qwen(config), params, tokenizer)


def shape(width, vocab_size):
    """Return the `ModelConfig` of a width, with the other sizes in proportion."""
    return ModelConfig(
        vocab_size=vocab_size,
        width=width,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=HEADS // 2,
        head_dim=width // HEADS,
        mlp_width=3 * width,
        tied=False,
    )


def fields(size, model, workdir):
    """Return the command line of a point's run."""
    given = {
        "model.path": model,
        "steps": STEPS,
        "env.context": "full",
        "env.max_turns": size.turns,
        "rollout.groups": size.episodes // GROUP_SIZE,
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_new_tokens": size.reply,
        "rollout.save_every": STEPS,
        "rollout.compact": False,  # all episodes end at the same turn
        "filter.strategy": "none",
        "optimizer.learning_rate": 1e-9,  # the agent hardly changes
        "optimizer.minibatches": MINIBATCHES,
        "optimizer.micro_batch": MICRO_BATCH,
        "diagnose.every": 0,
        "eval.every": 0,
        "checkpoint.every": 0,
        "checkpoint.export": False,
        "report.every": 0,
        "stopping.variance.action": "off",
        "log.trackers": "()",
    }
    flags = [f"--config.{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "ragen_jax.train", f"--config={CONFIG}"]
    return [*command, f"--workdir={workdir}", *flags]


# Linux includes the memory of a process before exec, a copy of its parent, in its peak. So the
# parent of a run must be small.
LAUNCH = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def measure(size):
    """Measure a point and return its row: sizes, seconds of a step, peak memory and tokens.

    Raises:
      RuntimeError: the run failed, or its replies were not as long as they should be.
    """
    with tempfile.TemporaryDirectory() as folder:
        model, workdir, log = (Path(folder) / name for name in ("model", "run", "log"))
        make_agent(model, size.width)
        flags = f"--xla_force_host_platform_device_count={size.devices}"
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            # Otherwise programs of another run would be loaded, which needs less memory.
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
            "XLA_FLAGS": f"{flags} {os.environ.get('XLA_FLAGS', '')}",
        }
        with log.open("w") as file:
            command = [sys.executable, "-c", LAUNCH, *fields(size, model, workdir)]
            run = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT)
        if run.returncode:
            raise RuntimeError(f"{size} ended with {run.returncode}:\n{log.read_text()[-2000:]}")
        peak_mib = int(log.read_text().split()[-1]) / 1024
        return {**dataclasses.asdict(size), **figures(workdir), "peak_mib": peak_mib}


def figures(workdir):
    """Return a run's medians over the steps after compilation, and the tokens of its prompts.

    Raises:
      RuntimeError: every step compiled something, or a reply was shorter than the limit.
    """
    rows = read_rows(workdir / "metrics.jsonl")
    rows = [row for row in rows if row["step"] > 1 and not row["time/compile"]]
    if not rows:
        raise RuntimeError(f"every step of {workdir} compiled something")
    episodes = read_rows(max((workdir / "rollouts").iterdir()))  # of the last step
    prompts = [max(len(turn["prompt_ids"]) for turn in turns) for turns in _turns(episodes)]
    replies = {len(turn["sampled_ids"]) for turns in _turns(episodes) for turn in turns}
    limit = json.loads((workdir / "config.json").read_text())["rollout"]["max_new_tokens"]
    if replies != {limit}:
        raise RuntimeError(f"replies of {sorted(replies)} tokens, not all of {limit}")
    return {
        **{
            name: statistics.median(row[f"time/{name}"] for row in rows)
            for name in ("cpu", "step", "rollout", "update")
        },
        "steps": len(rows),
        "prompts": prompts,
    }


def _turns(episodes):
    """Return, for each turn index, the list of that turn of each episode."""
    return list(zip(*(episode["turns"] for episode in episodes), strict=True))


def read_rows(path):
    """Return the objects of a file's lines; [] if the file does not exist."""
    if not path.exists():
        return []
    with path.open() as lines:  # str.splitlines would also split at characters inside replies
        return [json.loads(line) for line in lines]


def size_of(row):
    """Return the `Size` of a row."""
    return Size(**{field.name: row[field.name] for field in dataclasses.fields(Size)})


# ------------------------------------------------------------------------------ predicting


def flops(row):
    """Return the operations of a step, by the formulas of programs/roofline.py for its tokens.

    A step is a rollout of all episodes in lock step, with the cache kept between turns, and updates
    in micro-batches of whole rows, without padding, shared positions, reference model and critic.
    """
    B, T = row["episodes"], row["reply"]
    work = Work(shape(row["width"], VOCABULARY))
    total = work.prefill(B // GROUP_SIZE, row["prompts"][0]).flops
    for before, prompt in itertools.pairwise(row["prompts"]):
        total += work.extend(B, prompt, prompt - before - T).flops
    total += sum(work.decode(B, prompt, T).flops for prompt in row["prompts"])
    positions = row["prompts"][-1] + T - 1  # of a row; each attends to all of them
    update = work.update(
        MICRO_BATCH * positions,
        MICRO_BATCH * positions**2,
        MICRO_BATCH * len(row["prompts"]) * T,
        micro_batches=B // MICRO_BATCH,
        reference=False,
        trained=0,
    )
    return total + update.flops


def peak_bytes(row):
    """Return the bytes of a step's arrays at its peak, in the rollout or in the update.

    Both hold the parameters and Adam's moments, float32. The rollout also holds the caches of the
    last turn and of the turn before. The update also holds the gradient and the values saved for
    the backward pass of one micro-batch: eight arrays of the model's width and three of the MLP's
    width per token and layer, two numbers per pair of positions and head, and two numbers per token
    and vocabulary entry.
    """
    config = shape(row["width"], VOCABULARY)
    work = Work(config)
    last = row["prompts"][-1]
    positions = last + max(row["prompts"][-2:-1], default=0)
    N, T, L = MICRO_BATCH, last + row["reply"], config.layers
    token = L * (8 * config.width + 3 * config.mlp_width) + 2 * config.vocab_size
    rollout = work.cache_bytes(row["episodes"] * (positions + row["reply"]))
    update = 4 * work.parameters + 4 * N * T * (token + 2 * L * config.heads * T)
    return 3 * 4 * work.parameters + max(rollout, update)


def slope(values, figures):
    """Return the slope of the straight line through the logarithms."""
    return round(float(np.polyfit(np.log(values), np.log(figures), 1)[0]), 3) + 0.0  # no -0.0


def curve(name, rows):
    """Return the values of a varied size, with measured and predicted processor seconds and MiB.

    Predictions start from the measured base point: its seconds times the ratio of operations, and
    its MiB plus the difference of held bytes.
    """
    rows_by_size = {size_of(row): row for row in rows}
    base = rows_by_size[Size()]
    sizes = [dataclasses.replace(Size(), **{name: value}) for value in VARIED_SIZES[name]]
    chosen = [rows_by_size[size] for size in sizes if size in rows_by_size]
    return {
        "values": [row[name] for row in chosen],
        "cpu": [row["cpu"] for row in chosen],
        "step": [row["step"] for row in chosen],
        "predicted cpu": [base["cpu"] * flops(row) / flops(base) for row in chosen],
        "peak": [row["peak_mib"] for row in chosen],
        "predicted peak": [
            base["peak_mib"] + (peak_bytes(row) - peak_bytes(base)) / 2**20 for row in chosen
        ],
    }


# ------------------------------------------------------------------------------ showing


def table(rows):
    """Return two Markdown tables: the points of the curves, and the slopes."""
    lines = [
        "| varied | value | processor s a step | predicted | wall s | peak MiB | predicted |",
        "| --- " * 7 + "|",
    ]
    slopes = [
        "| varied | time: measured slope | predicted | peak memory: measured slope | predicted |",
        "| --- " * 5 + "|",
    ]
    for name, label in LABELS.items():
        found = curve(name, rows)
        values = found.pop("values")
        for value, *cells in zip(values, *_columns(found), strict=True):
            lines.append("| " + " | ".join([label, str(value), *cells]) + " |")
        if len(values) > 1:
            given = [slope(values, found[key]) for key in SLOPES]
            slopes.append("| " + " | ".join([label, *(f"{x:.2f}" for x in given)]) + " |")
    return "\n".join([*slopes, "", *lines])


SLOPES = ("cpu", "predicted cpu", "peak", "predicted peak")


def _columns(found):
    """Return cells of a table: seconds with two decimals, MiB with none."""
    seconds = [[f"{x:.2f}" for x in found[key]] for key in ("cpu", "predicted cpu", "step")]
    return [*seconds, *([f"{x:,.0f}" for x in found[key]] for key in ("peak", "predicted peak"))]


def draw(rows, path):
    """Draw time and memory against each size, measured and predicted, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(VARIED_SIZES), figsize=(16, 6.4), layout="constrained")
    for (top, bottom), (name, label) in zip(axes.T, LABELS.items(), strict=True):
        found = curve(name, rows)
        values = found["values"]
        for axis, key in ((top, "cpu"), (bottom, "peak")):
            for curve_key, style in ((key, "o-"), (f"predicted {key}", "s:")):
                word = "predicted" if curve_key != key else "measured"
                slope_text = (
                    f", slope {slope(values, found[curve_key]):.2f}" if len(values) > 1 else ""
                )
                axis.plot(values, found[curve_key], style, label=word + slope_text, markersize=4)
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(values, map(str, values))
            axis.minorticks_off()
            low, high = axis.get_ylim()
            ticks = [t for t in TICKS if low / 1.5 <= t <= high * 1.5]
            axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
            axis.set_ylim(min(low, ticks[0]), max(high, ticks[-1]))
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        bottom.set_xlabel(label)
    axes[0, 0].set_ylabel("processor seconds a step")
    axes[1, 0].set_ylabel("peak memory, MiB")
    base = dataclasses.asdict(Size())
    rest = ", ".join(f"{label}: {base[name]}" for name, label in LABELS.items())
    figure.suptitle(f"One size varied at a time, from {rest}")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


TICKS = [digit * 10.0**power for power in range(-2, 5) for digit in (1, 2, 5)]


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks curves", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=OUT, help="folder of cost_curves.{jsonl,png}")
    parser.add_argument("--draw", action="store_true", help="only draw the existing points")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "cost_curves.jsonl"
    rows = read_rows(path)
    measured = {size_of(row) for row in rows}
    for size in () if options.draw else points():
        if size in measured:
            continue
        row = measure(size)
        print(
            f"{size}: {row['cpu']:.2f} processor s a step, {row['peak_mib']:,.0f} MiB", flush=True
        )
        rows.append(row)
        new_path = path.with_suffix(".new")
        new_path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        new_path.rename(path)
    if Size() not in map(size_of, rows):
        parser.error(f"{path} has no row of {Size()}, the base point of all curves")
    draw(rows, options.out / "cost_curves.png")
    print(table(rows))
