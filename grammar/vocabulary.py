"""One engine's tokens as grammars see them: bytes, special tokens, ends of sequence. Built once, off the event loop.

llguidance needs a tokenizer of its own. Made of our table of bytes it takes a quarter of the time and three quarters of
the memory of one read from the tokenizer's file, with the same masks. Making it holds the interpreter lock for half a
second at 150,000 tokens, so an engine does it while it loads and never while it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakMethod

import llguidance
import numpy as np

MAX_TOKEN_BYTES = 32
"""Longer tokens (mostly runs of blanks and dashes) are ignored when a text is cut into the fewest tokens."""
ANCHOR = "\n"
"""Encoded in front of a text, and then cut off, where a tokenizer changes the beginning of a text."""


class Vocabulary:
    """Immutable; any number of threads may share it.

    `token_bytes[i]` are the bytes token i adds to a text, those of its name for a special token, empty for an id
    without a token. `vocab_size` is the width of the model's logits, which may exceed their number. `encode` is the
    tokenizer's own encoding of a text without special tokens added; None: any cut into tokens will do.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], eos_ids: Sequence[int], special_ids: Collection[int], vocab_size: int,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:  # fmt: skip
        self.token_bytes = list(token_bytes)[:vocab_size]
        self.eos_ids = tuple(dict.fromkeys(i for i in eos_ids if i < vocab_size))
        self.special_ids = frozenset(special_ids) | frozenset(self.eos_ids)
        self.vocab_size = vocab_size
        self._encode = encode

    @property
    def mask_words(self) -> int:
        """Length of a packed mask."""
        return -(-self.vocab_size // 32)

    def tokenize(self, text: str) -> list[int]:
        """Tokens that spell exactly `text`: the tokenizer's own, or the longest if those spell something else."""
        wanted = text.encode("utf-8", "surrogatepass")
        if self._encode is not None:
            ids = self._encode(text)
            if self._spell(ids) == wanted:
                return ids
            behind, anchor = self._encode(ANCHOR + text), self._encode(ANCHOR)
            if behind[: len(anchor)] == anchor and self._spell(behind[len(anchor) :]) == wanted:
                return behind[len(anchor) :]
        return self._greedy(wanted)

    def _spell(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.token_bytes[i] if i < len(self.token_bytes) else b"" for i in ids)

    def _greedy(self, data: bytes) -> list[int]:
        ids: list[int] = []
        offset = 0
        while offset < len(data):
            ends = range(min(len(data), offset + MAX_TOKEN_BYTES), offset, -1)
            end = next((end for end in ends if data[offset:end] in self.by_bytes), None)
            if end is None:
                break  # bytes that no token spells: the tokens so far spell a prefix
            ids.append(self.by_bytes[data[offset:end]])
            offset = end
        return ids

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """Ordinary tokens by their bytes; the lowest id where several have the same."""
        table: dict[bytes, int] = {}
        for token, data in enumerate(self.token_bytes):
            if data and token not in self.special_ids and len(data) <= MAX_TOKEN_BYTES:
                table.setdefault(data, token)
        return table

    @cached_property
    def lengths(self) -> dict[bytes, tuple[int, ...]]:
        """Lengths of the tokens in `by_bytes` of two bytes or more, ascending, by their first two bytes."""
        table: dict[bytes, set[int]] = {}
        for data in self.by_bytes:
            if len(data) > 1:
                table.setdefault(data[:2], set()).add(len(data))
        return {begin: tuple(sorted(found)) for begin, found in table.items()}

    @cached_property
    def _ascii_tokens(self) -> tuple[Any, Any, Any]:
        """(tokens, lengths, sets) of the tokens in `by_bytes` of several ASCII bytes, longest first, then by id. The
        sets of their bytes have shape [2, tokens], uint64: bit b of row r is byte 64 * r + b."""
        keys = sorted((-len(data), token) for data, token in self.by_bytes.items() if len(data) > 1 and data.isascii())
        tokens, lengths = [token for _, token in keys], np.array([-length for length, _ in keys], np.int64)
        letters = np.frombuffer(b"".join(self.token_bytes[token] for token in tokens), np.uint8)
        bits = np.zeros((len(letters), 2), np.uint64)
        bits[np.arange(len(letters)), letters // 64] = np.uint64(1) << (letters % 64).astype(np.uint64)
        sets = np.bitwise_or.reduceat(bits, np.cumsum(lengths) - lengths, axis=0)
        return np.array(tokens, np.int64), lengths, np.ascontiguousarray(sets.T)

    def within(self, letters: int) -> dict[int, int]:
        """{length: lowest id} of the tokens of two bytes or more that contain only bytes of the set `letters` (bit b:
        byte b), longest first."""
        tokens, lengths, sets = self._ascii_tokens
        low, high = (np.uint64(~letters >> shift & (1 << 64) - 1) for shift in (0, 64))
        fitting = np.flatnonzero((sets[0] & low | sets[1] & high) == 0)
        sizes = lengths[fitting]
        first = np.flatnonzero(np.diff(sizes, prepend=0))
        return dict(zip(sizes[first].tolist(), tokens[fitting[first]].tolist(), strict=True))

    @cached_property
    def filler(self) -> int:
        """The byte of which one token holds the most: text that only has to be long is cheapest made of it."""
        fit = {*range(33, 127)} - {*b'"\\{}[]()<>'}  # these could end a string or a call
        runs = [data for data in self.by_bytes if data[0] in fit and data == data[:1] * len(data)]
        return max(runs, key=lambda data: (len(data), data[0]))[0] if runs else ord("a")

    @cached_property
    def ll_tokenizer(self) -> Any:
        """llguidance's view of the whole vocabulary. Half a second at 150,000 tokens, holding the interpreter lock."""
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Source(self)), eos_token=list(self.eos_ids))

    @cached_property
    def marks(self) -> tuple[int, ...]:
        """Special tokens that a grammar may name, ascending; ends of sequence are not among them."""
        ordinary = set(self.eos_ids)
        return tuple(i for i in sorted(self.special_ids) if i not in ordinary and i < len(self.token_bytes))

    @property
    def end(self) -> int:
        """The symbol of the byte vocabulary that ends an output."""
        return 256 + len(self.marks)

    @cached_property
    def _mark_symbols(self) -> dict[int, tuple[int]]:
        return {token: (256 + index,) for index, token in enumerate(self.marks)}

    def symbols(self, token: int) -> Sequence[int]:
        """The symbols of a token in the byte vocabulary."""
        return self._mark_symbols.get(token) or (self.token_bytes[token] if token < len(self.token_bytes) else b"")

    def warm_up(self) -> None:
        """Build now what would be built at first use."""
        for name in ("ll_tokenizer", "filler", "lengths", "_ascii_tokens"):
            getattr(self, name)


