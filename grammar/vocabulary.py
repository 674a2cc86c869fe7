"""One engine's tokens as grammars see them: bytes, special tokens, ends of sequence. Built once, off the event loop.

llguidance wants a tokenizer of its own. Handing it our table of bytes takes a quarter of the time and three quarters
of the memory of letting it read the tokenizer's file, with the same masks; it holds the interpreter lock for half a
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
"""Longer tokens (runs of blanks and dashes, mostly) are not looked for when a text is cut into few tokens."""
ANCHOR = "\n"
"""A text put before another where a tokenizer changes the beginning of what it encodes."""


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
        """Tokens that spell exactly `text`, as the tokenizer itself would cut it wherever it can be asked to."""
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
        at = 0
        while at < len(data):
            ends = range(min(len(data), at + MAX_TOKEN_BYTES), at, -1)
            end = next((end for end in ends if data[at:end] in self.by_bytes), None)
            if end is None:
                break  # bytes that no token spells: what there is, is a prefix
            ids.append(self.by_bytes[data[at:end]])
            at = end
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
        """Lengths of the tokens in `by_bytes` that begin with these two bytes, ascending; the one for single bytes is
        in none of them."""
        table: dict[bytes, set[int]] = {}
        for data in self.by_bytes:
            if len(data) > 1:
                table.setdefault(data[:2], set()).add(len(data))
        return {begin: tuple(sorted(found)) for begin, found in table.items()}

    @cached_property
    def _ascii_tokens(self) -> tuple[Any, Any, Any]:
        """Tokens in `by_bytes` of several ASCII bytes, the longest first and of one length the lowest, their lengths,
        and the sets of their bytes as two rows of 64 bits each (bit b: byte b is in it)."""
        found = sorted((-len(data), token) for data, token in self.by_bytes.items() if len(data) > 1 and data.isascii())
        tokens, lengths = [token for _, token in found], np.array([-length for length, _ in found], np.int64)
        letters = np.frombuffer(b"".join(self.token_bytes[token] for token in tokens), np.uint8)
        bits = np.zeros((len(letters), 2), np.uint64)
        bits[np.arange(len(letters)), letters // 64] = np.uint64(1) << (letters % 64).astype(np.uint64)
        sets = np.bitwise_or.reduceat(bits, np.cumsum(lengths) - lengths, axis=0)
        return np.array(tokens, np.int64), lengths, np.ascontiguousarray(sets.T)

    def within(self, letters: int) -> dict[int, int]:
        """{bytes of it: the lowest token} of those made of several of these ASCII letters alone (bit b: byte b),
        longest first."""
        tokens, lengths, sets = self._ascii_tokens
        low, high = (np.uint64(~letters >> shift & (1 << 64) - 1) for shift in (0, 64))
        fitting = np.flatnonzero((sets[0] & low | sets[1] & high) == 0)
        sizes = lengths[fitting]
        first = np.flatnonzero(np.diff(sizes, prepend=0))
        return dict(zip(sizes[first].tolist(), tokens[fitting[first]].tolist(), strict=True))

    @cached_property
    def filler(self) -> int:
        """The byte of which the most fit into one token: text that only has to be long is cheapest made of it."""
        fit = {*range(33, 127)} - {*b'"\\{}[]()<>'}  # those mean something to whoever looks for an end
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
    """A vocabulary for `llguidance.TokenizerWrapper`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        padding = [b""] * (vocabulary.vocab_size - len(vocabulary.token_bytes))  # never allowed by any mask
        self.tokens = [*vocabulary.token_bytes, *padding]
        self.special_token_ids = sorted(i for i in vocabulary.special_ids if i < len(self.tokens))
        # weak, for the library's objects are none that the garbage collector looks into: a vocabulary that they
        # referred to would stay for ever, with its tokenizer and chat template, as it refers to them
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
    """(fewest tokens to the end, the first of them) for each position in `text` and its end; `UNREACHABLE` or more
    where the vocabulary cannot spell it."""
    table, lengths = vocabulary.by_bytes, vocabulary.lengths
    found = [(UNREACHABLE, -1)] * len(text) + [(0, -1)]
    for at in range(len(text) - 1, -1, -1):
        first = table.get(text[at : at + 1], -1)
        best = UNREACHABLE if first < 0 else min(found[at + 1][0] + 1, UNREACHABLE)
        for length in lengths.get(text[at : at + 2], ()):
            end = at + length
            if end > len(text):
                break
            if found[end][0] + 1 < best and (token := table.get(text[at:end])) is not None:
                best, first = found[end][0] + 1, token
        found[at] = best, first
    return found
