"""SearchQA for language agents: answer questions by searching and reading.

As in the released RAGEN, `search[...]` shows documents and `finish[...]` ends the task with an
answer; any other text counts as an answer. The number of searches is limited by the rollout
(env.max_turns).
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.envs.options import bounds, file_name, one_of, probability, problem_seed, whole
from ragen_jax.envs.problems import MAX_ATTEMPTS, SPLITS, Draws
from ragen_jax.envs.search_qa import questions, world
from ragen_jax.envs.search_qa.protocols import MAX_DOCUMENTS
from ragen_jax.envs.search_qa.questions import Question
from ragen_jax.envs.search_qa.reading import MAX_ANSWER, one_line, read_action, show_documents
from ragen_jax.envs.search_qa.retrieve import BM25, MAX_QUERY, Retriever, check_installed
from ragen_jax.envs.search_qa.retrievers import SOURCES, check_sources, open_retriever
from ragen_jax.envs.search_qa.score import score_answer
from ragen_jax.envs.search_qa.world import Link
from ragen_jax.envs.styles import Style, make_styles
from ragen_jax.envs.types import Resident, Step

TAG = 0x5EA2C402  # tag of the `Draws` of a question

MAX_ROWS = 10**7  # rows of a file
MAX_WORLDS = 256  # encyclopedias whose indices are kept in memory
MAX_CHARS = 50_000  # that a search shows; observations are limited (rollout/env_calls.py)
MAX_ECHO = 60  # characters of a query or an answer that are repeated in the observation

_RULES = """\
You are answering a question by searching an encyclopedia. Each of your answers is one action:
search[query] shows the documents that fit the query best, each behind \
"[Document 1] (ID: ..., Score: ...)" and so on;
finish[answer] ends the task with the final one, as short as possible: for example a name.
The question may need several searches, one after another. Only the final answer earns something: \
1 if it is exactly right, less where some of its words are right, 0 otherwise. Text that is no \
action is taken as the final answer."""

# The rules of `SearchQA.brief`.
_BRIEF = """\
Answer the question by searching an encyclopedia, perhaps several times. The answer is one action: \
search[query] shows documents; finish[answer] ends the task with a short answer, such as a name. \
Any other text counts as the final answer."""

_UNKNOWN = "The answer is not known yet."  # what `narrate` says without a fact and a plan
_FORMAT_HINT = "Say search[query] or finish[answer]."
# ASCII, because in Unicode a letter may match another's capital ("\u017f" matches "s").
_CLAIM = re.compile(
    rf"\b({'|'.join(world.KIND_OF)}) of (\w+) is (?:the )?(\w+)", re.IGNORECASE | re.ASCII
)


@dataclass(frozen=True, slots=True)
class SearchState:
    """A state: a question, the last query (at most MAX_QUERY characters), and the text shown below
    the question."""

    question: Question
    query: str | None = None
    shown: str = ""


class SearchQA:
    """Questions over a generated encyclopedia, or given questions over given documents; see
    `ragen_jax.envs.types.Environment`.

    An action is any text, so `actions` is empty.

    hops: (fewest, most) facts in the chain to an answer, each in the passage about the thing that
        the previous fact names
    things: number of things of each of four kinds in an encyclopedia, which has a passage about
        each thing
    worlds: number of encyclopedias that questions are about; they share their things, not the facts
    path: file of questions to draw from instead of generating them (`load_questions`); hops, things
        and worlds are then unused, and retriever selects the source of documents
    max_rows: number of its rows to draw from (None: all)
    retriever: for given questions, a key of RETRIEVERS; "bm25" searches within the process
    corpus, index, url: the data that it searches, or its address (`retrievers.SOURCES`)
    documents: number of documents that a search shows
    document_chars, total_chars: maximum characters of each document, and of all that a search shows
    search_cost: deducted from the reward of each search; 0 to 1
    split: "imitation", "train" or "eval": three sets of questions that share no chain of facts;
        None draws from all
    """

    actions: tuple[str, ...] = ()
    fields: tuple[str, ...] = questions.FIELDS

    def __init__(
        self,
        hops: Sequence[int] = (2, 2),
        things: int = 100,
        worlds: int = 8,
        path: str | Path | None = None,
        max_rows: int | None = None,
        retriever: str = "bm25",
        corpus: str | None = None,
        index: str | None = None,
        url: str | None = None,
        documents: int = 5,
        document_chars: int = 800,
        total_chars: int = 4000,
        search_cost: float = 0.0,
        split: str | None = "train",
    ) -> None:
        self.hops = bounds("hops", hops, most=world.MAX_HOPS)
        self.things = whole("things", things, least=world.MIN_THINGS, most=world.MAX_THINGS)
        self.worlds = whole("worlds", worlds, least=1, most=MAX_WORLDS)
        self.documents = whole("documents", documents, least=1, most=MAX_DOCUMENTS)
        self.document_chars = whole("document_chars", document_chars, least=1, most=MAX_CHARS)
        self.total_chars = whole("total_chars", total_chars, least=1, most=MAX_CHARS)
        self.search_cost = probability("search_cost", search_cost)
        self.max_rows = None
        if max_rows is not None:
            self.max_rows = whole("max_rows", max_rows, least=1, most=MAX_ROWS)
        self.split = one_of("split", split, (*SPLITS, None))
        self.path = file_name("path", path)
        sources = dict(zip(SOURCES, (corpus, index, url), strict=True))
        self._file_questions: tuple[Question, ...] | None = None
        self._retriever: Retriever | None = None
        if path is None:
            _check_generated(retriever, sources)
            check_installed(stem=False)
        else:
            check_sources(retriever, **sources)  # before a long file is read
            self._file_questions = questions.load_questions(path, max_rows=self.max_rows)
            self._retriever = open_retriever(retriever, **sources)
        cost = f" Each search costs {self.search_cost:g}." if self.search_cost else ""
        self.instructions: str = _RULES + cost
        self.brief: str = _BRIEF + cost
        shown = ("Question: ", "Search results for '", "':\n", "[Document ", "] (ID: ", ", Score: ")
        said = ("search[", "finish[", "find ", " find ", ")\n", "\n\n", '" ')
        self.words: tuple[str, ...] = (*world.words(things), *shown, *said)

    def reset(self, seed: int) -> SearchState:
        """Return question number `seed`, an int in [0, 2**63), of this split.

        Raises ValueError after MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_ATTEMPTS):
            question = self._draw(Draws(seed, attempt, TAG))
            if question is not None and self.split in (None, questions.split_of(question)):
                return SearchState(question)
        raise ValueError(
            f"no question found in {MAX_ATTEMPTS} attempts for seed={seed}, hops={self.hops}, "
            f"things={self.things}, worlds={self.worlds}, path={self.path}, "
            f"max_rows={self.max_rows}, split={self.split!r}: have more things or worlds, or read "
            "more rows"
        )

    def _draw(self, draws: Draws) -> Question | None:
        """Make one attempt at a question of any split."""
        if self._file_questions is not None:
            return self._file_questions[draws.below(len(self._file_questions))]
        number = draws.below(self.worlds)
        fewest, most = self.hops
        hops = fewest + draws.below(most - fewest + 1)
        chain = world.draw_chain(draws, world.make_world(number, self.things), hops)
        if chain is None:
            return None
        return Question(
            text=world.ask(chain),
            answers=(chain[-1].y,),
            identity=world.identity(chain),
            world=number,
            chain=chain,
        )

    def list_problems(self) -> Iterator[tuple[int, str, SearchState]]:
        """Yield (row, split, state) of each question of the file, in its order."""
        for row, question in enumerate(self._file_questions or ()):
            yield row, questions.split_of(question), SearchState(question)

    def render(self, state: SearchState) -> str:
        """Return "Question: ..." and below it the result of the last action."""
        shown = f"Question: {state.question.text}"
        return f"{shown}\n{state.shown}" if state.shown else shown

    def step(self, state: SearchState, action: str, rng: np.random.Generator | None = None) -> Step:
        """Search, or take an answer, whatever the action holds. `rng` is unused.

        info: "kind" of action (from `reading.read_action`), "success" (an answer is exactly right);
        for a search "found" (number of documents), for an answer "f1" and "exact_match". Raises
        ConnectionError if a retriever cannot be reached: that episode is left out, not scored.
        """
        kind, text = read_action(action)
        info: dict[str, object] = {"success": False, "kind": kind or "none"}
        if kind == "search":
            query = text[:MAX_QUERY]
            (found,) = self._find_retriever(state.question).search([query], self.documents)
            documents = show_documents(
                found, document_chars=self.document_chars, total_chars=self.total_chars
            )
            shown = f"Search results for '{_short(query)}':\n{documents}"
            info["found"] = len(found)
            reward = 0.0 - self.search_cost  # not -0.0
            return Step(SearchState(state.question, query, shown), reward, False, info)
        if not kind:
            return Step(replace(state, shown=_FORMAT_HINT), 0.0, False, info)
        score = score_answer(text[:MAX_ANSWER], state.question.answers)
        info |= {"f1": score["f1"], "exact_match": score["exact_match"]}
        info["success"] = score["exact_match"]
        after = replace(state, shown=f"Your answer: {_short(text)}")
        return Step(after, float(score["reward"]), True, info)

    def _find_retriever(self, question: Question) -> Retriever:
        """Return the retriever for a question."""
        return self._retriever or _index(question.world, self.things)

    @staticmethod
    def resident(
        mesh: Any,
        *,
        retriever: str = "bm25",
        index: str | None = None,
        documents: int = 5,
        **others: Any,
    ) -> Resident | None:
        """Return the `Resident` of the vectors of a dense index; see `ResidentEnvironment`."""
        if retriever != "dense":
            return None
        sources = {name: others.get(name) for name in SOURCES} | {"index": index}
        check_sources(retriever, **sources)  # ensures that an index is given
        assert index is not None
        from ragen_jax.envs.search_qa.dense_index import DenseIndex  # only this needs devices

        return DenseIndex(index).resident(mesh, documents)

    def identity(self, state: SearchState) -> str:
        """Return the facts that lead to the answer, for a given question its normalized text."""
        return state.question.identity

    def solve(self, state: SearchState) -> tuple[str, ...] | None:
        """Return how a reader finds the answer from here: a search for each thing in the chain.

        None if a search did not show the document that it was for. For a given question, whose
        chain is unknown, the answer alone.
        """
        rest = self._rest(state)
        if rest and state.query == rest[0].x:
            return None
        return (*(f"search[{link.x}]" for link in rest), f"finish[{state.question.answers[0]}]")

    def explain(self, state: SearchState, plan: Sequence[str]) -> str:
        """Return the expert's reasoning: the latest known fact of the chain, and the next to find.

        For example "birthplace of Marwyn is Corford find mayor of Corford". It does not reveal the
        rest of the plan, which nobody knows before reading; for a given question it is empty.
        """
        known, rest = self._known(state), self._rest(state)
        parts = [f"{link.relation} of {link.x} is {link.y}" for link in known]
        parts += [f"find {link.relation} of {link.x}" for link in rest[:1]]
        return " ".join(parts)

    def narrate(self, state: SearchState, plan: Sequence[str]) -> str:
        """Return the reasoning of `explain` in sentences.

        For example "The birthplace of Marwyn is Corford. The next thing to find is the mayor of
        Corford."; before a final answer "The mayor of Corford is Norric. The answer is Norric.".
        For a given question, whose chain is unknown, only the answer.
        """
        rest = self._rest(state)
        sentences = [f"The {link.claim()}." for link in self._known(state)]
        if not plan:
            return " ".join(sentences) or _UNKNOWN
        if rest:
            sentences.append(f"The next thing to find is the {rest[0].relation} of {rest[0].x}.")
        else:
            sentences.append(f"The answer is {state.question.answers[0]}.")
        return " ".join(sentences)

    @property
    def sentence_styles(self) -> Mapping[str, Style]:
        """Reasoning styles in sentences, for `warmstart.styles` of a language model."""
        if self._file_questions is not None:
            pattern = rf"The answer is (?s:.+)\.|{re.escape(_UNKNOWN)}"
            return make_styles(self.narrate, pattern, "The")
        name, fact = "[A-Z]?[a-z]+", f"(?:{'|'.join(world.KIND_OF)}) of [A-Z][a-z]+"
        known = rf"The {fact} is (?:the )?{name}\."
        then = rf"The next thing to find is the {fact}\.|The answer is {name}\."
        pattern = rf"{known}(?: (?:{then}))?|{then}|{re.escape(_UNKNOWN)}"
        return make_styles(self.narrate, pattern, "The")

    def _known(self, state: SearchState) -> tuple[Link, ...]:
        """Return the latest known fact of the chain, if any."""
        chain = state.question.chain
        return chain[: len(chain) - len(self._rest(state))][-1:]

    def _rest(self, state: SearchState) -> tuple[Link, ...]:
        """Return the facts of the chain after the last fact that is shown."""
        chain = state.question.chain
        seen = [i for i, link in enumerate(chain) if link.sentence() in state.shown]
        return chain[seen[-1] + 1 :] if seen else chain

    def asks(self, action: str) -> bool:
        """Return whether an action is a search."""
        return read_action(action)[0] == "search"

    def needed(self, state: SearchState) -> tuple[str, ...]:
        """Return the sentences with the facts that lead to the answer; for a given question ()."""
        return tuple(link.sentence() for link in state.question.chain)

    def count_grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """Return (number of facts in `thought` that a shown document states, number of facts).

        Facts are stated in the form of `explain`. For given questions, whose wording is free,
        nothing is checked: (0, 0).
        """
        if self._file_questions is not None:
            return 0, 0
        claims = [
            Link(x.title(), relation.lower(), y)
            for relation, x, y in _CLAIM.findall(thought[:MAX_ANSWER])
        ]
        sentences = [claim.sentence().lower() for claim in claims]
        observation = observation.lower()
        return sum(sentence in observation for sentence in sentences), len(claims)


def _check_generated(retriever: str, sources: dict[str, str | None]) -> None:
    """Raise ValueError for a source of documents that generated questions do not need."""
    defaults = {"retriever": "bm25", **dict.fromkeys(sources)}
    for name, value in {"retriever": retriever, **sources}.items():
        if value != defaults[name]:
            raise ValueError(
                f"{name}={value!r} is for questions of a file, but path is None: generated "
                "questions have their own encyclopedia, which is searched in process"
            )


@functools.lru_cache(maxsize=MAX_WORLDS)
def _index(number: int, things: int) -> BM25:
    """Return the index of an encyclopedia, shared by all environments of a process."""
    return BM25(world.make_world(number, things).passages, stem=False)


def _short(text: str) -> str:
    """Return a query or an answer as the observation repeats it."""
    line = one_line(text[: 4 * MAX_ECHO])
    return line if len(line) <= MAX_ECHO else line[: MAX_ECHO - 3] + "..."
