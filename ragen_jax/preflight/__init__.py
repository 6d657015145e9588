"""The pod's programs on a CPU machine: a config and a topology come in; out goes what each program
takes of a chip's memory, and how long a step takes at least.

`python -m ragen_jax.preflight` (`__main__`); `programs` says what is compiled, `shapes` with what,
`roofline` what it costs.
"""
