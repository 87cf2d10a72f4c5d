"""A Hugging Face hub on this machine, as much of one as downloads need."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"

_JSON = {"Content-Type": "application/json"}
_RESOLVE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/[^/]+/(?P<file>.+)")
_LIST = re.compile(r"/api/models\?(?P<query>.*)")
_API = re.compile(r"/api/models/(?P<name>[^/?]+/[^/?]+)(?P<rest>/[^?]*)?(\?.*)?")


class Hub:
    """Serves folders as repositories."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.requests: list[tuple[str, str, str | None]] = []  # for files: method, file, Range
        self.held: dict[str, threading.Event] = {}  # files that are not sent before it is set
        self.reached = threading.Event()  # set when one of them is asked for
        self.gated = ""  # a repository whose licence nobody has accepted

    def fetched(self, file: str = ".safetensors") -> list[str | None]:
        """The ranges of what was fetched of files that end so, None for a whole file."""
        return [part for how, name, part in self.requests if how == "GET" and name.endswith(file)]


def use_hub(patch: pytest.MonkeyPatch, url: str = "http://127.0.0.1:9") -> None:
    """Ask the hub at this address instead of the public one, or one that nobody can reach."""
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@contextmanager
def serve(repositories: dict[str, Path], cache: Path | None = None) -> Iterator[Hub]:
    """A hub with these repositories, for as long as the block lasts.

    cache: where downloads go; with it this hub is asked instead of the public one.
    """
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if cache is not None:
                use_hub(patch, f"http://127.0.0.1:{server.server_port}")
                patch.setattr(constants, "HF_HUB_CACHE", str(cache))
            yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:  # noqa: N802 (http.server's name)
        if match := _LIST.fullmatch(self.path):
            self.list_models(parse_qs(match["query"]))
        elif match := _API.fullmatch(self.path):
            self.describe(match["name"], match["rest"] or "")
        elif match := _RESOLVE.fullmatch(self.path.partition("?")[0]):
            self.send_file(match["name"], match["file"])
        else:
            self.send(404, b"", {})

    do_HEAD = do_GET  # noqa: N815

    def list_models(self, query: dict[str, list[str]]) -> None:
        author, text = query["author"][0], query["search"][0].lower()
        names = [n for n in self.hub.repositories if n.startswith(f"{author}/")]
        found = [{"id": name} for name in names if text in name.lower()]
        self.send(200, json.dumps(found).encode(), _JSON)

    def describe(self, name: str, rest: str) -> None:
        if name not in self.hub.repositories:
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if name == self.hub.gated:
            return self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        folder = self.hub.repositories[name]
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
        found: Any = [{"type": "file", "path": f, "size": n, "oid": f} for f, n in sizes.items()]
        if not rest.startswith("/tree/"):
            siblings = [{"rfilename": f, "size": n} for f, n in sizes.items()]
            found = {"id": name, "sha": COMMIT, "siblings": siblings}
        return self.send(200, json.dumps(found).encode(), _JSON)

    def send_file(self, name: str, path: str) -> None:
        part = self.headers.get("Range")
        self.hub.requests.append((self.command, path, part))
        file = self.hub.repositories.get(name, Path("nowhere")) / path
        if self.command == "GET" and part is None and path in self.hub.held:
            self.hub.reached.set()
            self.hub.held[path].wait(60)
        if not file.is_file():
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data, status = file.read_bytes(), 200
        digest = hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", part or ""):
            begin, end = int(match[1]), min(int(match[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            data, status = data[begin : end + 1], 206
        return self.send(status, data, headers)

    def send(self, status: int, data: bytes, headers: Any) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)
