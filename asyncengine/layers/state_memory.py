"""The number of recurrent states that there is memory for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncengine.config import EngineConfig
from asyncengine.device.memory import limited_by
from asyncengine.errors import InvalidParameter, OutOfMemory
from asyncengine.layers.states import StateSpec

_SHARE, _CPU_CAP = 0.25, 4 * 2**30
"""Without a setting: of what is free, and on a CPU at most these bytes (the machine has other work)."""


def state_bytes(specs: Sequence[StateSpec], dtype: torch.dtype) -> int:
    """Bytes of one sequence's states of all layers."""
    return sum(spec.nbytes(dtype) for spec in specs)


def num_states_for(
    specs: Sequence[StateSpec], config: EngineConfig, dtype: torch.dtype, device: torch.device, free_bytes: int
) -> int:
    """Slots for recurrent states, slot 0 included; 0: the model keeps none.

    `state_memory` bytes if given; else a share of `free_bytes`, at most enough for `max_num_seqs` running requests and
    as many snapshots, and on a CPU at most 4 GiB. Raises `InvalidParameter` for bytes that hold no running request
    (which takes two slots: slot 0 is memory too), `OutOfMemory` if there are not so many, or too few without a setting.
    """
    size = state_bytes(specs, dtype)
    if not size:
        return 0
    asked = config.state_memory
    assert asked is None or isinstance(asked, int)
    if asked is None:
        budget = int(free_bytes * _SHARE)
        if device.type == "cpu":
            budget = min(budget, _CPU_CAP)
        if budget < 2 * size:
            raise OutOfMemory(
                f"recurrent states get {budget / 2**20:.0f} MiB, and one takes {size / 2**20:.1f} MiB; two are needed"
            )
        return min(budget // size, 2 * config.max_num_seqs + 1)
    if asked < 2 * size:
        raise InvalidParameter(
            "state_memory", f"one state takes {size} bytes, and a request needs two: at least {2 * size}", asked
        )
    if asked > free_bytes:
        raise OutOfMemory(
            f"state_memory asks for {asked / 2**20:.0f} MiB, but only {free_bytes / 2**20:.0f} MiB are free on {device}"
            + limited_by(device)
        )
    return asked // size
