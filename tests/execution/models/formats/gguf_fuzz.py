"""Mutated GGUF files: each opens, or fails with a short typed error, at once and without taking memory.

python tests/execution/models/formats/gguf_fuzz.py 20000
"""

from __future__ import annotations

import math
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.models.formats.gguf.model import GgufModel

SECONDS = 1.0
"""Seconds of this thread: others may keep the machine busy."""
MEMORY = 100e6
_NUMBERS = (0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_LONG = (*_NUMBERS, 2**40, 2**60, 2**62 - 1, 2**63 - 1, 2**63, 2**64 - 1)
LARGEST = 2**20
"""Numbers of a tensor that is read as well."""


def mutate(content: bytes, generator: random.Random) -> bytes:
    """A few changes, most of them in the header."""
    data = bytearray(content)
    header = max(content.find(b"\0" * 64), 400)
    for _ in range(generator.choice((1, 1, 1, 2, 3, 8))):
        end = len(data) if generator.random() < 0.1 else min(header, len(data))
        if end < 16:
            break
        at = generator.randrange(end)
        kind = generator.randrange(8)
        if kind == 0:
            data[at] = generator.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", generator.choice(_NUMBERS))
        elif kind == 3:
            data[at : at + 8] = struct.pack("<Q", generator.choice(_LONG))
        elif kind == 4:
            del data[at : at + generator.choice((1, 4, 8, 100, len(data)))]
        elif kind == 5:
            length = generator.choice((1, 4, 8, 64))
            data[at:at] = data[generator.randrange(end) :][:length]
        elif kind == 6:
            data[at:at] = generator.randbytes(generator.choice((1, 8, 1000)))
        else:
            length = generator.choice((4, 8, 32))
            data[at : at + length] = data[generator.randrange(end) :][:length]
    return bytes(data)


def attempt(path: Path) -> str:
    """Open a file, and read every tensor of modest size. What it was: "opened", or the error's name."""
    try:
        model = GgufModel(path)
        for key in model.metadata:
            if key in model.metadata.short or model.metadata.long[key].length <= LARGEST:
                model.metadata.get(key)
        for name, stored in model.tensors.items():
            if stored.elements > LARGEST:
                continue
            read = model.read(name)
            plain = isinstance(read, torch.Tensor)
            shape = read.shape if plain else read.rows(0, read.shape[0]).numbers.shape
            # experts' matrices, quantized, lie one below the other
            if (tuple(shape) != stored.shape) if plain else math.prod(shape) != stored.elements:
                raise ValueError(f"{name} has {tuple(shape)}, not {stored.shape}")
            model.release(read)
    except (ModelNotFound, UnsupportedModel) as error:
        return type(error).__name__ if len(str(error)) <= 1000 else "long"
    return "opened"


def run(seeds: list[bytes], cases: int, folder: Path, first: int = 0) -> Counter[str]:
    """`cases` mutated files; what became of them. Raises `AssertionError` with the case's number."""
    found: Counter[str] = Counter()
    path = folder / "model.gguf"
    for seed in seeds:  # whole, so that kernels are compiled before time is taken
        path.write_bytes(seed)
        assert attempt(path) == "opened"
    tracemalloc.start()
    for case in range(first, first + cases):
        generator = random.Random(case)
        path.write_bytes(mutate(generator.choice(seeds), generator))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        begun = time.thread_time()
        try:
            found[attempt(path)] += 1
        except Exception as error:
            raise AssertionError(f"case {case}: {type(error).__name__}: {error}") from error
        seconds, memory = time.thread_time() - begun, tracemalloc.get_traced_memory()[1] - before
        assert seconds < SECONDS, f"case {case} took {seconds:.1f} s"
        assert memory < MEMORY, f"case {case} took {memory / 1e6:.0f} MB"
    tracemalloc.stop()
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from execution.models.formats.test_gguf_fuzz import seed_files

    with tempfile.TemporaryDirectory() as temporary:
        print(run(seed_files(Path(temporary)), int(sys.argv[1]) if len(sys.argv) > 1 else 1000, Path(temporary)))
