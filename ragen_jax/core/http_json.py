"""JSON over HTTP with one deadline and bounded memory: the client for every server a run queries.

    post_json     one exchange, from looking up the host's name to the last byte of the answer
    parse_json    strict JSON from outside, with clean strings and a limited number of values
    TimedReader   reads a socket until a deadline, up to a limit of bytes

The peer may be hostile. Every wait ends at the deadline, and every byte received counts,
whichever part of HTTP it belongs to, so nothing that a server drips or repeats (status
lines, headers, chunk sizes, trailers, "100 Continue") extends an exchange. Redirects are not
followed, environment variables for proxies are not read, and compressed answers are refused.
"""

import functools
import http.client
import io
import ipaddress
import itertools
import json
import math
import re
import socket
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

from ragen_jax.core.clean_text import load_json, one_line

MAX_HEAD = 1 << 16  # limit in bytes for status lines, headers, chunk sizes and trailers
BYTES_PER_VALUE = 32  # an answer may hold one value per this many bytes of its limit
MAX_DIGITS = 300  # digits of an integer; 309 or more may be too large for a float
PIECE = 1 << 16  # bytes per read
SHOWN = 200  # characters of a server's text that an error repeats
TRY_AGAIN = (408, 425, 429)  # 4xx statuses worth a retry; the others mean a bad request

# A string, or a character that another value begins with or follows.
_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[,\[{]', re.DOTALL)


class ExchangeError(ConnectionError):
    """An exchange without a usable answer. The message names the address and the cause.

    retry: whether the same request may succeed later; False if the status refuses it
    """

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


@dataclass(frozen=True)
class Address:
    """The parts of a server's URL.

    path: "", or a path that starts with a slash; includes the query.
    """

    secure: bool
    host: str
    port: int
    path: str


def parse_url(url: str) -> Address:
    """Parse http://HOST[:PORT][/PATH], or the same with https.

    Raises:
      ValueError: the URL has another form, or contains a user name, which is never sent.
    """
    try:
        parts = urllib.parse.urlsplit(url if isinstance(url, str) else "")
        port = parts.port
    except ValueError:  # a malformed port or IPv6 address
        parts, port = urllib.parse.urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"url must have the form http://HOST:PORT, got {url!r}")
    if "@" in parts.netloc:
        raise ValueError("url must have the form http://HOST:PORT, without user name and password")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    secure = parts.scheme == "https"
    return Address(secure, parts.hostname, port or (443 if secure else 80), path)


def post_json(url: str, payload: Any, *, timeout_s: float, max_bytes: int) -> Any:
    """Post a value as JSON and return the parsed answer, which must have status 200.

    Args:
      url: http://HOST[:PORT][/PATH], or https, whose certificate is verified.
      payload: any value that json.dumps accepts.
      timeout_s: time limit of the whole exchange in seconds, above 0.
      max_bytes: size limit of the answer's body. The body, its text and its values together take
        at most about 12 times that much memory, whatever the server sends (see `parse_json`).

    Raises:
      ValueError: the URL or the payload cannot be used.
      ExchangeError: any other failure. Lone surrogates and bytes that are not UTF-8 are not
        errors: they become U+FFFD.
    """
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"timeout_s must be a positive number of seconds, got {timeout_s!r}")
    address, content = parse_url(url), json.dumps(payload).encode()
    deadline = time.monotonic() + timeout_s
    try:
        with _connect(address, deadline) as sock:
            status, reason, answer = _exchange(sock, address, content, deadline, max_bytes)
        if status == http.client.OK:
            return parse_json(answer, max_values=max_values(max_bytes))
    except TimeoutError as error:
        cause = f"TimeoutError: no complete answer within {timeout_s:g} s"
        detail = f" ({one_line(str(error), SHOWN)})" if str(error) else ""
        raise ExchangeError(f"{url}: {cause}{detail}", retry=True) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = f"{type(error).__name__}: {one_line(str(error), SHOWN)}"
        raise ExchangeError(f"{url}: {cause}", retry=True) from None
    shown = one_line(answer[:SHOWN].decode(errors="replace"), SHOWN)
    if 300 <= status < 400:
        shown = "redirects are not followed; use the final URL"
    refused = 300 <= status < 500 and status not in TRY_AGAIN
    raise ExchangeError(
        f"{url}: status {status} {one_line(reason, SHOWN)}: {shown}", retry=not refused
    )


def max_values(max_bytes: int) -> int:
    """Return the number of values that an answer of up to `max_bytes` may hold."""
    return max_bytes // BYTES_PER_VALUE + 1024


