"""Servers that answer a POST in every hostile way: half-dead, endless, malformed, oversized.

    with hostile("endless_trailers") as url: ...

WAYS maps a name to a function that talks to one connected client over a raw socket. The function
returns when its client disconnects. `python tests/hostile_servers.py` prints how
`search_qa.remote.RemoteRetriever` handles each way: seconds, peak memory and the error.
"""

import contextlib
import gzip
import json
import multiprocessing
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

DRIP_SECONDS = 0.1  # delay between two bytes
LARGE = (64 << 20) - 1000  # bytes; below the client's former limit of 64 MiB
ANSWER = {"result": [[{"document": {"id": "1", "contents": "text"}, "score": 0.5}]]}
SOUND = json.dumps(ANSWER).encode()
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def _head(length: object, status: bytes = OK, extra: bytes = b"") -> bytes:
    return status + extra + f"Content-Length: {length}\r\n\r\n".encode()


def _document(**fields: object) -> bytes:
    """Return a valid answer with these fields replaced; a value of type bytes is already JSON."""
    parts = {"document": b'{"id": "1", "contents": "text"}', "score": b"0.5"} | fields
    return b'{"result": [[{%s}]]}' % b", ".join(
        b'"%s": %s' % (name.encode(), value) for name, value in parts.items()
    )


def _request(client: socket.socket) -> None:
    """Read a request's head and at least the start of its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(1 << 16)
        if not piece:
            raise ConnectionResetError("the client has gone")
        data += piece


def _wait(client: socket.socket) -> None:
    """Wait until the client disconnects."""
    while client.recv(1 << 16):
        pass


def drip(prefix: bytes, byte: bytes = b"x") -> Callable[[socket.socket], None]:
    """Send `prefix`, then one byte every DRIP_SECONDS forever."""

    def talk(client):
        _request(client)
        client.sendall(prefix)
        while True:
            client.sendall(byte)
            time.sleep(DRIP_SECONDS)

    return talk


def flood(prefix: bytes, line: bytes) -> Callable[[socket.socket], None]:
    """Send `prefix`, then a line forever, as fast as the client reads."""

    def talk(client):
        _request(client)
        client.sendall(prefix)
        while True:
            client.sendall(line * 100)

    return talk


def send(*pieces: bytes, repeat: int = 1) -> Callable[[socket.socket], None]:
    """Send the pieces, the last piece `repeat` times, and close the connection."""

    def talk(client):
        _request(client)
        for piece in pieces[:-1]:
            client.sendall(piece)
        for _ in range(repeat):
            client.sendall(pieces[-1])

    return talk


def hold(data: bytes) -> Callable[[socket.socket], None]:
    """Send `data` and keep the connection open."""

    def talk(client):
        _request(client)
        client.sendall(data)
        _wait(client)

    return talk


def body(content: bytes, extra: bytes = b"", status: bytes = OK) -> Callable[[socket.socket], None]:
    """Send a well-formed answer with this content."""
    return send(_head(len(content), status, extra), content)


def large(piece: bytes, start: bytes = b"[", end: bytes = b"0]") -> Callable:
    """Send a JSON list of LARGE bytes that repeats `piece`."""
    count = LARGE // len(piece)
    size = len(start) + count * len(piece) + len(end)
    block = piece * 4096

    def talk(client):
        _request(client)
        client.sendall(_head(size) + start)
        for _ in range(count // 4096):
            client.sendall(block)
        client.sendall(piece * (count % 4096) + end)

    return talk


def reset(client: socket.socket) -> None:
    """Answer a request with RST."""
    _request(client)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def redirect(location: str) -> Callable[[socket.socket], None]:
    status = b"HTTP/1.1 307 Temporary Redirect\r\n"
    return body(b"", f"Location: {location}\r\n".encode(), status)


def never_reads(client: socket.socket) -> None:
    """Neither read nor answer; a client with a long request waits in `send`."""
    while True:
        client.send(b"")
        time.sleep(DRIP_SECONDS)


GZIP = b"Content-Encoding: gzip\r\n"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 86400\r\n"

WAYS: dict[str, Callable[[socket.socket], None]] = {
    # Slow or endless
    "dripped_status_line": drip(b"HTTP/1.1 200 "),
    "dripped_header": drip(OK + b"X-Header: "),
    "dripped_headers": drip(OK, b"A: b\r\n"),
    "endless_headers": flood(OK, b"X-Header: x\r\n"),
    "endless_header_line": flood(OK + b"X-Header: ", b"x" * 100),
    "dripped_body": drip(_head(10**6) + b'{"result": "'),
    "endless_body": flood(OK + b"\r\n[", b"0,"),
    "dripped_chunk_size": drip(CHUNKED, b"0"),
    "dripped_chunk_extension": drip(CHUNKED + b"5;x="),
    "endless_chunk_extension": flood(CHUNKED + b"5;x=", b"x" * 100),
    "dripped_trailers": drip(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-Trailer: x\r\n"),
    "endless_trailers": flood(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X-Trailer: x\r\n"),
    "dripped_continue": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "endless_continue": flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "never_answers": hold(b""),
    "never_reads": never_reads,
    # Connections that end
    "closes_at_once": lambda client: None,
    "closes_mid_body": send(_head(len(SOUND)), SOUND[:20]),
    "closes_mid_chunk": send(CHUNKED + b"50\r\n", SOUND[:20]),
    "resets": reset,
    # Lengths
    "length_too_long": hold(_head(len(SOUND) + 10) + SOUND),
    "length_too_short": send(_head(10), SOUND),
    "length_negative": hold(_head(-5) + SOUND),
    "length_huge": hold(_head(10**15) + SOUND),
    "length_of_400_digits": hold(_head("9" * 400) + SOUND),
    "length_of_letters": hold(_head("many") + SOUND),
    "chunk_negative": hold(CHUNKED + b"-5\r\n" + SOUND),
    "chunk_huge": hold(CHUNKED + b"f" * 40 + b"\r\n" + SOUND),
    # Redirects
    "redirect_loop": redirect("/retrieve"),
    "redirect_to_file": redirect("file:///etc/passwd"),
    "redirect_to_elsewhere": redirect("http://192.0.2.1/"),
    # Sizes
    "gzip_bomb": body(gzip.compress(b"[" + b"0," * (8 << 20) + b"0]"), GZIP),
    "gzip_unasked": body(gzip.compress(SOUND), GZIP),
    "large_empty_lists": large(b"[],"),
    "large_empty_objects": large(b"{},"),
    "large_strings": large(b'"ab",'),
    "large_numbers": large(b"1.5,"),
    "large_wide_text": large(b"a", '["\U0001f600'.encode(), b'"]'),
    "deep_lists": body(b"[" * 10**6 + b"]" * 10**6),
    "deep_objects": body(b'{"a":' * 10**6 + b"0" + b"}" * 10**6),
    # Values
    "number_of_400_digits": body(_document(score=b"1" * 400)),
    "number_of_5000_digits": body(_document(score=b"1" * 5000)),
    "number_too_large": body(_document(score=b"1e400")),
    "number_nan": body(_document(score=b"NaN")),
    "number_infinity": body(_document(score=b"-Infinity")),
    "invalid_utf8": body(_document(document=b'{"id": "\xff", "contents": "a\xed\xa0\x80"}')),
    "lone_surrogates": body(
        _document(document=b'{"id": "\\ud800", "contents": "a \\udfff \\ud83d\\ude00"}')
    ),
    # Answers that are not valid HTTP
    "errors_for_ever": body(b"later", b"", UNAVAILABLE),
    "http_09": send(b"welcome to the server\r\n" * 100),
    "binary": send(bytes(range(256)) * 100),
    "switches_protocols": hold(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"),
    "early_hints": flood(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    "no_content": body(b"", b"", b"HTTP/1.1 204 No Content\r\n"),
    "status_of_control_characters": body(b"\x1b[2J\r\n\x00", b"", b"HTTP/1.1 400 \x1b]0;x\x07\r\n"),
}
SOUND_WAYS = ("invalid_utf8", "lone_surrogates")  # these answers are read, with characters replaced
HTTPS_WAYS = ("tls_hangs", "tls_dripped")  # the client is given an https:// address


def _tls_hangs(client: socket.socket) -> None:
    _wait(client)


def _tls_dripped(client: socket.socket) -> None:
    client.recv(1 << 16)
    client.sendall(b"\x16\x03\x03\x40\x00")  # a handshake record of 16 KiB
    while True:
        client.sendall(b"\x02")
        time.sleep(DRIP_SECONDS)


@contextlib.contextmanager
def hostile(way: str) -> Iterator[str]:
    """Yield the address of a server that treats every client in one way.

    way: a key of WAYS, an entry of HTTPS_WAYS, or "never_accepts" (a full backlog)
    """
    if way == "never_accepts":
        with _full_backlog() as url:
            yield url
        return
    talk = {"tls_hangs": _tls_hangs, "tls_dripped": _tls_dripped}.get(way) or WAYS[way]
    open_clients: list[socket.socket] = []

    def handle(client):
        # The function of a way ends with an OSError when its client disconnects.
        with client, contextlib.suppress(OSError):
            talk(client)

    def accept():
        with contextlib.suppress(OSError):  # raised when the listener is closed
            while True:
                client, _ = listener.accept()
                open_clients.append(client)
                threading.Thread(target=handle, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        scheme = "https" if way in HTTPS_WAYS else "http"
        try:
            yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for client in open_clients:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _full_backlog() -> Iterator[str]:
    """Yield a listener that accepts no connection and has a full queue: further connections
    hang."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# ------------------------------------------------------------------------------ measurements


