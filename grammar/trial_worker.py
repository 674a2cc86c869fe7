"""The process in which llguidance tries a grammar before it may compile it beside the engine. Run as a script.

llguidance catches its own panics, but a stack that overflows or memory that runs out ends the process it is in. Here
that costs one request. The grammar comes by standard input; arguments: bytes of address space, bytes of the stack,
seconds of the processor. Nothing of asyncengine is imported: the process starts in about 0.2 s and never sees torch.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

STEPS = 64
"""Symbols of an output that are tried."""
OUT_OF_MEMORY = 3
"""The exit status that says so. Whatever else the library says of a grammar will be heard again."""


def limit(memory: int, seconds: int) -> None:
    """Address space and time, and no core files. Nothing on systems without such limits."""
    try:
        import resource
    except ImportError:
        return
    for kind, wanted in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


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

    try:
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        for step in range(STEPS):
            bits = int.from_bytes(matcher.compute_bitmask(), "little") & ((1 << 256) - 1)
            if matcher.is_error() or matcher.is_stopped() or not bits:
                return
            matcher.consume_token((bits & -bits).bit_length() - 1 if step % 2 else bits.bit_length() - 1)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BaseException:  # a panic, or a complaint that will be heard again
        return


def main() -> None:
    memory, stack, seconds = map(int, sys.argv[1:4])
    text = sys.stdin.buffer.read().decode()
    from llguidance import LLTokenizer, TokenizerWrapper

    limit(memory, seconds)
    tokenizer = LLTokenizer(TokenizerWrapper(ByteSource()), eos_token=[256], slices=[])
    threading.stack_size(stack)
    thread = threading.Thread(target=walk, args=(text, tokenizer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
