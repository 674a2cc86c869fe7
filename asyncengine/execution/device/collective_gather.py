"""The exchange of results between the processes of one model on GPUs, by collective operations of `torch.distributed`.

Rank r computes on `cuda:r`, writes its results into zeros, and NCCL adds up the ranks' buffers. It is an addition
rather than a gather, since a rank writes columns, rows of an embedding, or pairs of a mixture, and ranks may write
unequal amounts: a gather needs equal contiguous slices, and a copy after it. An all-reduce moves twice the bytes of a
gather; decode steps move so few that latency dominates either way. Numbers are added as int32, so that x + 0 has the
bits of x in every type. The exchange does not wait for the host, and its sizes follow from the step's, so that a CUDA
graph could hold it. In tests, gloo stands in for NCCL between processes of a CPU.

The process group is the model's own; `torch.distributed`'s default group is left to the program.
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
"""Means of exchange: shared memory (""), and backends of `torch.distributed`. Processes are given an index."""
_BUFFER_BYTES = 2**25
"""Bytes that are exchanged at once; a longer result is exchanged in several pieces."""
_MEETING = timedelta(seconds=60)
"""Timeout of connecting all ranks."""
_PATIENCE = timedelta(days=1)
"""Timeout of an exchange. It never applies: the engine's watchdog ends slow steps, and `Ranks` reports dead ranks."""
_WATCHED = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Variables that keep torch's own watchdogs from ending the whole program when a rank is gone."""


def missing(backend: str) -> str | None:
    """Why this exchange is not available here; None: it is."""
    if not backend:
        return shared_gather.missing()
    if not hasattr(os, "memfd_create") or not dist.is_available() or not dist.is_backend_available(backend):
        return f"needs Linux, and a torch with {backend}"
    return None


def make_memory(backend: str, stages: int = 1) -> int:
    """The descriptor of new memory, which the ranks inherit, and by which they connect. Raises `OSError`."""
    return os.memfd_create("asyncengine-ranks") if backend else shared_gather.make_memory(stages)


def open_gather(
    memory: int, rank: int, size: int, backend: str, stages: int = 1, links: Sequence[Connection] = ()
) -> Gather:
    """One process's end of the exchange. `memory`: the descriptor of `make_memory`, which may be closed afterwards.
    `links`: see `SharedGather`."""
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
        return max(1, _BUFFER_BYTES // row_bytes)

    def buffer(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [rows, columns] on this rank's device. Each number is written by at most one rank before `meet`, and is
        there in all ranks after it."""
        nbytes = rows * columns * dtype.itemsize
        self._flat = torch.zeros(-(-nbytes // 4), dtype=torch.int32, device=self._device)
        return self._flat.view(torch.uint8)[:nbytes].view(dtype).view(rows, columns)

    def meet(self) -> None:
        """Exchange the buffer's numbers: on a GPU in stream order, without waiting for it. Raises `RuntimeError` if
        another rank is known to be gone."""
        if self.lost is not None:
            raise RuntimeError(self.lost)
        try:
            if self._group is None:
                self._group = self._connect()
            self._add_up(self._group, self._flat)
        except RuntimeError as error:
            # rank 0's watcher reports which process ended, and why; it gets a moment to do so, for a better message
            self._ended.wait(1.0 if self.rank == 0 else 0.2)
            raise RuntimeError(self.lost or f"another rank of the model is gone: {error}") from error

    def _connect(self) -> Any:
        """The group of all ranks, once all of them have called this."""
        future: Future[Any] = Future()
        store_path = self._store_path()

        def make() -> None:
            try:
                future.set_result(self._make_group(store_path))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=make, daemon=True).start()  # connecting cannot be interrupted if a rank is gone by now
        while not wait([future], 0.02).done:
            if self.lost is not None:
                raise RuntimeError(self.lost)
        self._remove_store()
        return future.result()

    def _store_path(self) -> str:
        """Path of the file store by which ranks connect. Rank 0 makes its folder, and writes the path into the memory
        that all have inherited. The memory itself cannot be the store: a `FileStore` opens its file by name again when
        it ends, and the descriptor may belong to another file by then."""
        if self.rank == 0:
            self._folder = tempfile.mkdtemp(prefix="asyncengine-ranks-")
            os.pwrite(self._file, self._folder.encode(), 0)
        while not (folder := os.pread(self._file, 4096, 0)):
            if self.lost is not None:
                raise RuntimeError(self.lost)
            time.sleep(0.005)
        return os.path.join(folder.decode(), "store")

    def _remove_store(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make_group(self, store_path: str) -> Any:
        """The group, after a first exchange: NCCL connects only then."""
        store: Any = dist.FileStore(store_path, -1)  # type: ignore[attr-defined]
        store.set_timeout(_MEETING)
        group_type: Any = dist.ProcessGroupNCCL if self._backend == "nccl" else dist.ProcessGroupGloo
        options = group_type.Options() if self._backend == "nccl" else group_type._Options()
        options._timeout = _MEETING
        if self._backend == "gloo":
            options._devices, options._threads = [group_type.create_device(hostname="127.0.0.1")], 1
        with _environment(_WATCHED):  # torch reads these variables only while a group is made
            group = group_type(store, self.rank, self.size, options)
        self._add_up(group, torch.zeros(1, dtype=torch.int32, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return group

    def _add_up(self, group: Any, numbers: torch.Tensor | None) -> None:
        if (work := group.allreduce([numbers], self._options)) is not None:
            work.wait()

    def break_off(self, reason: str) -> None:
        """End all waiting in this process, as another rank is gone. From any thread; the first reason is kept. A
        waiting NCCL kernel ends, and its result is garbage."""
        self.lost = self.lost or reason
        self._ended.set()
        if (group := self._group) is not None:
            with suppress(RuntimeError):
                group.abort()

    def pools(self, nbytes: int) -> None:
        """None: each rank keeps its caches on its own device."""

    def close(self) -> None:
        """Let go of the group, after the last exchange. Idempotent."""
        self.break_off("the model is closed")
        self._remove_store()
        self._close_file()
        self._group = self._flat = None


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Context with these environment variables, which are restored afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)  # in tests, ranks are threads of one process, and each of them restores it
            else:
                os.environ[name] = value


Gather = SharedGather | CollectiveGather
