"""Play tasks of a taskset of the package `verifiers` (0.4), whose Python runs this file.

Standard input and output are lines of JSON:

    {"taskset", "arguments", "settings", "limit"}  ->  {"tasks": [[text, content], ...]}
    {"id", "task", "base_url", "api_key"}          ->  {"id", "reward", "info"}
    {"cancel": id}

The first line comes once. Tasks are played in parallel, and each is answered when it ends. An
answer has "error", a text, if something failed. The process ends with its standard input.
"""

import asyncio
import hashlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

vf: Any = importlib.import_module("verifiers.v1")
null: Any = importlib.import_module("verifiers.v1.harnesses.null")

CHAT = "ragen_jax_chat"  # under which `verifiers` imports this module, for the harness below
EPISODES = 256  # after which connections are closed: `verifiers` keeps those of every key
END = 20.0  # seconds for episodes to end with the standard input
SHOWN = 2000  # characters of an error
__all__ = ["Chat"]


class Chat(null.NullHarness):
    """The chat program of `verifiers`, with the tools of a task, run by this Python.

    The package's own `null` makes an environment for the program with uv, for which it downloads
    packages; this Python has them all.
    """

    async def setup(self, runtime: Any) -> None:
        if runtime.type != "subprocess":
            await super().setup(runtime)
            return

        async def prepare(script: Any, *_: Any, **__: Any) -> list[str]:
            data = script.encode() if isinstance(script, str) else script
            name = f"{hashlib.sha256(data).hexdigest()}.py"
            await runtime.write(name, data)
            return [sys.executable, name]

        runtime.prepare_uv_script = prepare


def main() -> None:
    """Play until the standard input ends."""
    # Programs that a taskset starts must not read the requests, nor write among the answers.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.modules[CHAT] = sys.modules[__name__]

    def answer(**value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        environment, tasks = load(**json.loads(requests.readline()))
        listed = [describe(task) for task in tasks]
    except Exception as error:  # the taskset's code may raise anything
        answer(error=f"{type(error).__name__}: {error}"[:SHOWN])
        return
    answer(tasks=listed)
    asyncio.run(serve(environment, tasks, requests, answer))


def load(
    taskset: str, arguments: dict[str, Any], settings: dict[str, Any], limit: int
) -> tuple[Any, list[Any]]:
    """Return the environment of a taskset, and its first `limit` tasks; 0: all.

    Agents for which neither the settings nor the environment name a harness or a runtime use `Chat`
    on this machine: the package's defaults are a shell and a rented sandbox.

    Raises:
      ValueError: the taskset has no end, and there is no limit.
      Any other exception of the taskset.
    """
    raw: dict[str, Any] = {**settings, "taskset": {"id": taskset, **arguments}}
    kind = vf.env_config_type(taskset, str(raw.get("id") or ""))
    for name, field in kind.model_fields.items():
        if not isinstance(field.default, vf.AgentConfig):
            continue
        role: dict[str, Any] = {**(raw.get(name) or {})}
        raw[name] = role
        declared = field.default.harness.id if field.default.harness else None
        harness: dict[str, Any] = {**(role.get("harness") or {})}
        if harness.get("id", declared or vf.default_harness_id(taskset)) in ("null", "bash"):
            chosen = harness.get("id", declared)  # a shell only if somebody wants it
            role["harness"] = {**harness, "id": "bash" if chosen == "bash" else CHAT}
        if "runtime" not in field.default.model_fields_set:
            role.setdefault("runtime", {"type": "subprocess"})
    environment = vf.load_environment(vf.resolve_env_config(raw))
    found = environment.taskset
    if limit:
        found = found.take(limit)
    if not found.bounded:
        raise ValueError(f"taskset {taskset} has no end; give limit, the number of tasks to use")
    return environment, list(found)


def describe(task: Any) -> tuple[str, str]:
    """Return the text of a task's first prompt, and the hash of its content but its place."""
    data = task.data.model_dump(mode="json", exclude_none=True, exclude={"idx"})
    text = task.data.prompt_text or task.data.description or task.data.name or ""
    content = json.dumps(data, sort_keys=True)
    return text, hashlib.sha256(content.encode()).hexdigest()


async def serve(
    environment: Any, tasks: list[Any], requests: Any, answer: Callable[..., None]
) -> None:
    """Play the requested tasks until there are no more requests."""
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    threading.Thread(
        target=_read, args=(requests, lines, asyncio.get_running_loop()), daemon=True
    ).start()
    running: dict[int, asyncio.Task[None]] = {}

    async def run(number: int, **request: Any) -> None:
        try:
            answer(id=number, **await play(environment, tasks, number, **request))
        except asyncio.CancelledError:
            answer(id=number, error="the episode was given up")
        except Exception as error:  # the taskset's code may raise anything
            answer(id=number, error=f"{type(error).__name__}: {error}"[:SHOWN])
        finally:
            del running[number]

    line = await lines.get()
    while line:
        async with environment.serving():
            begun = 0
            while line and (running or begun < EPISODES):
                request = json.loads(line)
                if "cancel" in request:
                    if request["cancel"] in running:
                        running[request["cancel"]].cancel()
                else:
                    number = request.pop("id")
                    running[number] = asyncio.create_task(run(number, **request))
                    begun += 1
                    await asyncio.sleep(0)  # it begins, so that it answers if it is cancelled
                line = await lines.get()
            left = list(running.values())
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)


def _read(requests: Any, lines: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Pass lines on to the loop. If the loop hangs when they end, end the process."""
    for line in requests:
        loop.call_soon_threadsafe(lines.put_nowait, line)
    loop.call_soon_threadsafe(lines.put_nowait, b"")
    threading.Event().wait(END)
    os._exit(1)


async def play(
    environment: Any, tasks: list[Any], number: int, task: int, base_url: str, api_key: str
) -> dict[str, Any]:
    """Play a task and return its reward and its facts.

    Raises:
      RuntimeError: `verifiers` could not finish the episode.
      ValueError: it was not played by one agent that is to be trained.
    """
    # Named so that the programs of a task do not inherit it (verifiers/v1/runtimes/subprocess.py).
    variable = f"RAGEN_JAX_API_KEY_{number}"
    os.environ[variable] = api_key
    try:
        context = vf.ModelContext(
            client=vf.EvalClientConfig(base_url=base_url, api_key_var=variable),
            model="policy",
            sampling=vf.SamplingConfig(),
        )
        (slot,) = environment.slots(tasks[task])
        episode = await environment.run_slot(slot, context)
    finally:
        del os.environ[variable]
    failed = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        reason = f"{failed[-1].type}: {failed[-1].message}" if failed else "no reason given"
        raise RuntimeError(f"verifiers could not finish the episode: {reason}")
    asked = [t for t in episode.traces if t.agent.config.client.base_url == base_url]
    fixed = sorted({trace.agent.name for trace in asked if not trace.agent.trainable})
    if fixed:
        raise ValueError(
            f"the agent {fixed[0]} of this environment is not to be trained, so it needs a model "
            f"of its own: env.options.settings.{fixed[0]}.model and .client"
        )
    if len(asked) != 1:
        names = ", ".join(trace.agent.name for trace in asked)
        raise ValueError(
            f"an episode must have one agent that is trained, but has {names or 'none'}"
        )
    (trace,) = asked
    rewards = {f"reward_{k}": r.value for k, r in trace.rewards.items() if r is not None}
    metrics = {f"metric_{k}": x for k, x in trace.metrics.items() if x is not None}
    return {"reward": trace.reward, "info": {**rewards, **metrics}}


if __name__ == "__main__":
    main()
