"""MetaMathQA. Modules: `stories` (generator), `questions` (file, splits), `compare` (judges
answers; `worker` is its process), `env` (the rules)."""

from ragen_jax.envs.metamathqa.env import MetaMathQA
from ragen_jax.envs.metamathqa.questions import Question, load_questions, split_of

__all__ = ["MetaMathQA", "Question", "load_questions", "split_of"]
