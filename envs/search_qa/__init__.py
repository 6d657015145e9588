"""SearchQA. Modules: `world` (generated encyclopedias), `questions` (file, splits), `retrieve`
(protocol of retrievers, BM25; `retrievers` is their registry), `reading` (actions and documents as
text), `score` (reward of an answer), `env` (the rules)."""

from ragen_jax.envs.search_qa.env import SearchQA
from ragen_jax.envs.search_qa.questions import Question, load_questions, split_of
from ragen_jax.envs.search_qa.retrieve import BM25, Document, Retriever
from ragen_jax.envs.search_qa.retrievers import RETRIEVERS, open_retriever
from ragen_jax.envs.search_qa.score import score_answer

__all__ = [
    "BM25",
    "RETRIEVERS",
    "Document",
    "Question",
    "Retriever",
    "SearchQA",
    "load_questions",
    "open_retriever",
    "score_answer",
    "split_of",
]
