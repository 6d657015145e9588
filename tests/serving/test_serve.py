"""The endpoint with OpenAI's client over loopback: replies, sessions, faults, records."""

import asyncio
import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import jax
import numpy as np
import openai
import pytest
import uvicorn
from cli_commands import call

import ragen_jax
from ragen_jax import serve
from ragen_jax.config.load import load_config
from ragen_jax.configs import sokoban
from ragen_jax.core.sharding import make_mesh
from ragen_jax.model.likelihood import token_logps
from ragen_jax.rollout.episode import Sampling
from ragen_jax.serving import engine as engine_module
from ragen_jax.serving.engine import Engine
from ragen_jax.serving.server import MOST_BYTES, Served, make_app
from ragen_jax.serving.sessions import Budget, Sessions

pytestmark = pytest.mark.medium
ASKED = [{"role": "user", "content": "what is there?"}]


@pytest.fixture(scope="module")
def policy(language_model):
    config = sokoban.get_config("llm")
    config.model.path, config.model.dtype = str(language_model), "float32"
    return serve.of_model(str(language_model), load_config(config))


class Running:
    """A server on a free port; `records` are the lines written when sessions end."""

    def __init__(self, policy, calls=0, slots=4, most=12):
        self.records = []
        self.engine = Engine(
            policy.model,
            policy.params,
            mesh=make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]),
            slots=slots,
            longest_reply=most,
            sampling=Sampling(temperature=1.0),
            endings=policy.endings,
            key=jax.random.key(3),
        )
        self.sessions = Sessions(Budget(calls), self.keep)
        served = Served(
            engine=self.engine,
            conversation=policy.conversation,
            sessions=self.sessions,
            name="tiny",
            positions=policy.model.config.max_positions,
            vocabulary=policy.model.config.vocab_size,
            most=most,
            endings=policy.endings,
            admin_key="admin",
        )
        config = uvicorn.Config(make_app(served), port=0, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def keep(self, lines):
        self.records += [json.loads(line) for line in lines.splitlines()]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def client(self, key=None, **options):
        key = key or self.sessions.open()
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **options)

    def stop(self):
        self.server.should_exit = True
        self.thread.join()
        self.engine.close()


@pytest.fixture(scope="module")
def running(policy):
    server = Running(policy)
    yield server
    server.stop()


