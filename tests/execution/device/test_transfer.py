"""Results on their way to the host: kept until they have arrived, waited for without burning a core."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from support.fake_cuda import CUDA, FakeCuda, FakeEvent
from support.fake_flashinfer import FakeMemory

from asyncengine.execution.device.pinned import FixedInputs, on_device
from asyncengine.execution.device.transfer import Readback, copy_stream, send, upload

CPU = torch.device("cpu")


def test_what_is_copied_is_kept_until_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    stream: Any = copy_stream(CUDA)
    readback = Readback(stream)
    assert not readback.ready
    source = torch.arange(3)
    kept = weakref.ref(source)
    host = readback.fetch(source)
    readback.send()
    assert cuda.log[-1] == f"{stream.number} waits for 0", "a copy runs behind the step that computes what it takes"
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


def test_results_that_the_next_step_overwrites_use_the_same_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied in the stream of the steps; a host array serves again once it has been read, and not before."""
    cuda, made = FakeCuda(monkeypatch), []
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        made.append(pin_memory)
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    used: list[torch.Tensor] = []
    stream, fixed = copy_stream(CUDA), torch.zeros(3, dtype=torch.int64)
    unread: list[tuple[Readback, torch.Tensor, int]] = []
    for turn in range(9):
        fixed.fill_(turn)
        readback = Readback(stream, used)
        unread.append((readback, readback.fetch_now(fixed), turn))
        readback.send()
        if len(unread) == 3:
            readback, host, number = unread.pop(0)
            readback.wait()
            assert host.tolist() == [number] * 3
            readback.release()
            readback.release()  # nothing more to give back
    assert made == [True] * 3
    assert cuda.log == [], "one stream, that waits for nobody"


class Careless(FixedInputs):
    """Waits for no copy."""

    def take(self) -> torch.Tensor:
        self._copied = [None] * len(self._copied)
        return super().take()


@pytest.mark.parametrize("kind", [FixedInputs, Careless])
def test_an_array_is_written_again_when_its_copy_has_run(kind: type[FixedInputs]) -> None:
    memory = FakeMemory()
    inputs = kind(memory, 6, kept=4)
    inputs.device[:4] = 9

    def steps() -> None:
        for turn in range(7):
            inputs.take()[:] = torch.tensor([turn, turn, 0, 0, 0, 7])
            inputs.send(2 + turn % 3)
            assert inputs.device[:6].tolist() == [9, 9, 9, 9, turn, turn]
            assert inputs.sent.data_ptr() == inputs.device[4:].data_ptr()
        done = memory.event()
        done.record()
        done.synchronize()

    if kind is FixedInputs:
        steps()
        assert memory.waits == 7 - 3 + 1
        assert inputs.device[-1] == 0, "what was not sent"
    else:
        with pytest.raises(AssertionError, match="changed before its copy had run"):
            steps()


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
