"""Learning: take a batch of episodes and the state, return the state after the updates.

`learner` selects episodes, assigns credit and updates; `policy` and `critic` take optimizer steps
on the minibatches of `optimize`; `passes` and `reading` compute log-probs, entropies and values.
"""

from ragen_jax.model.likelihood import token_logps as token_logps
