"""results.jsonl of verifiers (verifiers/legacy/utils/save_utils.py); prime-rl wrote the same."""

from ragen_jax.score.formats.replies import prompt_and_reply
from ragen_jax.score.formats.rows import Format

FORMAT = Format(("prompt", "completion", "example_id"), prompt_and_reply("prompt", "completion"))
