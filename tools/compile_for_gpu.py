"""Triton kernels compiled for a GPU on a machine without one, as far as tests call them.

    python -m tools.compile_for_gpu [tests/kernels/cuda/test_norm.py -k gated] [--capability 90 --shared 227]

Tests run these kernels by Triton's interpreter, which takes what its compiler refuses (a name that has another shape in
a branch) and knows no limit of memory. Here the same tests call the compiler instead and nothing is launched: what they
find wrong with the results means nothing, what the compiler refuses is printed and is the exit status. About a second
for each form of a kernel; other arguments go to pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--shared", type=int, default=227, help="KiB of shared memory that a program may have there")
    options, rest = parser.parse_known_args()
    os.environ["TRITON_INTERPRET"] = "0"
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", options.capability, 32)
    driver.set_active(
        SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target)
    )
    compiled: dict[tuple[str, str], int] = {}
    refused: dict[str, str] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        try:
            found = run(kernel, *args, grid=grid, warmup=True, **settings)
        except Exception as error:
            refused[f"{kernel.__name__}: {str(error).strip().splitlines()[-1]}"] = str(error)
            return
        shared = compiled[kernel.__name__, found.hash] = found.metadata.shared
        if shared > options.shared << 10:
            refused[f"{kernel.__name__}: {shared >> 10} KiB of shared memory of {options.shared}"] = ""

    JITFunction.run = compile_only
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*(rest or ["tests/kernels/cuda"]), "-q", "-p", "no:cacheprovider"])
    names = sorted({name for name, _ in compiled})
    for name in names:
        forms = [shared for (own, _), shared in compiled.items() if own == name]
        print(f"{name}: {len(forms)} forms, at most {max(forms) / 1024:.1f} KiB of shared memory")
    for line, text in refused.items():
        print(f"refused: {line}\n{text}", file=sys.stderr)
    return 1 if refused or not compiled else 0


if __name__ == "__main__":
    sys.exit(main())
