"""Serve a retriever over HTTP: both protocols at /retrieve, and /health.

Clients may be slow or hostile. A connection has REQUEST_SECONDS to send a request and SEND_SECONDS
to receive the answer. If MAX_CONNECTIONS are open, a new connection replaces the connection that
has been sending its request for longest. A request's size, queries, characters, documents and
values are limited (protocols.py). Its queries are searched in small parts, so that other requests
are served in between, and a search that takes longer than SEARCH_SECONDS is refused.
"""

import contextlib
import io
import json
import socket
import sys
import threading
import time
import traceback
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ragen_jax.core.clean_text import one_line
from ragen_jax.core.http_json import TimedReader
from ragen_jax.envs.search_qa import dense_index, protocols
from ragen_jax.envs.search_qa.batching import BatchingRetriever
from ragen_jax.envs.search_qa.dense_index import DenseIndex
from ragen_jax.envs.search_qa.retrieve import Document, Retriever
from ragen_jax.envs.search_qa.words import Words

SHOWN = 150  # maximum characters of a reason in an answer
MAX_BODY = 2 << 20  # bytes of a request's body
MAX_HEAD = 1 << 16  # bytes of a request's first line and headers
MAX_ANSWER = 64 << 20  # characters of all documents of an answer together
MAX_CONNECTIONS = 128  # each has a thread
REQUEST_SECONDS = 20.0  # from a connection's opening, or its last answer, to the end of a request
SEARCH_SECONDS = 30.0  # time of a request's search; our client does not wait longer
SEND_SECONDS = 30.0
PART, PART_LETTERS = 32, 4000  # maximum queries of a part, and their characters
DISCARD_SECONDS = 1.0  # time to read the rest of a refused request, so that its answer arrives


def open_index(folder: str) -> Words | DenseIndex:
    """Return the retriever for an index of either kind, loaded in memory and on the devices.

    Raises:
      ValueError: the folder has no index, or an incomplete index.
    """
    if not (Path(folder) / dense_index.SETTINGS).exists():
        return Words(folder)
    index = DenseIndex(folder)
    index.load()
    return index


