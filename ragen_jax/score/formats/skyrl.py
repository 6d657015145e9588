"""SkyRL's dumps of evaluations, dumped_evals/global_step_N_evals/DATASET.jsonl.

The writer: skyrl/train/utils/trainer_utils.py, dump_per_dataset_eval_results. Prompts and outputs
are decoded with their control tokens; an output of several turns holds the observations. `score` is
a number, or a list with a number per token. Rollouts of training are pickles, which are not read.
"""

from ragen_jax.score.formats.replies import prompt_and_reply
from ragen_jax.score.formats.rows import Format

FORMAT = Format(
    ("input_prompt", "output_response"), prompt_and_reply("input_prompt", "output_response")
)
