"""Capturing without a device: which streams, one at a time in a process, and what a failed capture leaves behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from support.fake_cuda import CUDA, FakeCuda

from asyncengine.execution.device.transfer import copy_stream
from asyncengine.execution.runner.graphs import CudaCapture


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_all_captures_share_their_two_streams(cuda: FakeCuda) -> None:
    capture = CudaCapture()
    for _ in range(40):
        seen: list[int] = []

        def work(seen: list[int] = seen) -> torch.Tensor:
            seen.append(cuda.current().number)
            return torch.zeros(1)

        capture(work)
        assert seen == [1, 2]
        assert cuda.current().number == 0
    assert cuda.made == 2
    assert cuda.log == ["1 waits for 0", "0 waits for 1", "capture on 2"] * 40


def test_the_two_streams_differ_where_streams_are_handed_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch, streams=1)
    made = cuda.stream
    numbers = iter([7, 7, 7, 8])

    def again() -> object:
        stream = made()
        stream.number = next(numbers)
        return stream

    monkeypatch.setattr(torch.cuda, "Stream", again)
    CudaCapture()(lambda: torch.zeros(1))
    assert cuda.log[-1] == "capture on 8"


def test_results_never_travel_in_a_stream_that_may_be_captured(cuda: FakeCuda) -> None:
    for _ in range(40):
        CudaCapture()(lambda: torch.zeros(1))
    capturing = {int(line.split()[-1]) for line in cuda.log if line.startswith("capture")}
    copying = {copy_stream(CUDA).number for _ in range(40)}  # type: ignore[union-attr]
    assert capturing
    assert not capturing & copying


@pytest.mark.parametrize("where", [0, 1])
def test_a_failed_capture_leaves_the_thread_where_it_was(where: int, cuda: FakeCuda) -> None:
    calls = 0

    def work() -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == where + 1:
            cuda.broken = where == 1
            raise RuntimeError("not permitted when stream is capturing")
        return torch.zeros(1)

    capture = CudaCapture()
    with pytest.raises(RuntimeError):
        capture(work)
    assert cuda.current().number == 0
    cuda.broken = False
    capture(lambda: torch.zeros(1))
    assert cuda.current().number == 0


def test_engines_capture_one_after_the_other(cuda: FakeCuda) -> None:
    """A capture waits for the whole device before it begins, which no engine may do while another captures."""
    errors: list[BaseException] = []

    def engine() -> None:
        try:
            capture = CudaCapture()
            for _ in range(5):
                capture(slow)
        except BaseException as error:
            errors.append(error)

    def slow() -> torch.Tensor:
        time.sleep(0.002)
        return torch.zeros(1)

    threads = [threading.Thread(target=engine) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sum(entry.startswith("capture") for entry in cuda.log) == 20
