"""The terms of reports and docs: a table for docs/glossary.md, and folded at the end of a page."""

from html import escape

TERMS = {
    "agent, policy": "the language model that is trained",
    "prompt, X": "the text that a reply continues: rules, observations, earlier turns as the "
    "context mode shows them",
    "reasoning, Z": "the tokens between <think> and </think>, without the tags",
    "action, A": "the content of <answer>",
    "episode, turn": "a game from its first observation to its end; one prompt with its reply",
    "group": "episodes of the same problem; their rewards are compared with each other",
    "step": "one round: rollout, diagnosis, update",
    "return": "sum of the rewards of an episode, penalties included, without discount",
    "kept": "fraction of the groups, or of the sound episodes, that the update learns from",
    "information (own_margin)": "how much likelier reasoning is under its own prompt than under "
    "other prompts, in nats per reasoning; 0: it does not depend on its prompt; no upper bound",
    "retrieval": "fraction of reasoning that is most likely under its own prompt; chance is 1 over "
    "the number of prompts",
    "MI (mi, mi_seq, mi_released)": "mutual information of prompt and reasoning: per token and per "
    "reasoning as in the paper, and as in its released code; at most the log of the number of "
    "prompts",
    "H(Z|X) (h_cond)": "entropy of the reasoning given its prompt, nats per token",
    "template collapse": "reasoning stays diverse (H(Z|X) high) but no longer depends on its "
    "prompt (information low)",
    "za_swap": "how much likelier an action is after its own reasoning than after reasoning for "
    "other prompts, nats per action; 0: the action ignores the reasoning",
    "grounded": "a statement of the reasoning that is true of its prompt, where an environment can "
    "check it",
    "misplaced tag (tags/misplaced)": "a <think>, </think>, <answer> or </answer> of a reply that "
    "is not where it belongs",
    "needed texts (eval/ask/shown)": "texts that an agent's questions must show it before an "
    "answer is known; the fraction that it has seen",
    "reward variance": "variance of the returns inside a group; without it, a group teaches "
    "nothing",
    "top-p filter": "keeps the groups with the largest variance, up to a fraction p of the total",
    "alarm": "on if information has fallen far below its level in this run, or if two weaker signs "
    "agree",
    "level": "the value of a metric early in a run, with which the alarm compares later values",
    "nat": "unit of information: 1 nat = 1.44 bits",
    "95 % CI, ±": "an interval that contains the true value in 95 % of repetitions",
}


def glossary_markdown() -> str:
    """Return the table of terms as Markdown."""
    rows = (f"| {_cell(term)} | {_cell(words)} |" for term, words in TERMS.items())
    return "\n".join(["| term | meaning |", "| --- | --- |", *rows])


def _cell(text: str) -> str:
    for letter in "|<_":
        text = text.replace(letter, f"\\{letter}")
    return text


def glossary_html() -> str:
    """Return the terms as a folded list of definitions."""
    rows = (f"<dt>{escape(term)}</dt><dd>{escape(words)}</dd>" for term, words in TERMS.items())
    return f'<details><summary>Terms</summary><dl class="terms">{"".join(rows)}</dl></details>'
