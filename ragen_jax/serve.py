"""Serve a run's policy or a model to any agent that speaks the OpenAI API, and record its tokens.

    python -m ragen_jax.serve --workdir=runs/NAME [--step=N] [--record=FILE.jsonl]
    python -m ragen_jax.serve --model=DIR_OR_HUB_ID [--record=FILE.jsonl]
                              [--host=127.0.0.1] [--port=8000] [--slots=16]
                              [--config.FIELD=VALUE ...]

Two keys are printed. The API key is that of a session that clients share; the admin key opens
further sessions (POST /admin/sessions). When sessions end, at the latest with Ctrl-C, their
conversations are appended to --record with the token ids that were shown and sampled; `score`
diagnoses that file. Replies are drawn with eval.temperature and the other eval.* settings, whatever
a request asks for, and have at most rollout.max_new_tokens tokens. rollout.cache_dtype and
rollout.cache_kernel are those of the run, unless they are given.
"""

import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from absl import flags

from ragen_jax.config import command_line as command
from ragen_jax.config.build_learner import build_eval_sampling
from ragen_jax.config.build_model import build_meshes, build_model
from ragen_jax.config.fields import is_within
from ragen_jax.config.load import load_config
from ragen_jax.configs.base import Config
from ragen_jax.core.progress import enter_phase
from ragen_jax.core.randomness import Purpose, stream_key
from ragen_jax.core.sharding import platform_of
from ragen_jax.core.types import Params
from ragen_jax.model import hf
from ragen_jax.model.dates import day_of
from ragen_jax.model.layout import sampling_params
from ragen_jax.model.qwen import Qwen, with_cache
from ragen_jax.rollout.rows import Endings
from ragen_jax.run.load import for_sampling, restore_run
from ragen_jax.serving.conversation import Conversation, make_conversation
from ragen_jax.serving.engine import Engine
from ragen_jax.serving.loopback import require_uvicorn
from ragen_jax.serving.record_file import RecordFile
from ragen_jax.serving.server import Served, make_app
from ragen_jax.serving.sessions import Budget, Sessions
from ragen_jax.storage.compilation_cache import enable_compilation_cache
from ragen_jax.storage.console import console
from ragen_jax.storage.program_store import enable_program_store


class Policy(NamedTuple):
    """What is served: a model, how it writes conversations, and what ends its replies."""

    config: Config
    name: str
    model: Qwen
    params: Params
    conversation: Conversation
    endings: Endings


# Fields and sections that serving reads.
READ = (
    "eval",
    "rollout.max_new_tokens",
    "rollout.cache_dtype",
    "rollout.cache_kernel",
    "mesh",
    "sampling_mesh",
)
READ_OF_MODEL = (*READ, "model")


def refuse_others(names: Sequence[str], read: Sequence[str]) -> None:
    """Raise ValueError for fields that the command line sets and serving does not read."""
    refused = [name for name in names if not is_within(name, read)]
    if refused:
        raise ValueError(
            f"{', '.join(f'config.{name}' for name in refused)} cannot be set; fields that serving "
            f"reads: {', '.join(read)}"
        )


def of_run(workdir: Path, step: int | None, config: Config | None = None) -> Policy:
    """Return the policy of a run's checkpoint, whose replies begin inside <think>.

    Args:
      config: the run's config, possibly with other values in READ; None: unchanged.
    """
    trained = restore_run(workdir, config, step)
    config = trained.config
    policy = for_sampling(trained)
    chat = policy.tasks[0].settings.chat
    conversation = make_conversation(policy.tokenizer, thinks=True, date=day_of(config.model.date))
    endings = Endings(chat.stop_ids, chat.stops)
    return Policy(config, workdir.name, policy.model, policy.params, conversation, endings)


