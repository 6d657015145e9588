"""A conversation per line, {"messages": [...]}, as of OpenAI's API."""

from ragen_jax.score.formats.replies import conversation_replies
from ragen_jax.score.formats.rows import Format, ParsedReply
from ragen_jax.score.values import Fields


def read(record: Fields) -> tuple[ParsedReply, ...]:
    """Return the assistant messages of a conversation."""
    return conversation_replies([], record.get("messages"))


FORMAT = Format(("messages",), read)
