"""Helpers that every other folder may import: row arrays, keys, the mesh, text and HTTP.

In: NumPy and JAX arrays, text, bytes. Out: the same, typed, padded, sharded or cleaned. Nothing
here knows a model, a task or a run.
"""
