"""Sampled replies as console lines: some of every step, and an example if most are invalid."""

from collections import Counter
from collections.abc import Sequence

from ragen_jax.core.clean_text import one_line
from ragen_jax.core.types import Episode, Turn
from ragen_jax.rollout.chat import Chat
from ragen_jax.rollout.task import Task

FEW_VALID = 0.5  # fraction of valid replies below which an example is printed
PROMPT = 200  # printed characters of a prompt, from its last message
REPLY = 400  # printed characters of a reply


def sample_lines(task: Task, episodes: Sequence[Episode], count: int) -> list[str]:
    """Return lines with the first replies of `count` groups: prompt, reply and reward.

    Args:
      count: number of replies; fewer if there are fewer groups.
    """
    firsts = {e.group: e for e in reversed(episodes) if e.turns and not e.error}
    lines = []
    for group in sorted(firsts)[:count]:
        turn = firsts[group].turns[0]
        lines += [*_shown(task, turn), f"    reward {turn.reward:+.2f}"]
    return lines


def invalid_reply_lines(task: Task, episodes: Sequence[Episode], max_new_tokens: int) -> list[str]:
    """Return why replies are invalid, with counts and an example; [] if at least half are valid."""
    turns = [turn for e in episodes if not e.error for turn in e.turns]
    invalid = [turn for turn in turns if not turn.valid]
    if not turns or len(turns) - len(invalid) >= FEW_VALID * len(turns):
        return []
    chat = task.settings.chat
    reasons = [explain_invalid(chat, turn, max_new_tokens) for turn in invalid]
    counts, example = summarise_reasons(reasons)
    name = f"{task.label}: " if task.label else ""
    head = f"  {name}{len(invalid)} of {len(turns)} replies are not valid: {counts}; for example"
    return [head, *_shown(task, invalid[example])]


def summarise_reasons(reasons: Sequence[str]) -> tuple[str, int]:
    """Return (how often each reason occurs, index of the first with the most frequent one)."""
    counted = Counter(reasons).most_common()
    counts = ", ".join(f"{count} {reason}" for reason, count in counted)
    return counts, reasons.index(counted[0][0])


def explain_invalid(chat: Chat, turn: Turn, max_new_tokens: int) -> str:
    """Return why a turn's reply is not valid, in a few words."""
    cut = len(turn.sampled) >= max_new_tokens and not chat.ends_reply(turn.sampled)
    return explain_text(chat.text(turn.sampled), cut=cut, more=turn.answer == (0, 0))


def explain_text(text: str, *, cut: bool, more: bool) -> str:
    """Return why a reply is not valid, in a few words.

    Args:
      text: the reply after its opening reasoning tag.
      cut: whether it was cut off.
      more: whether text after a complete answer makes it invalid.
    """
    if cut:
        return "cut off at rollout.max_new_tokens"
    _, closed, rest = text.partition("</think>")
    if not closed:
        return "with unclosed reasoning"
    if "<answer>" not in rest or "</answer>" not in rest:
        return "without an answer"
    if not rest.lstrip().startswith("<answer>"):
        return "with text before <answer>"
    if more:
        return "with text after </answer>"
    return "with an unknown or no action"


def _shown(task: Task, turn: Turn) -> list[str]:
    chat = task.settings.chat
    prompt = one_line(turn.message[-PROMPT:], PROMPT)
    reply = one_line(chat.text(turn.sampled), REPLY)
    opening = "" if turn.messages and not chat.text(turn.prompt).endswith("<think>") else "<think>"
    return [f"    prompt: {prompt}", f"    reply: {opening}{reply}"]
