"""{"prompt", "response"} of any source: each as text, messages or token ids."""

from ragen_jax.score.formats.replies import prompt_and_reply
from ragen_jax.score.formats.rows import Format

FORMAT = Format(("prompt", "response"), prompt_and_reply("prompt", "response"))
