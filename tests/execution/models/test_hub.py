"""Models on the hub: names as people paste them, what is fetched, what errors say. The hub is a server of ours."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from support.data import cases_of
from support.gguf_files import write_gguf
from support.tiny_models import FAMILIES, make_model

from asyncengine.errors import ModelNotFound
from asyncengine.execution.models.checkpoint import open_checkpoint
from asyncengine.execution.models.hub import HubName, download, parse_name

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
        """Answers, with headers, that a repository's requests get instead."""
        self.cut: dict[str, int] = {}
        """Files whose connection breaks after so many bytes, once."""
        self.sizes: dict[str, int] = {}
        """Files that are said to be of another size."""

    def begun(self, file: str) -> list[int]:
        """Offsets at which the downloads of a file began."""
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


CASES = cases_of(__file__)
PLAIN = {"config.json": b"{}", "model.safetensors": b"x" * 1000, "README.md": b"hi", "consolidated.safetensors": b"x"}
QUANTS = {
    "a-Q4_K_M.gguf": b"GGUF" * 25, "a-Q4_0.gguf": b"0" * 90, "a-IQ4_XS.gguf": b"1", "UD/a-Q4_K_XL.gguf": b"2" * 95,
    "a-Q8_0-00001-of-00002.gguf": b"3", "a-Q8_0-00002-of-00002.gguf": b"4", "mmproj-a-Q8_0.gguf": b"5",
}  # fmt: skip


def fetch(name: str, revision: str | None = None) -> Path:
    parsed = parse_name(name)
    assert parsed is not None
    return download(parsed, revision)


@pytest.mark.parametrize(
    ("text", "named"),
    CASES["names"].items(),
)  # fmt: skip
def test_names(text: str, named: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    assert parse_name(text) == (None if named is None else HubName(*named))


@pytest.mark.parametrize(
    "text",
    CASES["no addresses"],
)  # fmt: skip
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ModelNotFound, match="is no address of a model on the Hugging Face hub, such as"):
        open_checkpoint(text)


def test_a_whole_model_is_fetched_once(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """Only files that are read are fetched; where to, and how much, is said before."""
    hub.repos["me/a"] = PLAIN
    with caplog.at_level(logging.INFO, "asyncengine"):
        folder = fetch("me/a")
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert f"downloading 2 files of me/a (0.0 GB) to {folder.parents[3]}" in caplog.text
        caplog.clear()
        assert fetch("https://huggingface.co/me/a/tree/main") == folder
        assert fetch("me/a", revision=COMMIT) == folder
    assert len(hub.begun("model.safetensors")) == 1
    assert "downloading" not in caplog.text


@pytest.mark.parametrize(("choice", "file"), CASES["choices"].items())
def test_one_of_several_gguf_models(hub: Hub, choice: str, file: str) -> None:
    """A model is chosen by its file, or by a word of it; all its parts come, and nothing else."""
    hub.repos["me/a"] = QUANTS
    found = fetch(f"me/a:{choice}")
    assert found.read_bytes() == QUANTS[file]
    folder = found.parent.parent if "/" in file else found.parent
    parts = {name for name in QUANTS if name.startswith("a-Q8_0")} if "Q8_0" in file else {file}
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")} == parts
    assert fetch(f"https://huggingface.co/me/a/blob/main/{file}?download=true") == found


@pytest.mark.parametrize(("name", "says", "lists"), CASES["listed"])
def test_what_leaves_a_choice_is_listed(hub: Hub, name: str, says: str, lists: list[str]) -> None:
    hub.repos["me/a"] = QUANTS
    hub.sizes["a-Q4_K_M.gguf"] = 4_900_000_000
    with pytest.raises(ModelNotFound) as raised:
        open_checkpoint(name)
    error = str(raised.value)
    assert error.startswith(f'me/a {says}, as in "me/a:Q4_K_M": ')
    listed = error.partition(": ")[2] if name == "me/a" else error
    assert all(quant in listed for quant in lists)
    assert "a-Q4_K_M.gguf (4.9 GB)" in listed
    assert "mmproj" not in error


def test_a_gguf_model_is_opened_by_any_of_its_names(hub: Hub, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny-F32.gguf", FAMILIES["llama"](), dict(make_model("llama").state_dict()))
    hub.repos["me/tiny-GGUF"] = {"tiny-F32.gguf": (tmp_path / "tiny-F32.gguf").read_bytes(), "config.json": b"{}"}
    for name in ("me/tiny-GGUF", "hf.co/me/tiny-GGUF:F32", "https://huggingface.co/me/tiny-GGUF/tree/main"):
        opened = open_checkpoint(name)
        assert opened.config["model_type"] == "llama"
    assert len(hub.begun("tiny-F32.gguf")) == 1


@pytest.mark.parametrize(
    ("repo", "token", "says"),
    CASES["errors"],
)  # fmt: skip
def test_errors_say_what_helps(
    hub: Hub, repo: str, token: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos.update({"me/a": PLAIN, "me/gated": {**PLAIN, **QUANTS}})
    hub.gated.add("me/gated")
    hub.status.update({
        "me/busy": (429, {"Retry-After": "7"}), "me/busier": (429, {"RateLimit": '"api";r=0;t=55'}),
        "me/down": (503, {}), "me/forbidden": (403, {}), "me/odd": (418, {}),
    })  # fmt: skip
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelNotFound, match=says.replace("{url}", hub.url)):
        open_checkpoint(repo)


def test_what_the_disk_has_no_room_for_is_not_begun(hub: Hub) -> None:
    hub.repos["me/a"] = PLAIN
    hub.sizes["model.safetensors"] = 10**18
    with pytest.raises(
        ModelNotFound, match=r"me/a does not fit into .*hub, where .* GB are free \(it takes 10+\.0 GB\)"
    ):
        fetch("me/a")
    assert not hub.begun("model.safetensors")


def test_without_the_hub_what_is_here_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline by a setting, or because nobody answers."""
    from huggingface_hub import constants

    hub.repos.update({"me/a": PLAIN, "me/q": QUANTS})
    names = ("me/a", "me/q:Q4_K_M", "me/q:Q8_0")
    before = [fetch(name) for name in names]
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    assert [fetch(name) for name in names] == before
    with pytest.raises(ModelNotFound, match=r"cannot be reached at http://127.0.0.1:9 \(ConnectError: .*\)"):
        fetch("me/b")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [fetch(name) for name in names] == before
    with pytest.raises(ModelNotFound, match=r"me/b is not, or not whole, in .*, and HF_HUB_OFFLINE keeps it"):
        fetch("me/b")
    with pytest.raises(ModelNotFound, match=r"me/q has 2 GGUF models, none for 'Q4_0'"):
        fetch("me/q:Q4_0")
