"""The carrier of results between the processes of one model on GPUs: collective operations of `torch.distributed`.

Rank r computes on `cuda:r`, and NCCL adds up what the ranks have written into zeros. An addition rather than a gather,
since what a rank writes are columns, rows of an embedding, or pairs of a mixture, in parts that need not be equal: a
gather would want equal parts that each lie in one piece, and a copy behind it. It moves twice the bytes of a gather;
steps that decode move so few that they wait for the links' latency alike. Numbers are added as int32, so that x + 0 has
the bits of x in every type. Nothing of it waits for the host, and its sizes follow from the step's alone: a CUDA graph
could hold it. Between processes of a CPU gloo stands in for NCCL, for tests.

Groups are this model's own: `torch.distributed`'s default group is the program's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from asyncengine.execution.device import shared_gather
from asyncengine.execution.device.shared_gather import SharedGather

BACKENDS = ("", "gloo", "nccl")
"""Carriers by the number that a process is told: shared memory, and backends of `torch.distributed`."""
_PLACE = 2**25
"""Bytes that are exchanged at once; a longer result goes through in several parts."""
_MEETING = timedelta(seconds=60)
"""Time in which ranks that are there find each other."""
_PATIENCE = timedelta(days=1)
"""Time of an exchange: slow steps are the engine's to end, and dead ranks its watcher's to tell."""
_WATCHED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Variables that keep torch's watchdogs from ending the whole program where a rank is gone."""


def missing(backend: str) -> str | None:
    """The reason for which a carrier cannot be had; None: it can."""
    if not backend:
        return shared_gather.missing()
    if not hasattr(os, "memfd_create") or not dist.is_available() or not dist.is_backend_available(backend):
        return f"needs Linux, and a torch with {backend}"
    return None


def make_memory(backend: str, stages: int = 1) -> int:
    """A descriptor of new memory, which its processes inherit, and by which they find each other. Raises `OSError`."""
    return os.memfd_create("asyncengine-ranks") if backend else shared_gather.make_memory(stages)


def open_gather(
    memory: int, rank: int, size: int, backend: str, stages: int = 1, links: Sequence[Connection] = ()
) -> Gather:
    """One process's end of a carrier; `memory`: what `make_memory` gave, which may be closed afterwards. `links`: see
    `SharedGather`."""
    if backend:
        return CollectiveGather(memory, rank, size, backend)
    return SharedGather(memory, rank, size, stages, links)


class CollectiveGather:
    """One process's end of the exchange: a `layers.sharded.Ranks`. Used by one thread at a time."""

    exact = shares_pages = False
    stage, stages = 0, 1

    def __init__(self, memory: int, rank: int, size: int, backend: str) -> None:
        """Connects at the first `meet`, not here."""
        self.rank, self.size, self._backend = rank, size, backend
        self.lost: str | None = None
        """The reason that `break_off` was given."""
        self._ended = threading.Event()
        self._device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
        self._file = os.dup(memory)
        self._close_file = weakref.finalize(self, os.close, self._file)
        self._group: Any = None
        self._folder: str | None = None
        self._options: Any = dist.AllreduceOptions()
        self._options.asyncOp = False  # in the stream that computes
        self._options.timeout = _PATIENCE
        self._flat: torch.Tensor | None = None

    def rows_at_once(self, row_bytes: int) -> int:
        """Number of rows of `row_bytes` each that are exchanged at once, one at least."""
        return max(1, _PLACE // row_bytes)

    def place(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [rows, columns] of zeros on this rank's device, of which no two ranks write the same number before
        `meet`; behind it all have all."""
        nbytes = rows * columns * dtype.itemsize
        self._flat = torch.zeros(-(-nbytes // 4), dtype=torch.int32, device=self._device)
        return self._flat.view(torch.uint8)[:nbytes].view(dtype).view(rows, columns)

    def meet(self) -> None:
        """Exchange what was written: on a GPU, in the order of its stream, without waiting for it. Raises
        `RuntimeError` if another rank is known to be gone."""
        if self.lost is not None:
            raise RuntimeError(self.lost)
        try:
            if self._group is None:
                self._group = self._connect()
            self._add_up(self._group, self._flat)
        except RuntimeError as error:
            # rank 0 watches processes, and knows better which of them is gone, and how; it hears of the first one first
            self._ended.wait(1.0 if self.rank == 0 else 0.2)
            raise RuntimeError(self.lost or f"another rank of the model is gone: {error}") from error

    def _connect(self) -> Any:
        """A group of all ranks, once they have come here."""
        made: Future[Any] = Future()
        place = self._meeting_place()

        def make() -> None:
            try:
                made.set_result(self._make_group(place))
            except BaseException as error:
                made.set_exception(error)

        threading.Thread(target=make, daemon=True).start()  # one that is gone by now would be waited for
        while not wait([made], 0.02).done:
            if self.lost is not None:
                raise RuntimeError(self.lost)
        self._leave_place()
        return made.result()

    def _meeting_place(self) -> str:
        """The name of a file by which ranks find each other. Rank 0 makes its folder, and says so in the memory that
        all have inherited. That would be no file for it: a store goes back to its file by name when it ends, and by
        then a descriptor may be of another one."""
        if self.rank == 0:
            self._folder = tempfile.mkdtemp(prefix="asyncengine-ranks-")
            os.pwrite(self._file, self._folder.encode(), 0)
        while not (folder := os.pread(self._file, 4096, 0)):
            if self.lost is not None:
                raise RuntimeError(self.lost)
            time.sleep(0.005)
        return os.path.join(folder.decode(), "store")

    def _leave_place(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make_group(self, place: str) -> Any:
        """The group, which has exchanged something once: NCCL connects no sooner."""
        store: Any = dist.FileStore(place, -1)  # type: ignore[attr-defined]
        store.set_timeout(_MEETING)
        kind: Any = dist.ProcessGroupNCCL if self._backend == "nccl" else dist.ProcessGroupGloo
        options = kind.Options() if self._backend == "nccl" else kind._Options()
        options._timeout = _MEETING
        if self._backend == "gloo":
            options._devices, options._threads = [kind.create_device(hostname="127.0.0.1")], 1
        with _environment(_WATCHED):  # which is read while a group is made, and nowhere else
            group = kind(store, self.rank, self.size, options)
        self._add_up(group, torch.zeros(1, dtype=torch.int32, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return group

    def _add_up(self, group: Any, numbers: torch.Tensor | None) -> None:
        if (work := group.allreduce([numbers], self._options)) is not None:
            work.wait()

    def break_off(self, reason: str) -> None:
        """Let this process not wait any more: another one is gone. From any thread; the first reason stands. A kernel
        of NCCL that waits for the other ends then, and what it leaves is not to be read."""
        self.lost = self.lost or reason
        self._ended.set()
        if (group := self._group) is not None:
            with suppress(RuntimeError):
                group.abort()

    def pools(self, nbytes: int) -> None:
        """No memory for caches: each rank has its own on its device."""

    def close(self) -> None:
        """Let go of the group, after the last exchange. Idempotent."""
        self.break_off("the model is closed")
        self._leave_place()
        self._close_file()
        self._group = self._flat = None


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables in the environment within; it is put back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)  # ranks that are threads of one process put it back, each of them
            else:
                os.environ[name] = value


Gather = SharedGather | CollectiveGather
