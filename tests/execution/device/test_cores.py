"""The threads that a step gets: fewer in company, shared between engines, and nobody else's settings touched."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from asyncengine.engine.device_thread import SwitchInterval
from asyncengine.execution.device.cores import Company, Cores, Sharing, torch_threads

pytest.importorskip("numba")

from asyncengine.kernels.cpu.team import Account, team_threads

GOOD, POOR = Account(100, 1000, 500, 10**7, 0, 2 * 10**7), Account(100, 1000, 900, 10**7, 10**7, 8 * 10**7)
STEP = 0.02


def steps(company: Company, seconds: float, loops: Account | None, preempted: int = 0) -> list[int]:
    """The threads of each step in so many seconds."""
    used = []
    for _ in range(round(seconds / STEP)):
        used.append(company.threads)
        company.note(company.threads, STEP, loops if company.threads > 1 else None, preempted)
    return used


def test_alone_all_threads_are_used() -> None:
    company = Company(4)
    assert set(steps(company, 5, GOOD)) == {4}
    assert company.efficiency == 1


def test_in_company_fewer_and_fewer_then_one() -> None:
    company = Company(8)
    used = steps(company, 0.3, POOR)
    assert used[0] == 8
    assert used == sorted(used, reverse=True)
    assert company.threads == 1


def test_more_is_tried_again_ever_more_rarely() -> None:
    company = Company(2)
    used = steps(company, 60, POOR)
    tries = [place for place in range(1, len(used)) if used[place] > used[place - 1]]
    gaps = [(later - earlier) * STEP for earlier, later in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 2
    assert gaps[-1] > 7
    assert used.count(2) < len(used) / 15


def test_an_engine_on_another_device_takes_no_threads() -> None:
    sharing = Sharing()
    cores = Cores(4, torch.device("meta"), sharing)
    before = torch.get_num_threads()
    with cores.step():
        assert sharing.enter(Cores(4, sharing=sharing)) == 4
        assert torch.get_num_threads() == before
    assert cores.stats.now == 1
    cores.close()


def test_engines_share_the_cores_while_they_run_steps() -> None:
    sharing = Sharing()
    one, two = Cores(4, sharing=sharing), Cores(4, sharing=sharing)
    try:
        with one.step():
            assert team_threads()[0] == 4
            other = on_a_thread(lambda: stepped(two))
            assert other == 2
            assert team_threads()[0] == 4
        assert on_a_thread(lambda: stepped(two)) == 4
        assert two.stats.now == 4
    finally:
        one.close()
        two.close()


def test_a_step_gives_cores_up_in_its_midst() -> None:
    """The step has them back when the other's is over: ten thousand documents are long steps, a chat's are short."""
    sharing = Sharing()
    long, short = Cores(4, sharing=sharing), Cores(4, sharing=sharing)
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with short.step():
            inside.set()
            leave.wait(120)

    holder = threading.Thread(target=hold)
    try:
        with long.step():
            assert team_threads()[0] == 4
            holder.start()
            assert inside.wait(120)
            assert team_threads()[0] == 2
            leave.set()
            holder.join()
            assert team_threads()[0] == 4
    finally:
        leave.set()
        long.close()
        short.close()


def stepped(cores: Cores) -> int:
    with cores.step():
        return team_threads()[0]


def on_a_thread(work: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_small_step_takes_one_thread() -> None:
    cores, threads = Cores(2), set(threading.enumerate())
    with cores.step(small=True):
        assert team_threads()[0] == 1
        assert torch.get_num_threads() == 1
    assert (cores.stats.now, cores.stats.most) == (1, 2)
    assert not set(threading.enumerate()) - threads


def test_torch_s_threads_are_set_for_this_thread_alone() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        assert on_a_thread(torch.get_num_threads) == before
    assert torch.get_num_threads() == before


@pytest.fixture
def interval() -> Iterator[SwitchInterval]:
    """A switch interval that begins with Python's own, whatever engines of other tests have made of it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield SwitchInterval()
    sys.setswitchinterval(before)


def test_the_switch_interval_is_the_shortest_wanted_and_set_back(interval: SwitchInterval) -> None:
    before = sys.getswitchinterval()
    with interval.shortened(0.002):
        assert sys.getswitchinterval() == pytest.approx(0.002)
        with interval.shortened(0.001), interval.shortened(None), interval.shortened(1.0):
            assert sys.getswitchinterval() == pytest.approx(0.001)
        assert sys.getswitchinterval() == pytest.approx(0.002)
    assert sys.getswitchinterval() == before


def test_what_the_program_sets_meanwhile_stands(interval: SwitchInterval) -> None:
    before = sys.getswitchinterval()
    try:
        with interval.shortened(0.002):
            sys.setswitchinterval(0.003)
            with interval.shortened(0.001):
                assert sys.getswitchinterval() == pytest.approx(0.003)
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(before)
