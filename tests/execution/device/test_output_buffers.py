"""Memory for large results is handed out again only when nobody holds it."""

from __future__ import annotations

import pytest

from asyncengine.execution.device import output_buffers
from asyncengine.execution.device.output_buffers import OutputBufferPool

LARGE = 2**18
"""Numbers of a result that is worth being kept; smaller ones are torch's."""


def test_memory_is_reused_only_when_nobody_holds_it() -> None:
    memory = OutputBufferPool()
    first = memory.take((2, LARGE))
    address = first.data_ptr()
    part = first[None][0][1:]
    del first
    second = memory.take((2, LARGE))
    assert second.data_ptr() != address
    del part
    address = second.data_ptr()
    del second
    assert memory.take((1, 2, LARGE - 1)).data_ptr() == address


def test_memory_without_torchs_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_buffers, "_use_count", None)
    memory = OutputBufferPool()
    first = memory.take((2, LARGE)).fill_(1)
    memory.take((2, LARGE)).fill_(2)
    assert (first == 1).all()
