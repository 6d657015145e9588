"""Files that survive: atomic writes, checksums, caches, locks, limits, the console.

In: paths, bytes, rows of metrics. Out: files that are complete or absent, and errors that say
what to do. Nothing here knows a model or an algorithm.
"""
