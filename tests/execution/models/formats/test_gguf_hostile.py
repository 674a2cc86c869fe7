"""GGUF files that lie: each a short typed error that names what is wrong, at once and without taking memory."""

from __future__ import annotations

import os
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gguf_bytes import ARRAY, F32, STRING, U32, array, gguf, place, string, text, value, whole

from asyncengine.errors import EngineError, ModelNotFound, UnsupportedModel
from asyncengine.execution.models.formats.gguf import header
from asyncengine.execution.models.formats.gguf.architectures import VALUES
from asyncengine.execution.models.formats.gguf.model import GgufModel

LLAMA = string("general.architecture", "llama")
EMBED = place("token_embd.weight", (32, 4), 0, 0)
BYTES = 32 * 4 * 4
SHAPE = [
    LLAMA, whole("llama.block_count", 1), whole("llama.context_length", 64), whole("llama.embedding_length", 32),
    whole("llama.attention.head_count", 2),
    value("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
]  # fmt: skip


def model(*more: bytes, tensors: tuple[bytes, ...] = (EMBED,), data: bytes = b"\0" * 4096) -> bytes:
    return gguf([*SHAPE, *more], tensors, data)


def pair(first: tuple[int, int], second: tuple[int, int]) -> bytes:
    """Two vectors at (numbers, offset)."""
    tensors = [place(name, (count,), 0, at) for name, (count, at) in zip("ab", (first, second), strict=True)]
    return gguf([LLAMA], tensors, b"\0" * 256)


def xielu(value: bytes) -> bytes:
    """A model whose header has numbers of every layer."""
    own = [string("general.architecture", "apertus")]
    own += [text(part[8 : 8 + part[0]].replace(b"llama", b"apertus")) + part[8 + part[0] :] for part in SHAPE[1:]]
    return gguf([*own, value, value.replace(b"alpha_n", b"alpha_p")], (EMBED,), b"\0" * 4096)


BROKEN: dict[str, tuple[bytes, type[EngineError], str]] = {
    "empty": (b"", ModelNotFound, "it has 0 bytes"),
    "wrong magic": (gguf(magic=b"GGML"), ModelNotFound, "it begins with b'GGML'"),
    "version 1": (gguf(version=1), UnsupportedModel, "is version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "is big-endian"),
    "2**60 tensors": (gguf(counts=(2**60, 0)), ModelNotFound, "claims 1152921504606846976 tensors"),
    "terabyte key": (gguf([text("x", 2**40)]), ModelNotFound, "a key of 1099511627776 bytes"),
    "2**64 - 1 bytes": (gguf([value("x", STRING, text("x", 2**64 - 1))]), ModelNotFound, "ends within its header"),
    "2**40 strings": (gguf([array("x", STRING, 2**40, b"")]), ModelNotFound, "claims 1099511627776 strings"),
    "arrays of arrays": (gguf([array("x", ARRAY, 1, b"\0" * 64)]), ModelNotFound, "x is an array of arrays"),
    "unknown value": (gguf([value("x", 13, b"")]), ModelNotFound, "x is of the unknown type 13"),
    "key twice": (gguf([LLAMA, LLAMA]), ModelNotFound, "the key 'general.architecture' twice"),
    "key of bytes": (gguf([string(b"\xff\xfe", "x")]), ModelNotFound, "a key that is not UTF-8"),
    "value of bytes": (gguf([string("general.architecture", b"\xff")]), ModelNotFound, "architecture is not UTF-8"),
    "alignment 24": (gguf([whole("general.alignment", 24)]), ModelNotFound, "general.alignment is 24"),
    "alignment 2**31": (gguf([whole("general.alignment", 2**31)]), ModelNotFound, "alignment is 2147483648"),
    "alignment of text": (gguf([string("general.alignment", "32")]), ModelNotFound, "alignment is '32'"),
    "tensor twice": (pair((8, 0), (8, 32)).replace(b"b", b"a"), ModelNotFound, "the tensor 'a' twice"),
    "no dimensions": (gguf([LLAMA], [place("a", (), 0, 0)], b"\0" * 64), ModelNotFound, "has 0 dimensions"),
    "2**31 dimensions": (
        gguf([LLAMA], [text("a") + struct.pack("<I", 2**31) + b"\0" * 64]), ModelNotFound, "has 2147483648 dimensions"
    ),
    "size 0": (gguf([LLAMA], [place("a", (0, 4), 0, 0)], b"\0" * 64), ModelNotFound, "impossible shape"),
    "sizes overflow": (gguf([LLAMA], [place("a", (2**32, 2**32), 0, 0)]), ModelNotFound, "impossible shape"),
    "truncated": (gguf([LLAMA], [place("a", (64,), 0, 0)], b"\0" * 255), ModelNotFound, "it is truncated"),
    "misaligned": (pair((8, 0), (8, 40)), ModelNotFound, "b begins at 40, no multiple of the alignment 32"),
    "overlapping": (pair((16, 0), (8, 32)), ModelNotFound, "b begins at 32, within or before"),
    "unknown type": (gguf([LLAMA], [place("a", (1,), 999, 0)], b"\0" * 64), ModelNotFound, "the unknown type 999"),
    "type that is gone": (gguf([LLAMA], [place("a", (32,), 5, 0)], b"\0" * 64), ModelNotFound, "Q4_3, which llama.cpp"),
    "part of a block": (gguf([LLAMA], [place("a", (33,), 8, 0)], b"\0" * 64), ModelNotFound, "blocks of 32"),
    "nothing": (gguf(), ModelNotFound, "names no general.architecture"),
    "architecture of a number": (gguf([whole("general.architecture", 1)]), ModelNotFound, "names no general.arch"),
    "architecture of megabytes": (
        gguf([string("general.architecture", "a" * 2**20)]),
        UnsupportedModel, r"\.\. is not",
    ),
    "unknown architecture": (
        gguf([string("general.architecture", "mamba")], [EMBED], b"\0" * BYTES), UnsupportedModel,
        "'mamba' is not read. Read are llama, mistral3",
    ),
    "projector": (gguf([string("general.architecture", "clip")]), UnsupportedModel, "image part of a model"),
    "adapter": (gguf([LLAMA, string("general.type", "adapter")]), UnsupportedModel, "LoRA adapter in GGUF"),
    "old imatrix": (gguf([LLAMA, whole("imatrix.chunk_count", 1)]), UnsupportedModel, "importance matrix"),
    "embedder": (gguf([string("general.architecture", "bert")]), UnsupportedModel, "embedding model"),
    "tokenizer alone": (gguf([LLAMA]), ModelNotFound, "a tokenizer alone"),
    "heads of text": (
        gguf([*SHAPE[:4], string("llama.attention.head_count", "2")], [EMBED], b"\0" * BYTES), ModelNotFound,
        "llama.attention.head_count must be a whole number",
    ),
    "as many layers as fit": (
        gguf([*SHAPE[:1], whole("llama.block_count", 2**32 - 1), *SHAPE[2:]], [EMBED], b"\0" * BYTES), ModelNotFound,
        "num_hidden_layers must be between",
    ),
    "a million layers": (
        model(array("llama.attention.head_count_kv", U32, 10**6, b"\1" * 4 * 10**6)), ModelNotFound, "1000000 values"
    ),
    "half of a head rotated": (model(whole("llama.rope.dimension_count", 8)), UnsupportedModel, "rotated in part"),
    "more than a head rotated": (model(whole("llama.rope.dimension_count", 80)), ModelNotFound, "_count is 80"),
    "infinite base": (
        model(value("llama.rope.freq_base", F32, struct.pack("<f", float("inf")))), ModelNotFound, "a finite number"
    ),
    "xielu of text": (xielu(string("xielu.alpha_n", "x")), ModelNotFound, "xielu.alpha_. must have a finite number"),
    "tensor of another family": (
        model(tensors=(EMBED, place("blk.0.ssm_in.weight", (8,), 0, 512))), ModelNotFound,
        "llama does not have: blk.0.ssm_in.weight",
    ),
    "i-quant": (
        model(tensors=(place("token_embd.weight", (256, 4), 0, 0), place("blk.0.ffn_up.weight", (256, 1), 19, 4096)),
              data=b"\0" * 8192),
        UnsupportedModel, "blk.0.ffn_up.weight as IQ1_S, which is not read",
    ),
    "rows for no head": (
        model(tensors=(EMBED, place("blk.0.attn_q.weight", (32, 3), 0, 512))), ModelNotFound, "3 rows for 2 heads"
    ),
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


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    """The hub's cache and Ollama keep blobs, and links to them."""
    (tmp_path / "sha256-1").write_bytes(model())
    (tmp_path / "model.gguf").symlink_to("sha256-1")
    assert GgufModel(tmp_path / "model.gguf").config["model_type"] == "llama"


def test_every_key_that_is_read_has_a_type() -> None:
    """`Header.get` would take one that is written wrongly for one that files lack."""
    sources = "".join(file.read_text(encoding="utf-8") for file in Path(header.__file__).parent.glob("*.py"))
    read = set(re.findall(r"header(?:\.get\(|\.positive\(|\[)\s*\"([a-z_.]+)\"", sources))
    read |= {key for key, *_ in VALUES.values()}
    assert "attention.head_count" in read
    assert read <= header.KEYS.keys()