class Refused(Exception):
    """A request is refused, with a status of 400 or more and a reason in one line."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Server(ThreadingHTTPServer):
    """A server that answers with the documents that a retriever finds."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, retriever: Retriever, *, host: str, port: int, documents: int) -> None:
        """
        Args:
          port: port to listen on; 0: any free port.
          documents: documents per query if a request does not give a number.

        Raises:
          ValueError: the server cannot listen at the address.
        """
        self.retriever, self.documents = BatchingRetriever(retriever), documents
        self._lock = threading.Lock()
        self._open: set[Any] = set()  # connections
        self._receiving: dict[Any, None] = {}  # connections with incomplete requests, oldest first
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot serve at {host}:{port}: {error}") from None

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; see MAX_CONNECTIONS."""
        with self._lock:
            full = len(self._open) >= MAX_CONNECTIONS
            oldest = next(iter(self._receiving), None) if full else None
            if not full or oldest is not None:
                self._open.add(request)
                self._receiving[request] = None
            if oldest is not None:
                self._forget(oldest)
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which ends
        if full and oldest is None:
            self.shutdown_request(request)  # all other connections are being answered
            return
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._forget(request)
        super().shutdown_request(request)

    def _forget(self, connection: Any) -> None:
        self._open.discard(connection)
        self._receiving.pop(connection, None)

    def mark(self, connection: Any, *, receiving: bool) -> None:
        """Record whether a connection's request is still incomplete."""
        with self._lock:
            self._receiving.pop(connection, None)
            if receiving and connection in self._open:
                self._receiving[connection] = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, unless it is a client that has disconnected."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """The handler of one connection."""

    protocol_version = "HTTP/1.1"
    server: Server  # ty: ignore[incompatible-mutable-override] nobody gives it another

    # For an answer to invalid input: the base class sets these only while it reads a request.
    request_version, requestline, command = "HTTP/1.1", "", ""

    def setup(self) -> None:
        super().setup()
        self._reader = TimedReader(self.connection, 0.0, 0)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Read and answer a request; a refused request ends the connection."""
        self.server.mark(self.connection, receiving=True)
        self._reader.deadline = time.monotonic() + REQUEST_SECONDS
        self._reader.left = MAX_HEAD
        try:
            super().handle_one_request()
        except Refused as refused:
            self._refuse(refused.status, str(refused))
        except ValueError as error:  # from the reader: the head is too long
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, str(error))

    def do_GET(self) -> None:
        self.server.mark(self.connection, receiving=False)
        if self.path == protocols.HEALTH:
            self._answer(HTTPStatus.OK, b'{"status": "healthy"}')
        else:
            reason = f"GET is only for {protocols.HEALTH}, got {self.path}"
            raise Refused(HTTPStatus.NOT_FOUND, reason)

    def do_POST(self) -> None:
        body = self._body()
        self.server.mark(self.connection, receiving=False)
        if self.path != protocols.PATH:
            reason = f"POST is only for {protocols.PATH}, got {self.path}"
            raise Refused(HTTPStatus.NOT_FOUND, reason)
        try:
            request = protocols.read_request(body, self.server.documents)
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
        try:
            found = self._search(request)
        except Refused:
            raise
        except Exception as error:  # the server continues after any error of a query
            traceback.print_exc(file=sys.stderr)
            reason = f"{type(error).__name__}: {error}"
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, reason) from None
        self._answer(HTTPStatus.OK, protocols.answer_body(request, found))

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or "Transfer-Encoding" in self.headers:
            # The next bytes could be taken for another request.
            reason = f"a request needs Content-Length and no Transfer-Encoding, got {length!r}"
            raise Refused(HTTPStatus.BAD_REQUEST, reason)
        if len(length.lstrip("0")) > 15 or int(length) > MAX_BODY:
            reason = f"Content-Length must be at most {MAX_BODY}, got {length}"
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
        self._reader.left = int(length) + MAX_HEAD
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            reason = f"no complete request within {REQUEST_SECONDS:g} s"
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, reason) from None
        if len(body) < int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, f"received {len(body)} of {length} bytes")
        return body

    def _search(self, request: protocols.Request) -> list[list[Document]]:
        """Return the documents of each query.

        Raises:
          Refused: the search takes too long, or the documents are too large for an answer.
        """
        found: list[list[Document]] = []
        deadline, size = time.monotonic() + SEARCH_SECONDS, 0
        for part in protocols.split_queries(request.queries, most=PART, letters=PART_LETTERS):
            if time.monotonic() > deadline:
                reason = f"the search took more than {SEARCH_SECONDS:g} s; send fewer queries"
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, reason)
            new = self.server.retriever.search(part, request.k)
            size += sum(len(document.text) for documents in new for document in documents)
            if size > MAX_ANSWER:
                reason = (
                    f"the answer has more than {MAX_ANSWER} characters; request fewer documents"
                )
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, reason)
            found += new
        return found

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that the base class refuses: lines and headers that are not HTTP."""
        # Before a line is parsed this is "HTTP/0.9", which has no status.
        self.request_version = "HTTP/1.1"
        self._refuse(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Answer with a status and one line, and end the connection."""
        self.close_connection = True
        self._answer(status, json.dumps({"error": one_line(reason, SHOWN)}).encode())
        # Closed with bytes unread, the connection would be reset and the answer lost.
        self.connection.shutdown(socket.SHUT_WR)
        self._reader.deadline = time.monotonic() + DISCARD_SECONDS
        self._reader.left = 10**12
        with contextlib.suppress(TimeoutError):
            while self.rfile.read1(1 << 16):
                pass

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.connection.settimeout(SEND_SECONDS)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: with thousands of requests, none is logged."""
