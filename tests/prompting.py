"""Functions that an environment `dataset` is given: they pay, go on, and can be called."""


def score(prompt, reply, row):
    """1 for the answer, and a little for any number."""
    return 1.0 if reply == row["answer"] else 0.1 * reply.isdecimal()


def go_on(messages, row):
    """A word on a wrong answer, which shows it; the third ends the task."""
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
