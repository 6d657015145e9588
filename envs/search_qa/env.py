"""SearchQA for language agents: questions that are answered by searching and reading.

As in the released RAGEN `search[...]` shows documents, `finish[...]` ends the task with an answer,
and so does anything else. How many searches there are is a budget of the rollout (env.max_turns).
"""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.envs.options import bounds, file_name, one_of, problem_seed, whole
from ragen_jax.envs.problems import MAX_ATTEMPTS, SPLITS, Draws
from ragen_jax.envs.search_qa import questions, world
from ragen_jax.envs.search_qa.protocols import MAX_DOCUMENTS
from ragen_jax.envs.search_qa.questions import Question
from ragen_jax.envs.search_qa.reading import MAX_ANSWER, one_line, read_action, show_documents
from ragen_jax.envs.search_qa.retrieve import BM25, MAX_QUERY, Retriever, check_installed
from ragen_jax.envs.search_qa.retrievers import SOURCES, check_sources, open_retriever
from ragen_jax.envs.search_qa.score import score_answer
from ragen_jax.envs.search_qa.world import Link
from ragen_jax.envs.types import Resident, Step

TAG = 0x5EA2C402  # of the `Draws` of a question

MAX_ROWS = 10**7  # of a file
MAX_WORLDS = 256  # whose indices are kept in memory
MAX_CHARS = 50_000  # of what a search shows: more is no observation (rollout/env_calls.py)
SHOWN = 60  # characters of a query or an answer that are repeated

_RULES = """\
You are answering a question by searching an encyclopedia. Each of your answers is one action:
search[query] shows the documents that fit the query best, each behind \
"[Document 1] (ID: ..., Score: ...)" and so on;
finish[answer] ends the task with the final one, as short as possible: for example a name.
The question may need several searches, one after another. Only the final answer earns something: \
1 if it is exactly right, less where some of its words are right, 0 otherwise. Text that is no \
action is taken as the final answer."""

