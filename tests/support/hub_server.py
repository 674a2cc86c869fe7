"""A Hugging Face hub on this machine: what its client asks for, answered as the real one does, faults included."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_valid"


class Hub:
    """Repositories by name, each with files by path, and what the server is to do wrong."""

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        """Method and path of each request; of part of a file with where it begins."""
        self.status: dict[str, tuple[int, dict[str, str]]] = {}
        """Answers, with headers, to whatever is asked of a repository."""
        self.cut: dict[str, int] = {}
        """Files whose connection breaks after so many bytes, once."""
        self.sizes: dict[str, int] = {}
        """Files that are said to be of another size."""

    def begun(self, file: str) -> list[int]:
        """Where each download of a file began."""
        return [int(path.rpartition("@")[2]) for _, path in self.asked if f"/{file}@" in path]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        repo = found[1] if found else ""
        if repo in self.hub.status:
            return self._send(*self.hub.status[repo])
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in ("", TOKEN):
            return self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if found is None or repo not in self.hub.repos:
            return self._send(404 if token else 401, {"X-Error-Code": "RepoNotFound"})
        revision = (api[3] if api else found[2]) or "main"
        if revision not in ("main", "refs/pr/1", COMMIT):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        files = self.hub.repos[repo]
        if api is not None:
            return self._send_json(self._tree(files) if api[2] == "tree" else self._info(repo, files))
        if repo in self.hub.gated:
            return self._send(403 if token else 401, {"X-Error-Code": "GatedRepo"})
        if found[3] not in files:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        return self._send_file(found[3], files[found[3]], body)

    def _info(self, repo: str, files: dict[str, bytes]) -> Any:
        siblings = [{"rfilename": name, "size": self._size(name, content)} for name, content in files.items()]
        return {"id": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0}

    def _tree(self, files: dict[str, bytes]) -> Any:
        return [
            {"type": "file", "path": name, "size": self._size(name, content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]

    def _size(self, name: str, content: bytes) -> int:
        return self.hub.sizes.get(name, len(content))

    def _send(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _send_json(self, data: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(data).encode())

    def _send_file(self, name: str, content: bytes, body: bool) -> None:
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes",
            "Content-Length": str(self._size(name, content) - begin),
        }  # fmt: skip
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if not body:
            return self._send(200, headers)
        self.hub.asked[-1] = (self.command, f"{self.path}@{begin}")
        cut = self.hub.cut.pop(name, None)
        self._send(206 if begin else 200, headers, content[begin : None if cut is None else begin + cut])
        if cut is not None:
            self.close_connection = True
        return None


@contextmanager
def serve() -> Iterator[Hub]:
    """The hub, on a port of its own."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub that huggingface_hub talks to, with an empty cache and no token."""
    import huggingface_hub
    from huggingface_hub import constants

    with serve() as server:
        home = tmp_path_factory.mktemp("hf")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()
