"""The processes that compute one model together with the engine's own (tensor or pipeline parallelism), as the engine
sees them: started, spoken to, watched, ended.

The engine's process is rank 0. It alone schedules and samples; before each forward pass it tells the others the pass's
inputs, and all compute their part of it (`rank_worker`), exchanging results through shared memory
(`device.shared_gather`), or between GPUs by NCCL (`device.collective_gather`). By a socket each other rank is told what
to do, in order; that it lives is known as of any child (`device.child`).
"""

from __future__ import annotations

import os
import pickle
import queue
import select
import socket
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, ModelNotFound, OutOfMemory
from asyncengine.execution.device.child import Child, end_children, start_child
from asyncengine.execution.device.collective_gather import BACKENDS, Gather, make_memory, missing, open_gather
from asyncengine.execution.device.cores import threads_for
from asyncengine.execution.runner.stage_host import connect_stage, hang_up
from asyncengine.execution.runner.step_inputs import StepInputs
from asyncengine.kernels.api import can_start
from asyncengine.pooling_spec import PoolingSpec


class Order(NamedTuple):
    """The model to be loaded."""

    path: str
    config: EngineConfig
    """With the threads of one rank."""
    headless: bool
    """No logits are wanted."""


class _Rank(NamedTuple):
    """One other process."""

    rank: int
    child: Child
    orders: Connection


