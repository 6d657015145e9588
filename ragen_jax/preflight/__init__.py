"""Compile the programs of a TPU pod on a CPU machine.

In: a config and a topology. Out: the chip memory of each program, and a lower bound on the time of
a step. The command is `python -m ragen_jax.preflight`. The list of programs, their shapes and their
costs are in ragen_jax/programs (training.py, shapes.py, roofline.py).
"""
