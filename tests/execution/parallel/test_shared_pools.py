"""Pages and states of several ranks in one memory, as the engine's process reads and writes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.rank_threads import gathers

pytest.importorskip("numba")

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.attention.torch_paged import TorchPagedBackend
from asyncengine.execution.device import shared_gather
from asyncengine.execution.layers.states import StatePools, StateSpec
from asyncengine.execution.runner.model_memory import CpuPageMemory
from asyncengine.step import RecordType

pytestmark = pytest.mark.skipif(shared_gather.missing() is not None, reason=str(shared_gather.missing()))
CPU, TYPE = torch.device("cpu"), torch.float32
SPEC = LayerSpec(index=0, num_heads=2, num_kv_heads=2, key_dim=4, value_dim=4, scale=1.0)
STATES = (StateSpec((3, 4), (2, 5)),)


def test_a_page_is_what_all_ranks_have_of_it() -> None:
    """Heads side by side where they are divided, one copy for all where they are not; states alike."""
    specs = [SPEC, replace(SPEC, index=1, num_heads=1, num_kv_heads=1, divided=True)]
    views = [each.pools(2**16) for each in gathers(2)]
    backends = [TorchPagedBackend(specs, 5, 4, TYPE, CPU, 0, shared) for shared in views]
    states = [StatePools(STATES, 3, TYPE, CPU, shared=shared) for shared in views]
    memory = CpuPageMemory(backends[0].page_pools(), states[0], "torch", views[0])
    plain = TorchPagedBackend([SPEC, replace(SPEC, index=1)], 5, 4, TYPE, CPU)
    alone = CpuPageMemory(plain.page_pools(), StatePools(STATES, 3, TYPE, CPU), "torch")
    assert memory.layout == alone.layout
    for part, index in ((RecordType.PAGE, 3), (RecordType.STATE, 2)):
        given, buffers = [], memory.buffers(part, index)
        assert [len(each) for each in buffers] == [len(each) for each in alone.buffers(part, index)]
        assert sum(len(each) for each in buffers) == memory.nbytes(part) == alone.nbytes(part)
        for number, buffer in enumerate(buffers):
            given.append(bytes([number + 1]) * len(buffer))
            buffer[:] = given[-1]
        memory.filled(part, index, buffers)
        assert [bytes(each) for each in memory.buffers(part, index)] == given
    keys = [backend.page_pools()[0].memory for backend in backends]
    assert torch.equal(keys[0][:, 3], keys[1][:, 3])
    assert keys[0][:, 3].any()
    divided = [backend.page_pools()[2].memory.view(torch.uint8)[0, 3].unique().tolist() for backend in backends]
    assert divided == [[5], [6]]
    assert torch.equal(states[0].recurrent[0][2], states[1].recurrent[0][2])
    assert states[0].recurrent[0][2].any()
    views[1].give_back()
    assert not keys[1].any()
    assert keys[0].any()


def test_a_state_of_several_ranks_has_the_bytes_of_one() -> None:
    """Heads one rank after the other; channels of each kind in each row of a window."""
    spec, half = StateSpec((4, 2, 3), (3, 10), (8, 2)), StateSpec((2, 2, 3), (3, 5), (4, 1), divided=True)
    views = [each.pools(2**16) for each in gathers(2)]
    states = [StatePools([half], 3, TYPE, CPU, shared=shared) for shared in views]
    memory, whole = CpuPageMemory([], states[0], "torch", views[0]), StatePools([spec], 3, TYPE, CPU)
    alone = CpuPageMemory([], whole, "torch")
    assert memory.layout == alone.layout
    for pool in (*whole.recurrent, *whole.windows):
        pool[2] = torch.arange(1, pool[2].numel() + 1).view(pool[2].shape)
    buffers, given = memory.buffers(RecordType.STATE, 2), b"".join(alone.buffers(RecordType.STATE, 2))
    assert sum(len(each) for each in buffers) == memory.nbytes(RecordType.STATE) == len(given)
    begin = 0
    for buffer in buffers:
        buffer[:] = given[begin : begin + len(buffer)]
        begin += len(buffer)
    memory.filled(RecordType.STATE, 2, buffers)
    for rank, channels in enumerate(([0, 1, 2, 3, 8], [4, 5, 6, 7, 9])):
        assert torch.equal(states[rank].recurrent[0], whole.recurrent[0][:, 2 * rank : 2 * rank + 2])
        assert torch.equal(states[rank].windows[0], whole.windows[0][:, :, channels])


def test_a_region_that_is_full_says_so() -> None:
    (shared, _) = [each.pools(100) for each in gathers(2)]
    with pytest.raises(MemoryError, match="more than is left"):
        shared.empty([2**16], torch.uint8)