class Ranks:
    """Ranks 1 .. size - 1 of one model. They hold nothing before `begin`."""

    def __init__(
        self, size: int, setting: str = "tensor_parallel", backend: str = "", stages: int = 1,
        hosts: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`setting`: the field of the configuration that asks for them. `backend`: one of `BACKENDS`. `stages`: of a
        pipeline, which divide them evenly. `hosts`: addresses at which all but the first stage are hosted
        (`stage_host`); none: on this machine. Raises `InvalidParameter` where there can be none, and `EngineError` for
        a host that does not answer."""
        reason = missing(backend)
        if reason is None and not can_start():
            reason = "needs a program that is Python as such, which can start others"
        if reason is not None:
            raise InvalidParameter(setting, reason, size)
        self.size = size
        memory = make_memory(backend, stages)
        others: list[_Rank] = []
        links: list[Connection] = []
        try:
            each = size // stages
            for first in range(each, each * (1 + len(hosts)), each):
                child, orders, rows = connect_stage(hosts[first // each - 1], first, size, stages)
                others += [_Rank(first + number, child, order) for number, order in enumerate(orders)]
                links.append(rows)
            self.gather = open_gather(memory, 0, size, backend, stages, links)
            for rank in range(1, each if hosts else size):
                others.append(_start(memory, rank, size, backend, stages))
        except BaseException:
            _end(others, links)
            raise
        finally:
            os.close(memory)
        self._others, self._sending = others, threading.Lock()
        self._closing = threading.Event()
        self._end = weakref.finalize(self, _end, others, links, self._closing)
        self._lost: queue.SimpleQueue[weakref.WeakMethod[Callable[[Exception], None]]] = queue.SimpleQueue()
        arguments = others, self.gather, self._closing, self._lost
        self._watcher = threading.Thread(target=_watch, args=arguments, name="asyncengine-ranks", daemon=True)
        self._watcher.start()

    def send(self, kind: str, *content: Any, stage: int | None = None) -> None:
        """Tell all of them one thing, or those of one stage, in order with everything else. From any thread. Raises
        `RuntimeError` if one is gone."""
        message = pickle.dumps((kind, content), pickle.HIGHEST_PROTOCOL)
        with self._sending, self._heard():
            for other in self._others:
                if stage is None or other.rank // self.gather.size == stage:
                    other.orders.send_bytes(message)

    def answers(self) -> list[Any]:
        """One answer of each, to the last thing that asks for one. Raises `RuntimeError` if one is gone, and what went
        wrong in one of them, naming the machine where it has other files or less memory than this one."""
        with self._heard():
            found = [other.orders.recv() for other in self._others]
        for other, answer in zip(self._others, found, strict=True):
            if isinstance(answer, (ModelNotFound, OutOfMemory)) and other.child.name:
                raise type(answer)(f"{other.child.name}: {answer}") from answer
            if isinstance(answer, BaseException):
                raise answer
        return found

    @contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise RuntimeError(self.gather.lost or "another rank of the model is gone") from error

    @contextmanager
    def loading(self, order: Order, threads: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Within, all load their parts, this one with its `threads`: once it has found nothing to refuse, and has seen
        how much memory is free."""
        config = order.config.replace(policy=EngineConfig().policy, show_progress=False)
        self.send("load", order._replace(config=config))
        with threads():
            yield

    @contextmanager
    def computing(self, inputs: StepInputs | None) -> Iterator[None]:
        """Within, this process computes a forward pass that all others compute as well; None: the end of the oldest
        one that the first stage has begun. One that fails here cannot be made again: the others are in the midst of
        it."""
        if inputs is None:
            self.send("end", stage=0)
        else:
            self.send("forward", inputs.packed())
        try:
            yield
        except BaseException as error:
            self.gather.break_off(f"rank 0 failed in a step: {error!r}")
            traceback.clear_frames(error.__traceback__)  # whoever keeps the error would keep shared memory
            if isinstance(error, Exception):
                raise RuntimeError(self.gather.lost) from error
            raise

    def along(self, own: Callable[[], None], kind: str, *content: Any) -> Callable[[], None]:
        """A function that calls `own` and has the others do the same by a message, and ends when all have."""

        def run() -> None:
            self.send(kind, *content)
            own()
            self.answers()

        return run

    def tell(self, failed: Callable[[Exception], None]) -> None:
        """Have a method `failed` called with an error, on another thread, once one of them is gone, while its object
        lives."""
        self._lost.put(weakref.WeakMethod(failed))

    def close(self) -> None:
        """End them, and wait until they are gone. Not while a pass is computed. Idempotent."""
        self._end()
        self._watcher.join()
        self.gather.close()


def _start(memory: int, rank: int, size: int, backend: str, stages: int) -> _Rank:
    """Start one process. Raises `OSError`."""
    orders, its_orders = socket.socketpair()
    with its_orders:
        try:
            numbers = rank, size, BACKENDS.index(backend), stages
            child = start_child("asyncengine.execution.runner.rank_worker", numbers, (its_orders.fileno(), memory))
        except BaseException:
            orders.close()
            raise
    return _Rank(rank, child, Connection(orders.detach()))


def _watch(
    others: Sequence[_Rank], gather: Gather, closing: threading.Event,
    listeners: queue.SimpleQueue[weakref.WeakMethod[Callable[[Exception], None]]],
) -> None:  # fmt: skip
    """Until the first of them is gone: then `listeners` hear of it, and nobody waits for it: in this order, since what
    a GPU has computed that does not wait for another any more is nothing to be told."""
    poll = select.poll()
    for other in others:
        poll.register(other.child.life, select.POLLIN)
    ended = {number for number, _ in poll.poll()}
    if closing.is_set():
        return
    other = next(other for other in others if other.child.life.fileno() in ended)
    last = other.child.last_words()
    program = other.child.program
    process = f"rank {other.rank} of the model ({f'process {program.pid}' if program else other.child.name})"
    reason = gather.lost or (f"{process} failed: {last}" if last else f"{process} was killed or has ended")
    while not listeners.empty():
        if (failed := listeners.get()()) is not None:
            failed(RuntimeError(reason))
    gather.break_off(reason)


def _end(others: Sequence[_Rank], links: Sequence[Connection], closing: threading.Event | None = None) -> None:
    """End them, and wait until they are gone."""
    if closing is not None:
        closing.set()
    end_children([other.child for other in others])
    for other in others:
        other.orders.close()
    for link in links:
        hang_up(link)


_ON_CPU = ""
"""The carrier between processes of a CPU, of `device.collective_gather.BACKENDS`; tests have gloo stand in for NCCL."""


def start_ranks(
    config: EngineConfig, device: torch.device, pooling: PoolingSpec | None, undo: ExitStack
) -> tuple[Ranks | None, EngineConfig]:
    """The other ranks of a model, which `undo` ends, and the settings of each: its share of the threads. None where the
    model is computed by one process.

    Raises `InvalidParameter` where it cannot be computed by several.
    """
    size, setting, staged = config.processes, config.parallel_field, config.pipeline_parallel > 1
    if size == 1:
        return None, config
    if device.type != "cpu":
        _check_gpus(config, device, staged)
    if pooling is not None and pooling.whole:
        raise InvalidParameter(setting, "is for decoders: an encoder is computed by one process", size)
    if pooling is not None and staged:
        raise InvalidParameter(setting, "is for models that write: vectors are computed by one process", size)
    if staged and (ahead := config.max_steps_in_flight or 1) > config.pipeline_parallel:
        raise InvalidParameter(
            "max_steps_in_flight", f"must be at most pipeline_parallel, {config.pipeline_parallel}", ahead
        )
    if config.stage_hosts and config.kv_cache_dir is not None:
        raise InvalidParameter("kv_cache_dir", "must be None with stage_hosts: pages lie on several machines")
    carrier, hosts = _ON_CPU if device.type == "cpu" else "nccl", config.stage_hosts
    ranks = Ranks(size, setting, carrier, config.pipeline_parallel, hosts)
    undo.callback(ranks.close)
    here = config.tensor_parallel if hosts else size
    return ranks, config.replace(num_threads=max(1, threads_for(config.num_threads, device) // here))


def _check_gpus(config: EngineConfig, device: torch.device, staged: bool) -> None:
    """Raises `InvalidParameter` where the ranks of a model cannot have a GPU each."""
    if staged:
        raise InvalidParameter(
            "pipeline_parallel", 'on CUDA is not there yet: it needs device="cpu"', config.pipeline_parallel
        )
    count = torch.cuda.device_count()
    if count < config.tensor_parallel:
        raise InvalidParameter(
            "tensor_parallel", f"needs a GPU for each rank; visible here: {count}", config.tensor_parallel
        )
    if device.index:
        raise InvalidParameter(
            "device", 'must be "cuda" or "cuda:0": with tensor_parallel rank r is on cuda:r', config.device
        )
    if config.kv_cache_memory is None:
        raise InvalidParameter(
            "kv_cache_memory", "must be given with tensor_parallel on GPUs: that of all ranks together"
        )
