"""Retrieval servers in a thread of this process, working or faulty."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def document(query, place):
    """Return the document that an echoing server finds; it depends only on the arguments."""
    return f"{place} about {query}"


def echo(fields):
    """Return (status, answer) to a request in either protocol."""
    if "query" in fields:
        found = [
            {"id": f"doc_{i}", "content": document(fields["query"], i), "score": 1 / i}
            for i in range(1, fields["top_k"] + 1)
        ]
        return 200, {"results": found}
    lists = [
        [
            {"document": {"id": str(i), "contents": document(query, i)}, "score": 1 / i}
            for i in range(1, fields["topk"] + 1)
        ]
        for query in fields["queries"]
    ]
    return 200, {"result": lists}


@contextlib.contextmanager
def serve(answer=echo, trouble=lambda number: None, late=1.5):
    """Serve answer(fields); yield (url, requests so far).

    trouble: number of a request -> None, "drop", "late" (by `late` seconds), "truncate" or "drip"
    (one byte at a time, for `late` seconds)
    """
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, fields))
            what = trouble(len(requests) - 1)
            if what == "drop":
                return
            if what == "late":
                time.sleep(late)
            status, body = answer(fields)
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if what == "drip":
                    for byte in body:
                        self.wfile.write(bytes([byte]))
                        self.wfile.flush()
                        time.sleep(late / 10)
                self.wfile.write(body[: len(body) // 2] if what == "truncate" else body)
            except OSError:  # the client has disconnected
                pass

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
