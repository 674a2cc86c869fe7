"""Triton's interpreter with products of bfloat16 blocks: it keeps such numbers as uint16, and multiplies those."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def with_bfloat16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter multiply bfloat16 blocks from now on in this test."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(block: Any) -> Any:
        if block.dtype.scalar != tl.bfloat16:
            return block
        return interpreter.TensorHandle((block.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, left: Any, right: Any, *more: Any) -> Any:
        return multiply(self, widened(left), widened(right), *more)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
