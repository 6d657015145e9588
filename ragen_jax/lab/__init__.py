"""Experiments of many small runs. In: an entry of configs/experiments. Out: a page with a figure.

`python -m ragen_jax.lab` (`__main__`) runs the arms in parallel (`arms`). Modules such as
`collapse` and `model_organism` evaluate the `curves`, and `pages` writes the result.
"""
