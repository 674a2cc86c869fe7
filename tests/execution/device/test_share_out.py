"""Python work shared among the threads that kernels may use."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("numba")

from asyncengine.execution.device.cores import Cores
from asyncengine.execution.layers.stored_weight import share_out
from asyncengine.kernels.cpu.team import use_team


@pytest.fixture
def cores() -> Cores:
    return Cores(3)


def test_all_threads_take_part_and_each_item_is_taken_once(cores: Cores) -> None:
    """Kernels and torch are alone on their thread meanwhile, and in the mode that the caller is in."""
    meeting, seen = threading.Barrier(3, timeout=120), list[tuple[int, int, int, bool]]()

    def work(item: int) -> None:
        if item < 3:
            meeting.wait()
        seen.append((item, use_team(), torch.get_num_threads(), torch.is_inference_mode_enabled()))

    with cores.loading(), torch.inference_mode():
        before = use_team(), torch.get_num_threads()
        share_out(work, range(100))
        assert (use_team(), torch.get_num_threads()) == before
        assert before[0] != 0
    assert sorted(seen) == [(item, 0, 1, True) for item in range(100)]
    cores.close()


def test_one_thread_does_it_in_order_where_there_is_no_team() -> None:
    seen = list[tuple[int, int]]()
    share_out(lambda item: seen.append((item, threading.get_ident())), range(5))
    assert seen == [(item, threading.get_ident()) for item in range(5)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_of_any_thread_is_raised_and_the_rest_is_left_out(cores: Cores, place: int) -> None:
    meeting, done = threading.Barrier(3, timeout=120), list[int]()

    def work(item: int) -> None:
        if item < 3:
            meeting.wait()
        if item == place:
            raise ValueError(f"item {item}")
        done.append(item)

    with cores.loading(), pytest.raises(ValueError, match=f"item {place}"):
        share_out(work, range(10**6))
    assert len(done) < 10**6
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncengine-load"]
    cores.close()


def test_the_system_has_no_more_threads(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    seen = list[int]()
    with cores.loading():
        monkeypatch.setattr(threading.Thread, "start", refuse)
        share_out(seen.append, range(5))
    assert seen == [0, 1, 2, 3, 4]
    monkeypatch.undo()
    cores.close()
