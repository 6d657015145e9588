"""The collapse diagnosis inside other trainers, scored by the model that trains.

`monitor` computes the figures of training from a trainer's rollouts and any function that returns
log-probabilities; `torch_model` is that function for a model of transformers; `trl` attaches both
to a trainer of TRL. The figures are NumPy and JAX on the CPU. torch and TRL are imported on use.
"""
