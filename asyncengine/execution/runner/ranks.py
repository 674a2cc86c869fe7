"""The processes that compute one model together with the engine's own (tensor or pipeline parallelism), as the engine
sees them: it starts them, sends commands, watches that they live, and ends them.

The engine's process is rank 0. It alone schedules and samples. Before each forward pass it sends the pass's inputs to
the other ranks, and all compute their shard of it (`rank_worker`), exchanging results through shared memory
(`device.shared_gather`), or between GPUs by NCCL (`device.collective_gather`). Each rank gets its commands, in order,
by a socket; a second one tells when it has ended (`device.child`).
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

_NAMED = 5.0
"""Seconds after a socket's end in which it is known which rank is gone."""


class Order(NamedTuple):
    """The model to be loaded."""

    path: str
    config: EngineConfig
    """With the threads of one rank."""
    headless: bool
    """The model has no output layer: it embeds."""


class _Rank(NamedTuple):
    """One other process."""

    rank: int
    child: Child
    orders: Connection


class Ranks:
    """Ranks 1 .. size - 1 of one model. They have no weights before `loading`."""

    def __init__(
        self, size: int, setting: str = "tensor_parallel", backend: str = "", stages: int = 1,
        hosts: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`setting`: the configuration's field that asks for them, for errors. `backend`: one of `BACKENDS`. `stages`:
        pipeline stages, each of which has equally many ranks. `hosts`: addresses of the hosts of all stages but the
        first (`stage_host`); none: all are on this machine. Raises `InvalidParameter` where ranks cannot run, and
        `EngineError` for a host that does not answer."""
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
            per_stage = size // stages
            for first in range(per_stage, per_stage * (1 + len(hosts)), per_stage):
                child, orders, rows = connect_stage(hosts[first // per_stage - 1], first, size, stages)
                others += [_Rank(first + number, child, order) for number, order in enumerate(orders)]
                links.append(rows)
            self.gather = open_gather(memory, 0, size, backend, stages, links)
            for rank in range(1, per_stage if hosts else size):
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

    def send(self, command: str, *arguments: Any, stage: int | None = None) -> None:
        """Send a command to all ranks, or to those of one stage; each rank runs its commands in order. From any thread.
        Raises `RuntimeError` if a rank is gone."""
        message = pickle.dumps((command, arguments), pickle.HIGHEST_PROTOCOL)
        with self._sending, self._heard():
            for other in self._others:
                if stage is None or other.rank // self.gather.size == stage:
                    other.orders.send_bytes(message)

    def answers(self) -> list[Any]:
        """The answers of all ranks to the last command that has one. Raises `RuntimeError` if a rank is gone, and the
        exception of a rank that failed, with its machine's name where files or memory may differ from this one's."""
        with self._heard():
            answers = [other.orders.recv() for other in self._others]
        for other, answer in zip(self._others, answers, strict=True):
            if isinstance(answer, (ModelNotFound, OutOfMemory)) and other.child.name:
                raise type(answer)(f"{other.child.name}: {answer}") from answer
            if isinstance(answer, BaseException):
                raise answer
        return answers

    @contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            self._watcher.join(_NAMED)  # a socket may end before the watcher has seen whose it was
            raise RuntimeError(self.gather.lost or "another rank of the model is gone") from error

    @contextmanager
    def loading(self, order: Order, threads: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Context in which all ranks load their shards; this one enters it with its `threads` once it has checked the
        checkpoint and measured its free memory, so that a refused load starts nothing."""
        config = order.config.replace(policy=EngineConfig().policy, show_progress=False)
        self.send("load", order._replace(config=config))
        with threads():
            yield

    @contextmanager
    def computing(self, inputs: StepInputs | None) -> Iterator[None]:
        """Context in which this process computes a forward pass together with all ranks. `inputs` None: it ends the
        oldest pass that the first stage has begun. An error within ends the ranks: they are in the middle of the pass,
        and it cannot be repeated."""
        if inputs is None:
            self.send("end", stage=0)
        else:
            self.send("forward", inputs.packed())
        try:
            yield
        except BaseException as error:
            self.gather.break_off(f"rank 0 failed in a step: {error!r}")
            traceback.clear_frames(error.__traceback__)  # a kept error would keep its frames' shared memory
            if isinstance(error, Exception):
                raise RuntimeError(self.gather.lost) from error
            raise

    def along(self, work: Callable[[], None], command: str, *arguments: Any) -> Callable[[], None]:
        """A function that calls `work` here and sends a command to the ranks, and returns when all are done."""

        def run() -> None:
            self.send(command, *arguments)
            work()
            self.answers()

        return run

    def tell(self, failed: Callable[[Exception], None]) -> None:
        """Have the method `failed` called with an error, on another thread, once a rank is gone. Its object is
        referenced weakly."""
        self._lost.put(weakref.WeakMethod(failed))

    def close(self) -> None:
        """End all ranks, and wait until they are gone. Not while a pass is computed. Idempotent."""
        self._end()
        self._watcher.join()
        self.gather.close()


def _start(memory: int, rank: int, size: int, backend: str, stages: int) -> _Rank:
    """Start the process of one rank. Raises `OSError`."""
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
    """Wait until the first rank is gone; then call `listeners`, and break off the exchange. In this order: a GPU that
    no longer waits for the lost rank computes garbage, which must not be delivered before the failure is known."""
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
    """End these ranks, and wait until they are gone."""
    if closing is not None:
        closing.set()
    end_children([other.child for other in others])
    for other in others:
        other.orders.close()
    for link in links:
        hang_up(link)


_ON_CPU = ""
"""Shared memory, of `device.collective_gather.BACKENDS`."""


def start_ranks(
    config: EngineConfig, device: torch.device, pooling: PoolingSpec | None, undo: ExitStack
) -> tuple[Ranks | None, EngineConfig]:
    """Start the other ranks of a model; `undo` ends them. Returns them, None if one process computes the model, and the
    settings with one rank's share of the threads.

    Raises `InvalidParameter` for settings under which several processes cannot compute it.
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
