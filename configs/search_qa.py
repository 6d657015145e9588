"""SearchQA (RAGEN-2, section 4.1): answer a question by searching and reading documents.

    python -m ragen_jax.train --config=configs/search_qa.py[:PRESET]
                              [--config.env.options.path=train.parquet
                               --config.env.options.corpus=corpus.json]

tiny (default)
    A 0.2 M parameter agent that first imitates a solver. Questions combine two facts of a generated
    encyclopedia; a search returns one short document, and prompts show only the last search.
    Hardware and time: 2 CPU cores; 8 minutes of CPU time, including 2 for the imitation (once).
    Expected: held-out success 0.56 -> 0.67 (mean of three seeds; docs/results/search_qa_tiny.md).
    Differences from the paper: generated questions; no KL term; four turns; learning rate 2e-4,
    decaying to 0; diagnosis every fifth step; imitation ends early, so that training starts with an
    agent that still makes different errors.
llm
    As below, for any Qwen, Llama 3 or Gemma 3 model given by --config.model.path. Its size and the
    devices determine dtype, micro-batch, mesh and rematerialisation (configs/presets.py).
smollm2-135m, smollm2-360m, smollm2-1.7b
    Small language models with brief prompts, which first imitate the solver (docs/cli.md).
qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, qwen2.5-7b, qwen3-0.6b, qwen3-1.7b, qwen3-4b,
qwen3.5-0.8b, qwen3.5-2b, qwen3.5-4b, qwen3.5-9b,
gemma3-270m, gemma3-1b, gemma3-4b, qwen3-30b-a3b
    The setting of the released code (config/_9_search.yaml) with group-relative advantages: 5 turns
    of one action, 16 prompts of 8 episodes, 5,000 tokens of prompt and reply, 256 held-out
    questions. The released script trains with PPO; add +ppo for that. Time and score: not measured
    yet.

With `path`, questions are drawn from a file instead of being generated (the released code's
scripts/prepare_search_data.py writes the file for HotpotQA). `max_rows` is the number of first rows
to use (released code: 20,000). `hops`, `things` and `worlds` are then ignored, and `corpus` is the
file of documents that BM25 searches. The expert does not know which searches lead to the answers of
such questions: set `warmstart.fine_tune=False`, or a language model imitates answers without
searches.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from ragen_jax.configs.presets import TINY_REPLIES, build_config


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the config of a preset of presets.PRESETS with any recipes, such as "tiny+ppo"."""
    return build_config(
        preset,
        dict(name="search_qa", max_turns=5, actions_per_turn=1, max_actions=5, max_context=5000),
        dict(
            hops=(2, 2),
            things=100,
            worlds=8,
            path=placeholder(str),  # file to draw from instead
            max_rows=placeholder(int),  # maximum questions of the file; None: all
            retriever="bm25",  # retriever for questions of a file
            corpus=placeholder(str),  # this or one of the next two: source of documents
            index=placeholder(str),
            url=placeholder(str),
            documents=5,
            document_chars=800,
            total_chars=4000,
            search_cost=0.0,
        ),
        fields={"rollout.groups": 16, "rollout.group_size": 8, "eval.episodes": 256},
        tiny={
            **TINY_REPLIES,
            "env.max_turns": 4,  # a search more than two facts need
            "env.max_actions": 4,
            "env.max_context": 0,
            "env.options.things": 20,
            "env.options.worlds": 32,
            "env.options.documents": 1,
            "rollout.groups": 16,
            "rollout.group_size": 16,
            "rollout.max_new_tokens": 24,
            "optimizer.learning_rate": 2e-4,
            "warmstart.success": 0.2,
        },
    )
