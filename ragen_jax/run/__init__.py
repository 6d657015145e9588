"""What a config becomes: the parts of a run, and what it reads and writes.

In comes a config, checked by `check` and `domains`; out go the objects that it stands for (`build`,
`tasks`), the stages that know environments and schedules (`stages`, `training`), checkpoints,
metrics and lines on the console.
"""
