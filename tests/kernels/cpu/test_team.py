"""A team's loops: each piece once whoever comes, nobody waited for who has nothing begun, and nothing left behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from support.teams import team_of

from asyncengine.kernels.cpu.atomics import AFFINITY_BYTES, keep_off_core, load, store
from asyncengine.kernels.cpu.calls import parallel_for
from asyncengine.kernels.cpu.jit import array, pointer, serial_in_order
from asyncengine.kernels.cpu.team import Account, Team, use_team
from asyncengine.kernels.cpu.team_loops import pieces_of


@serial_in_order
def _count(piece: int, pieces: int, worker: int, out: int, workers: int) -> None:
    array(pointer(out, np.int64(0)), (pieces,))[piece] += 1
    array(pointer(workers, np.int64(0)), (64,))[worker] += 1


@serial_in_order
def _count_all(out: int, workers: int, pieces: int, loops: int, team: int) -> None:
    for _ in range(loops):
        parallel_for(_count, team, pieces, (out, workers))


@serial_in_order
def _meet(piece: int, pieces: int, worker: int, words: int) -> None:
    """Piece 0 and the last one each wait until the other has begun."""
    if piece == 0 or piece == pieces - 1:
        store(words + (0 if piece == 0 else 8), 1)
        while load(words + (8 if piece == 0 else 0)) == 0:
            pass


@serial_in_order
def _meet_all(words: int, pieces: int, team: int) -> None:
    parallel_for(_meet, team, pieces, (words,))


def run(pieces: int, loops: int) -> tuple[list[int], list[int]]:
    """Counts of how often each piece was computed, and of how many each worker did."""
    out, workers = np.zeros(pieces, np.int64), np.zeros(64, np.int64)
    _count_all(out.ctypes.data, workers.ctypes.data, pieces, loops, use_team())
    return out.tolist(), workers.tolist()


@pytest.mark.parametrize("threads", [2, 3, 6])
def test_every_piece_once_however_many_threads_there_are_cores_for(threads: int) -> None:
    with team_of(threads) as team:
        for pieces, loops in ((2, 2000), (7, 2000), (threads * 16, 300)):
            counts, _ = run(pieces, loops)
            assert counts == [loops] * pieces
        assert team.account.loops == 4300
        assert team.account.pieces == 2000 * 9 + 300 * threads * 16


def test_helpers_take_part() -> None:
    with team_of(2):
        words = np.zeros(2, np.int64)
        _meet_all(words.ctypes.data, 2, use_team())  # would never end with one thread
    assert words.tolist() == [1, 1]


def test_nobody_is_waited_for_who_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The helpers' threads never run, like those whose cores are taken for good."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: None)
    with team_of(4) as team:
        counts, workers = run(64, 10)
        assert counts == [10] * 64
        assert workers[0] == 640
        assert team.account.own == team.account.pieces == 640


def test_one_thread_does_it_alone_and_nothing_is_cut() -> None:
    with closing(Team(3)) as team:
        with team.joined(1):
            assert use_team() == 0
            assert pieces_of(2**30, 1000, use_team()) == 1
        with team.joined():
            assert pieces_of(2**30, 1000, use_team()) == 48
            assert pieces_of(2**30, 5, use_team()) == 5
            assert pieces_of(2**18, 1000, use_team()) == 2
            assert pieces_of(4 * 2**17, 1000, use_team()) == 6  # as many for each of three threads
            assert pieces_of(3 * 2**16, 1000, use_team()) == 2
            assert pieces_of(10, 1000, use_team()) == 1
    assert use_team() == 0


def test_fewer_threads_and_more_again() -> None:
    with closing(Team(4, piece=1)) as team:
        for threads in (4, 2, 1, 3, 4):
            with team.joined(threads):
                assert team.active == threads
                counts, workers = run(40, 200)
            assert counts == [200] * 40
            assert not any(workers[threads:])


def test_helpers_that_wait_sleep() -> None:
    with team_of(3):
        run(30, 10)
        time.sleep(0.02)  # longer than anybody spins
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.15
        assert run(30, 10)[0] == [10] * 30


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is told on which core a thread wakes")
def test_a_helper_wakes_on_another_core_and_may_use_all_of_them_afterwards() -> None:
    """It is kept off its waker's core. What it may use is never less for that, even if that was changed meanwhile."""
    allowed, ended = os.sched_getaffinity(0), threading.Event()
    sleeper = threading.Thread(target=ended.wait)
    sleeper.start()
    space = np.zeros(2 * AFFINITY_BYTES // 8, np.int64)
    try:
        for core in sorted(allowed)[:2]:
            os.sched_setaffinity(0, {core})
            os.sched_setaffinity(sleeper.native_id or 0, allowed)
            assert keep_off_core(sleeper.native_id, space.ctypes.data) == (len(allowed) > 1)
            assert os.sched_getaffinity(sleeper.native_id or 0) == (allowed - {core} or allowed)
        assert keep_off_core(-1, space.ctypes.data) == 0
    finally:
        os.sched_setaffinity(0, allowed)
        ended.set()
        sleeper.join()
    with team_of(3) as team:
        for cores in (allowed, set(sorted(allowed)[:1])):
            for helper in team._helpers:
                os.sched_setaffinity(helper.native_id or 0, cores)
            for _ in range(20):
                run(30, 3)
                time.sleep(0.002)  # longer than a helper spins
            run(30, 3)
            for helper in team._helpers:
                deadline = time.monotonic() + 120
                while os.sched_getaffinity(helper.native_id or 0) != cores:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_no_thread_before_the_first_use_and_none_after_the_last() -> None:
    team = Team(3, name="tested-core")
    assert not threads_named("tested-core")
    with team.joined():
        assert len(threads_named("tested-core")) == 2
    team.close()
    team.close()
    assert not threads_named("tested-core")
    with pytest.raises(RuntimeError, match="closed"), team.joined():
        pass


def test_a_team_that_nobody_holds_ends() -> None:
    team = Team(2, name="dropped-core")
    with team.joined():
        run(8, 3)
    helpers = threads_named("dropped-core")
    assert len(helpers) == 1
    del team
    gc.collect()
    helpers[0].join(120)
    assert not helpers[0].is_alive()


def test_one_thread_at_a_time() -> None:
    with team_of(2) as team:
        failed: list[BaseException] = []

        def intrude() -> None:
            try:
                with team.joined():
                    pass
            except RuntimeError as error:
                failed.append(error)

        other = threading.Thread(target=intrude)
        other.start()
        other.join()
        assert "another thread" in str(failed[0])
        assert use_team() != 0


def test_efficiency() -> None:
    """Two threads each did half; the caller waited as long as it computed; the helper never came; no loop at all."""
    assert Account(1, 10, 5, 100, 0, 200).efficiency == 1
    assert Account(1, 10, 5, 100, 100, 400).efficiency == 0.5
    assert Account(1, 10, 10, 100, 0, 200).efficiency == 0.5
    assert Account(0, 0, 0, 0, 0, 0).efficiency == 1
    assert Account(3, 4, 5, 6, 7, 8).since(Account(1, 1, 1, 1, 1, 1)) == Account(2, 3, 4, 5, 6, 7)


def test_a_fork_closes_what_it_has_not() -> None:
    """Its helpers are in the other process, and their locks may be held for ever."""
    with team_of(2) as team:
        run(8, 5)
        child = os.fork()
        if child == 0:
            team.close()
            os._exit(0)
        deadline = time.monotonic() + 120
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert run(8, 5)[0] == [5] * 8


def test_without_another_thread_to_have_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with team_of(3):
        assert run(20, 5)[0] == [5] * 20


def test_fewer_and_more_while_loops_run() -> None:
    """Another thread says so at any moment; every piece is computed once all the same."""
    with team_of(4) as team:
        ended = threading.Event()

        def change() -> None:
            turn = 0
            while not ended.is_set():
                turn += 1
                team.limit(1 + turn % 4)

        changing = threading.Thread(target=change)
        changing.start()
        try:
            for pieces in (2, 7, 64):
                counts, _ = run(pieces, 3000)
                assert counts == [3000] * pieces
        finally:
            ended.set()
            changing.join()
        team.limit(1)
        assert use_team() == 0
        team.limit(64)
        assert team.active == 4
        counts, _ = run(40, 200)
        assert counts == [200] * 40
