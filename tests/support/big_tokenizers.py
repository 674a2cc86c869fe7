"""Byte-level BPE tokenizers of real size for tests, cut from a real one that happens to be installed.

The first N ranks of a BPE are themselves a BPE. The ranks are o200k_base's, which llama-index-core ships as the cache
file of tiktoken. Nothing is downloaded; without that file the tests that ask are skipped.
"""

from __future__ import annotations

import base64
import importlib.util
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

SMALL, LARGE = 32_000, 151_650
"""Entries, added tokens included."""

O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"
"""The name under which tiktoken caches o200k_base."""

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern that cuts text into words before merging; tiktoken and tokenizers read it alike."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Single tokens that are not special: they are shown when decoding, as in the models that have them."""

EOS = ("<|im_end|>", "<|endoftext|>")


def ranks_file() -> Path:
    """Path of the file of ranks. Skips the test where it is not installed."""
    found = importlib.util.find_spec("llama_index.core")
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "_static" / "tiktoken_cache" / O200K
        if path.is_file():
            return path
    pytest.skip("the tokenizer of real size is cut from o200k_base in llama-index-core, which is not installed")


@cache
def _ranked() -> tuple[bytes, ...]:
    lines = ranks_file().read_bytes().splitlines()
    pairs = (line.split() for line in lines if line)
    by_rank = {int(rank): base64.b64decode(token) for token, rank in pairs}
    return tuple(by_rank[rank] for rank in range(LARGE - len(SPECIAL) - len(ADDED)))


class BigTokenizer:
    """A vocabulary of `size` entries: byte-level tokens in rank order, then SPECIAL, then ADDED."""

    def __init__(self, size: int) -> None:
        extra = (*SPECIAL, *ADDED)
        self.size = size
        self.ranked: tuple[bytes, ...] = _ranked()[: size - len(extra)]
        first = len(self.ranked)
        self.added: dict[str, int] = {name: first + index for index, name in enumerate(extra)}
        self.token_bytes: list[bytes] = [*self.ranked, *(name.encode() for name in extra)]
        self.special_ids: list[int] = [self.added[name] for name in SPECIAL]
        self.eos_ids: list[int] = [self.added[name] for name in EOS]

    @cached_property
    def encoding(self) -> Any:
        """The `tiktoken.Encoding`: fast, no merges needed."""
        tiktoken = pytest.importorskip("tiktoken")
        ranks = {token: rank for rank, token in enumerate(self.ranked)}
        return tiktoken.Encoding("cut", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.added)

    def encode(self, text: bytes | str) -> list[int]:
        """The tokenizer's own tokens. Names of added tokens are plain text; bytes that are no UTF-8 are merged as one
        word."""
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError:
                return list(self.encoding._encode_single_piece(text))
        return list(self.encoding.encode_ordinary(text))


@cache
def big_tokenizer(size: int = SMALL) -> BigTokenizer:
    """A tokenizer that is built once in a run. Skips the test where the ranks are not installed."""
    return BigTokenizer(size)
