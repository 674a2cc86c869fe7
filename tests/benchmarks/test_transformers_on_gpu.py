"""The peer on a GPU, without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import transformers_on_gpu
from tools.gpucheck.shapes import Shape

TINY = Shape("tiny", 32, 48, 2, 2, 1, tied=True, head_dim=16, vocab=128)


def test_a_peer_that_fails_is_absent_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> float:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(transformers_on_gpu, "_transformers_batching", broken)
    found = transformers_on_gpu.transformers_batching(TINY, torch.device("cpu"), [[1, 2]], 3)
    assert found == (None, "RuntimeError: no such kernel")