def of_model(path: str, config: Config) -> Policy:
    """Return a model as a policy; its replies begin as its chat template says."""
    mesh, sampling_mesh = build_meshes(config)
    folder = hf.resolve(path)
    enter_phase(f"loading {folder}")
    model, params, tokenizer = hf.load(folder, mesh=mesh, dtype=config.model.dtype)
    model = build_model(config.model, model.config, mesh)
    conversation = make_conversation(tokenizer, thinks=False, date=day_of(config.model.date))
    ends = {conversation.close_id, *hf.stop_ids(folder), *conversation.control}
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    params = sampling_params(params, model, sampling_mesh)
    endings = Endings(tuple(sorted(ends)), None)
    return Policy(config, Path(path).name, model, params, conversation, endings)


def cached_model(policy: Policy) -> Qwen:
    """Return the model with the cache of rollout.cache_dtype and rollout.cache_kernel.

    Raises:
      ValueError: as in `with_cache`.
    """
    rollout = policy.config.rollout
    return with_cache(
        policy.model,
        cache_dtype=rollout.cache_dtype,
        cache_kernel=rollout.cache_kernel,
        platform=platform_of(policy.params),
    )


def main(argv: Sequence[str]) -> None:
    del argv
    enable_compilation_cache()
    enable_program_store()
    with command.bad_input():
        uvicorn = require_uvicorn()
        if bool(WORKDIR.value) == bool(MODEL.value):
            raise ValueError("give either --workdir (a run) or --model (a directory or hub id)")
        if SLOTS.value < 1:
            raise ValueError(f"--slots is {SLOTS.value}; it must be at least 1")
        if jax.process_count() > 1:
            raise ValueError("serving runs in one process")
        if WORKDIR.value:
            workdir = Path(WORKDIR.value)
            refuse_others(command.overrides(), READ)
            policy = of_run(workdir, STEP.value, load_config(CONFIG.value, workdir))
        else:
            refuse_others(command.overrides(), READ_OF_MODEL)
            given, path = CONFIG.value, MODEL.value or ""
            given.model.path, given.warmstart.fine_tune = path, False
            policy = of_model(path, load_config(given))
        model = cached_model(policy)
        record = RecordFile(Path(RECORD.value)) if RECORD.value else None
        try:
            bound = socket.create_server((HOST.value, PORT.value))
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen on {HOST.value}:{PORT.value}: {error}") from error
    config = policy.config
    engine = Engine(
        model,
        policy.params,
        mesh=build_meshes(config)[1],
        slots=SLOTS.value,
        longest_reply=config.rollout.max_new_tokens,
        sampling=build_eval_sampling(config.eval),
        endings=policy.endings,
        key=stream_key(Purpose.SERVE, config.eval.seed),
    )
    sessions = Sessions(Budget(), None if record is None else record.write)
    served = Served(
        engine=engine,
        conversation=policy.conversation,
        sessions=sessions,
        name=policy.name,
        positions=policy.model.config.max_positions,
        vocabulary=policy.model.config.vocab_size,
        most=config.rollout.max_new_tokens,
        endings=policy.endings,
        admin_key=secrets.token_urlsafe(24),
    )
    host, port, *_ = bound.getsockname()
    console(f"OPENAI_BASE_URL=http://{host}:{port}/v1")
    console(f"OPENAI_API_KEY={sessions.open(shared=True)}")
    console(f"admin key: {served.admin_key}")
    console(f"recorded in {RECORD.value}" if RECORD.value else "not recorded; see --record")
    enter_phase("")  # it may wait for requests for hours
    try:
        server = uvicorn.Server(uvicorn.Config(make_app(served), log_level="warning"))
        server.run(sockets=[bound])
    finally:
        sessions.end_all()
        engine.close()
        if record is not None:
            record.close()


if __name__ == "__main__":
    CONFIG = command.define_config("sokoban:llm", reads_run=True)
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run to serve.")
    MODEL = flags.DEFINE_string("model", None, "Model directory or hub id to serve.")
    STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; default: the newest.")
    HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on.")
    PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any free one.")
    SLOTS = flags.DEFINE_integer("slots", 16, "Requests that are served at a time.")
    RECORD = flags.DEFINE_string("record", None, "File to which conversations are appended.")
    command.run_command(main)
