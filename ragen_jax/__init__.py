"""RL for LLM agents in JAX, with collapse diagnosis built in.

EXPORTS lists the public API. Its modules, and JAX, are imported on first use:

    model, params, tokenizer = ragen_jax.load_model("DIR")
    figures = ragen_jax.mutual_information(model, params, tokenizer, prompts, reasonings)

The commands are functions as well (ragen_jax/api.py):

    run = ragen_jax.train("sokoban", workdir="runs/first")
"""

import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragen_jax.algorithm.advantage import bi_level_gae as bi_level_gae
    from ragen_jax.algorithm.advantage import gae as gae
    from ragen_jax.algorithm.advantage import group_relative as group_relative
    from ragen_jax.algorithm.advantage import leave_one_out as leave_one_out
    from ragen_jax.algorithm.filter import group_scores as group_scores
    from ragen_jax.algorithm.filter import select_groups as select_groups
    from ragen_jax.algorithm.filter import select_members as select_members
    from ragen_jax.api import Run as Run
    from ragen_jax.api import evaluate as evaluate
    from ragen_jax.api import report as report
    from ragen_jax.api import score as score
    from ragen_jax.api import train as train
    from ragen_jax.diagnostics.cross_scoring import cross_score as cross_score
    from ragen_jax.diagnostics.flow import flow_metrics as flow_metrics
    from ragen_jax.diagnostics.information import information_metrics as information_metrics
    from ragen_jax.diagnostics.information import within_metrics as within_metrics
    from ragen_jax.diagnostics.intervals import confidence_intervals as confidence_intervals
    from ragen_jax.diagnostics.permutation import retrieval_p as retrieval_p
    from ragen_jax.model import hf as _hf
    from ragen_jax.model.likelihood import token_logps as token_logps
    from ragen_jax.score.texts import mutual_information as mutual_information
    from ragen_jax.update.row_logps import row_logps as row_logps

    load_model = _hf.load

__version__ = "0.2.0"

# A command imports some 300,000 objects, all of which stay: looking for garbage among them takes
# 0.15 s. `command_line.run_parsed` sets what holds afterwards. (While Python looks for the module
# of `python -m ragen_jax.NAME`, its first argument is -m.)
if sys.argv[:1] == ["-m"] and any(word.startswith(__name__) for word in sys.orig_argv):
    gc.set_threshold(500_000, 10, 10)

EXPORTS = {  # name: (module, attribute)
    "Run": ("ragen_jax.api", "Run"),
    "bi_level_gae": ("ragen_jax.algorithm.advantage", "bi_level_gae"),
    "confidence_intervals": ("ragen_jax.diagnostics.intervals", "confidence_intervals"),
    "cross_score": ("ragen_jax.diagnostics.cross_scoring", "cross_score"),
    "flow_metrics": ("ragen_jax.diagnostics.flow", "flow_metrics"),
    "gae": ("ragen_jax.algorithm.advantage", "gae"),
    "group_relative": ("ragen_jax.algorithm.advantage", "group_relative"),
    "group_scores": ("ragen_jax.algorithm.filter", "group_scores"),
    "information_metrics": ("ragen_jax.diagnostics.information", "information_metrics"),
    "leave_one_out": ("ragen_jax.algorithm.advantage", "leave_one_out"),
    "load_model": ("ragen_jax.model.hf", "load"),
    "mutual_information": ("ragen_jax.score.texts", "mutual_information"),
    "retrieval_p": ("ragen_jax.diagnostics.permutation", "retrieval_p"),
    "select_groups": ("ragen_jax.algorithm.filter", "select_groups"),
    "select_members": ("ragen_jax.algorithm.filter", "select_members"),
    "token_logps": ("ragen_jax.model.likelihood", "token_logps"),
    "row_logps": ("ragen_jax.update.row_logps", "row_logps"),
    "within_metrics": ("ragen_jax.diagnostics.information", "within_metrics"),
}

# Commands that are functions as well: calling the module calls the function of ragen_jax.api.
CALLABLE_MODULES = ("train", "evaluate", "report", "score")


def __getattr__(name: str) -> Any:
    if name in CALLABLE_MODULES:
        return importlib.import_module(f"ragen_jax.{name}")
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = EXPORTS[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value  # next time found without __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS, *CALLABLE_MODULES})
