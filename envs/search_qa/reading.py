"""Text in and out: parsing actions and formatting documents.

Sources, of mll-lab-nu/RAGEN: ragen/env/search/env.py (step) and reward.py
(extract_answer_from_response) for actions, retrieval_client.py (_format_results) for documents.
"""

import re
from collections.abc import Sequence

from ragen_jax.envs.search_qa.retrieve import Document

NO_DOCUMENTS = "No relevant documents found for the query."
MAX_ANSWER = 2000  # characters of an answer that are read
MAX_NAME = 60  # characters of a document's name that are shown

_BOXED = re.compile(r"\\boxed\{([^{}]+)\}")
_BOLD = re.compile(r"\*+([^*]+)\*+")
_ANSWER_IS = re.compile(r"\banswer is\s*:?\s*([^.!?]+)", re.IGNORECASE)
_THEREFORE = re.compile(r"\b(?:therefore|thus|so|hence)\b,?([^.!?]+)", re.IGNORECASE)
_SENTENCE_ENDS = re.compile(r"[.!?]+")


def read_action(action: str) -> tuple[str, str]:
    """Parse an action of any content.

    Returns:
      ("search", query), ("finish", answer), ("", "") for an empty action, or ("answer", answer):
      any other text counts as an answer, as in the released code.
    """
    action = action.strip()
    for kind in ("search", "finish"):
        if action.startswith(f"{kind}[") and action.endswith("]"):
            return kind, action[len(kind) + 1 : -1].strip()
    return ("answer", find_answer(action)) if action else ("", "")


def find_answer(text: str) -> str:
    r"""Return the answer in a text that was not put into finish[...].

    It is the first of: the content of \boxed{}, bold text, the text after "answer is", the text
    after "therefore" or the like, the first sentence of more than five characters, the whole text.
    Only the first MAX_ANSWER characters are read.
    """
    text = one_line(text[:MAX_ANSWER])
    for pattern in (_BOXED, _BOLD, _ANSWER_IS, _THEREFORE):
        for found in pattern.findall(text):
            if any(character.isalnum() for character in found):
                return found.strip()
    sentences = (sentence.strip() for sentence in _SENTENCE_ENDS.split(text))
    return next((sentence for sentence in sentences if len(sentence) > 5), text)


def show_documents(documents: Sequence[Document], *, document_chars: int, total_chars: int) -> str:
    """Format documents as the released code does: a numbered header, and the text below it.

    Unlike there, a text is one line, so it cannot imitate the header of another document. Truncated
    text ends with "...".

    Args:
      document_chars: maximum characters of a document's text.
      total_chars: maximum characters of the result, including headers.
    """
    if not documents:
        return NO_DOCUMENTS
    parts = [
        f"[Document {number}] (ID: {_cut(one_line(document.name), MAX_NAME)}, "
        f"Score: {document.score:.3f})\n{_cut(one_line(document.text), document_chars)}"
        for number, document in enumerate(documents, 1)
    ]
    return _cut("\n\n".join(parts), total_chars)


def one_line(text: str) -> str:
    """Return a text in one line, with characters that UTF-8 cannot encode replaced."""
    return " ".join(text.encode(errors="replace").decode().split())


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."
