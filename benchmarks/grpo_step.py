"""A GRPO step of a language model: the command `train` against TRL's GRPOTrainer.

    python -m benchmarks grpo-step [--trl=PYTHON] [--pairs=3] [--steps=4] [--diagnose] [--json]

TRL needs its own environment; give its Python:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    python -m benchmarks grpo-step --trl=trl/bin/python

Both train one model on the same prompts: SmolLM2-135M's shape with random weights, float32; 4
prompts of 160 tokens with 8 replies of 64 tokens each; one update of AdamW per step, no KL. The
processes run in turn. The first step of each is not counted: it compiles or warms up. Peak memory
is that of the whole process. Cross-scoring is off without --diagnose.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.curves import LAUNCH
from benchmarks.llm import random_params
from benchmarks.prefixes import MODEL
from ragen_jax.config.build_environment import build_chat, build_environment
from ragen_jax.config.load import load_config
from ragen_jax.configs import dataset
from ragen_jax.model import hf
from ragen_jax.model.qwen import Qwen
from ragen_jax.model.tokenizer import CHAT_TEMPLATE, SPECIAL

ROOT = Path(__file__).parents[1]
PROMPTS, MEMBERS, PROMPT, REPLY = 4, 8, 160, 64
LEARNING_RATE = 1e-6
REWARD = "def score(prompt, reply, row):\n    return float(len(reply) % 2)\n"


def build_tokenizer():
    """Return a tokenizer of 4,096 tokens, trained on the project's documentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in sorted((ROOT / "docs").glob("*.md"))], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_files(folder, steps):
    """Write the model, the rows and the reward function; return the prompts as texts."""
    tokenizer = build_tokenizer()
    hf.save(folder / "model", Qwen(MODEL), random_params(MODEL), tokenizer)
    (folder / "odd_length.py").write_text(REWARD)
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "none yet", "split": "train"}) + "\n")
    config = dataset.get_config()
    config.model.path, config.env.options.path = str(folder / "model"), str(file)
    config.env.options.reward, config.env.options.split_field = "odd_length:score", "split"
    config.rollout.max_new_tokens, config.eval.every = REPLY, 0
    sys.path.insert(0, str(folder))  # the reward function
    config = load_config(config)
    chat = build_chat(config, tokenizer, build_environment(config.env, "train"))
    rng = np.random.default_rng(0)
    words = sorted(set((ROOT / "docs" / "glossary.md").read_text().split()))
    rows, prompts = [], []
    for _ in range(PROMPTS * steps):
        text, more = "", ""
        while len(ids := chat.prompt_ids((), chat.observe(more, actions_used=0, last_valid=True))):
            if len(ids) > PROMPT:  # the last word had too many tokens
                more = text + " ."
                continue
            text, prompt = more, chat.text(ids)
            if len(ids) == PROMPT:
                break
            more = f"{text} {rng.choice(words)}"
        rows.append({"prompt": text, "split": "train"})
        prompts.append(prompt)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prompts


