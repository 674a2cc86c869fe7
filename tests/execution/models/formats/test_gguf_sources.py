"""Places where a GGUF model may be: paths, folders, Ollama's store."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from support.demo_gguf import write_demo
from support.gguf_files import write_gguf
from support.tiny_models import FAMILIES, make_model

from asyncengine import Engine, SamplingParams
from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.models.formats.sources import find_gguf, find_ollama

KIND = "application/vnd.ollama.image."


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, and the same in two files."""
    folder = tmp_path_factory.mktemp("model")
    config = FAMILIES["llama"]()
    tensors = dict(make_model("llama").state_dict())
    write_gguf(folder / "whole.gguf", config, tensors)
    write_gguf(folder / "parts.gguf", config, tensors, split=20)
    return folder


def found(path: Path | str) -> tuple[Path, ...]:
    opened = find_gguf(str(path))
    assert opened is not None
    assert opened.config["model_type"] == "llama"
    return opened.files


def link(folder: Path, *files: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for file in files:
        (folder / file.name).symlink_to(file)
    return folder


def test_paths(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of any name, the user's folder, a folder with one model; other things are others' business."""
    whole = weights / "whole.gguf"
    assert found(whole) == (whole,)
    (tmp_path / "sha256-1").symlink_to(whole)
    assert found(tmp_path / "sha256-1") == (tmp_path / "sha256-1",)
    monkeypatch.setenv("HOME", str(weights))
    assert found("~/whole.gguf") == (whole,)
    one = link(tmp_path / "one", whole)
    for name in ("mmproj-model-f16.gguf", "model.imatrix.gguf"):
        (one / name).write_bytes(b"GGUF")
    assert found(one) == (one / "whole.gguf",)
    parts = sorted(weights.glob("parts-*.gguf"))
    assert found(link(tmp_path / "parts", *parts)) == tuple(tmp_path / "parts" / part.name for part in parts)
    for other in ("", ".", "Qwen/Qwen3-0.6B", str(tmp_path / "nothing"), "x" * 5000, "\0", "a/b:c.gguf/../d"):
        assert find_gguf(other) is None
    (tmp_path / "x.txt").write_text("x")
    assert find_gguf(str(tmp_path / "x.txt")) is None


def test_folders_that_leave_a_choice(weights: Path, tmp_path: Path) -> None:
    """Several models are listed; safetensors are what a folder was made from, and win."""
    folder = link(tmp_path / "several", weights / "whole.gguf", *sorted(weights.glob("parts-*.gguf")))
    with pytest.raises(
        ModelNotFound, match=r"has 2 GGUF models; pass the path of one: (parts-00001-of-\d+|whole)\.gguf \(0\.0 GB\), "
    ):
        find_gguf(str(folder))
    both = link(tmp_path / "both", weights / "whole.gguf")
    (both / "model.safetensors").write_bytes(b"")
    assert find_gguf(str(both)) is None
    for missing in (tmp_path / "no.gguf", "no/such/model.gguf"):
        with pytest.raises(ModelNotFound, match="no file"):
            find_gguf(str(missing))
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFound, match="not a whole GGUF file"):
        find_gguf(str(tmp_path / "empty.gguf"))


class Store:
    """A folder as Ollama keeps it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)

    def blob(self, content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / "blobs" / f"sha256-{digest}").write_bytes(content)
        return {"mediaType": KIND + kind, "digest": f"sha256:{digest}", "size": len(content)}

    def manifest(self, path: str, content: object) -> None:
        file = self.folder / "manifests" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    return Store(tmp_path / "models")


def test_ollama(store: Store, weights: Path) -> None:
    """Names with and without host, user and tag; parameters become defaults."""
    layer = store.blob((weights / "whole.gguf").read_bytes(), "model")
    params = store.blob(
        json.dumps({"stop": ["<end>"], "temperature": 0.5, "num_ctx": 9, "top_k": "x"}).encode(), "params"
    )
    for path in ("registry.ollama.ai/library/llama3/latest", "registry.ollama.ai/library/llama3/1b-q8",
                 "registry.ollama.ai/me/mine/latest", "hf.co/me/repo-GGUF/Q4_K_M"):  # fmt: skip
        store.manifest(path, {"layers": [{"mediaType": "other"}, layer, params]})
    blob = store.folder / "blobs" / layer["digest"].replace(":", "-")
    for name in ("llama3", "llama3:latest", "llama3:1b-q8", "me/mine", "hf.co/me/repo-GGUF:Q4_K_M"):
        assert found(f"ollama:{name}") == (blob,)
    opened = find_gguf("ollama:llama3")
    assert opened is not None
    assert opened.generation_defaults() == {"temperature": 0.5, "stop_strings": ["<end>"]}


def test_stop_strings_of_ollama_end_a_text(store: Store, tmp_path: Path) -> None:
    """Stop strings that are special tokens end it as tokens; a request's own go first, `ignore_eos` before both."""
    write_demo(tmp_path / "demo.gguf", "Q8_0")
    layer = store.blob((tmp_path / "demo.gguf").read_bytes(), "model")
    params = store.blob(json.dumps({"stop": [" Oslo", "<|im_start|>", ""]}).encode(), "params")
    store.manifest("registry.ollama.ai/library/demo/latest", {"layers": [layer, params]})
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    with Engine.from_pretrained("ollama:demo", show_progress=False, kv_cache_memory="16MiB") as engine:
        assert engine.info.generation_defaults["stop_strings"] == (" Oslo", "<|im_start|>")
        assert engine.info.eos_token_ids == (2, 0, 1)
        turns = [{"role": "user", "content": "What is the capital of Norway?"}]
        ended, own, on = (
            engine.chat(turns, greedy.replace(**fields)) for fields in ({}, {"stop": " capital"}, {"ignore_eos": True})
        )
    assert (ended.text, ended.finish_reason) == ("The capital of Norway is", "stop")
    assert own.text == "The"
    assert on.text.startswith("The capital of Norway is Oslo.")


def test_ollama_without_that_model(store: Store) -> None:
    with pytest.raises(ModelNotFound, match=r"Ollama has no model 'nothing' in .*models$"):
        find_ollama("nothing")
    store.manifest("registry.ollama.ai/library/llama3/8b", {"layers": []})
    with pytest.raises(ModelNotFound, match=r"It has llama3:8b$"):
        find_ollama("nothing")


@pytest.mark.parametrize("digest", ["", None, 7, [], "../../../etc/passwd", "sha256:../x", "sha256:" + "A" * 64,
                                    "sha256:" + "0" * 63, "md5:" + "0" * 64, "sha256:" + "0" * 64 + "/.."])  # fmt: skip
def test_digests_that_are_none(digest: Any, store: Store) -> None:
    """Nothing of them becomes part of a path."""
    store.manifest("registry.ollama.ai/library/a/latest", {"layers": [{"mediaType": KIND + "model", "digest": digest}]})
    with pytest.raises(ModelNotFound, match="a digest that is none"):
        find_ollama("a")


def test_broken_manifests(store: Store, weights: Path) -> None:
    layer = store.blob((weights / "whole.gguf").read_bytes(), "model")
    adapter = {**layer, "mediaType": KIND + "adapter"}
    gone = {**layer, "digest": "sha256:" + "0" * 64}
    for content, kind, words in (
        ("{", ModelNotFound, "cannot be read"),
        ("[]", ModelNotFound, "does not hold a JSON object"),
        ("[" * 100_000, ModelNotFound, "cannot be read"),
        ('{"x": "' + "y" * 2**21 + '"}', ModelNotFound, "is larger than 1048576 bytes"),
        ({}, ModelNotFound, "has no layers"),
        ({"layers": [None, 1, {"mediaType": 1}]}, ModelNotFound, "names no weights"),
        ({"layers": [layer, layer]}, ModelNotFound, "names several files of weights"),
        ({"layers": [gone]}, ModelNotFound, "pull the model again"),
        ({"layers": [{**layer, "size": 5}]}, ModelNotFound, "its manifest says 5; pull the model again"),
        ({"layers": [layer, adapter]}, UnsupportedModel, "has an adapter in GGUF"),
    ):
        store.manifest("registry.ollama.ai/library/a/latest", content)
        with pytest.raises(kind, match=words):
            find_ollama("a")
