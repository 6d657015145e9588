"""Agents with the `openai` package, which tests let a run train."""

import asyncio
import functools
import itertools
import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import openai

from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.model.template import NOTICE

GAME = Sokoban(split="train")
TURNS = 3


def clients(base_url, api_key):
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)


def sokoban(problem, base_url, api_key):
    """Play Sokoban with terse prompts, one action per reply, as the built-in environment does."""
    client, rng = clients(base_url, api_key), np.random.default_rng(0)
    state, messages, rewards, valid = GAME.reset(problem["seed"]), [], [], True
    actions = {action.lower(): action for action in GAME.actions}
    success = False
    for _ in range(TURNS):
        shown = GAME.render(state)
        messages.append({"role": "user", "content": shown if valid else f"{NOTICE}\n{shown}"})
        answer = client.chat.completions.create(model="any", messages=messages)
        said = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": said})
        found = re.fullmatch(r"\s*<answer>(.*)</answer>\s*", said, re.DOTALL)
        word = actions.get(found[1].split("||")[0].strip().lower()) if found else None
        valid, done = word is not None, False
        rewards.append(0.0)
        if valid:
            step = GAME.step(state, word, rng)
            state, done, rewards[-1] = step.state, step.done, step.reward
            success = bool(step.info["success"])
        if done:
            break
    return {"rewards": rewards, "success": success}


def ask(base_url, api_key, messages, **options):
    return clients(base_url, api_key).chat.completions.create(
        model="any", messages=messages, **options
    )


def letters(problem, base_url, api_key):
    """One request; the reward is the share of the letter e in the reply."""
    answer = ask(base_url, api_key, [{"role": "user", "content": problem["ask"]}])
    said = answer.choices[0].message.content or ""
    return said.count("e") / max(len(said), 1)


PLAYED = itertools.count(1)


def mortal(problem, base_url, api_key):
    """Two requests. In episode number KILLED_IN, the process is killed between them, as soon as the
    folder KILLED_AFTER exists."""
    messages = [{"role": "user", "content": problem["ask"]}]
    said = ask(base_url, api_key, messages).choices[0].message.content or ""
    if next(PLAYED) == int(os.environ.get("KILLED_IN", 0)):
        while not Path(os.environ["KILLED_AFTER"]).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
    again = ask(base_url, api_key, messages).choices[0].message.content or ""
    return {"reward": (said + again).count("e") / max(len(said + again), 1), "success": False}


async def letters_async(problem, base_url, api_key):
    """The same, asynchronously, with a second request beside it."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = [{"role": "user", "content": problem["ask"]}]
    requests = (client.chat.completions.create(model="any", messages=messages) for _ in range(2))
    answers = await asyncio.gather(*requests)
    return {"reward": float(len(answers)), "success": True, "asked": len(answers)}


def streamed(base_url, api_key, messages):
    """Return the text of a reply that is streamed."""
    chunks = ask(base_url, api_key, messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def talk(problem, base_url, api_key):
    """Three requests of a conversation, streamed or not, or left after the first chunk and asked
    again."""
    messages, mode = [], problem["mode"]
    for text in (problem["ask"], "and then?", "at last?"):
        messages.append({"role": "user", "content": text})
        if mode == "leaves":
            with ask(base_url, api_key, messages, stream=True) as chunks:
                next(iter(chunks))
        if mode == "whole":
            said = ask(base_url, api_key, messages).choices[0].message.content or ""
        else:
            said = streamed(base_url, api_key, messages)
        messages.append({"role": "assistant", "content": said})
    return sum(len(message["content"]) for message in messages)


async def flood(problem, base_url, api_key):
    """64 requests at once, every second one streamed; 16 of them repeat a prompt."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    async def one(number):
        messages = [{"role": "user", "content": f"{problem['ask']}, part {number % 48}"}]
        create = functools.partial(
            client.chat.completions.create, model="any", messages=messages, stream=number % 2 == 1
        )
        if number % 2 == 0:
            return (await create()).usage.completion_tokens
        *_, last = [c async for c in await create(stream_options={"include_usage": True})]
        return last.usage.completion_tokens

    sampled = await asyncio.gather(*map(one, range(64)))
    return {"reward": 1.0, "answered": len(sampled), "sampled": sum(sampled)}


def faulty(problem, base_url, api_key):
    """Fail in the way that the problem names."""
    kind = problem["kind"]
    messages = [{"role": "user", "content": "go"}]
    if kind == "silent":
        return 1.0
    if kind == "crash first":
        raise RuntimeError("it broke")
    ask(base_url, api_key, messages)
    if kind == "crash":
        raise RuntimeError("it broke")
    if kind == "slow":
        time.sleep(0.5)
        ask(base_url, api_key, [{"role": "user", "content": "done"}])
    if kind == "hang":
        time.sleep(60)
    if kind == "late":  # goes on after its time limit
        for number in range(400):
            time.sleep(0.1)
            ask(base_url, api_key, [{"role": "user", "content": f"again {number}"}])
    if kind == "greedy":
        while True:
            ask(base_url, api_key, messages)
    if kind == "long":
        ask(base_url, api_key, [{"role": "user", "content": "long " * 5000}])
    if kind == "stubborn":  # goes on after the refusal
        try:
            ask(base_url, api_key, [{"role": "user", "content": "long " * 5000}])
        except openai.BadRequestError:
            ask(base_url, api_key, messages)
        raise RuntimeError("it broke later")
    return {"text": "good", "nothing": None, "nan": float("nan")}.get(kind, 1.0)


PROGRAM = """
import json, os, sys, urllib.request

problem = json.load(sys.stdin)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]

def post(path, body):
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), head)
    return json.load(urllib.request.urlopen(request))

answer = post("chat/completions", {"model": "any", "messages": [{"role": "user", "content": "go"}]})
"""


def program(rest):
    """Return the source of a program that sends a request and goes on with `rest`."""
    return PROGRAM + rest


def write_problems(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