def send(url, method="POST", key="", content=None):
    """(status, JSON of the body) of a raw request."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, content, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(client, messages=ASKED, **options):
    return client.chat.completions.create(model="any", messages=messages, **options)


def ids_of(answer):
    (choice,) = answer.choices
    return answer.prompt_token_ids, choice.token_ids


RAW = {"return_token_ids": True}
EXTRA = {"extra_body": RAW, "logprobs": True}


def test_a_reply_has_the_ids_and_log_probs_that_were_sampled(running, policy):
    answer = ask(running.client(), **EXTRA)
    prompt, sampled = ids_of(answer)
    tokenizer = policy.conversation.tokenizer
    rendered = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert prompt == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    (choice,) = answer.choices
    logps = [entry.logprob for entry in choice.logprobs.content]
    whole = np.array([prompt + sampled], np.int32)
    again = np.asarray(token_logps(policy.model, policy.params, whole))[0, len(prompt) :]
    np.testing.assert_allclose(logps, again, atol=1e-4)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(sampled) <= 12
    ended = sampled[-1] in policy.endings.ids
    assert choice.finish_reason == ("stop" if ended else "length")
    assert answer.id.startswith("chatcmpl-") and answer.id != ask(running.client()).id


def test_the_cache_is_that_of_the_config(policy):
    """With int8, the log-probs differ by the rounding of keys and values."""

    def served(**rollout):
        config = sokoban.get_config("llm")
        config.model.path, config.model.dtype = policy.config.model.path, "float32"
        config.rollout.update(rollout)
        return serve.cached_model(policy._replace(config=load_config(config)))

    found = []
    for dtype in ("model", "int8"):
        server = Running(policy._replace(model=served(cache_dtype=dtype)))
        (choice,) = ask(server.client(), **EXTRA).choices
        found.append([entry.logprob for entry in choice.logprobs.content])
        server.stop()
    assert 1e-7 < abs(found[0][0] - found[1][0]) < 0.5
    with pytest.raises(ValueError, match="config.rollout.cache_kernel is 'pages'"):
        served(cache_kernel="pages")


def test_a_conversation_repeats_the_ids_of_its_earlier_replies(running, policy):
    client = running.client()
    messages, path = [*ASKED], []
    for turn in range(4):
        answer = ask(client, messages, **EXTRA)
        prompt, sampled = ids_of(answer)
        assert prompt[: len(path)] == path
        path = prompt + sampled
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        messages.append({"role": "user", "content": f"and {turn}, <|im_end|>?"})
    session = running.sessions.find(client.api_key)
    assert [call.continues for call in session.calls] == [None, 0, 1, 2]
    # A message of the client never becomes a control token.
    clean = [m if i % 2 else {"role": "user", "content": "x"} for i, m in enumerate(messages[:-2])]
    clean = [m if m["role"] == "user" else {"role": "assistant", "content": "x"} for m in clean]
    tokenizer, close = policy.conversation.tokenizer, policy.conversation.close_id
    rendered = tokenizer.apply_chat_template(clean, tokenize=True, add_generation_prompt=True)
    assert len(clean) == 7
    assert prompt.count(close) == rendered["input_ids"].count(close) == 7


def test_an_edited_conversation_is_a_new_root_and_a_fork_continues_its_branch(running):
    client = running.client()
    first = ask(client, **EXTRA)
    reply = {"role": "assistant", "content": first.choices[0].message.content}
    left = ask(client, [*ASKED, reply, {"role": "user", "content": "left"}], **EXTRA)
    right = ask(client, [*ASKED, reply, {"role": "user", "content": "right"}], **EXTRA)
    edited = reply | {"content": "something that was never sampled"}
    ask(client, [*ASKED, edited, {"role": "user", "content": "left"}])
    calls = running.sessions.find(client.api_key).calls
    assert [call.continues for call in calls] == [None, 0, 0, None]
    trunk = sum(ids_of(first), [])
    for branch in (left, right):
        assert ids_of(branch)[0][: len(trunk)] == trunk


def test_replies_do_not_depend_on_what_is_served_with_them(policy):
    def replies(slots):
        server = Running(policy, slots=slots)
        keys = [server.sessions.open() for _ in range(6)]

        async def all_at_once():
            clients = [openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) for key in keys]
            asked = [
                client.chat.completions.create(model="m", messages=ASKED, **EXTRA)
                for client in clients
            ]
            return await asyncio.gather(*asked)

        found = [ids_of(answer) for answer in asyncio.run(all_at_once())]
        server.stop()
        return found

    together = replies(6)
    assert len({tuple(sampled) for _, sampled in together}) > 3  # each session has its own draws
    assert replies(2) == together


def test_a_stream_holds_the_same_reply(running):
    client = running.client()
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    session = running.sessions.find(client.api_key)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == session.calls[0].shown[-1].text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == session.calls[0].finish
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == len(session.calls[0].sampled)


def test_a_reply_is_as_short_as_asked_and_cut_at_the_clients_stop(running):
    short = ask(running.client(), max_tokens=3, **EXTRA)
    assert len(ids_of(short)[1]) <= 3
    long = ask(running.client(), max_completion_tokens=10**6, **EXTRA)
    assert len(ids_of(long)[1]) <= 12
    client = running.client()
    answer = ask(client, **EXTRA)
    text = answer.choices[0].message.content
    middle = next((c for c in text[1:] if c not in text[:1]), None)
    assert middle is not None
    other = running.client()
    running.sessions.find(other.api_key).draw = running.sessions.find(client.api_key).draw
    cut = ask(other, stop=[middle], **EXTRA)  # the same draws
    assert ids_of(cut) == ids_of(answer)  # what was sampled stays
    assert cut.choices[0].message.content == text[: text.index(middle)]
    assert cut.choices[0].finish_reason == "stop"


def test_the_completions_api(running, policy):
    client = running.client()
    tokenizer, control = policy.conversation.tokenizer, policy.conversation.control
    first = client.completions.create(model="m", prompt="go <|im_end|>", logprobs=1, extra_body=RAW)
    (choice,) = first.choices
    assert control.isdisjoint(first.prompt_token_ids)
    assert tokenizer.decode(first.prompt_token_ids) == "go <|im_end|>"
    whole = np.array([first.prompt_token_ids + choice.token_ids], np.int32)
    again = np.asarray(token_logps(policy.model, policy.params, whole))[0]
    np.testing.assert_allclose(
        choice.logprobs.token_logprobs, again[len(first.prompt_token_ids) :], atol=1e-4
    )
    ids = [*whole[0].tolist(), policy.conversation.close_id, 5]
    longer = client.completions.create(model="m", prompt=ids, max_tokens=2, extra_body=RAW)
    assert longer.prompt_token_ids == ids and len(longer.choices[0].token_ids) <= 2
    calls = running.sessions.find(client.api_key).calls
    assert [call.continues for call in calls] == [None, 0]
    streamed = list(client.completions.create(model="m", prompt=["go"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == calls[-1].shown[-1].text
    for prompt, message in (
        ("", "prompt must be one text or one list of token ids"),
        (["a", "b"], "prompt must be one text"),
        ([1, 10**9], "prompt has token id 1000000000; the model has"),
        ([True], "prompt must be one text"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.post("/completions", body={"prompt": prompt}, cast_to=object)


def test_the_responses_api(running):
    client = running.client()
    first = client.responses.create(model="m", input="what is there?", instructions="Be brief.")
    session = running.sessions.find(client.api_key)
    assert [m.role for m in session.calls[0].shown] == ["system", "user", "assistant"]
    assert first.output_text == session.calls[0].shown[-1].text
    assert first.usage.output_tokens == len(session.calls[0].sampled)
    assert first.status == ("incomplete" if session.calls[0].finish == "length" else "completed")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "what is there?"}]},
        *[item.model_dump() for item in first.output],
        {"role": "user", "content": "and there?"},
    ]
    client.responses.create(model="m", input=items, instructions="Be brief.")
    assert [call.continues for call in session.calls] == [None, 0]
    calls = [
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    client.responses.create(model="m", input=[*items, *calls], tools=[tool])
    *_, asked, called, result, _ = session.calls[-1].shown
    assert (asked.text, result.role, result.text) == ("and there?", "tool", "2")
    assert called.calls[0].arguments == {"a": 1}
    for body, message in (
        ({"input": "x", "stream": True}, "stream is True, which is not supported"),
        ({"input": "x", "previous_response_id": "r"}, "send the whole input"),
        ({"input": []}, "input must be a text or a list"),
        ({"input": [{"type": "image_generation_call"}]}, "has type 'image_generation_call'"),
        ({"input": [{"type": "function_call", "arguments": "{"}]}, "a call without function.name"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.post("/responses", body=body, cast_to=object)


@pytest.mark.parametrize(
    "body, message",
    [
        ({"messages": []}, "messages must be a list of at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\] has role 'robot'"),
        ({"messages": ASKED, "n": 2}, "n is 2; only 1 is supported"),
        ({"messages": ASKED, "max_tokens": 0}, "max_tokens is 0; it must be a whole number"),
        ({"messages": ASKED, "tools": [{}]}, "each of tools must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "has a part of type 'image_url'; only text is read",
        ),
        (
            {"messages": [{"role": "user", "content": "x " * 5000}]},
            "maximum context length is 4096",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line_that_the_client_shows(running, body, message):
    with pytest.raises(openai.BadRequestError, match=message):
        running.client().post("/chat/completions", body=body, cast_to=object)


def test_keys(running):
    with pytest.raises(openai.AuthenticationError, match="not that of an open session"):
        ask(running.client(key="wrong"))
    sessions = f"{running.url}/admin/sessions"
    for key in ("", "wrong", running.sessions.open()):
        assert send(sessions, key=key)[0] == 401
    _, made = send(sessions, key="admin")
    by_path = openai.OpenAI(base_url=running.url + made["path"], api_key="none", max_retries=0)
    ask(by_path)
    models = running.client(key=made["api_key"]).models.list()
    assert models.data[0].model_dump()["max_model_len"] == 4096
    assert send(f"{sessions}/{made['api_key']}", "DELETE", "admin") == (200, {"calls": 1})
    with pytest.raises(openai.AuthenticationError):
        ask(by_path)
    with pytest.raises(openai.NotFoundError, match="there is no /v1/nothing"):
        running.client().get("/nothing", cast_to=object)


def test_a_budget_ends_a_session_with_an_error_that_is_not_retried(policy):
    server = Running(policy, calls=2)
    client = server.client()
    ask(client)
    ask(client)
    with pytest.raises(openai.BadRequestError, match="has used its 2 calls"):
        ask(client)
    ask(server.client())  # another session has its own
    server.stop()


BUDGETS = [  # the body of a request to open a session, its second request
    (None, None),
    ({"calls": 1}, "has used its 1 calls"),
    ({"tokens": 1}, "has used its 1 tokens"),
    ({"seconds": 1e-6}, "has used its 1e-06 seconds"),
    ({"calls": 5, "tokens": 5000, "seconds": 600.0}, None),
]


@pytest.mark.parametrize(("budget", "message"), BUDGETS)
def test_a_session_may_be_opened_with_a_budget(running, budget, message):
    content = None if budget is None else json.dumps(budget).encode()
    _, made = send(f"{running.url}/admin/sessions", key="admin", content=content)
    client = running.client(key=made["api_key"])
    ask(client)
    if message is None:
        assert ask(client).choices
    else:
        with pytest.raises(openai.BadRequestError, match=message):
            ask(client)


@pytest.mark.parametrize(
    "budget", [[], {"turns": 1}, {"calls": -1}, {"calls": 1.5}, {"seconds": "1"}, {"calls": True}]
)
def test_budgets_that_are_refused(running, budget):
    content = json.dumps(budget).encode()
    status, body = send(f"{running.url}/admin/sessions", key="admin", content=content)
    assert status == 400 and "must be" in body["error"]["message"]


def test_bodies_that_are_broken_or_too_long(running):
    url, key = f"{running.url}/v1/chat/completions", running.sessions.open()
    for content in (b"{", b"[1]", b"\xff", b"[" * 100_000):
        status, body = send(url, key=key, content=content)
        assert status == 400 and body["error"]["message"], content[:10]
    assert send(url, key=key, content=b" " * (MOST_BYTES + 1))[0] == 413


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_fails_answers_those_that_wait_and_those_that_come(policy, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no memory")

    monkeypatch.setattr(engine_module, "decode_rows", fail)
    server = Running(policy)
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="engine has (failed|ended)"):
            ask(server.client())
    server.stop()


def test_the_record_of_a_session(policy):
    server = Running(policy)
    client = server.client()
    first = ask(client, **EXTRA)
    again = ask(client, **EXTRA)  # a retry: the same prompt, and nothing continues the first
    assert ids_of(again)[1] != ids_of(first)[1]  # each call has its own draws
    ask(client, [{"role": "system", "content": "Make a title."}, *ASKED])  # a side call
    server.sessions.end_all()
    (record,) = server.records
    assert record["calls"] == 3 and record["left_out"] == {"retry": 1, "side call": 1}
    (turn,) = record["turns"]
    assert (turn["prompt_ids"], turn["sampled_ids"]) == ids_of(again)
    assert len(turn["sampled_ids"]) == len(turn["logps"])
    server.stop()


def test_clients_that_hang_or_send_slowly_do_not_keep_others_waiting(running):
    opened = []
    for index in range(100):
        link = socket.create_connection(("127.0.0.1", running.port))
        opened.append(link)
        if index % 2:
            link.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        if index % 4 == 3:
            link.sendall(b"Content-Length: 1000000\r\n\r\n{")
    begin = time.monotonic()
    assert ask(running.client()).choices
    assert time.monotonic() - begin < 5
    for link in opened:
        link.close()
    assert ask(running.client()).choices


def test_a_stream_that_is_left_stays_in_the_record(running):
    client = running.client()
    with ask(client, stream=True) as stream:
        next(iter(stream))
    assert ask(running.client()).choices
    (call,) = running.sessions.find(client.api_key).calls
    assert len(call.sampled)


@pytest.mark.parametrize("whole", [True, False], ids=["asked", "asking"])
def test_a_client_that_leaves_does_not_stop_the_others(running, whole, caplog):
    key = running.sessions.open()
    body = json.dumps({"messages": ASKED}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    address = urllib.parse.urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + (body if whole else body[:-1]))
    assert ask(running.client()).choices
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


# ------------------------------------------------------------------------------ a run


@pytest.fixture(scope="module")
def run(agent, tmp_path_factory):
    """A run of one step, which is saved and exported."""
    fields = {
        **{"model.path": str(agent.directory), "steps": 1, "rollout.groups": 2},
        **{"rollout.group_size": 2, "eval.every": 0, "eval.episodes": 4, "report.every": 0},
        **{"filter.strategy": "none", "optimizer.minibatches": 1, "optimizer.micro_batch": 4},
    }
    folder = tmp_path_factory.mktemp("served") / "run"
    return ragen_jax.train("sokoban", workdir=folder, overrides=fields)


def test_a_run_without_a_date_is_served(agent, run, tmp_path, monkeypatch):
    """The date of a tiny agent stays open, since its template writes none."""
    models = tmp_path / "cache" / "ragen_jax" / "models"
    shutil.copytree(agent.directory, models / agent.directory.name)  # so that it is not made again
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    shutil.copytree(run.workdir, folder)
    config = json.loads((folder / "config.json").read_text())
    config["model"] |= {"path": "tiny", "date": "auto"}
    config["warmstart"] = agent.config.warmstart.to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    tokenizers = [serve.of_run(path, None).conversation.tokenizer for path in (folder, run.workdir)]
    texts = [tokenizer.apply_chat_template(ASKED, tokenize=False) for tokenizer in tokenizers]
    assert texts[0] == texts[1]


def test_the_prompts_and_replies_of_a_run_are_those_of_its_environment(run):
    policy = serve.of_run(run.workdir, None)
    task = run.policy().tasks[0]
    chat, environment = task.settings.chat, task.settings.environment
    server = Running(policy, most=48)
    for seed in range(4):
        client = server.client()
        shown = environment.render(environment.reset(seed))
        message = chat.observe(shown, actions_used=0, last_valid=True)
        answer = ask(client, [{"role": "user", "content": message}], **EXTRA)
        prompt, sampled = ids_of(answer)
        np.testing.assert_array_equal(prompt, chat.prompt_ids((), message))
        (choice,) = answer.choices
        text = chat.text([i for i in sampled if i not in chat.stop_ids])
        reasoning, closed, rest = text.partition("</think>")
        assert closed and choice.message.content == rest
        assert choice.message.reasoning_content == reasoning
        # The client repeats only the content; the next prompt has the reasoning as it was sampled.
        again = [
            {"role": "user", "content": message},
            {"role": "assistant", "content": choice.message.content},
            {"role": "user", "content": message},
        ]
        longer, _ = ids_of(ask(client, again, **EXTRA))
        assert longer[: len(prompt) + len(sampled)] == prompt + sampled
    server.stop()


@pytest.mark.long
def test_the_command_serves_a_run_and_score_reads_its_record(run, tmp_path):
    record = tmp_path / "record.jsonl"
    words = [f"--workdir={run.workdir}", "--port=0", f"--record={record}", "--slots=2"]
    words += ["--config.rollout.max_new_tokens=40", "--config.eval.temperature=1.0"]
    command = [sys.executable, "-m", "ragen_jax.serve", *words]
    environment = run.policy().tasks[0].settings.environment
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        found = {}
        for line in process.stdout:
            name, _, value = line.strip().partition("=")
            found[name] = value
            if "recorded in" in line:
                break
        client = openai.OpenAI(
            base_url=found["OPENAI_BASE_URL"], api_key=found["OPENAI_API_KEY"], max_retries=5
        )
        for seed in range(3):
            room = environment.render(environment.reset(seed))
            for _ in range(2):
                ask(client, [{"role": "user", "content": room}])
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(rows) == 6  # two samples of each prompt
    assert all(row["calls"] == 6 and not row["left_out"] for row in rows)
    words = [f"--rollouts={record}", f"--model={run.workdir}", f"--out={tmp_path / 's.json'}"]
    code, out, err = call("ragen_jax.score", *words)
    assert code == 0, err
    assert "retrieval" in out, out


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "give either --workdir (a run) or --model"),
        (["--model=nowhere"], "nowhere"),
        (["--workdir=nowhere"], "nowhere"),
        (["--model=x", "--slots=0"], "--slots is 0; it must be at least 1"),
        (
            ["--model=x", "--config.steps=3"],
            "config.steps cannot be set; fields that serving reads",
        ),
    ],
)
def test_bad_input_to_the_command_is_a_line(words, message):
    code, _, err = call("ragen_jax.serve", *words)
    assert code == 2 and message in err.splitlines()[-1], err