def parse_json(data: bytes | bytearray, *, max_values: int) -> Any:
    """Parse strict JSON: no NaN, no infinity, every whole number within a float's range.

    Values are counted before any is built, since a list of three bytes takes 72 in memory, and a
    dict of nine bytes with one field takes about 200. Bytes that are not UTF-8 and lone surrogates
    become U+FFFD.

    Args:
      max_values: limit on lists, dicts, their items and their names together.

    Raises:
      ValueError: the data is not strict JSON, is nested too deeply or holds more values.
    """
    if next(itertools.islice(_VALUE.finditer(data), max_values, None), None) is not None:
        raise ValueError(f"JSON with more than {max_values} values")
    try:
        return load_json(
            data.decode("utf-8-sig", errors="replace"),
            parse_int=_whole,
            parse_float=_real,
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number with {len(digits)} digits; at most {MAX_DIGITS}")
    return int(digits)


def _real(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"a number that is too large: {digits[:40]}")
    return number


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# ------------------------------------------------------------------------------ one exchange


def _seconds_left(deadline: float) -> float:
    """Return the seconds until a deadline.

    Raises:
      TimeoutError: the deadline has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _connect(address: Address, deadline: float) -> socket.socket:
    """Connect to the first of the host's addresses that accepts, over TLS if `secure`."""
    error: OSError = OSError(f"{address.host} has no address")
    for family, kind, protocol, _, place in _look_up(address.host, address.port, deadline):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_seconds_left(deadline))
            sock.connect(place)
            if address.secure:
                sock.settimeout(_seconds_left(deadline))
                return _tls().wrap_socket(sock, server_hostname=address.host)
            return sock
        except OSError as reason:
            sock.close()
            error = reason
    raise error


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return a context that verifies certificates with the system's authorities (slow to load)."""
    return ssl.create_default_context()


def _look_up(host: str, port: int, deadline: float) -> list[Any]:
    """Call socket.getaddrinfo with a deadline.

    It has no time limit, so it runs in a thread, which is abandoned at the deadline.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass  # a name
    else:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found: list[Any] = []

    def ask():
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:  # ValueError: an empty or overlong label
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_seconds_left(deadline))
    if not found:
        raise TimeoutError(f"the name {host} could not be resolved")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _exchange(
    sock: socket.socket, address: Address, content: bytes, deadline: float, max_bytes: int
) -> tuple[int, str, bytearray]:
    """POST `content` and return (status, reason, body) of the answer."""
    connection = http.client.HTTPConnection(address.host, address.port)
    connection.default_port = 443 if address.secure else 80  # omitted in the Host header
    connection.sock = _TimedSocket(sock, deadline, max_bytes + MAX_HEAD)  # has the used members
    headers = {"Content-Type": "application/json", "Connection": "close"}
    try:
        connection.request("POST", address.path or "/", content, headers)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has stopped reading; its answer may say why
    response = connection.getresponse()
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if response.status == http.client.OK and coding != "identity":
        raise ValueError(f"the answer is compressed ({coding}), which was not requested")
    length = response.headers.get("Content-Length")
    if length is not None and not response.chunked:
        if not (length.isascii() and length.isdecimal()):
            raise ValueError(f"Content-Length must be a whole number, got {length!r}")
        if len(length.lstrip("0")) > 15 or int(length) > max_bytes:
            raise ValueError(f"the answer is longer than {max_bytes} bytes")
    answer = bytearray()
    while piece := response.read1(PIECE):
        answer += piece
        if len(answer) > max_bytes:
            raise ValueError(f"the answer is longer than {max_bytes} bytes")
    if response.length:  # announced bytes that did not arrive
        raise http.client.IncompleteRead(b"", response.length)
    return response.status, response.reason, answer


class TimedReader(io.RawIOBase):
    """Read a socket until a deadline, up to a limit of bytes.

    deadline: time on the clock of time.monotonic(), in seconds
    left: number of bytes that may still arrive
    """

    def __init__(self, sock: socket.socket, deadline: float, left: int) -> None:
        self._sock, self.deadline, self.left = sock, deadline, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for at least one byte and read the available bytes; return 0 at the end.

        Raises:
          TimeoutError: the deadline has passed.
          ValueError: more bytes arrived than `left` allows.
        """
        self._sock.settimeout(_seconds_left(self.deadline))
        count = self._sock.recv_into(buffer)
        self.left -= count
        if self.left < 0:
            raise ValueError("more bytes arrived than are accepted")
        return count


class _TimedSocket:
    """The members of a socket that http.client uses, with one deadline for all of them."""

    def __init__(self, sock: socket.socket, deadline: float, limit: int) -> None:
        self._sock, self._deadline, self._limit = sock, deadline, limit

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:  # sendall over TLS would restart its time limit with each record
            self._sock.settimeout(_seconds_left(self._deadline))
            view = view[self._sock.send(view) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(TimedReader(self._sock, self._deadline, self._limit))

    def close(self) -> None:
        """Do nothing: http.client would close before reading; the opener closes the socket."""
