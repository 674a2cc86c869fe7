"""Models on the hub: names as people paste them, what is fetched, what errors say. The hub is a server of ours."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.gguf_files import write_gguf
from support.hub_server import COMMIT, TOKEN, Hub, hub
from support.tiny_models import FAMILIES, make_model

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound
from asyncengine.models.checkpoint import open_checkpoint
from asyncengine.models.hub import HubName, download, parse_name, short_name

__all__ = ["hub"]
CONFIG = EngineConfig()
PLAIN = {"config.json": b"{}", "model.safetensors": b"x" * 1000, "README.md": b"hi", "consolidated.safetensors": b"x"}
QUANTS = {
    "a-Q4_K_M.gguf": b"GGUF" * 25, "a-Q4_0.gguf": b"0" * 90, "a-IQ4_XS.gguf": b"1", "UD/a-Q4_K_XL.gguf": b"2" * 95,
    "a-Q8_0-00001-of-00002.gguf": b"3", "a-Q8_0-00002-of-00002.gguf": b"4", "mmproj-a-Q8_0.gguf": b"5",
}  # fmt: skip


def fetch(name: str, **fields: object) -> Path:
    parsed = parse_name(name)
    assert parsed is not None
    return download(parsed, EngineConfig.from_dict(fields))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("me/a", HubName("me/a")),
        ("gpt2", HubName("gpt2")),
        ("bartowski/X-GGUF:Q4_K_M", HubName("bartowski/X-GGUF", "Q4_K_M")),
        ("me/a:dir/b.Q8_0.gguf", HubName("me/a", "dir/b.Q8_0.gguf")),
        ("hf.co/me/a:Q4", HubName("me/a", "Q4")),
        ("huggingface.co/me/a", HubName("me/a")),
        ("hf://me/a", HubName("me/a")),
        ("https://huggingface.co/me/a", HubName("me/a")),
        ("https://huggingface.co/me/a/?library=gguf#files", HubName("me/a")),
        ("http://www.huggingface.co/gpt2", HubName("gpt2")),
        ("https://hf.co/me/a:Q4_K_M", HubName("me/a", "Q4_K_M")),
        ("https://huggingface.co/me/a/tree/main", HubName("me/a", "", "main")),
        ("https://huggingface.co/me/a/tree/refs%2Fpr%2F1/Q8", HubName("me/a", "Q8", "refs/pr/1")),
        ("https://huggingface.co/me/a/blob/main/x/f.gguf", HubName("me/a", "x/f.gguf", "main")),
        ("https://huggingface.co/me/a/resolve/v1/f%20g.gguf?download=true", HubName("me/a", "f g.gguf", "v1")),
        ("https://huggingface.co/me/a/blob/main/config.json", HubName("me/a", "", "main")),
        ("https://mirror.example/hub/me/a/tree/main", HubName("me/a", "", "main")),
        # paths
        ("./me/a", None), ("/me/a", None), ("~/a", None), ("me\\a", None), ("C:/me/a", None), ("a/b/c", None),
        ("me/a.gguf", None), ("a.gguf", None), ("a:Q4", None), ("ollama:a", None), ("ollama:me/a", None), ("", None),
        ("me/a:", None), ("me/a:b:c", None), ("../a:Q4", None), ("me/a/tree/main", None), ("not an id!", None),
    ],
)  # fmt: skip
def test_names(text: str, named: HubName | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub/")
    assert parse_name(text) == named


@pytest.mark.parametrize(
    "text",
    ["https://huggingface.co/", "https://huggingface.co/datasets/me/a", "https://huggingface.co/me/a/discussions/3",
     "https://example.com/me/a", "https://example.com/a.gguf", "hf.co/a/b/c/d"],
)  # fmt: skip
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ModelNotFound, match="is no address of a model on the Hugging Face hub, such as"):
        open_checkpoint(text, CONFIG)


def test_models_are_called_by_their_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert short_name("https://huggingface.co/me/a/tree/main") == "a"
    assert short_name("hf.co/me/a:dir/b-Q8_0.gguf") == "a:b-Q8_0.gguf"
    assert short_name("/models/a/") == "a"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "a:Q4").mkdir()
    assert short_name("me/a:Q4") == "a:Q4"


def test_a_whole_model_is_fetched_once(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """Only what is read of it; where to, and how much, is said before."""
    hub.repos["me/a"] = PLAIN
    with caplog.at_level(logging.INFO, "asyncengine"):
        folder = fetch("me/a")
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
        assert f"downloading 2 files of me/a (0.0 GB) to {folder.parents[2]}" in caplog.text
        caplog.clear()
        assert fetch("https://huggingface.co/me/a/tree/main") == folder
        assert fetch("me/a", revision=COMMIT) == folder
    assert len(hub.begun("model.safetensors")) == 1
    assert "downloading" not in caplog.text


def test_an_interrupted_download_goes_on_where_it_broke(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    content = bytes(range(250)) * 10
    hub.repos["me/a"] = {"a.gguf": content}
    hub.cut["a.gguf"] = 1000
    with suppress(ModelNotFound):  # releases of huggingface_hub before 2 leave it to the next try
        fetch("me/a")
    assert fetch("me/a").read_bytes() == content
    assert hub.begun("a.gguf") == [0, 1000]


def test_files_that_came_before_an_end_are_not_fetched_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    get = file_download.http_get
    ended = {"model.safetensors"}

    def end(url: str, *args: Any, **options: Any) -> None:
        if (name := url.rpartition("/")[2]) in ended:
            ended.remove(name)
            raise ConnectionError("the network is gone")
        get(url, *args, **options)

    monkeypatch.setattr(file_download, "http_get", end)
    hub.repos["me/a"] = {**PLAIN, "tokenizer.json": b"[]"}
    with pytest.raises(ModelNotFound, match="the network is gone"):
        fetch("me/a")
    assert (fetch("me/a") / "model.safetensors").read_bytes() == PLAIN["model.safetensors"]
    assert [len(hub.begun(name)) for name in ("config.json", "tokenizer.json", "model.safetensors")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("choice", "file"),
    [
        ("Q4_K_M", "a-Q4_K_M.gguf"),
        ("q4_k_m", "a-Q4_K_M.gguf"),
        ("a-Q4_0.gguf", "a-Q4_0.gguf"),
        ("a-Q4_0", "a-Q4_0.gguf"),
        ("IQ4", "a-IQ4_XS.gguf"),
        ("UD", "UD/a-Q4_K_XL.gguf"),
        ("Q8", "a-Q8_0-00001-of-00002.gguf"),
        ("a-Q8_0-00002-of-00002.gguf", "a-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_one_of_several_gguf_models(hub: Hub, choice: str, file: str) -> None:
    """By its file, or by a word of it; with all parts, and nothing else."""
    hub.repos["me/a"] = QUANTS
    found = fetch(f"me/a:{choice}")
    assert found.read_bytes() == QUANTS[file]
    folder = found.parent.parent if "/" in file else found.parent
    parts = {name for name in QUANTS if name.startswith("a-Q8_0")} if "Q8_0" in file else {file}
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")} == parts
    assert fetch(f"https://huggingface.co/me/a/blob/main/{file}?download=true") == found


@pytest.mark.parametrize(
    ("name", "says", "lists"),
    [
        ("me/a", "has 5 GGUF models; choose one", ["Q4_K_M", "Q4_0", "IQ4_XS", "Q4_K_XL", "Q8_0"]),
        ("me/a:Q4", "has 3 GGUF models for 'Q4'; choose one", ["Q4_K_M", "Q4_0", "Q4_K_XL"]),
        ("me/a:Q6_K", "has 5 GGUF models, none for 'Q6_K'; choose one", ["Q4_K_M", "Q8_0"]),
        ("me/a:Q4_K_", "has 2 GGUF models for 'Q4_K_'; choose one", ["Q4_K_M", "Q4_K_XL"]),
    ],
)
def test_what_leaves_a_choice_is_listed(hub: Hub, name: str, says: str, lists: list[str]) -> None:
    hub.repos["me/a"] = QUANTS
    hub.sizes["a-Q4_K_M.gguf"] = 4_900_000_000
    with pytest.raises(ModelNotFound) as raised:
        open_checkpoint(name, CONFIG)
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
        opened = open_checkpoint(name, CONFIG)
        assert opened.config["model_type"] == "llama"
    assert len(hub.begun("tiny-F32.gguf")) == 1


@pytest.mark.parametrize(
    ("repo", "token", "says"),
    [
        ("me/gated", None, r"me/gated is gated: accept its licence at {url}/me/gated, and set HF_TOKEN .* is none"),
        ("me/gated", TOKEN, r"me/gated is gated: accept its licence at .* there is one, which may not read it"),
        ("me/gated:Q4_K_M", None, "me/gated is gated"),
        ("me/none", None, r"'me/none' is neither a folder here nor a model on .*; for a private one, set HF_TOKEN"),
        ("me/none", TOKEN, r"is neither a folder .*there is one, which may not read it"),
        ("me/a", "hf_expired", r"refuses your token: set HF_TOKEN to a valid one"),
        ("https://huggingface.co/me/a/tree/v9", None, r"me/a has no revision 'v9'"),
        ("me/busy", None, r"wants you to wait 7 seconds after too many requests; with HF_TOKEN"),
        ("me/busier:Q4", None, r"wants you to wait 55 seconds"),
        ("me/down", None, r"has a fault of its own \(HTTP 503\): try again later"),
        ("me/forbidden", TOKEN, r"does not let you read me/forbidden"),
        ("me/odd", None, r"answers HTTP 418 for me/odd"),
        ("me/a--b", None, r"'me/a--b' is neither a folder here nor a valid Hugging Face hub id"),
    ],
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
        open_checkpoint(repo, CONFIG)


def test_what_the_disk_has_no_room_for_is_not_begun(hub: Hub) -> None:
    hub.repos["me/a"] = PLAIN
    hub.sizes["model.safetensors"] = 10**18
    with pytest.raises(
        ModelNotFound, match=r"me/a does not fit into .*hub, where .* GB are free \(it takes 10+\.0 GB\)"
    ):
        fetch("me/a")
    assert not hub.begun("model.safetensors")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"No space left on device\): make room, or set HF_HOME to"),
        (RuntimeError("Data processing error: No space left on device (os error 28)"), "make room, or set HF_HOME to"),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            r"cannot be kept in .* \(Permission denied\): set HF_HOME to",
        ),
        (OSError(errno.EROFS, "Read-only file system"), r"cannot be kept in .*: set HF_HOME to a folder that you may"),
        (TimeoutError("timed out"), r"cannot be reached at http://127.* \(TimeoutError: timed out\)"),
    ],
)
def test_what_happens_on_the_way(hub: Hub, error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    def fail(*args: object, **options: object) -> None:
        raise error

    hub.repos["me/a"] = PLAIN
    monkeypatch.setattr(file_download, "http_get", fail)
    with pytest.raises(ModelNotFound, match=says):
        fetch("me/a")


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