_AGAIN = "Say search[query] or finish[answer]."
# ASCII, because without it a letter may be another one's capital ("\u017f" of "s").
_CLAIM = re.compile(
    rf"\b({'|'.join(world.KIND_OF)}) of (\w+) is (?:the )?(\w+)", re.IGNORECASE | re.ASCII
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A state: a question, the last query (MAX_QUERY characters of it at most), and what is shown
    below the question."""

    question: Question
    query: str | None = None
    shown: str = ""


class SearchQA:
    """Questions over a generated encyclopedia, or given questions over given documents; see
    `ragen_jax.envs.types.Environment`.

    An action is any text, so `actions` is empty.

    hops: (fewest, most) facts that lead to an answer, each in the passage about what the one before
        leads to
    things: of each of four kinds in an encyclopedia, which has a passage about each
    worlds: encyclopedias that questions are about, of the same things with other facts
    path: file of questions to draw from instead of generating them (`load_questions`); hops, things
        and worlds then have no part, and retriever says where documents come from
    max_rows: how many of its rows are drawn from (None: all)
    retriever: of given questions, a key of RETRIEVERS; "bm25" in process
    corpus, index, url: what it searches in, or where it is (`retrievers.SOURCES`)
    documents: that a search shows
    document_chars, total_chars: characters of each of them, and of all that a search shows
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
        split: str | None = "train",
    ) -> None:
        self.hops = bounds("hops", hops, most=world.MAX_HOPS)
        self.things = whole("things", things, least=world.MIN_THINGS, most=world.MAX_THINGS)
        self.worlds = whole("worlds", worlds, least=1, most=MAX_WORLDS)
        self.documents = whole("documents", documents, least=1, most=MAX_DOCUMENTS)
        self.document_chars = whole("document_chars", document_chars, least=1, most=MAX_CHARS)
        self.total_chars = whole("total_chars", total_chars, least=1, most=MAX_CHARS)
        self.max_rows = None
        if max_rows is not None:
            self.max_rows = whole("max_rows", max_rows, least=1, most=MAX_ROWS)
        self.split = one_of("split", split, (*SPLITS, None))
        self.path = file_name("path", path)
        sources = dict(zip(SOURCES, (corpus, index, url), strict=True))
        self._given: tuple[Question, ...] | None = None
        self._retriever: Retriever | None = None
        if path is None:
            _check_generated(retriever, sources)
            check_installed(stem=False)
        else:
            check_sources(retriever, **sources)  # before a long file is read
            self._given = questions.load_questions(path, max_rows=self.max_rows)
            self._retriever = open_retriever(retriever, **sources)
        self.instructions: str = _RULES
        shown = ("Question: ", "Search results for '", "':\n", "[Document ", "] (ID: ", ", Score: ")
        said = ("search[", "finish[", "find ", " find ", ")\n", "\n\n", '" ')
        self.words: tuple[str, ...] = (*world.words(things), *shown, *said)

    def reset(self, seed: int) -> Reading:
        """Question number `seed`, an int in [0, 2**63), of this split.

        Raises ValueError after MAX_ATTEMPTS.
        """
        seed = problem_seed(seed)
        for attempt in range(MAX_ATTEMPTS):
            question = self._draw(Draws(seed, attempt, TAG))
            if question is not None and self.split in (None, questions.split_of(question)):
                return Reading(question)
        raise ValueError(
            f"no question found in {MAX_ATTEMPTS} attempts for seed={seed}, hops={self.hops}, "
            f"things={self.things}, worlds={self.worlds}, path={self.path}, "
            f"max_rows={self.max_rows}, split={self.split!r}: have more things or worlds, or read "
            "more rows"
        )

    def _draw(self, draws: Draws) -> Question | None:
        """One attempt, of any split."""
        if self._given is not None:
            return self._given[draws.below(len(self._given))]
        number = draws.below(self.worlds)
        fewest, most = self.hops
        hops = fewest + draws.below(most - fewest + 1)
        chain = world.draw_chain(draws, world.make_world(number, self.things), hops)
        if chain is None:
            return None
        return Question(
            text=world.ask(chain),
            answers=(chain[-1].y,),
            about=world.about(chain),
            world=number,
            chain=chain,
        )

    def given(self) -> Iterator[tuple[int, str, Reading]]:
        """(row, split, state) of each question of the file, in its order."""
        for row, question in enumerate(self._given or ()):
            yield row, questions.split_of(question), Reading(question)

    def render(self, state: Reading) -> str:
        """The observation: "Question: ...", and below it what the last action led to."""
        shown = f"Question: {state.question.text}"
        return f"{shown}\n{state.shown}" if state.shown else shown

    def step(self, state: Reading, action: str, rng: np.random.Generator | None = None) -> Step:
        """Searches, or takes an answer, whatever the action holds. `rng` is unused.

        info: "kind" of action (as `reading.read_action` tells), "success" (an answer is exactly
        right), and of a search "found" (documents), of an answer "f1" and "exact_match". Raises
        ConnectionError where a retriever cannot be reached: that episode is left out, not scored.
        """
        kind, text = read_action(action)
        info: dict[str, object] = {"success": False, "kind": kind or "none"}
        if kind == "search":
            query = text[:MAX_QUERY]
            (found,) = self._searched(state.question).search([query], self.documents)
            documents = show_documents(
                found, document_chars=self.document_chars, total_chars=self.total_chars
            )
            shown = f"Search results for '{_short(query)}':\n{documents}"
            info["found"] = len(found)
            return Step(Reading(state.question, query, shown), 0.0, False, info)
        if not kind:
            return Step(replace(state, shown=_AGAIN), 0.0, False, info)
        scored = score_answer(text[:MAX_ANSWER], state.question.answers)
        info |= {"f1": scored["f1"], "exact_match": scored["exact_match"]}
        info["success"] = scored["exact_match"]
        after = replace(state, shown=f"Your answer: {_short(text)}")
        return Step(after, float(scored["reward"]), True, info)

    def _searched(self, question: Question) -> Retriever:
        """What is searched for a question's answer."""
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
        """See `ResidentEnvironment`: the vectors of a dense index."""
        if retriever != "dense":
            return None
        sources = {name: others.get(name) for name in SOURCES} | {"index": index}
        check_sources(retriever, **sources)  # an index is among what it needs
        assert index is not None
        from ragen_jax.envs.search_qa.dense_index import DenseIndex  # all else needs no devices

        return DenseIndex(index).resident(mesh, documents)

    def identity(self, state: Reading) -> str:
        """The facts that lead to the answer, in whichever world; the words of a given question."""
        return state.question.about

    def solve(self, state: Reading) -> tuple[str, ...] | None:
        """How one who must read finds the answer: a search for each thing on the way to it.

        From what is shown now. None where a search did not show what it was for. Of a given
        question, of which no more is known, the answer alone.
        """
        rest = self._rest(state)
        if rest and state.query == rest[0].x:
            return None
        return (*(f"search[{link.x}]" for link in rest), f"finish[{state.question.answers[0]}]")

    def explain(self, state: Reading, plan: Sequence[str]) -> str:
        """What an imitated expert thinks: the fact on the way to the answer that is shown, and what
        is to be found next.

        For example "birthplace of Marwyn is Corford find mayor of Corford". Of the plan, which
        nobody knows before reading, nothing is told; of a given question nothing at all.
        """
        rest = self._rest(state)
        known = state.question.chain[: len(state.question.chain) - len(rest)]
        parts = [f"{link.relation} of {link.x} is {link.y}" for link in known[-1:]]
        parts += [f"find {link.relation} of {link.x}" for link in rest[:1]]
        return " ".join(parts)

    def _rest(self, state: Reading) -> tuple[Link, ...]:
        """The facts on the way to the answer behind the last of them that is shown."""
        chain = state.question.chain
        seen = [i for i, link in enumerate(chain) if link.sentence() in state.shown]
        return chain[seen[-1] + 1 :] if seen else chain

    def grounded(self, observation: str, thought: str) -> tuple[int, int]:
        """(facts in `thought`, told as `explain` does, that a document shown states; facts told).

        Nothing is checked of a given question, which has words of its own.
        """
        if self._given is not None:
            return 0, 0
        claims = [
            Link(x.title(), relation.lower(), y)
            for relation, x, y in _CLAIM.findall(thought[:MAX_ANSWER])
        ]
        sentences = [claim.sentence().lower() for claim in claims]
        observation = observation.lower()
        return sum(sentence in observation for sentence in sentences), len(claims)


def _check_generated(retriever: str, sources: dict[str, str | None]) -> None:
    """Raises ValueError for a source of documents that generated questions do not need."""
    usual = {"retriever": "bm25", **dict.fromkeys(sources)}
    for name, value in {"retriever": retriever, **sources}.items():
        if value != usual[name]:
            raise ValueError(
                f"{name}={value!r} is for questions of a file, but path is None: generated ones "
                "have an encyclopedia of their own, which is searched in process"
            )


@functools.lru_cache(maxsize=MAX_WORLDS)
def _index(number: int, things: int) -> BM25:
    """The index of an encyclopedia, which all environments of a process share."""
    return BM25(world.make_world(number, things).passages, stem=False)


def _short(text: str) -> str:
    """A query or an answer as it is repeated."""
    line = one_line(text[: 4 * SHOWN])
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."
