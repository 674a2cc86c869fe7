"""The process in which llguidance tries a grammar before it may compile it beside the engine. Run as a script.

llguidance catches its own panics, but a stack that overflows or memory that runs out ends the process it is in. Here
that costs one request. A request is the library's text of a grammar, an answer is TRIED, whatever the library said of
it: only whether there is an answer matters. Frames, the parent's end and the limit of memory are as in
`outlines_core_worker`, which is loaded by its path: nothing of asyncengine is imported.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

STEPS = 64
"""Symbols of an output that are tried."""
TRIED = b"tried"
MEMORY = b"memory"


def frames_module() -> Any:
    path = Path(__file__).with_name("outlines_core_worker.py")
    found = importlib.util.spec_from_file_location("frames", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


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
    frames = frames_module()
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=frames.follow, args=(inbox, sys.stdin.buffer), daemon=True).start()
    out = sys.stdout.buffer
    options = json.loads(inbox.get())
    sys.path[:] = options["path"]
    try:
        from llguidance import LLTokenizer, TokenizerWrapper

        frames.limit_memory(options["memory_limit"])
        tokenizer = LLTokenizer(TokenizerWrapper(ByteSource()), eos_token=[256], slices=[])
    except Exception as error:  # whatever keeps it from starting is told to the parent
        frames.write_frame(out, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
        return
    frames.write_frame(out, frames.READY)

    def serve() -> None:
        while True:
            frames.write_frame(out, answer(inbox.get().decode(), tokenizer))

    threading.stack_size(options["stack_bytes"])  # less than the engine's own thread that compiles
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
