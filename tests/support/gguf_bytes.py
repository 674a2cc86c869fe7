"""GGUF files byte by byte: what no writer would write."""

from __future__ import annotations

import struct
from collections.abc import Sequence

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(content: str | bytes, length: int | None = None) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def string(key: str | bytes, content: str | bytes) -> bytes:
    return value(key, STRING, text(content))


def whole(key: str, number: int) -> bytes:
    return value(key, U32, struct.pack("<I", number))


def array(key: str, kind: int, count: int, payload: bytes) -> bytes:
    return value(key, ARRAY, struct.pack("<IQ", kind, count) + payload)


def place(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor's line; dimensions innermost first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(
    values: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int | None, int | None] = (None, None),
    alignment: int = 32,
) -> bytes:
    """A file; `counts`: what the header says of tensors and values."""
    tensor_count, value_count = counts
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(values) if value_count is None else value_count,
    )
    head += b"".join(values) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data
