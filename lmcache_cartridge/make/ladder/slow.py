"""SlowStore: an S3 server for a few files of this machine, as much of it as reading needs, that can hold bytes back."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from blake3 import blake3

BUCKET = "validate"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "validate", "AWS_SECRET_ACCESS_KEY": "validate", "AWS_DEFAULT_REGION": "us-east-1"}
"""For the server that reads from it; it looks at none."""
_HELD_S = 25.0
"""The longest that bytes are held back, so that a failed test ends."""


class SlowStore:
    """Listens at `url` on the loopback interface from when it is made. A context manager, or close it."""

    def __init__(self) -> None:
        self._roots: dict[str, Path] = {}
        self._free = threading.Event()
        self._free.set()
        self.asked = threading.Event()
        """Set when bytes of a payload were asked for while they were held back."""
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                store._answer(self, body=True)

            def do_HEAD(self) -> None:
                store._answer(self, body=False)

            def log_message(self, *arguments: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    def __enter__(self) -> SlowStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End it; whoever waits for bytes gets them or none."""
        self._free.set()
        self._server.shutdown()
        self._server.server_close()

    def offer(self, key: str, root: Path) -> None:
        """Have the files of a directory as objects below `key`."""
        self._roots[key] = root

    def hold(self) -> None:
        """Hold back payloads from now on."""
        self.asked.clear()
        self._free.clear()

    def let_go(self) -> None:
        """Hand out what was held back."""
        self._free.set()

    def _answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        key, _, name = request.path.partition("?")[0].removeprefix(f"/{BUCKET}/").rpartition("/")
        root = self._roots.get(key)
        file = None if root is None else root / name
        if file is None or not file.is_file():
            request.send_response(404)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        data = file.read_bytes()
        if name.endswith(".safetensors") and not self._free.is_set():
            self.asked.set()
            self._free.wait(_HELD_S)
        etag = f'"{blake3(data).hexdigest(16)}"'
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if request.headers.get("If-None-Match") == etag:
            request.send_response(304)
            part = b""
        elif wanted:
            start, end = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
            part = data[start : end + 1]
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
        else:
            part = data
            request.send_response(200)
        request.send_header("ETag", etag)
        request.send_header("Content-Length", str(len(part)))
        request.end_headers()
        if body:
            request.wfile.write(part)
