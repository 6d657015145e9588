"""Learning: a batch of episodes and the state come in, the state behind its updates goes out.

`learner` selects, credits and updates; `policy` and `critic` take optimizer steps on `optimize`'s
minibatches; `likelihood` reads log-probs and entropies off whole rows.
"""

from ragen_jax.model.likelihood import token_logps as token_logps
