"""Functions for the options of environment `dataset`: a reward, a next message and a tool."""


def score(prompt, reply, row):
    """Return 1 for the answer, 0.1 for any other number, else 0."""
    return 1.0 if reply == row["answer"] else 0.1 * reply.isdecimal()


def next_message(messages, row):
    """Quote a wrong answer; return None to end after the right answer or three replies."""
    reply = messages[-1]["content"]
    if reply == row["answer"] or len(messages) >= 6:
        return None
    return f"No, not {reply[:1000]}."


def length(text: str) -> int:
    """How many characters a text has.

    Args:
        text: any
    """
    return len(text)


TOOLS = [length]
