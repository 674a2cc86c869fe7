"""Names of cached pages by what they stand for: the digest of a page covers its tokens and all before them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

PICTURE_WORDS = 6
"""int32 words of a picture's id behind the -1 that announces it."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as int32, little-endian. An id of a picture (`asyncengine.images`), which is negative and has some 160
    bits, is -1 and 24 bytes."""
    if min(tokens, default=0) >= 0:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    return b"".join(
        struct.pack("<i", token)
        if token >= 0
        else struct.pack("<i", -1) + token.to_bytes(4 * PICTURE_WORDS, "little", signed=True)
        for token in tokens
    )


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """Digest of a page of packed `tokens` behind the page of digest `parent`."""
    return hashlib.sha256(parent + tokens).digest()
