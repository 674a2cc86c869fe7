"""Facts about a tokenizer's tokens, computed once and shared by all requests."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal
from weakref import WeakValueDictionary

from asyncengine.text.streams import ByteStream, Pieces, PieceStream, Stream, WholeStream, WindowStream

Mode = Literal["bytes", "pieces", "window", "whole"]
Plan = tuple[Mode, Callable[[bool], Stream]]

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SAMPLES = (
    "It does n't work ? He 's , she 've ! I 'm . we 're ' so ' well.",
    "  two  spaces\n\ttab. \u00e4\u00f6\u00fc \u4f60\u597d \ud55c\uad6d\uc5b4 \u0645\u0631\u062d\u0628\u0627",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947",
)
TRIALS = 400
"""Random sequences a plan must reproduce before it is used."""


class TokenTable:
    """Every token's bytes and text, and a proven way to decode streams of them.

    `tokenizer` is a transformers tokenizer or a bare `tokenizers.Tokenizer`; anything with `decode(ids,
    skip_special_tokens=...)` and `get_vocab()` works. Building takes about a second for 150,000 tokens: do it once,
    off the event loop. Immutable afterwards, so any number of threads may share it.

    Decoders are not classified by name: each plan (fastest first) must reproduce `tokenizer.decode` on every single
    token and on random sequences; the last plan, decoding everything at the end, cannot fail. `mode` tells which plan
    it is: "bytes" and "pieces" look tokens up, "window" decodes the newest tokens again, "whole" does not stream.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The backend of a fast transformers tokenizer skips what transformers adds: argument handling and clean-up.
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._tokens, self.special_ids = _names(tokenizer, self._backend)
        """Ids left out of the text with `skip_special_tokens`."""
        self.size = len(self._tokens)
        """One more than the largest id that has a token."""
        self._holes = frozenset(i for i, token in enumerate(self._tokens) if token is None)
        self._data: list[bytes] = []
        self.mode: Mode = "whole"
        self._open: Callable[[bool], Stream] = self._whole
        for mode, plan in self._plans():
            if self._agrees(plan):
                self.mode, self._open = mode, plan
                break
        if self.mode in ("window", "whole"):
            self._data = [
                b"" if t is None else self._raw([i]).encode("utf-8", "surrogatepass")
                for i, t in enumerate(self._tokens)
            ]

    def stream(self, skip_special_tokens: bool = True) -> Stream:
        """A new stream for one output."""
        return self._open(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds to a text it does not begin; special tokens have those of their name.

        Empty for an id without a token.
        """
        return self._data[token_id] if 0 <= token_id < self.size else b""

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD where they are not whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    # -- plans

    def _plans(self) -> Iterator[Plan]:
        if data := self._byte_level():
            self._data = data
            yield "bytes", self._byte_plan(data)
        if (tables := self._pieces()) is not None:
            head, tail, bytes_of = tables
            self._data = [
                bytes([bytes_of[i]]) if t is None else t.encode("utf-8", "surrogatepass") for i, t in enumerate(tail)
            ]
            yield "pieces", self._piece_plan(head, tail, bytes_of)
        for hold in (1, 4, 8):
            yield "window", self._window_plan(hold)

    def _byte_plan(self, data: list[bytes]) -> Callable[[bool], Stream]:
        texts = [_whole_text(item) for item in data]
        variants = []
        for hidden in (self._hidden(False), self._hidden(True)):
            shown = ["" if i in hidden else text for i, text in enumerate(texts)]
            variants.append((shown, [b"" if i in hidden else item for i, item in enumerate(data)]))
        return lambda skip: ByteStream(*variants[skip])

    def _piece_plan(
        self, head: list[str], tail: list[str | None], bytes_of: dict[int, int]
    ) -> Callable[[bool], Stream]:
        space = next((i for i, byte in bytes_of.items() if byte == 0x20), None)
        strip = space is not None and self._raw([space]) == ""
        variants = []
        for hidden in (self._hidden(False), self._hidden(True)):
            shown = ["" if i in hidden else text for i, text in enumerate(tail)]
            variants.append(Pieces(head, shown, bytes_of, strip, hidden))
        return lambda skip: PieceStream(variants[skip])

    def _window_plan(self, hold: int) -> Callable[[bool], Stream]:
        return lambda skip: WindowStream(self._decoder(skip), hold, self._visible(skip))

    def _whole(self, skip: bool) -> Stream:
        return WholeStream(self._decoder(skip), self._visible(skip))

    def _hidden(self, skip: bool) -> frozenset[int]:
        return self._holes | self.special_ids if skip else self._holes

    def _visible(self, skip: bool) -> Callable[[int], bool]:
        hidden = self._hidden(skip)
        return lambda token: token < self.size and token not in hidden

    def _decoder(self, skip: bool) -> Callable[[list[int]], str]:
        decode = self._tokenizer.decode
        return lambda ids: str(decode(ids, skip_special_tokens=skip)) if ids else ""

    def _raw(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    # -- tables

    def _byte_level(self) -> list[bytes] | None:
        """Each token's bytes, if every single token decodes to them."""
        alphabet = byte_alphabet()
        data = []
        for token_id, token in enumerate(self._tokens):
            item = b""
            if token is not None:
                try:
                    item = bytes(map(alphabet.__getitem__, token))
                except KeyError:  # an added token with characters outside the alphabet stands for itself
                    item = token.encode("utf-8", "surrogatepass")
                if self._raw([token_id]) != item.decode("utf-8", "replace"):
                    return None
            data.append(item)
        return data

    def _pieces(self) -> tuple[list[str], list[str | None], dict[int, int]] | None:
        """Each token's text as the first and as a later one, read off the tokenizer's own decoding."""
        anchor = self._anchor()
        if anchor is None:
            return None
        before = self._raw([anchor])
        bytes_of = self._byte_tokens(anchor, before)
        head: list[str] = []
        tail: list[str | None] = []
        for token_id, token in enumerate(self._tokens):
            if token is None or token_id in bytes_of:
                head.append("")
                tail.append(None if token_id in bytes_of else "")
                continue
            both = self._raw([anchor, token_id])
            if not both.startswith(before):
                return None
            head.append(self._raw([token_id]))
            tail.append(both[len(before) :])
        return head, tail, bytes_of

    def _anchor(self) -> int | None:
        """A token that is plain letters alone and before others."""
        for token_id, token in enumerate(self._tokens):
            if token and token.isascii() and token.isalpha() and token_id not in self.special_ids:
                text = self._raw([token_id])
                if text.isascii() and text.isalpha():
                    return token_id
        return None

    def _byte_tokens(self, anchor: int, before: str) -> dict[int, int]:
        """Tokens named <0xNN>, if the decoder takes them for bytes."""
        named = {i: BYTE_TOKEN.fullmatch(token) for i, token in enumerate(self._tokens) if token}
        bytes_of = {i: int(match.group(1), 16) for i, match in named.items() if match}
        letter = next((i for i, byte in bytes_of.items() if byte == 0x41), None)
        return bytes_of if letter is not None and self._raw([anchor, letter]) == before + "A" else {}

    # -- proof

    def _agrees(self, plan: Callable[[bool], Stream]) -> bool:
        """Whether the plan reproduces `tokenizer.decode` on samples and on random sequences, token by token."""
        trials = list(self._trials())
        for skip in (False, True):
            decode = self._decoder(skip)
            for ids in trials:
                stream = plan(skip)
                text = "".join([stream.push([token]) for token in ids]) + stream.finish()
                if text != decode(ids):
                    return False
        return True

    def _trials(self) -> Iterator[list[int]]:
        rng = random.Random(0)
        named = [i for i, token in enumerate(self._tokens) if token is not None]
        odd = [i for i in named if self._data and _whole_text(self._data[i]) is None]
        empty = [i for i in named if self._data and not self._data[i]]
        special = [i for i in named if i in self.special_ids]
        pools = [pool for pool in (named, named, odd, empty, special) if pool]
        for text in SAMPLES:
            encoded = self._tokenizer.encode(text)
            yield list(getattr(encoded, "ids", encoded))
        for token_id in empty[:64]:  # an invisible first token is where decoders differ most
            yield [token_id, token_id, *rng.choices(named, k=2)] if named else []
        for trial in range(TRIALS):
            length = rng.randrange(1, 24) if trial else 300  # one long sequence moves the window several times
            yield [rng.choice(pool) for pool in rng.choices(pools, k=length)] if pools else []


_SMALL = 2**15
"""Tokens of a table that may stay when no engine uses it: a few megabytes."""
_tables: WeakValueDictionary[str, TokenTable] = WeakValueDictionary()
_recent: deque[TokenTable] = deque(maxlen=2)


def table_of(tokenizer: Any) -> TokenTable:
    """The table of a tokenizer. Those of a `PlainTokenizer` are shared by all that were made of the same file."""
    digest = getattr(tokenizer, "digest", None)
    if digest is None:
        return TokenTable(tokenizer)
    table = _tables.get(digest)
    if table is None:
        table = _tables.setdefault(digest, TokenTable(tokenizer))
    if table.size <= _SMALL and table not in _recent:
        _recent.append(table)
    return table


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2, Radford et al. 2019).

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in sorted(printable)}
    alphabet.update((chr(0x100 + index), byte) for index, byte in enumerate(unprintable))
    return alphabet


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _names(tokenizer: Any, backend: Any) -> tuple[list[str | None], frozenset[int]]:
    """(name of each id's token, ids of special tokens)."""
    names: dict[int, str] = {index: token for token, index in tokenizer.get_vocab().items()}
    if hasattr(backend, "get_added_tokens_decoder"):
        added, special = backend.get_added_tokens_decoder(), set[int]()
    else:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = set(getattr(tokenizer, "all_special_ids", ()))
    for index, token in added.items():
        names[index] = str(getattr(token, "content", token))
        if getattr(token, "special", False):
            special.add(index)
    return [names.get(index) for index in range(max(names, default=-1) + 1)], frozenset(special)