class _Source:
    """A vocabulary with the attributes that `llguidance.TokenizerWrapper` reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        padding = [b""] * (vocabulary.vocab_size - len(vocabulary.token_bytes))  # never allowed by any mask
        self.tokens = [*vocabulary.token_bytes, *padding]
        self.special_token_ids = sorted(i for i in vocabulary.special_ids if i < len(self.tokens))
        # weak, for the garbage collector cannot look into the library's objects: the cycle from the vocabulary to its
        # `ll_tokenizer` and back would keep it, its tokenizer and chat template for ever
        self._tokenize = WeakMethod(vocabulary.tokenize)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("this tokenizer encodes text")  # makes the wrapper hand over str
        tokenize = self._tokenize()
        if tokenize is None:
            raise ReferenceError("the vocabulary of this tokenizer is gone")
        return tokenize(text)


UNREACHABLE = 1 << 60


def cut(text: bytes, vocabulary: Vocabulary) -> list[tuple[int, int]]:
    """(fewest tokens to the end, the first of them) at each position of `text` and behind it, by dynamic programming
    from the end; `UNREACHABLE` or more where no tokens spell the rest."""
    table, lengths = vocabulary.by_bytes, vocabulary.lengths
    spelling = [(UNREACHABLE, -1)] * len(text) + [(0, -1)]
    for offset in range(len(text) - 1, -1, -1):
        first = table.get(text[offset : offset + 1], -1)
        best = UNREACHABLE if first < 0 else min(spelling[offset + 1][0] + 1, UNREACHABLE)
        for length in lengths.get(text[offset : offset + 2], ()):
            end = offset + length
            if end > len(text):
                break
            if spelling[end][0] + 1 < best and (token := table.get(text[offset:end])) is not None:
                best, first = spelling[end][0] + 1, token
        spelling[offset] = best, first
    return spelling
