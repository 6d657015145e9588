"""The tiny agent: a config comes in, a model directory that imitates the environment's solver goes
out.

`python -m ragen_jax.warmstart` (`__main__`) builds it ahead; `train` and `evaluate` do when it is
missing.
"""
