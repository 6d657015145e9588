"""The mathematics of a step: rewards, filter, advantages, objectives and their terms.

In: the arrays of a Batch and frozen settings. Out: masks, advantages, losses and their metrics.
Pure functions, most of them jit-compiled; nothing here knows a config or a file.
"""
