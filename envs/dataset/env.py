"""Prompts from a file or the Hub, with the user's own reward function.

    --config=dataset:llm --config.env.options.path=prompts.jsonl
                         --config.env.options.reward=lengths:score

    def score(prompt, reply, row): -> a number, or dict(reward=..., success=...)

With `step`, the user answers the agent (for more turns set both env.max_turns and
env.max_actions):

    def go_on(messages, row): -> the next message; None: the task is over, and `reward` scores the
        last reply; or dict(message=..., reward=..., success=...), over without a message

With `tools`, a reply may call a function instead of answering, and the next turn shows its result:

    TOOLS = [look_up]  # functions with types and a docstring; --config.env.options.tools=mine:TOOLS

The tools of MCP servers are called in the same way: --config.env.options.mcp="('python x.py',)".

A reply is the text in <answer>. The functions are called in the trainer's process, perhaps in
several threads (env.time_limit). They must return the same for the same arguments if a run is to
resume exactly. If a function raises, hangs or returns an invalid value, only its episode fails
(rollout/env_calls.py).
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ragen_jax.envs.dataset.functions import (
    Outcome,
    convert_reward,
    convert_step,
    reward_function,
    user_function,
)
from ragen_jax.envs.dataset.mcp_tools import McpServers, McpSession
from ragen_jax.envs.dataset.rows import (
    Rows,
    file_source,
    hub_source,
    load_rows,
    prompt_identity,
    rows_of_split,
)
from ragen_jax.envs.dataset.tools import Tools, is_call, parse_call
from ragen_jax.envs.options import file_name, finite_number, one_of, problem_seed, text, whole
from ragen_jax.envs.problems import SPLITS, Draws
from ragen_jax.envs.types import Step

TAG = 0xDA7A5E7  # tag of this environment's `Draws`
MAX_ROWS = 10**7
MAX_SUCCESS = 1e6  # larger rewards are refused (rollout/env_calls.py)
SOLUTION_PREFIX = "so "  # precedes the solution in the reasoning of the imitated expert
WORD_ROWS = 2000  # rows whose words are counted
MAX_WORDS = 1000  # words that the tokenizer keeps as one token

_WORD = re.compile(r" ?[^\W\d_]+| ?\d+")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A state: a row, the text of its prompt, and the conversation since.

    messages: (role, text) in order: "assistant", then "user" or "tool", and so on
    session: the episode's MCP servers; None: none has been called
    """

    row: int
    prompt: str
    messages: tuple[tuple[str, str], ...] = ()
    session: McpSession | None = field(default=None, compare=False, repr=False)


