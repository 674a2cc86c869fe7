"""Messages on a byte stream that may break and be made again: each arrives once, in order.

    frame = bytes of this part · whether more parts follow · serial of the message · last serial heard from there

Whoever sends a message keeps it until the other end says that it has heard it. After a new connection both say first
what they have heard; what the other has not is sent again, and what comes twice is dropped by its serial.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

HEADER = struct.Struct("!IBQQ")
PART_BYTES = 1 << 20
"""Most bytes of a part: what a stranger's length could make this end wait for."""


class BrokenLine(ConnectionError):
    """What came is no frame, or none that may come now."""


class Message(NamedTuple):
    """One whole message, or with serial 0 only the news of what was heard."""

    serial: int
    heard: int
    body: bytes


def packed(message: Message) -> bytes:
    """Its frames."""
    serial, heard, body = message
    if len(body) <= PART_BYTES:
        return HEADER.pack(len(body), 0, serial, heard) + body
    parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
    last = len(parts) - 1
    heads = [HEADER.pack(len(part), index < last, serial, heard) for index, part in enumerate(parts)]
    return b"".join(piece for pair in zip(heads, parts, strict=True) for piece in pair)


class Unpacker:
    """Takes the bytes of one connection as they come, and gives its messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._parts: list[bytes] = []
        self._serial = 0
        """Of the message that these parts are of."""

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole with `data`. Raises `BrokenLine` for what is no frame, however little of it is
        here."""
        buffer, at = self._buffer, 0
        buffer += data
        while len(buffer) - at >= HEADER.size:
            size, more, serial, heard = HEADER.unpack_from(buffer, at)
            self._check(size, more, serial)
            end = at + HEADER.size + size
            if len(buffer) < end:
                break
            self._parts.append(bytes(buffer[at + HEADER.size : end]))
            self._serial, at = serial, end
            if not more:
                parts, self._parts = self._parts, []
                yield Message(serial, heard, parts[0] if len(parts) == 1 else b"".join(parts))
        del buffer[:at]

    def _check(self, size: int, more: int, serial: int) -> None:
        if size > PART_BYTES:
            raise BrokenLine(f"a frame of {size} bytes is longer than {PART_BYTES}")
        if more > 1 or (not serial and (size or more)):
            raise BrokenLine("a frame's header makes no sense")
        if self._parts and serial != self._serial:
            raise BrokenLine(f"message {serial} begins within message {self._serial}")


class Ledger:
    """What one end has sent and heard, whichever connections it went over."""

    def __init__(self) -> None:
        self.heard = 0
        """Serial of the last message from there."""
        self.told = 0
        """What of `heard` was said there."""
        self._unheard: deque[tuple[int, bytes]] = deque()
        self._last = 0

    @property
    def num_unheard(self) -> int:
        """Messages of which nobody has said that they arrived."""
        return len(self._unheard)

    @property
    def unheard(self) -> list[bytes]:
        """Their bodies, oldest first."""
        return [body for _, body in self._unheard]

    def add(self, body: bytes) -> bytes:
        """A new message, to be sent now or with the next connection: its frames."""
        self._last += 1
        self._unheard.append((self._last, body))
        self.told = self.heard
        return packed(Message(self._last, self.heard, body))

    def again(self) -> bytes:
        """Everything that the other end has not heard."""
        self.told = self.heard
        return b"".join(packed(Message(serial, self.heard, body)) for serial, body in self._unheard)

    def word(self) -> bytes:
        """Nothing but what was heard."""
        self.told = self.heard
        return packed(Message(0, self.heard, b""))

    def hears(self, serial: int) -> None:
        """The other end has everything up to this message. Raises `BrokenLine` for one that was never sent."""
        if serial > self._last:
            raise BrokenLine(f"message {serial} was heard, of {self._last} sent")
        while self._unheard and self._unheard[0][0] <= serial:
            self._unheard.popleft()

    def take(self, message: Message) -> bool:
        """Whether it is the next message from there, and not one that came before or none. Raises `BrokenLine` if one
        is missing before it."""
        self.hears(message.heard)
        if message.serial <= self.heard:
            return False
        if message.serial != self.heard + 1:
            raise BrokenLine(f"message {message.serial} came after message {self.heard}")
        self.heard = message.serial
        return True
