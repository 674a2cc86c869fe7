"""The process in which llguidance tries a grammar before it may compile it beside the engine. Run as a script.

llguidance catches its own panics, but a stack that overflows or memory that runs out ends the process it is in. Here
that costs one request. A request is the library's text of a grammar, an answer is TRIED, whatever the library said of
it: only whether there is an answer matters. Nothing of asyncengine is imported: the process starts in about 0.2 s and
never sees torch.

Frames, both ways: eight bytes of length, then that many bytes. The end of standard input ends the process at once,
also in the midst of compiling: it cannot outlive its parent.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import struct
import sys
import threading
from typing import Any, BinaryIO

STEPS = 64
"""Symbols of an output that are tried."""
LENGTH = struct.Struct("<Q")
READY = b"ready"
TRIED = b"tried"
MEMORY = b"memory"


def write_frame(stream: BinaryIO, *parts: bytes) -> None:
    stream.write(LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        stream.write(part)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """None where the stream ended before the frame did."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


def limit_memory(limit: int) -> None:
    """Address space, and no core files. Nothing on systems without such limits."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def follow(frames: queue.SimpleQueue[bytes], stream: BinaryIO) -> None:
    """Read requests on a thread of its own: only so is the parent's end seen while a grammar is compiled."""
    while (frame := read_frame(stream)) is not None:
        frames.put(frame)
    os._exit(0)


class ByteSource:
    """A vocabulary for `llguidance.TokenizerWrapper`: the 256 bytes and an end."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def walk(text: str, tokenizer: Any) -> None:
    """Compile, and follow an output for a while, always by the first and the last symbol allowed in turn."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    for step in range(STEPS):
        if matcher.is_error() or matcher.is_stopped():
            return
        bits = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << 256) - 1)
        if not bits:
            return
        matcher.consume_token((bits & -bits).bit_length() - 1 if step % 2 else bits.bit_length() - 1)


def answer(text: str, tokenizer: Any) -> bytes:
    try:
        walk(text, tokenizer)
    except MemoryError:
        return MEMORY
    except BaseException:  # a panic, or a complaint that will be heard again; it goes on living
        return TRIED
    return TRIED


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=follow, args=(inbox, sys.stdin.buffer), daemon=True).start()
    out = sys.stdout.buffer
    options = json.loads(inbox.get())
    sys.path[:] = options["path"]
    try:
        from llguidance import LLTokenizer, TokenizerWrapper

        limit_memory(options["memory_limit"])
        tokenizer = LLTokenizer(TokenizerWrapper(ByteSource()), eos_token=[256], slices=[])
    except Exception as error:  # whatever keeps it from starting is told to the parent
        write_frame(out, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
        return
    write_frame(out, READY)

    def serve() -> None:
        while True:
            write_frame(out, answer(inbox.get().decode(), tokenizer))

    threading.stack_size(options["stack_bytes"])  # less than the engine's own thread that compiles
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
