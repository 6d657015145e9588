"""Run a command of ragen_jax. `ragen-train` is short for `python -m ragen_jax.train`.

python -m ragen_jax [COMMAND [ARGUMENT ...]]
"""

import runpy
import sys
from pathlib import Path

from ragen_jax.core.suggest import did_you_mean
from ragen_jax.storage.console_streams import set_up_console, show_line

COMMANDS = {
    "train": "train an agent, or resume a run",
    "evaluate": "success, return, pass@k and collapse diagnosis of a run or a model",
    "score": "the same diagnosis for rollouts of other trainers",
    "report": "one HTML page for one or more runs",
    "plot": "plot metrics of runs as PNG or SVG",
    "export": "export the model of a run's checkpoint in Hugging Face format",
    "check_data": "show and play the problems of a config, and check its environment",
    "warmstart": "build the tiny agent that a config starts from",
    "sft": "fine-tune a language model on an environment's demonstrations",
    "preflight": "compile a run for a TPU pod before renting it",
    "lab": "experiments of many small runs: claims of the papers, detectors, treatments",
    "serve": "serve a run's policy to agents that speak the OpenAI API, and record its tokens",
    "retriever": "index a corpus and serve it for search_qa",
}


def listed() -> str:
    """Return the text that is printed if no command is named."""
    lines = ["ragen_jax: RL for LLM agents in JAX, with collapse diagnosis built in", ""]
    lines += [f"  python -m ragen_jax.{name:<11} {what}" for name, what in COMMANDS.items()]
    return "\n".join([*lines, "", "Help for a command: python -m ragen_jax.train --help"])


def run(name: str) -> None:
    """Run a command as `python -m ragen_jax.NAME` does, with the arguments in sys.argv."""
    runpy.run_module(f"ragen_jax.{name}", run_name="__main__", alter_sys=True)


def script() -> None:
    """Run the command that the console script is named after, such as ragen-train."""
    run(Path(sys.argv[0]).stem.removeprefix("ragen-").replace("-", "_"))


def main() -> None:
    set_up_console()
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "-help", "--help"):
        print(listed())
    elif name in COMMANDS:
        sys.argv[:] = [f"ragen_jax.{name}", *rest]
        run(name)
    else:
        known = f"{', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}"
        show_line("error", f"ragen_jax has no command {name!r}; accepted: {known}")
        sys.exit(2)


if __name__ == "__main__":
    main()
