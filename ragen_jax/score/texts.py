"""Mutual information of prompts and reasonings given as texts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ragen_jax.configs.base import Config
from ragen_jax.core.randomness import Purpose, generator
from ragen_jax.core.types import Metrics, Params
from ragen_jax.diagnostics.cross_scoring import cross_score
from ragen_jax.diagnostics.information import information_metrics
from ragen_jax.diagnostics.intervals import confidence_intervals, log_margin
from ragen_jax.diagnostics.permutation import retrieval_p
from ragen_jax.model.qwen import Qwen
from ragen_jax.score.encode import THINK, Encoder
from ragen_jax.score.formats import Prompt
from ragen_jax.score.prompts import text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def mutual_information(
    model: Qwen,
    params: Params,
    tokenizer: "PreTrainedTokenizerFast",
    prompts: Sequence[Prompt],
    reasonings: Sequence[str | Sequence[int]],
    *,
    think: Sequence[str] = THINK,
    micro_batch: int | None = None,
    seed: int = 0,
    date: str | None = None,
) -> Metrics:
    """Measure how much the reasoning depends on the prompt (RAGEN-2, section 2.3).

    Every reasoning is scored under every distinct prompt. If the model is not the policy that
    wrote the reasonings, `mi_seq` is the InfoNCE lower bound of the mutual information (van den
    Oord et al. 2018, arXiv 1807.03748) with the model's likelihood as its critic.

    Args:
      model, params, tokenizer: as returned by `ragen_jax.load_model`.
      prompts: M, the prompt from which each reasoning was sampled: text as the policy read it,
        OpenAI messages for the model's chat template, or token ids. If a text or a conversation
        does not end with the tag that opens a reasoning, the tag is appended; token ids are used
        unchanged.
      reasonings: M, without tags: texts or token ids.
      think: the tags around a reasoning.
      micro_batch: (prompt, reasoning) rows per device call; None: that of configs/base.py.
      seed: seed of the permutations.
      date: the day, YYYY-MM-DD, that the chat template writes, if any (Llama 3.2's); None:
        2024-07-26, the day that Llama 3.2's template writes without a clock.

    Returns:
      The metrics of `information_metrics`, their `confidence_intervals` (prompts are the groups)
      and `retrieval_p`.

    Raises:
      ValueError: different numbers of prompts and reasonings, none at all, an empty prompt or
        reasoning, or messages that the template refuses.
    """
    if len(prompts) != len(reasonings):
        raise ValueError(f"{len(prompts)} prompts, but {len(reasonings)} reasonings")
    encoder = Encoder(tokenizer, model.config.vocab_size, think, date=date)
    column, read_N, own_M = {}, [], []
    for prompt in prompts:
        ids = encoder.encode_prompt(prompt)
        is_text_or_messages = isinstance(prompt, str) or isinstance(prompt[0], dict)
        if is_text_or_messages and not encoder.opens_reasoning(ids):
            ids = np.append(ids, np.asarray(text_ids(tokenizer, think[0]), np.int32))
        if column.setdefault(ids.tobytes(), len(column)) == len(read_N):
            read_N.append(ids)
        own_M.append(column[ids.tobytes()])
    reasoning_ids_M = [text_ids(tokenizer, z) if isinstance(z, str) else z for z in reasonings]
    own_M = np.array(own_M)
    rows = Config().diagnose.micro_batch if micro_batch is None else micro_batch
    score_MN, length_M = cross_score(model, params, read_N, reasoning_ids_M, micro_batch=rows)
    metrics = information_metrics(score_MN, length_M, own_M)
    metrics |= confidence_intervals(score_MN, length_M, own_M) | log_margin(score_MN, own_M)
    p = retrieval_p(score_MN, own_M, rng=generator(Purpose.PERMUTATIONS, seed))
    return metrics | {"retrieval_p": p}
