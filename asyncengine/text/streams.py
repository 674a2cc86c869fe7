"""Ways to turn token ids into text piece by piece. Each is exact for one class of decoders; `TokenTable` picks one.

Common contract: the concatenation of everything `push` and `finish` return equals decoding all ids at once, and no
emitted text is ever taken back, nor half a character emitted: U+FFFD appears only where the full decoding has it. An id
without a token (a padded vocabulary has such) has no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\ufffd"


class Stream(Protocol):
    """One output being decoded. One user at a time; `TokenTable.mode` says which tokenizers hold back what."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; often "" for a part of a character."""

    def finish(self) -> str:
        """The rest; the stream is spent afterwards."""


class ByteStream:
    """Byte-level tokens (GPT-2, Llama 3, Qwen): the text is the UTF-8 decoding of the joined bytes.

    Python and Rust replace the same maximal subparts of ill-formed input by U+FFFD (Unicode 15, section 3.9), so
    holding back only an incomplete character is exact.
    """

    __slots__ = ("_data", "_pending", "_texts")

    def __init__(self, texts: list[str | None], data: list[bytes]) -> None:
        """`texts[id]` is the token's text if its bytes are whole characters, else None; `data[id]` its bytes."""
        self._texts = texts
        self._data = data
        self._pending = b""

    def push(self, token_ids: Sequence[int]) -> str:
        texts = self._texts
        out = ""
        for token in token_ids:
            try:
                text = texts[token]
            except IndexError:
                continue
            if text is not None and not self._pending:
                out += text
            else:
                data = self._pending + self._data[token]
                text, used = codecs.utf_8_decode(data, "replace", False)
                self._pending = data[used:]
                out += text
        return out

    def finish(self) -> str:
        rest, self._pending = self._pending, b""
        return rest.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Pieces:
    """The text of each token where it depends only on whether the token is the first."""

    head: list[str]
    """Text of the token as the first one."""
    tail: list[str | None]
    """Text of the token after others; None for a byte token."""
    bytes_of: dict[int, int]
    """Byte tokens (`<0x0A>`) -> their byte."""
    strip_space: bool
    """A run of byte tokens at the beginning loses one leading space."""
    hidden: frozenset[int]
    """Ids that leave no trace: ids without a token, and special tokens where they are skipped."""


class PieceStream:
    """Pieces (SentencePiece BPE and Unigram, WordPiece, characters), with byte fallback.

    A run of byte tokens is one unit to the decoder: text if the whole run is UTF-8, else one U+FFFD for each byte. One
    byte more can thus change all of the run, so a run is held until another token ends it.
    """

    __slots__ = ("_pieces", "_run", "_started", "_tail")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._tail = pieces.tail
        self._run = bytearray()
        self._started = False

    def push(self, token_ids: Sequence[int]) -> str:
        tail = self._tail
        out = ""
        for token in token_ids:
            if self._started and not self._run:
                try:
                    text = tail[token]
                except IndexError:
                    continue
                if text is not None:
                    out += text
                    continue
            out += self._step(token)
        return out

    def _step(self, token: int) -> str:
        pieces = self._pieces
        if token >= len(pieces.tail) or token in pieces.hidden:
            return ""
        byte = pieces.bytes_of.get(token)
        if byte is not None:
            self._run.append(byte)
            return ""
        out = self.finish()
        if self._started:
            return out + (pieces.tail[token] or "")
        self._started = True
        return pieces.head[token]

    def finish(self) -> str:
        """The text of the run of byte tokens that ends here."""
        if not self._run:
            return ""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * len(self._run)
        if not self._started and self._pieces.strip_space:
            text = text.removeprefix(" ")
        self._run.clear()
        self._started = True
        return text


class WindowStream:
    """Any decoder whose effects are local: decodes a window of the newest tokens with and without the last `hold`.

    Text both decodings agree on is certain. The idea of decoding a sliding window is that of Text Generation Inference
    and vLLM (prefix and read offsets); measuring positions from the window's end makes moving it exact.
    """

    __slots__ = ("_decode", "_hold", "_ids", "_limit", "_sent", "_visible")

    LIMIT = 96
    """Tokens in the window before it moves."""
    KEEP = 48
    """Tokens left in it then."""
    MARGIN = 16
    """Emitted characters that must look the same in the old and the new window."""

    def __init__(self, decode: Callable[[list[int]], str], hold: int, visible: Callable[[int], bool]) -> None:
        self._decode = decode
        self._hold = hold
        self._visible = visible
        self._ids: list[int] = []
        self._sent = 0
        self._limit = self.LIMIT

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(filter(self._visible, token_ids))
        whole = self._decode(self._ids)
        before = self._decode(self._ids[: -self._hold])
        differing = (at for at, (one, two) in enumerate(zip(whole, before, strict=False)) if one != two)
        stable = next(differing, min(len(whole), len(before)))
        while stable and whole[stable - 1] == REPLACEMENT:
            stable -= 1
        out = whole[self._sent : stable]
        self._sent = max(self._sent, stable)
        if len(self._ids) >= self._limit:
            self._move(whole)
        return out

    def finish(self) -> str:
        out = self._decode(self._ids)[self._sent :]
        self._ids, self._sent = [], 0
        return out

    def _move(self, whole: str) -> None:
        newest = self._ids[-self.KEEP :]
        text = self._decode(newest)
        sent = len(text) - (len(whole) - self._sent)
        if sent >= self.MARGIN and text[sent - self.MARGIN :] == whole[self._sent - self.MARGIN :]:
            self._ids, self._sent, self._limit = newest, sent, self.LIMIT
        else:
            self._limit = 2 * len(self._ids)  # try again later, so that the total work stays O(n log n)


class WholeStream:
    """A decoder nothing is known about: all text comes at the end."""

    __slots__ = ("_decode", "_ids", "_visible")

    def __init__(self, decode: Callable[[list[int]], str], visible: Callable[[int], bool]) -> None:
        self._decode = decode
        self._visible = visible
        self._ids: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids.extend(filter(self._visible, token_ids))
        return ""

    def finish(self) -> str:
        ids, self._ids = self._ids, []
        return self._decode(ids) if ids else ""
