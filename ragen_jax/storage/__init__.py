"""Robust files: atomic writes, checksums, caches, locks, limits, the console.

In: paths, bytes, rows of metrics. Out: files that are complete or absent, and errors that say
what to do. Nothing here depends on a model or an algorithm.
"""