class Dataset:
    """Rows with a prompt; see `ragen_jax.envs.types.Environment`.

    An action is any text, so `actions` is empty.

    path: a JSON Lines file, a JSON list or a parquet file
    hub, hub_subset, hub_split, hub_revision: in place of `path`, a data set that
        `datasets.load_dataset` finds (rows.hub_source)
    prompt: the field that is shown: a text, or messages of the system and the user (rows.py)
    reward: MODULE:FUNCTION; its module is imported from the folder where the command is started, or
        from the installed packages
    step: MODULE:FUNCTION that returns the user's next message; "": the episode has one answer
    tools: MODULE:LIST of functions that a reply may call (tools.Tools); "": none
    mcp: command lines of MCP servers whose tools a reply may call (mcp_tools.McpServers)
    success: reward from which a reply counts as a success, if the function does not say
    solution: the field with a correct reply, a text, which the tiny agent imitates; "": none.
        Without it, the problems of the imitation split are used for training
    split_field: the field with each row's split (rows.SPLIT_NAMES); "": split by a hash of the
        prompt
    instructions: beginning of the system message
    max_rows: number of rows used, from the first (None: all)
    split: "imitation", "train" or "eval": three disjoint sets of prompts; None: all rows
    """

    actions: tuple[str, ...] = ()

    def __init__(
        self,
        path: str | Path | None = None,
        hub: str = "",
        hub_subset: str = "",
        hub_split: str = "train",
        hub_revision: str = "",
        prompt: str = "prompt",
        reward: str = "",
        step: str = "",
        tools: str = "",
        mcp: Sequence[str] = (),
        success: float = 1.0,
        solution: str = "",
        split_field: str = "",
        instructions: str = "",
        max_rows: int | None = None,
        split: str | None = "train",
    ) -> None:
        for name, value in {
            **dict(hub=hub, hub_subset=hub_subset, hub_split=hub_split, hub_revision=hub_revision),
            **dict(prompt=prompt, reward=reward, step=step, tools=tools, solution=solution),
            **dict(split_field=split_field, instructions=instructions),
        }.items():
            text(name, value)
        success = finite_number("success", success, most=MAX_SUCCESS)
        if max_rows is not None:
            whole("max_rows", max_rows, least=1, most=MAX_ROWS)
        self.split = one_of("split", split, (*SPLITS, None))
        if (file_name("path", path) is None) == (not hub):
            raise ValueError(f"give path, a file, or hub, a data set: got {path!r} and {hub!r}")
        if not reward and not step:
            raise ValueError("reward must be MODULE:FUNCTION of (prompt, reply, row), got ''")
        self._reward = reward_function(reward) if reward else None
        self._step = user_function("step", step, "messages", "row") if step else None
        self._tools = Tools("tools", tools) if tools else None
        # The chat format shows them (envs.types.ToolEnvironment).
        functions = self._tools.schemas if self._tools else ()
        self._mcp = McpServers(_command_lines(mcp)) if mcp else None
        of_servers = self._mcp.schemas if self._mcp else ()
        self.tools: tuple[dict[str, Any], ...] = (*functions, *of_servers)
        self._function_names = {tool["function"]["name"] for tool in functions}
        self._tool_names = [tool["function"]["name"] for tool in self.tools]
        if len(set(self._tool_names)) < len(self._tool_names):
            raise ValueError(f"a function of {tools} and an mcp tool have the same name")
        self._names, self._success = (reward, step), success
        self._prompt, self._solution = prompt, solution
        self.instructions: str = instructions
        field_names = (prompt, solution, split_field)
        self.fields: tuple[str, ...] = tuple(dict.fromkeys(name for name in field_names if name))

        if path is not None:
            source = file_source(path)
        else:
            source = hub_source(hub, subset=hub_subset, split=hub_split, revision=hub_revision)
        self._rows = load_rows(source, prompt=prompt, solution=solution, split_field=split_field)
        splits = self._rows.splits[:max_rows]
        if not solution:
            splits = np.where(splits == "imitation", "train", splits)
        self._splits = splits
        self._split_rows = rows_of_split(splits, self.split, source.name)
        # Members that the tiny agent needs (envs.types.SolvableEnvironment).
        self.solvable_by = "name the field with a right reply: --config.env.options.solution=FIELD"
        if solution:
            self.words = _words(self._rows, len(splits))
            self.solve, self.explain = self._solve, self._explain

    def reset(self, seed: int) -> Dialogue:
        """Return the state of row number `seed`, an int in [0, 2**63), of this split."""
        draws = Draws(problem_seed(seed), 0, TAG)
        return self._begin(int(self._split_rows[draws.below(len(self._split_rows))]))

    def _begin(self, row: int) -> Dialogue:
        return Dialogue(row, self._rows.prompt(row))

    def list_problems(self) -> Iterator[tuple[int, str, Dialogue]]:
        """Yield (row, split, state) of each row that is not left out, in order."""
        for row, split in enumerate(self._splits):
            if split:
                yield row, str(split), self._begin(row)

    def render(self, state: Dialogue) -> str:
        """Return the last message to the agent: at first, the prompt."""
        received = (message for role, message in reversed(state.messages) if role != "assistant")
        return next(received, state.prompt)

    def identity(self, state: Dialogue) -> str:
        """Return the prompt, ignoring case and spaces."""
        return prompt_identity(state.prompt)

    def step(self, state: Dialogue, action: str, rng: np.random.Generator | None = None) -> Step:
        """Run a call, or ask the functions for the result of an answer. `rng` is unused.

        info: "success" and the other entries of the function's dict. Raises TypeError for an
        invalid return value, and any exception of the functions.
        """
        after = replace(state, messages=(*state.messages, ("assistant", action)))
        if self.tools and is_call(action):
            said, session = self._call(action, state.session)
            messages = (*after.messages, ("tool", said))
            after = replace(after, messages=messages, session=session)
            return Step(after, 0.0, False, {"success": False})
        row = self._rows.row(state.row)
        outcome = self._ask_step(after, row) or self._ask_reward(action, row)
        if outcome.message is None and state.session is not None:
            state.session.close()
        if outcome.message is not None:
            after = replace(after, messages=(*after.messages, ("user", outcome.message)))
        info = outcome.info | {"success": outcome.success}
        return Step(after, outcome.reward, outcome.message is None, info)

    def _call(self, action: str, session: McpSession | None) -> tuple[str, McpSession | None]:
        """Run a call; return the text to show, and the episode's MCP servers after it."""
        try:
            name, arguments = parse_call(action, self._tool_names)
        except ValueError as error:
            return f"error: {error}", session
        if name in self._function_names:
            assert self._tools is not None
            return self._tools.call(name, arguments), session
        assert self._mcp is not None
        session = session or self._mcp.open()
        return self._mcp.call(session, name, arguments), session

    def _ask_step(self, state: Dialogue, row: dict[str, Any]) -> Outcome | None:
        if self._step is None:
            return None
        prompt = row[self._prompt]
        first = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        messages = first + [{"role": role, "content": content} for role, content in state.messages]
        return convert_step(self._step(messages, row), self._names[1], self._success)

    def _ask_reward(self, reply: str, row: dict[str, Any]) -> Outcome:
        reward, step = self._names
        if self._reward is None:
            raise TypeError(
                f"{step} returned None, but the rows have no reward function for a reply"
            )
        return convert_reward(self._reward(row[self._prompt], reply, row), reward, self._success)

    def _solve(self, state: Dialogue) -> tuple[str, ...]:
        """Return the row's solution, whatever was said before."""
        return (self._rows.solution(state.row),)

    def _explain(self, state: Dialogue, plan: Sequence[str]) -> str:
        """Return the expert's reasoning, which only announces the solution."""
        return SOLUTION_PREFIX + " ".join(plan)


def _command_lines(mcp: Any) -> tuple[str, ...]:
    """Return the command lines of MCP servers; one alone may be a text."""
    return (mcp,) if isinstance(mcp, str) else tuple(mcp)


def _words(rows: Rows, count: int) -> tuple[str, ...]:
    """Return the most frequent words and numbers in the prompts and solutions of the first rows."""
    found = Counter()
    for index in range(min(count, WORD_ROWS)):
        found.update(_WORD.findall(f"{rows.prompt(index)}\n{rows.solution(index)}"))
    frequent = sorted(found, key=lambda word: (-found[word], word))[:MAX_WORDS]
    return tuple(dict.fromkeys((SOLUTION_PREFIX, *frequent)))