def _measure(url: str, pipe: object) -> None:
    """Send (seconds, MiB of peak memory added, outcome) of one search."""
    from ragen_jax.envs.search_qa.remote import RemoteRetriever

    remote = RemoteRetriever(url, protocol="search_r1", time_limit=1.0, tries=1, seed=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    try:
        outcome = ascii(remote.search(["a"], 1))
    except BaseException as error:
        outcome = f"{type(error).__name__}: {ascii(str(error))}"
    seconds = time.monotonic() - start
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    pipe.send((seconds, added, outcome))


def main(most: float) -> None:
    """Print a row for each way; a client is killed after `most` seconds."""
    context = multiprocessing.get_context("spawn")
    for way in (*WAYS, *HTTPS_WAYS, "never_accepts"):
        with hostile(way) as url:
            here, there = context.Pipe()
            process = context.Process(target=_measure, args=(url, there))
            process.start()
            if here.poll(most):
                seconds, added, outcome = here.recv()
                print(f"| {way} | {seconds:.2f} | {added} | {outcome[:150]} |", flush=True)
            else:
                print(f"| {way} | > {most:g} | | still under way |", flush=True)
            process.kill()
            process.join()


if __name__ == "__main__":
    main(float(sys.argv[1]) if sys.argv[1:] else 20.0)
