"""What a config becomes: the parts of a run, and what it reads and writes.

In comes a config, checked by `check` and `domains`; out go environments, datasets, models, meshes
and settings (`build`, `tasks`), checkpoints, metrics and lines on the console.
"""
