"""Experiments of many small runs: an entry of configs/experiments.py comes in, a page with a
figure goes out.

`python -m ragen_jax.lab` (`__main__`) runs the arms, `report` writes what they say.
"""
