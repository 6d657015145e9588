"""Diagnose the rollouts of any trainer: does their reasoning depend on the prompt?

    python -m ragen_jax.score --model=DIR --rollouts=FILE [--rollouts=FILE ...] [--out=score.json]
                              [--think='<think>,</think>'] [--answer='<answer>,</answer>']
                              [--reward=FIELD,...] [--format=NAME] [--date=YYYY-MM-DD]
                              [--first_turn_samples=64] [--seed=0] [--all] [--follow] [--gate]
    python -m ragen_jax.score --sample

Files are JSON lines, JSON documents or Parquet tables of ragen_jax, verl, RAGEN, TRL, verifiers,
prime-rl, NeMo-Gym, NeMo-RL, SkyRL, rLLM, slime, Harbor (ATIF) and OpenEnv, or {"prompt",
"response"[, "reward", "success", "step", "group"]}; a folder stands for the files in it
(docs/score.md). The format is recognised, or named with --format. Reasonings are cross-scored under
the model in DIR. The figures of one step are summed up in a few lines (--all prints every figure),
and each of several steps in one; score.json has all figures, and score.html is the report page.
Rows that cannot be used are listed and the others are scored; the exit code is 2 if no row can be
used.

With --follow, the files are looked at every few seconds and new steps are scored while another
trainer writes them, until Ctrl-C. With --gate, the exit code is 3 if the page is red: the alarm is
on, or a rule holds that docs/report.md calls red; with both, the command ends as soon as it is.
--sample scores rollouts that come with the package, of an agent that loses its reasoning.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.core.memory import keep_freed_memory
from ragen_jax.model import hf
from ragen_jax.score.encode import ANSWER, THINK
from ragen_jax.score.follow import LOOK_SECONDS, follow_files
from ragen_jax.score.formats import FORMATS, find_format
from ragen_jax.score.run import DEFAULTS, SAMPLE_FILES, ScoreSettings, is_bad, score_files
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.console import console
from ragen_jax.storage.heartbeat import heartbeat
from ragen_jax.storage.program_store import enable_program_store

RED = 3  # exit code with --gate


def parse(argv: Sequence[str]) -> list[str]:
    """Parse the command line and return its words; an error prints a single line."""
    with command.bad_input(flags.Error):
        words = command.words_of(argv)
        if words:
            raise ValueError(f"unexpected argument {words[0]!r}; a file is --rollouts={words[0]}")
        given = (("--model=DIR", MODEL.value), ("--rollouts=FILE", ROLLOUTS.value))
        for name, value in given:
            if SAMPLE.value and value:
                raise ValueError(f"--sample has its own model and rollouts; leave out {name}")
            if not SAMPLE.value and not value:
                raise ValueError(f"score needs {name}, or --sample")
        find_format(FORMAT.value)
        if Path(OUT.value).suffix == ".html":
            raise ValueError(
                f"--out={OUT.value} is the JSON file of all metrics; the page has the same "
                "name and ends with .html; use --out=NAME.json"
            )
        return words


def main(argv: Sequence[str]) -> None:
    del argv
    with heartbeat():
        score()


def score() -> None:
    """Score as the flags say, and exit with code RED if the gate fails."""
    enable_compilation_cache()
    enable_program_store()
    rollouts = (str(SAMPLE_FILES / "rollouts.jsonl.gz"),) if SAMPLE.value else ROLLOUTS.value
    settings = ScoreSettings(
        model=str(SAMPLE_FILES / "model") if SAMPLE.value else MODEL.value,
        rollouts=tuple(rollouts),
        think=tuple(THINKING.value),
        answer=tuple(ANSWERING.value),
        reward=tuple(REWARD.value),
        format=FORMAT.value,
        date=DATE.value,
        first_turn_samples=FIRST.value,
        trajectory_samples=LATER.value,
        micro_batch=ROWS.value,
        seed=SEED.value,
        dtype=DTYPE.value,
        out=Path(OUT.value),
        all=ALL.value,
    )
    if FOLLOW.value:
        scored = follow_files(settings, gate=GATE.value, wait=wait)
    else:
        scored = score_files(settings)
    if GATE.value and scored is not None and is_bad(scored):
        console(f"--gate: the page is red, exit code {RED}")
        sys.exit(RED)


def wait() -> bool:
    """Wait until the next look at the files; False after Ctrl-C."""
    try:
        time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        return False
    return True


if __name__ == "__main__":
    d = DEFAULTS.diagnose
    MODEL = flags.DEFINE_string("model", "", "Directory or hub id of the model that scores.")
    ROLLOUTS = flags.DEFINE_multi_string("rollouts", [], "File of rollouts, or a folder of files.")
    THINKING = flags.DEFINE_list("think", ",".join(THINK), "Tags around the reasoning.")
    ANSWERING = flags.DEFINE_list(
        "answer", ",".join(ANSWER), "Tags around the answer; empty: the text after the reasoning."
    )
    REWARD = flags.DEFINE_list("reward", [], "Fields that are summed to the reward of a row.")
    FORMAT = flags.DEFINE_string(
        "format", "", f"Format of all rows, one of {', '.join(FORMATS)}; empty: recognised."
    )
    DATE = flags.DEFINE_string(
        "date",
        "",
        "Date that chat templates write, YYYY-MM-DD, if rows record none; empty: today.",
    )
    FIRST = flags.DEFINE_integer(
        "first_turn_samples", d.first_turn_samples, "Reasoning samples scored per step; 0: all.", 0
    )
    LATER = flags.DEFINE_integer(
        "trajectory_samples",
        d.trajectory_samples,
        "Samples from later turns; 0: one per episode.",
        0,
    )
    ROWS = flags.DEFINE_integer("micro_batch", d.micro_batch, "Pairs per device call.", 1)
    SEED = flags.DEFINE_integer("seed", DEFAULTS.seed, "Seed of draws and permutations.", 0)
    DTYPE = flags.DEFINE_enum("dtype", "float32", hf.COMPUTE_DTYPES, "Dtype of activations.")
    OUT = flags.DEFINE_string("out", "score.json", "JSON file of all metrics.")
    ALL = flags.DEFINE_bool("all", False, "Print every figure of a single step.")
    FOLLOW = flags.DEFINE_bool("follow", False, "Score new steps while the files grow.")
    GATE = flags.DEFINE_bool("gate", False, f"Exit with code {RED} if the page is red.")
    SAMPLE = flags.DEFINE_bool("sample", False, "Score the rollouts that come with ragen_jax.")
    keep_freed_memory()
    command.run_parsed(main, parse)
