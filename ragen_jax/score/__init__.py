"""Diagnoses of other trainers: a model and files of rollouts come in, what training would have
logged of them goes out.

`formats` says which trainers write what, with the rules of `values` and `messages`; `files` reads
it, `encode` makes token ids of texts (`prompts`, `transcript`), `episodes` the groups of a step,
`figures` the rows of figures and the alarm; `notices` are lines on everything that is not read.
`texts` is the same for callers of the library; `python -m ragen_jax.score` (`__main__`) prints and
writes.
"""
