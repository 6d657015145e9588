"""RAGEN's evaluation as JSON lines.

The writers: ragen/llm_agent/agent_proxy.py, _save_as_jsonl, and scripts/convert_to_jsonl.py.
"""

from ragen_jax.score.formats.chat_log import read
from ragen_jax.score.formats.rows import Format

FORMAT = Format(("messages", "metadata"), read)
