"""The ranks of one model as threads of one process, over the shared memory that processes have."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from asyncengine.execution.device.child import Child
from asyncengine.execution.device.shared_gather import SharedGather, make_memory
from asyncengine.execution.runner.rank_worker import _serve
from asyncengine.execution.runner.ranks import _Rank
from asyncengine.execution.runner.stage_host import hang_up

Made = TypeVar("Made")


def gathers(size: int, stages: int = 1) -> list[SharedGather]:
    """Every rank's view of one memory."""
    memory = make_memory(stages)
    try:
        return [SharedGather(memory, rank, size, stages) for rank in range(size)]
    finally:
        os.close(memory)


def gathers_apart(ranks: int, stages: int) -> list[SharedGather]:
    """The same with a memory of its own for each stage, as on several machines, which connections join."""
    pairs = [[Connection(end.detach()) for end in socket.socketpair()] for _ in range(stages - 1)]
    made: list[SharedGather] = []
    for stage in range(stages):
        memory = make_memory(stages)
        links = [pair[0] for pair in pairs] if stage == 0 else [pairs[stage - 1][1]]
        for number in range(ranks):
            own = links if number == 0 else []
            made.append(SharedGather(memory, stage * ranks + number, ranks * stages, stages, own))
        os.close(memory)
    return made


def in_ranks(size: int, work: Callable[[Any], Made], ranks: list[SharedGather] | None = None) -> list[Made]:
    """`work(ranks)` of every rank, of those given or of new ones. One that fails leaves nobody waiting."""
    ranks = ranks or gathers(size)

    def run(one: SharedGather) -> Made:
        try:
            with torch.inference_mode():
                return work(one)
        except BaseException as error:
            for each in ranks:
                each.break_off(repr(error))
                for link in each.links:
                    hang_up(link)
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, ranks))


class _Thread:
    """A rank in a thread of this process, with as much of `subprocess.Popen` as `runner.ranks` uses."""

    pid = 0

    def __init__(self, orders: socket.socket, memory: int, rank: int, size: int, stages: int) -> None:
        self._orders, self._gather = orders, SharedGather(memory, rank, size, stages)
        self._thread = threading.Thread(target=self._serve, name=f"rank {rank}")
        self._thread.start()

    def _serve(self) -> None:
        with torch.inference_mode(), contextlib.suppress(EOFError):
            try:
                _serve(Connection(os.dup(self._orders.fileno())), self._gather)
            except BaseException as error:
                if not isinstance(error, EOFError):
                    self._gather.break_off(repr(error))
                raise

    def wait(self, timeout: float | None = None) -> None:
        self._orders.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._orders.close()


def start_as_thread(memory: int, rank: int, size: int, backend: str, stages: int) -> _Rank:
    """The same as `runner.ranks._start`, without the seconds in which a process imports what is needed."""
    orders, its_orders = socket.socketpair()
    life, _ = pair = socket.socketpair()
    program: Any = _Thread(its_orders, memory, rank, size, stages)
    program.life = pair  # its own end stays open
    return _Rank(rank, Child(program, life), Connection(orders.detach()))
