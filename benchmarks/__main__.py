"""Compare with other programs, with this program without a feature, and with the machine's limits.

    python -m benchmarks CASE [--repeats=N] [--json]

Without a case, the command lists the cases. NOTES.md has the figures and the conclusions.
"""

import argparse
import sys

from benchmarks import (
    accelerator,
    ahead,
    alarm,
    alarm_bound,
    caching,
    chaos,
    continuous,
    curves,
    endpoint,
    filtering,
    generation,
    grpo_step,
    harness_learning,
    layer_kinds,
    lengths,
    llm,
    measure,
    odd,
    padding,
    prefixes,
    reading,
    saving,
    scaling,
    scoring,
    searching,
    servers,
    slots,
    small_model,
)
from ragen_jax.core.memory import keep_freed_memory

CASES = {  # name: (function, default repeats, dtype of the limiting matrix product)
    "rollout-full": (generation.rollout_full, 9, "float32"),
    "rollout-single": (generation.rollout_single, 15, "float32"),
    "rollout-0.5b": (generation.rollout_05b, 3, "float32"),
    "rollout-tunix": (generation.rollout_tunix, 15, "float32"),
    "kept-cache": (caching.kept_cache, 15, "float32"),
    "slots": (slots.slots, 3, "float32"),
    "slots-equal": (slots.slots_equal, 3, "float32"),
    "slots-64": (slots.slots_64, 3, "float32"),
    "endpoint": (endpoint.endpoint, 3, "float32"),
    "endpoint-latency": (endpoint.latency, 3, "float32"),
    "tiny-step": (slots.tiny_step, 9, "float32"),
    "generate-batch": (continuous.generate_batch, 1, "float32"),
    "generate-batch-135m": (continuous.generate_batch_135m, 3, "float32"),
    "slots-memory": (slots.slots_memory, 1, "float32"),
    "ahead": (ahead.ahead, 3, "float32"),
    "int8-cache": (caching.int8_cache, 3, "float32"),
    "group-prefill": (caching.group_prefill, 50, "float32"),
    "filtered-update": (filtering.filtered_update, 9, "float32"),
    "padded-update": (padding.padded_update, 5, "float32"),
    "shared-prefixes": (prefixes.shared_prefixes, 3, "float32"),
    "scoring": (scoring.scoring, 3, "float32"),
    "saving": (saving.saving, 9, "float32"),
    "reading": (reading.reading, 5, "float32"),
    "bm25": (searching.bm25, 9, "float32"),
    "flat-search": (searching.flat_search, 9, "float32"),
    "qwen-0.5b": (llm.qwen_05b, 3, "float32"),
    "layer-kinds": (layer_kinds.layer_kinds, 7, "float32"),
}
# name: (module with report and as_table, default number of runs)
SIMULATIONS = {"alarm": (alarm, 400), "alarm-bound": (alarm_bound, 400)}
# name: module whose main parses the remaining arguments
OWN_OPTIONS = {
    "accelerator": accelerator,
    "chaos": chaos,
    "curves": curves,
    "grpo-step": grpo_step,
    "harness-learning": harness_learning,
    "odd": odd,
    "scaling": scaling,
    "servers": servers,
    "small-model": small_model,
    "train-length": lengths,
}
ONE_ARENA = (
    "slots",
    "slots-equal",
    "slots-64",
    "generate-batch",
    "generate-batch-135m",
    "rollout-full",
    "kept-cache",
    "rollout-0.5b",
    "qwen-0.5b",
    "shared-prefixes",
    "layer-kinds",
)  # cases with one pool of memory for all threads, as in `train`


def run(case, repeats=None, **sizes):
    """Run a case and return its JSON object (measure.report)."""
    function, usual, dtype = CASES[case]
    repeats = repeats or usual
    before = measure.limits(dtype)
    rows = function(repeats, **sizes)
    return measure.report(case, rows, before, measure.limits(dtype), repeats=repeats)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in OWN_OPTIONS:
        OWN_OPTIONS[argv[0]].main(argv[1:])
        return
    texts = {name: case[0].__doc__ for name, case in (CASES | SIMULATIONS).items()}
    texts |= {name: module.__doc__ for name, module in OWN_OPTIONS.items()}
    cases = "\n".join(f"  {name:<15} {text.splitlines()[0]}" for name, text in texts.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"cases:\n{cases}",
    )
    parser.add_argument("case", choices=texts, metavar="CASE")
    parser.add_argument(
        "--repeats", type=int, help="measured runs of each side, after a warm-up; simulated runs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if not argv:
        parser.print_help()
        return
    options = parser.parse_args(argv)
    if options.repeats is not None and options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.case in SIMULATIONS:
        module, usual = SIMULATIONS[options.case]
        found = module.report(options.repeats or usual)
        print(measure.as_json(found) if options.json else module.as_table(found))
        return
    keep_freed_memory(one_arena=options.case in ONE_ARENA)
    found = run(options.case, options.repeats)
    print(measure.as_json(found) if options.json else measure.as_table(found))


if __name__ == "__main__":
    main()
