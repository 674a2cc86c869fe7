"""The process in which outlines_core compiles, so that a pattern that explodes can be killed. Run as a script.

Outside the engine's process, because outlines_core has no limit of time or memory and cannot be interrupted. The
vocabulary is received once; then each request is a pattern and each answer a finished table. Nothing of asyncengine is
imported: the process starts in about 0.2 s and never sees torch.

The sentinel: outlines_core 0.2.14 drops ways out of accepting states and prefers early alternatives (`a` in `a|ab`).
So what it is given accepts nowhere but after U+10FFFF, which one id past the vocabulary spells: an output may end
exactly where that id leads to a final state. No other token may contain the byte 0xF4; that gives up plane 16, which
is private use.

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
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int32]

SENTINEL = "\U0010ffff"
SENTINEL_BYTE = 0xF4
"""First byte of all characters from U+100000 on."""
UNREACHABLE = 2**31 - 1
LENGTH = struct.Struct("<Q")
SIZES = struct.Struct("<QQ")
READY, TABLES, INVALID, IMPOSSIBLE, MEMORY, TOO_LARGE = (LENGTH.pack(code) for code in range(6))
"""First eight bytes of an answer (so the arrays are aligned). TABLES: `SIZES` (states, edges), then int32 arrays;
INVALID: the reason as text."""


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


def build_vocabulary(lengths: list[int], data: bytes) -> tuple[Any, int]:
    """outlines_core's Vocabulary and the id that spells the sentinel. Token i is the next `lengths[i]` bytes of `data`;
    a token of length 0 is never allowed."""
    import outlines_core  # type: ignore[import-untyped]

    table: dict[bytes, list[int]] = {}
    at = 0
    for token, length in enumerate(lengths):
        spelled = data[at : at + length]
        at += length
        if spelled and SENTINEL_BYTE not in spelled:
            table.setdefault(spelled, []).append(token)
    size = len(lengths)
    # outlines_core refuses a pattern for one state without a way on, though others would do: let every byte lead on.
    for byte in range(256):
        if byte != SENTINEL_BYTE:
            table.setdefault(bytes([byte]), [size + 2])
    table[SENTINEL.encode()] = [size]
    return outlines_core.Vocabulary(size + 1, table), size


class TooLarge(Exception):
    """The tables exceed the limit on their size."""


def walk(index: Any, sentinel: int, max_bytes: int) -> tuple[list[Ints], list[Ints], list[bool]]:
    """Per state, numbered as met from the beginning (0): tokens ascending, the state each leads to, may it end here."""
    import numpy as np

    numbers = {index.get_initial_state(): 0}
    order = list(numbers)
    tokens: list[Ints] = []
    targets: list[Ints] = []
    accepting: list[bool] = []
    edges = 0
    for state in order:  # grows while it is walked
        allowed = np.sort(np.array(index.get_allowed_tokens(state) or [], np.int64))
        last = np.searchsorted(allowed, sentinel)
        row = allowed[:last].astype(np.int32)
        edges += len(row)
        if 8 * edges + 16 * len(order) > max_bytes:
            raise TooLarge
        end = index.get_next_state(state, sentinel)
        accepting.append(end is not None and index.is_final_state(end))
        found = np.fromiter(map(partial(index.get_next_state, state), row.tolist()), np.int64, len(row))
        unique, inverse = np.unique(found, return_inverse=True)
        for new in unique.tolist():
            if new not in numbers:
                numbers[new] = len(order)
                order.append(new)
        renumbered = np.array([numbers[old] for old in unique.tolist()], np.int32)
        tokens.append(row)
        targets.append(renumbered[inverse] if len(row) else row)
    return tokens, targets, accepting


def distances(targets: list[Ints], accepting: list[bool]) -> Ints:
    """Tokens from each state to the nearest one where the output may end; UNREACHABLE where there is none."""
    import numpy as np

    sources: list[list[int]] = [[] for _ in accepting]
    for state, row in enumerate(targets):
        for target in np.unique(row).tolist():
            sources[target].append(state)
    found = np.full(len(accepting), UNREACHABLE, np.int32)
    front = [state for state, ends in enumerate(accepting) if ends]
    found[front] = 0
    steps = 0
    while front:
        steps += 1
        reached = []
        for target in front:
            for state in sources[target]:
                if found[state] == UNREACHABLE:
                    found[state] = steps
                    reached.append(state)
        front = reached
    return found


def tables(index: Any, sentinel: int, max_bytes: int) -> list[bytes]:
    """Tables for `Tables.load`. Tokens that lead nowhere an output could end are left out."""
    import numpy as np

    tokens, targets, accepting = walk(index, sentinel, max_bytes)
    cost = distances(targets, accepting)
    if cost[0] == UNREACHABLE:
        return [IMPOSSIBLE]
    first = np.full(len(accepting), -1, np.int32)
    starts = np.zeros(len(accepting) + 1, np.int64)
    for state, row in enumerate(targets):
        alive = cost[row] != UNREACHABLE
        tokens[state], targets[state] = tokens[state][alive], row[alive]
        starts[state + 1] = starts[state] + int(alive.sum())
        if 0 < cost[state] < UNREACHABLE:
            nearer = np.flatnonzero(cost[targets[state]] == cost[state] - 1)
            first[state] = tokens[state][nearer[0]]
    arrays = [cost, first, starts.astype(np.int32), np.concatenate(tokens), np.concatenate(targets)]
    sizes = SIZES.pack(len(accepting), int(starts[-1]))
    return [TABLES, sizes, *(array.astype(np.int32).tobytes() for array in arrays)]


def answer(pattern: str, vocabulary: Any, sentinel: int, max_bytes: int) -> list[bytes]:
    import outlines_core

    try:
        return tables(outlines_core.Index(f"(?:{pattern}){SENTINEL}", vocabulary), sentinel, max_bytes)
    except TooLarge:
        return [TOO_LARGE]
    except MemoryError:
        return [MEMORY]
    except ValueError as error:
        # Its message about a state without a way on quotes the whole pattern.
        if "vocabulary provided is incompatible" in str(error):
            return [IMPOSSIBLE]
        return [INVALID, str(error).encode("utf-8", "replace")]


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
    """Read requests on a thread of its own: only so is the parent's end seen while outlines_core is at work."""
    while (frame := read_frame(stream)) is not None:
        frames.put(frame)
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=follow, args=(frames, sys.stdin.buffer), daemon=True).start()
    out = sys.stdout.buffer
    options = json.loads(frames.get())
    sys.path[:] = options["path"]
    try:
        import numpy as np

        limit_memory(options["memory_limit"])
        lengths = np.frombuffer(frames.get(), np.int32).tolist()
        vocabulary, sentinel = build_vocabulary(lengths, frames.get())
    except Exception as error:  # whatever keeps it from starting is told to the parent
        write_frame(out, INVALID, f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
        return
    write_frame(out, READY)
    while True:
        write_frame(out, *answer(frames.get().decode(), vocabulary, sentinel, options["max_index_bytes"]))


if __name__ == "__main__":
    main()
