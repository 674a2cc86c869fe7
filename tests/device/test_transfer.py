"""Results on their way to the host: kept until they have arrived, waited for without burning a core."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support.fake_cuda import CUDA, FakeCuda, FakeEvent

from asyncengine.device.pinned import on_device
from asyncengine.device.transfer import Readback, copy_stream, send, upload

CPU = torch.device("cpu")


def test_what_is_copied_is_kept_until_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    readback = Readback(copy_stream(CUDA))
    assert not readback.ready
    source = torch.arange(3)
    kept = weakref.ref(source)
    host = readback.fetch(source)
    readback.send()
    del source
    gc.collect()
    assert kept() is not None, "its memory may be given to the next step, which this copy does not know"
    readback.wait()
    assert kept() is None
    assert host.tolist() == [0, 1, 2]
    event = readback._arrived
    assert isinstance(event, FakeEvent)
    assert event.blocking
    readback.wait()
    assert event.waited == 2


def test_on_the_host_nothing_moves() -> None:
    readback = Readback(None)
    values = torch.arange(3)
    assert readback.ready
    assert readback.fetch(values) is values
    readback.send()
    readback.wait()
    assert send(values, CPU) is values
    array = values.numpy()
    assert upload(array, CPU).data_ptr() == values.data_ptr()
    with on_device(CPU):
        pass
