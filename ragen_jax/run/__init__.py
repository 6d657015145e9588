"""The parts of a run, and the files that it reads and writes.

These modules turn a checked config (`ragen_jax.config`) into tasks (`tasks`, `datasets`), a model
(`load`, `imitate`), the stages that depend on environments and schedules (`stages`, `training`),
checkpoints (`checkpoint`), metrics and console lines (`log`).
"""
