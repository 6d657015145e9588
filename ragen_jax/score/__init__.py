"""Diagnose other trainers' rollouts: compute our training metrics from a model and rollout files.

`formats` describes the files of each trainer, with the rules of `values` and `messages`; `files`
reads them. `encode` converts texts to token ids (`prompts`, `transcript`), `episodes` builds the
groups of a step, and `figures` computes the rows of metrics and the alarm. `notices` reports
everything that is not read. `texts` is the interface for library callers; `python -m
ragen_jax.score` (`__main__`) prints and writes the results.
"""

from ragen_jax.core.callable_module import make_callable

make_callable(__name__, "score")
