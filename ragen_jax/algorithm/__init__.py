"""The mathematics of a training step: rewards, filters, advantages, objectives and losses.

Input: the arrays of a Batch and frozen settings. Output: masks, advantages, losses and their
metrics. The functions are pure and mostly jit-compiled; none of them reads a config or a file.
"""
