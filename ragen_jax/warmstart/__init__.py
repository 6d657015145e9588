"""Build the tiny agent, which imitates the environment's solver.

In: a config. Out: a model directory. `python -m ragen_jax.warmstart` builds it in advance; `train`
and `evaluate` build it if it is missing.
"""
