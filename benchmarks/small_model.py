"""SmolLM2-135M on Countdown: a step of RL and an update of fine-tuning, against TRL's trainers.

    python -m benchmarks small-model --model=DIR [--trl=PYTHON] [--pairs=3] [--json]

DIR is a Hugging Face directory of the model, fine-tuned so that its replies end (the policy/ that
`python -m ragen_jax.sft --config=countdown:smollm2-135m` writes). TRL's environment is that of
grpo_step.py, with the package datasets.

RL: the preset as it is, with diagnosis at every fifth step: 16 problems x 8 replies, two updates,
the filter. The same without filter updates all 128 replies, as GRPOTrainer does. Fine-tuning:
updates of 16 demonstrations; SFTTrainer computes the loss of completions only. Both sides train the
same weights on the same prompts or demonstrations, in float32. The processes run in turn. The first
step of each process is not counted: it compiles or warms up. A step is the mean over a process's
other steps; of our five, one is diagnosed. Peak memory is that of the whole process.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median

from benchmarks.grpo_step import ROOT, measured
from ragen_jax.config.build_environment import build_chat, build_environment
from ragen_jax.config.load import load_config
from ragen_jax.configs import countdown
from ragen_jax.model import hf

PRESET = "countdown:smollm2-135m"
DEMONSTRATIONS = 16  # rows of an update of fine-tuning
STEPS = {"ours": {"rl": 6, "no filter": 6, "sft": 10}, "trl": {"rl": 3, "sft": 10}}  # of a process
PARTS = {"rl": ("step", "rollout", "update", "diagnose"), "no filter": ("step",), "sft": ("step",)}


def write_files(folder, model):
    """Write prompts and demonstrations of training problems; return (prompts, demonstrations)."""
    config = countdown.get_config("smollm2-135m")
    config.model.path, config.warmstart.fine_tune = str(model), False
    config = load_config(config)
    environment = build_environment(config.env, "train")
    path = hf.resolve(config.model.path)
    chat = build_chat(config, hf.load_tokenizer(path), environment, hf.stop_ids(path))
    prompts, rows = [], []
    for seed in range(max(config.rollout.groups, DEMONSTRATIONS) * max(STEPS["trl"].values())):
        state = environment.reset(seed)
        message = chat.observe(environment.render(state), actions_used=0, last_valid=True)
        prompts.append(chat.text(chat.prompt_ids((), message)))
        plan = environment.solve(state)
        reply = f"<think>{environment.narrate(state, plan)}</think><answer>{plan[0]}</answer>"
        asked = [{"role": "system", "content": chat.system}, {"role": "user", "content": message}]
        rows.append({"prompt": asked, "completion": [{"role": "assistant", "content": reply}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prompts, rows


def counted(seconds):
    """Return the mean of a process's steps after the first."""
    return fmean(seconds[1:])


def run_ours(folder, model, case, number):
    """Run `train` or `sft`; return the mean seconds of a step by part, and memory in GiB."""
    steps = STEPS["ours"][case]
    run = folder / f"{case.replace(' ', '_')}_{number}"
    common = [f"--config={PRESET}", f"--config.model.path={model}", f"--workdir={run}"]
    if case == "sft":
        words = [
            *("-m", "ragen_jax.sft", *common, "--config.warmstart.check_episodes=1"),
            f"--config.warmstart.demonstrations={folder / 'rows.jsonl'}",
            f"--config.warmstart.batch={DEMONSTRATIONS}",
            *(f"--config.warmstart.{name}={steps}" for name in ("max_updates", "check_every")),
            "--config.warmstart.success=1",
        ]
    else:
        words = [
            *("-m", "ragen_jax.train", *common, f"--config.steps={steps}"),
            *("--config.warmstart.fine_tune=False", "--config.checkpoint.export=False"),
            *("--config.eval.every=0", "--config.checkpoint.every=0"),
            *(["--config.filter.strategy=none"] if case == "no filter" else []),
        ]
    memory = measured([sys.executable, *words], folder)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if case == "sft":
        return {"step": counted([row["time/update"] for row in rows[1:]]), "memory": memory}
    found = {part: counted([row.get(f"time/{part}", 0.0) for row in rows]) for part in PARTS["rl"]}
    kept = counted([row["filter/kept_ratio"] for row in rows])
    return found | {"memory": memory, "kept": kept, "reply": rows[-1]["rollout/response_length"]}


def run_trl(folder, case, options, prompts, rows):
    """Run GRPOTrainer or SFTTrainer; return the mean seconds of a step by part, and memory."""
    settings = dict(model=str(options.model), steps=STEPS["trl"][case], output=str(folder / "trl"))
    settings |= dict(micro_batch=options.trl_micro_batch, learning_rate=2e-5)
    if case == "sft":
        settings |= dict(rows=rows, batch=DEMONSTRATIONS)
    else:
        settings |= dict(prompts=prompts, members=8, batch=128, updates=2, reply=96)
    (folder / "settings.json").write_text(json.dumps(settings))
    name = "trl_sft_script.py" if case == "sft" else "trl_script.py"
    words = [options.trl, str(ROOT / "benchmarks" / name), str(folder / "settings.json")]
    memory = measured(words, folder)
    seconds = json.loads((folder / "trl" / "seconds.json").read_text())
    return {part: counted(values) for part, values in seconds.items()} | {"memory": memory}


def compare(options):
    """Run the processes in turn and return {case: {"ours": medians, "trl": medians, "ratio"}}."""
    found = {case: {"ours": [], "trl": []} for case in options.cases}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts, rows = write_files(folder, options.model)
        for number in range(options.pairs):
            theirs = {}
            for case, sides in found.items():
                sides["ours"].append(run_ours(folder, options.model, case, number))
                print(_line(f"{case}, ours", sides["ours"][-1]), file=sys.stderr, flush=True)
                if not options.trl:
                    continue
                trainer = "sft" if case == "sft" else "rl"  # TRL has no filter
                if trainer not in theirs:
                    theirs[trainer] = run_trl(folder, trainer, options, prompts, rows)
                    print(_line(f"{trainer}, TRL", theirs[trainer]), file=sys.stderr, flush=True)
                sides["trl"].append(theirs[trainer])
    return {case: _summary(sides) for case, sides in found.items()}


def _summary(sides):
    """Return the medians of both sides and the medians of the pairs' ratios."""
    medians = {
        side: {part: median(run[part] for run in runs) for part in runs[0]}
        for side, runs in sides.items()
        if runs
    }
    if sides["trl"]:
        pairs = list(zip(sides["ours"], sides["trl"], strict=True))
        medians["ratio"] = {
            part: median(trl[part] / ours[part] for ours, trl in pairs)
            for part in ("step", "memory")
        }
    return medians


def _line(name, figures):
    return f"{name}: " + ", ".join(f"{part} {value:.2f}" for part, value in figures.items())


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks small-model", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, type=Path, help="fine-tuned model's directory")
    parser.add_argument("--trl", default="", help="Python of an environment with TRL")
    parser.add_argument("--pairs", type=int, default=3, help="processes of each side")
    parser.add_argument("--trl-micro-batch", type=int, default=8, help="rows of a pass of TRL")
    parser.add_argument("--cases", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    options.model = options.model.resolve()
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    found = compare(options)
    if options.json:
        print(json.dumps(found))
        return
    for case, sides in found.items():
        for side, figures in sides.items():
            print(_line(f"{case}, {'TRL / ours' if side == 'ratio' else side}", figures))
