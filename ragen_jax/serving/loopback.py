"""Serve an application on a free port of this machine, in a thread."""

import contextlib
import importlib
import socket
import threading
import time
from collections.abc import Generator
from typing import Any

LOOPBACK = "127.0.0.1"
SECONDS_TO_STOP = 2  # for connections that are still open


@contextlib.contextmanager
def on_loopback(app: Any) -> Generator[str]:
    """Yield the address at which an ASGI application is served while the body runs.

    Raises:
      ValueError: the server's library is not installed.
      RuntimeError: the server does not start.
    """
    uvicorn = require_uvicorn()
    settings = uvicorn.Config(
        app,
        log_level="critical",
        lifespan="off",
        timeout_graceful_shutdown=SECONDS_TO_STOP,
    )
    server = uvicorn.Server(settings)
    with socket.create_server((LOOPBACK, 0), backlog=2048) as bound:
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [bound]}, name="server", daemon=True
        )
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise RuntimeError("the server of the policy did not start")
                time.sleep(0.005)
            yield f"http://{LOOPBACK}:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def require_uvicorn() -> Any:
    """Return the module uvicorn.

    Raises:
      ValueError: it is not installed.
    """
    try:
        return importlib.import_module("uvicorn")
    except ImportError as error:
        raise ValueError("the server needs an extra: pip install 'ragen_jax[serve]'") from error
