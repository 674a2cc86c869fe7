"""GGUF files that lie: each a short typed error that names what is wrong, at once and without taking memory."""

from __future__ import annotations

import os
import re
import struct
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.data import cases_of
from support.gguf_bytes import F32, STRING, array, gguf, place, string, text, value, whole

from asyncengine import errors
from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel
from asyncengine.execution.models.formats.gguf import header
from asyncengine.execution.models.formats.gguf.architectures import VALUES
from asyncengine.execution.models.formats.gguf.model import GgufModel

LLAMA = string("general.architecture", "llama")
EMBED = place("token_embd.weight", (32, 4), 0, 0)
SHAPE = {
    "general.architecture": LLAMA, "llama.block_count": whole("llama.block_count", 1),
    "llama.context_length": whole("llama.context_length", 64),
    "llama.embedding_length": whole("llama.embedding_length", 32),
    "llama.attention.head_count": whole("llama.attention.head_count", 2),
    "llama.attention.layer_norm_rms_epsilon":
        value("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
}  # fmt: skip


def model(*more: bytes, tensors: Sequence[bytes] = (EMBED,), data: bytes = b"\0" * 4096) -> bytes:
    return gguf([*SHAPE.values(), *more], tensors, data)


def xielu(value: bytes) -> bytes:
    """A model whose header has numbers of every layer."""
    own = [string("general.architecture", "apertus")]
    for part in [*SHAPE.values()][1:]:
        end = 8 + part[0]
        own.append(text(part[8:end].replace(b"llama", b"apertus")) + part[end:])
    return gguf([*own, value, value.replace(b"alpha_n", b"alpha_p")], (EMBED,), b"\0" * 4096)


def entry(row: Any) -> bytes:
    """One value of a header. Texts are bytes in Latin-1; an array's may be repeated."""
    if row == "llama":
        return LLAMA
    kind, key, *given = row
    given = [each.encode("latin-1") if isinstance(each, str) else each for each in given]
    if kind == "array" and len(given) == 4:
        given = [*given[:2], given[2] * given[3]]
    make: Any = {"text": text, "value": value, "string": string, "whole": whole, "array": array}[kind]
    made: bytes = make(key.encode("latin-1") if kind in ("string", "value") else key, *given)
    return made


def file_of(row: dict[str, Any]) -> bytes:
    """The file that a row describes: `values` of its header, or those of a small `model` changed; the bytes of `data`
    are zeros."""
    tensors = [EMBED if each == "embedding" else place(*each) for each in row.get("tensors", ())]
    if "model" in row:
        changed = SHAPE | {each[1]: entry(each) for each in row["model"]}
        return gguf([*changed.values()], tensors or [EMBED], b"\0" * row.get("data", 4096))
    head = {name: row[name] for name in ("version", "counts") if name in row}
    magic = row.get("magic", "GGUF").encode()
    return gguf([entry(each) for each in row.get("values", ())], tensors, b"\0" * row.get("data", 0), magic, **head)


Broken = tuple[bytes, type[EngineError], str]
BROKEN: dict[str, Broken] = {
    name: (file_of(row), getattr(errors, error), says) for name, (row, error, says) in cases_of(__file__).items()
} | {
    "empty": (b"", ModelNotFound, "it has 0 bytes"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "is big-endian"),
    "2**31 dimensions": (
        gguf([LLAMA], [text("a") + struct.pack("<I", 2**31) + b"\0" * 64]), ModelNotFound, "has 2147483648 dimensions"
    ),
    "architecture of megabytes": (
        gguf([string("general.architecture", "a" * 2**20)]), UnsupportedModel, r"\.\. is not",
    ),
    "xielu of text": (xielu(string("xielu.alpha_n", "x")), ModelNotFound, "xielu.alpha_. must have a finite number"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_named_error(name: str, tmp_path: Path) -> None:
    content, kind, words = BROKEN[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    begun = time.thread_time()
    try:
        with pytest.raises(kind, match=words) as caught:
            GgufModel(path)
        assert time.thread_time() - begun < 10
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) <= 1000
    assert str(path) in str(caught.value)


def test_a_million_words_open_at_once(tmp_path: Path) -> None:
    """A tokenizer of 150,000 words and as many merges costs little, and nothing before it is asked for."""
    count = 150_000
    words = b"".join(text(f"word{index}") for index in range(count))
    merges = b"".join(text(f"wo rd{index}") for index in range(count))
    path = tmp_path / "model.gguf"
    path.write_bytes(
        model(
            array("tokenizer.ggml.tokens", STRING, count, words), array("tokenizer.ggml.merges", STRING, count, merges)
        )
    )
    begun = time.thread_time()
    opened = GgufModel(path)
    assert time.thread_time() - begun < 5
    begun = time.thread_time()
    found = opened.metadata["tokenizer.ggml.tokens"]
    assert time.thread_time() - begun < 5
    assert (len(found), found[0], found[-1]) == (count, "word0", f"word{count - 1}")
    assert opened.metadata["llama.context_length"] == 64
    assert opened.metadata.get("no such key") is None
    assert opened.metadata.long["tokenizer.ggml.tokens"].length == count


def test_words_that_are_no_text(tmp_path: Path) -> None:
    """Words that are not UTF-8 are found when they are read."""
    path = tmp_path / "model.gguf"
    path.write_bytes(model(array("tokenizer.ggml.tokens", STRING, 2, text("a") + text(b"\xff"))))
    opened = GgufModel(path)
    with pytest.raises(ModelNotFound, match=r"model.gguf .* its tokenizer.ggml.tokens is not UTF-8"):
        opened.metadata["tokenizer.ggml.tokens"]


FILES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a fifo": lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to("fifo")),
}


@pytest.mark.parametrize("name", FILES)
def test_only_regular_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    FILES[name](path)
    begun = time.thread_time()
    with pytest.raises(ModelNotFound, match=r"is not a regular file|cannot be read"):
        GgufModel(path)
    assert time.thread_time() - begun < 10


def test_every_key_that_is_read_has_a_type() -> None:
    """`Header.get` would take one that is written wrongly for one that files lack."""
    sources = "".join(file.read_text(encoding="utf-8") for file in Path(header.__file__).parent.glob("*.py"))
    read = set(re.findall(r"header(?:\.get\(|\.positive\(|\[)\s*\"([a-z_.]+)\"", sources))
    read |= {key for key, *_ in VALUES.values()}
    assert "attention.head_count" in read
    assert read <= header.KEYS.keys()