def measured(words, folder):
    """Run a process in a folder and return its peak memory in GiB."""
    log = folder / "log.txt"
    with log.open("w") as out:
        command = [sys.executable, "-c", LAUNCH, *words]
        run = subprocess.run(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    if run.returncode:
        raise RuntimeError(f"{words[0]} failed:\n{log.read_text()[-3000:]}")
    return int(log.read_text().split()[-1]) / 2**20


def run_train(folder, options, number):
    """Run the command `train`; return the seconds of each counted step, by part, and memory."""
    run = folder / f"run_{number}"
    memory = measured(
        [
            *(sys.executable, "-m", "ragen_jax.train", "--config=dataset", f"--workdir={run}"),
            *(f"--config.steps={options.steps}", f"--config.model.path={folder / 'model'}"),
            f"--config.env.options.path={folder / 'rows.jsonl'}",
            "--config.env.options.reward=odd_length:score",
            "--config.env.options.split_field=split",
            f"--config.rollout.groups={PROMPTS}",
            f"--config.rollout.group_size={MEMBERS}",
            f"--config.rollout.max_new_tokens={REPLY}",
            "--config.rollout.stop=()",
            "--config.filter.strategy=none",
            "--config.algorithm.kl_coef=0",
            "--config.algorithm.entropy_coef=0",
            f"--config.optimizer.learning_rate={LEARNING_RATE}",
            "--config.optimizer.minibatches=1",
            f"--config.optimizer.micro_batch={options.micro_batch}",
            f"--config.diagnose.every={int(options.diagnose)}",
            "--config.eval.every=0",
            "--config.checkpoint.every=0",
        ],
        folder,
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 1]
    for row in rows:
        if row["update/count"] != 1 or row["filter/kept_ratio"] != 1:
            raise RuntimeError(f"step {row['step']} is not one update on all rows")
    parts = ("step", "rollout", "update", "diagnose")
    return {
        **{name: [row.get(f"time/{name}", 0.0) for row in rows] for name in parts},
        "memory": memory,
        "reply": [row["rollout/response_length"] for row in rows],
    }


def run_trl(folder, options, prompts):
    """Run TRL's trainer; return the seconds of each counted step, by part, and memory."""
    settings = dict(
        model=str(folder / "model"),
        prompts=prompts,
        members=MEMBERS,
        reply=REPLY,
        batch=PROMPTS * MEMBERS,
        updates=1,
        micro_batch=options.trl_micro_batch,
        learning_rate=LEARNING_RATE,
        steps=options.steps,
        output=str(folder / "trl"),
    )
    (folder / "settings.json").write_text(json.dumps(settings))
    script = ROOT / "benchmarks" / "trl_script.py"
    memory = measured([options.trl, str(script), str(folder / "settings.json")], folder)
    found = json.loads((folder / "trl" / "seconds.json").read_text())
    return {**{name: x[1:] for name, x in found.items()}, "memory": memory}


def compare(options):
    """Run the processes in turn and return {"train": figures, "trl": figures, ratios}."""
    found = {"train": [], "trl": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = write_files(folder, options.steps)
        for number in range(options.pairs):
            found["train"].append(run_train(folder, options, number))
            if options.trl:
                found["trl"].append(run_trl(folder, options, prompts))
            for side, runs in found.items():
                if runs:
                    print(_line(side, [runs[-1]]), file=sys.stderr, flush=True)
    medians = {
        side: {part: median(_values(runs, part)) for part in runs[0]}
        for side, runs in found.items()
        if runs
    }
    if options.trl:
        pairs = list(zip(found["train"], found["trl"], strict=True))
        medians["ratio"] = {
            "step": median(median(b["step"]) / median(a["step"]) for a, b in pairs),
            "memory": median(b["memory"] / a["memory"] for a, b in pairs),
        }
    return medians


def _values(runs, part):
    """Return a figure of all counted steps of all runs."""
    values = [run[part] for run in runs]
    return values if part == "memory" else [x for steps in values for x in steps]


def _line(side, runs):
    tokens = PROMPTS * MEMBERS * (PROMPT + REPLY)
    seconds = {part: median(_values(runs, part)) for part in runs[0]}
    memory, step = seconds.pop("memory"), seconds["step"]
    parts = ", ".join(f"{part} {x:.1f}" for part, x in seconds.items() if part != "reply")
    return f"{side}: {parts} s; {tokens / step:.0f} tokens/s; {memory:.2f} GiB"


def main(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks grpo-step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--trl", default="", help="Python of an environment with TRL")
    parser.add_argument("--pairs", type=int, default=3, help="processes of each side")
    parser.add_argument("--steps", type=int, default=4, help="steps of a process, 2 or more")
    parser.add_argument("--micro-batch", type=int, default=4, help="optimizer.micro_batch")
    parser.add_argument("--trl-micro-batch", type=int, default=8, help="rows of a pass of TRL")
    parser.add_argument("--diagnose", action="store_true", help="cross-score every step")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if options.steps < 2 or options.pairs < 1:
        parser.error("--steps must be at least 2 and --pairs at least 1")
    found = compare(options)
    if options.json:
        print(json.dumps(found))
        return
    for side in ("train", "trl"):
        if side in found:
            print(_line(side, [{k: v if k == "memory" else [v] for k, v in found[side].items()}]))
    if "ratio" in found:
        print("TRL / train: step {step:.2f}, peak memory {memory:.2f}".format(**found["ratio"]))
