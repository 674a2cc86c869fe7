"""A disk that takes the world's time, for stores of prefixes: what it loses is found by the next process."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Callable
from typing import Any

from support.fake_memory import FakePageMemory
from worlds.world.plan import Plan, Setup

from asyncengine.engine.prefix_store import PrefixStore
from asyncengine.kvcache.store.segments import SegmentStore
from asyncengine.testing.fake_runner import FakeExecutor
from asyncengine.testing.world import ProcessDied, VirtualDisk, World

FOLDER = "/prefixes"


class SlowDisk:
    """`kvcache.store.Disk` over a virtual disk. From the moment at which a process would die in one of its calls, all
    of them fail, so that the life goes on without a store."""

    def __init__(self, world: World, disk: VirtualDisk) -> None:
        self._world, self._disk = world, disk

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._disk, name)

        def later(*args: Any, **options: Any) -> Any:
            self._world.sleep(0.001 * self._world.rng.expovariate(1.0))
            try:
                return call(*args, **options)
            except ProcessDied:
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from None

        return later


def make_disk(plan: Plan) -> VirtualDisk:
    """A disk on which things go wrong as the plan's seed says."""
    rng = random.Random(f"disk {plan.seed}")
    disk = VirtualDisk(rng, capacity=rng.choice([None, None, 5000]))
    disk.dies_at = rng.choice([None, rng.randrange(1, 200)])
    disk.sync_fails_at = rng.choice([None, None, rng.randrange(1, 100)])
    return disk


def restart(disk: VirtualDisk) -> None:
    """The process has ended, somehow."""
    rng = random.Random(disk.calls)
    disk.restart(power_failed=rng.random() < 0.5)
    disk.flip_bits(rng.choice([0, 0, 20]))


def open_store(world: World, disk: VirtualDisk, setup: Setup, device: FakeExecutor) -> PrefixStore | None:
    """The store of an engine: those with pages of one size share their records. None: the disk is out of order."""
    fingerprint = hashlib.sha256(str(setup.config.page_size).encode()).digest()
    try:
        store = SegmentStore(SlowDisk(world, disk), FOLDER, fingerprint, 200_000)
    except OSError:
        return None
    evicted = setup.config.kv_cache_write == "on_eviction"
    return PrefixStore(store, FakePageMemory(device), setup.config.page_size, evicted=evicted)
