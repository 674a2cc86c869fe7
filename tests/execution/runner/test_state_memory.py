"""The number of states that a budget holds, and the error where it holds none."""

from __future__ import annotations

import re

import pytest
import torch

from asyncengine.errors import InvalidParameter, OutOfMemory
from asyncengine.execution.layers.states import StatePools, StateSpec
from asyncengine.execution.models.memory.caches import num_states_for, state_bytes
from asyncengine.execution.runner.building import largest_step

SPECS = (StateSpec((4, 8, 8), (64, 3)), StateSpec((), (64, 3)))
ONE = 4 * 8 * 8 * 4 + 2 * 64 * 3 * 2
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def slots(
    free: int = 2**40, device: torch.device = CPU, *, state_memory: int | None = None, max_num_seqs: int = 256
) -> int:
    return num_states_for(SPECS, state_memory, max_num_seqs, torch.bfloat16, device, free)


def test_a_budget_is_kept_and_used() -> None:
    assert state_bytes(SPECS, torch.bfloat16) == ONE
    for budget in (2 * ONE, 7 * ONE, 7 * ONE + ONE - 1):
        count = slots(state_memory=budget)
        assert count == budget // ONE
        pools = StatePools(SPECS, count, torch.bfloat16, CPU)
        assert pools.nbytes == count * ONE <= budget


@pytest.mark.parametrize("budget", [1, ONE, 2 * ONE - 1])
def test_a_budget_that_holds_no_request_is_refused_with_the_numbers(budget: int) -> None:
    words = f"state_memory: one state takes {ONE} bytes.*at least {2 * ONE}"
    with pytest.raises(InvalidParameter, match=words):
        slots(state_memory=budget)


def test_more_than_is_free_is_refused() -> None:
    with pytest.raises(OutOfMemory, match=re.escape("state_memory asks for 1 MiB, but only 0 MiB are free on cpu")):
        slots(1000, state_memory=2**20)


def test_without_a_budget_it_is_a_share_of_what_is_free_and_no_more_than_is_of_use() -> None:
    assert slots(max_num_seqs=5) == 11
    large = (StateSpec((2**22,)),)
    most = {device: num_states_for(large, None, 256, torch.float32, device, 2**40) for device in (CPU, CUDA)}
    assert most == {CPU: 4 * 2**30 // 2**24, CUDA: 513}
    assert slots(100 * ONE, max_num_seqs=64) == 25
    with pytest.raises(OutOfMemory, match="two are needed"):
        slots(7 * ONE)


def test_who_keeps_no_states_has_none() -> None:
    assert num_states_for((), 1, 256, torch.float32, CPU, 0) == 0


def test_the_largest_step_has_no_more_rows_than_there_are_states() -> None:
    batch, _ = largest_step(16, 64, 256, 512, num_states=6)
    assert [row.state.slot for row in batch.rows if row.state is not None] == [1, 2, 3, 4, 5]
    assert batch.num_tokens == 256


def test_memory_of_the_host_is_taken_when_it_is_written() -> None:
    """A pool for the most that may run at once costs what runs."""

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    pools = StatePools((StateSpec((64, 64, 64), (1024, 3)),), 300, torch.float32, CPU)
    assert pools.nbytes > 300 * 2**20
    assert resident() - before < 20 * 2**20
    assert all(pool is not None and not pool[299].any() for pool in (*pools.recurrent, *pools.windows))
    assert all(pool is not None and pool.data_ptr() % 64 == 0 for pool in (*pools.recurrent, *pools.windows))
