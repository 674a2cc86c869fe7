"""The fleet's loop and its frontend (an engine's `Frontend` on top of that loop), how both are made, and the processes
of a fleet on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import secrets
import socket
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import anyio.to_thread

from asyncengine import AdapterInfo, PrefixCacheReset
from asyncengine.assembly.relay import RelayLoop
from asyncengine.assembly.served_model import ServedModel
from asyncengine.config import EngineConfig
from asyncengine.demo import bundled_name, resolve_model
from asyncengine.engine.frontend import Frontend
from asyncengine.errors import AdapterError, EngineClosed, FleetError, InvalidParameter
from asyncengine.events import EngineDied
from asyncengine.execution.device.child import Child, end_children, start_child
from asyncengine.execution.device.topology import Share, bind, divide, memory_nodes
from asyncengine.integrations.fleet import replica_program
from asyncengine.integrations.fleet.adapters import FleetAdapters
from asyncengine.integrations.fleet.dispatcher import Dispatcher
from asyncengine.integrations.fleet.placing import read_claim, read_devices
from asyncengine.integrations.fleet.processes import Cluster, Process, ReplicaConnection
from asyncengine.integrations.fleet.ray_cluster import RayCluster
from asyncengine.integrations.fleet.replica_program import LENGTH, framed, received
from asyncengine.integrations.fleet.replicas import CHECK_SECONDS, ReplicaManager, start_replicas
from asyncengine.integrations.fleet.settings import FleetConfig
from asyncengine.integrations.fleet.stats import FleetStats, fleet_stats
from asyncengine.kernels.api import can_start
from asyncengine.seams import GrammarCompiler

# A fleet's processes on this machine alone, each bound to cores and memory of its own. Needs neither Ray nor pyzmq.


def runs_here(config: FleetConfig) -> bool:
    """Whether a fleet of these settings has its processes on this machine, without Ray."""
    if config.address is not None:
        return config.address == "local"
    ray = sys.modules.get("ray")
    return not (os.environ.get("RAY_ADDRESS") or (ray is not None and ray.is_initialized()))


class OneMachine(Cluster["LocalReplica"]):
    """The processes of one fleet on this machine. Blocking calls; any thread."""

    def __init__(self, config: FleetConfig, name: str) -> None:
        """Divide the machine. Raises `InvalidParameter` for what only nodes of a Ray cluster have, and `FleetError`."""
        if config.labels:
            raise InvalidParameter("labels", "are those of a Ray cluster's nodes: give its address", config.labels)
        if os.name != "posix" or not can_start():
            raise FleetError("a fleet on one machine needs Linux or macOS and a program that is Python as such")
        super().__init__(config, name)
        self._shares = divide(memory_nodes(), config.replicas if isinstance(config.replicas, int) else None)
        self.replicas = len(self._shares)
        self._gpus = self._divide_gpus() if config.num_gpus else [""] * self.replicas
        """Visible GPU of each share, as CUDA names it."""
        self._latest = [-1] * self.replicas
        """Serial number of the last replica that got each share."""

    def _divide_gpus(self) -> list[str]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = [str(index) for index in range(len(read_devices()))] if visible is None else visible.split(",")
        slots = [gpu for gpu in gpus if gpu for _ in range(int(1 / self.config.num_gpus))]
        if len(slots) < self.replicas:
            raise FleetError(f"no room for {self.replicas} replicas: {len(slots)} fit on the GPUs of this machine")
        return slots

    def prepare(self, model: str, config: EngineConfig) -> None:
        """Check that the memory nodes are large enough for a replica. Raises `FleetError`."""
        smallest = min(self._shares, key=lambda share: share.memory)
        if smallest.nodes and not self.config.num_gpus and os.path.exists(path := resolve_model(model)):
            needed = read_claim(path, config, self.config).cpu_bytes or 0
            if needed > smallest.memory:
                raise FleetError(
                    f"no room for a replica ({needed / 2**30:.2f} GiB): memory nodes {list(smallest.nodes)} have "
                    f"{smallest.memory / 2**30:.2f} GiB; fewer replicas have more"
                )

    def spawn(self) -> LocalReplica:
        """Start a process for a replica on the share with the fewest processes; of equals, on the one whose last start
        is longest ago, so that a round of restarts starts each successor beside its predecessor. Nothing is loaded yet.

        Raises `FleetError`.
        """
        with self._lock:
            used = Counter(process.share_index for process in self._processes.values())
            index = min(range(self.replicas), key=lambda index: (used[index], self._latest[index]))
            if self.config.num_gpus and used[index]:
                raise FleetError("no room for a replica: every GPU has its own")
            self._latest[index] = number = next(self._serial)
            try:
                process = LocalReplica(f"{self.name}/{number}", index, self._shares[index], self._gpus[index])
            except OSError as error:
                raise FleetError(f"no process can be started for a replica: {error}") from error
            self._processes[process.name] = process
            return process

    def removal_scores(self) -> dict[str, float]:
        """Score of keeping each replica, by name: lowest for those that share their cores with others."""
        with self._lock:
            used = Counter(process.share_index for process in self._processes.values())
            return {name: 1 / used[process.share_index] for name, process in self._processes.items()}


class LocalReplica(Process):
    """A process of this machine that hosts a `Replica`."""

    node = "this machine"

    def __init__(self, name: str, share_index: int, share: Share, gpu: str) -> None:
        """Start it, bound to `share`, which has number `share_index`. It sees no GPU but `gpu`. Raises `OSError`."""
        self.name, self.share_index = name, share_index
        self.threads = len(share.cores)
        self._numbers = itertools.count()
        self._unanswered: dict[int, Future[bytes]] = {}
        """Answers that are waited for, by the call's number."""
        self._lost = ""
        """Why the process was lost; "" while it lives."""
        self._lock, self._sending = threading.Lock(), threading.Lock()
        (self._calls, calls), (updates, its_updates) = socket.socketpair(), socket.socketpair()
        self.connection = LocalConnection(self, updates)

        def start() -> Child:
            bind(share)  # binds this thread, and by inheritance the process that it starts; the thread then ends
            descriptors, env = (calls.fileno(), its_updates.fileno()), {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            return start_child(replica_program.__name__, (), descriptors, env)

        try:
            with calls, its_updates, ThreadPoolExecutor(1, "asyncengine-start") as starter:
                self.child = starter.submit(start).result()
        except BaseException:
            self._calls.close()
            self.connection.close()
            raise
        self._reader = threading.Thread(target=self._take_answers, name="asyncengine-calls", daemon=True)
        self._reader.start()

    async def ask(self, method: str, arguments: bytes) -> bytes:
        answer: Future[bytes] = Future()
        answer.set_running_or_notify_cancel()  # so a caller that stops waiting cannot cancel it: the reader will set it
        number = next(self._numbers)
        with self._lock:
            if self._lost:
                raise self.loss()
            self._unanswered[number] = answer
        message = framed(pickle.dumps((number, method, arguments)))
        try:
            # on a thread: the write blocks when a process that stands still has filled its socket
            await anyio.to_thread.run_sync(self._send, message, abandon_on_cancel=True)
            return await asyncio.wrap_future(answer)
        except OSError as error:
            raise self.loss() from error

    def _send(self, message: bytes) -> None:
        with self._sending:
            self._calls.sendall(message)

    def _take_answers(self) -> None:
        """Take answers until the process is gone."""
        with contextlib.suppress(OSError), self._calls.makefile("rb") as answers:
            while len(head := answers.read(LENGTH)) == LENGTH:
                length = int.from_bytes(head)
                if len(message := answers.read(length)) < length:
                    break
                number, answer = pickle.loads(message)
                self._unanswered.pop(number).set_result(answer)
        words = next(iter(self.child.last_words().splitlines()), "")
        assert self.child.program is not None
        process = f"its process ({self.child.program.pid})"
        with self._lock:
            self._lost = f"{process} failed: {words}" if words else f"{process} was killed or has ended"
        for answer in self._unanswered.values():
            answer.set_exception(self.loss())

    def loss(self) -> FleetError:
        """The error for calls of the process, which is gone. Blocks until the reason is known."""
        if threading.current_thread() is not self._reader:
            self._reader.join()
        return FleetError(f"replica {self.name} was lost: {self._lost}")

    def kill(self) -> None:
        end_children([self.child])
        self._reader.join()
        self._calls.close()
        self.connection.close()


class LocalConnection(ReplicaConnection):
    """The fleet's end of the connection to a process of this machine, by a socket."""

    def __init__(self, process: LocalReplica, its: socket.socket) -> None:
        super().__init__("127.0.0.1")
        self._process = process
        self._socket: socket.socket | None = its
        self.post(b"")  # the replica speaks from the first message on

    async def open(self) -> tuple[Callable[[bytes], object], AsyncGenerator[bytes, None]]:
        mine, self._socket = self._socket, None
        if mine is None:  # it was killed before
            raise self._process.loss()
        reader, writer = await asyncio.open_unix_connection(sock=mine)
        return lambda commands: writer.write(framed(commands)), self._received(reader, writer)

    async def _received(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        try:
            while True:
                yield await received(reader)
        except (EOFError, OSError) as error:
            raise await anyio.to_thread.run_sync(self._process.loss) from error
        finally:
            writer.close()

    def close(self) -> None:
        """Close the socket, unless `open` has handed it to its reader."""
        mine, self._socket = self._socket, None
        if mine is not None:
            mine.close()


logger = logging.getLogger("asyncengine")


class FleetLoop(RelayLoop):
    """The fleet's only task: `run` serves until the fleet is closed. A router and replicas lie between inbox and
    mailboxes, where an engine has a scheduler and a device.

        inbox ──▶ dispatcher ──Submit──▶ replica (an engine on some machine)
                     │  ▲                   │
        mailboxes ◀──┘  └──────Update───────┘ (output, pages cached and evicted, statistics)

    One task is the only writer.
    """

    noun = "fleet"

    def __init__(
        self, config: EngineConfig, settings: FleetConfig, page_size: int, adapters: FleetAdapters,
        grammars: GrammarCompiler | None, manage: Callable[[Dispatcher], ReplicaManager],
    ) -> None:  # fmt: skip
        store: Any = adapters  # has those methods of `AdapterStore` that are called before an engine's loop
        super().__init__(config, store, grammars)
        self.dispatcher = Dispatcher(self, settings, page_size, adapters)
        self.manager = manage(self.dispatcher)
        self.runs_on: Future[asyncio.AbstractEventLoop] = Future()
        """The event loop that it runs on; set once its replicas can be called."""
        self.runs_on.set_running_or_notify_cancel()  # one impatient caller must not cancel it for all

    async def run(self) -> None:
        """Serve until drained. Raises nothing but cancellation."""
        try:
            await self.manager.begin(self._die)
            self.runs_on.set_result(asyncio.get_running_loop())
            while self.failure is None and not self._is_drained():
                self.dispatcher.take()
                for replica in self.dispatcher.replicas.values():
                    replica.send_commands()
                if not self._is_drained():
                    await self.inbox.wait(CHECK_SECONDS)
                    self.manager.check_silence()
                    self.dispatcher.expire()
        except BaseException as error:
            self.failure = self.failure or error
            if not isinstance(error, Exception):
                raise
            logger.exception("the fleet died")
        finally:
            if not self.runs_on.done():
                self.runs_on.set_exception(self.make_failure())
            if self.failure is not None:
                self.hooks.emit(EngineDied(self.failure))
            self.end_all()
            await self.manager.end()

    def _is_drained(self) -> bool:
        if self._drain is None:
            return False
        if self._drain.deadline is not None and self.clock.now() >= self._drain.deadline:
            self.dispatcher.abort_all()
        return not (self.dispatcher.requests or self.delivery.expected)

    def _die(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.inbox.post()


T = TypeVar("T")


class FleetFrontend(Frontend):
    """Text and requests in, streams out, as of one engine."""

    @property
    def fleet(self) -> FleetLoop:
        loop: Any = self.loop
        return cast(FleetLoop, loop)

    def stats(self) -> FleetStats:
        """See `FleetStats`."""
        return fleet_stats(self.fleet.dispatcher, self.started_at)

    # ---------------------------------------------------------------- adapters

    def load_adapter(
        self, name: str, path: str | os.PathLike[str] | None, tensors: object, config: object, pinned: bool
    ) -> Future[AdapterInfo]:
        """Load an adapter on every replica: `path` must lead to the same files on each node. Tensors are refused: they
        would have to go to every replica that is started later, too.

        Raises `AdapterError`, `FleetError`.
        """
        self.client.check_open()
        if tensors is not None or config is not None:
            raise AdapterError("tensors", "cannot be given to a fleet: save the adapter where all nodes read it", name)
        try:
            folder = os.fspath(path)  # type: ignore[arg-type]
            folder = os.path.abspath(folder) if os.path.isdir(folder) else folder
        except TypeError:
            raise AdapterError("path", "must be the path of an adapter's folder", path) from None
        return self.on_fleet(self.fleet.manager.load_adapter(name, folder, pinned))

    def unload_adapter(self, name: str, wait: bool) -> Future[None]:
        """Unload an adapter everywhere when no request uses it. Raises `AdapterNotFound`, `AdapterInUse`."""
        self.client.check_open()
        unused = self.fleet.dispatcher.adapters.forget(name, wait)

        async def unload() -> None:
            await asyncio.wrap_future(unused)
            await self.fleet.manager.call_all("unload_adapter", name)

        return self.on_fleet(unload())

    def reset_prefix_cache(self, namespace: str | None) -> Future[PrefixCacheReset]:
        """Reset the caches of all replicas. The counts are sums."""
        self.client.check_open()

        async def reset() -> PrefixCacheReset:
            resets = await self.fleet.manager.call_all("reset_prefix_cache", namespace)
            return PrefixCacheReset(*map(sum, zip((0, 0), *resets.values(), strict=True)))

        return self.on_fleet(reset())

    def on_fleet(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the fleet's loop, from any thread. Raises `EngineClosed`."""
        runs_on = self.fleet.runs_on
        if not runs_on.done() or runs_on.exception() is not None or runs_on.result().is_closed():
            work.close()
            raise EngineClosed("the fleet is closed")
        return asyncio.run_coroutine_threadsafe(work, runs_on.result())

    def discard(self) -> None:
        """End the processes of a fleet whose loop will not run."""
        self.fleet.dispatcher.adapters.close()
        if self.fleet.grammars is not None:
            self.fleet.grammars.close()
        self.fleet.manager.cluster.close()


def open_cluster(settings: FleetConfig, name: str) -> Cluster[Any]:
    """The machines on which a fleet has its processes. Raises `FleetError`, `InvalidParameter`."""
    return OneMachine(settings, name) if runs_here(settings) else RayCluster(settings, name)


def open_fleet(
    model: str | os.PathLike[str], config: EngineConfig, settings: FleetConfig, check: Callable[[], None]
) -> FleetFrontend:
    """Start all replicas on the machines of `open_cluster`, and make the fleet's loop and frontend. Blocks until the
    last replica has loaded. `check` raises once the attempt is given up.

    Raises `FleetError`, `InvalidParameter`, and what loading a model raises.
    """
    path = resolve_model(model)
    shipped = bundled_name(path) or path  # the bundled ones lie where each replica is installed
    cluster = open_cluster(settings, settings.name or f"fleet-{secrets.token_hex(4)}")
    try:
        check()
        settings.roles_of(cluster.replicas)  # refused before anything is loaded
        theirs = config.replace(
            max_queued_requests=None, max_queued_tokens=None, when_full="error", show_progress=False, uvloop=False
        )
        first = asyncio.run(start_replicas(cluster, shipped, theirs, settings))
        check()
        served = _common_model([loaded.model for _, loaded in first])
        adapters: Any = FleetAdapters(
            first[0][1].adapters
        )  # has those methods of `AdapterStore` that a validator calls

        def make_loop(grammars: GrammarCompiler | None) -> FleetLoop:
            manage = partial(ReplicaManager, cluster, shipped, theirs, settings, first)
            return FleetLoop(config, settings, served.info.page_size, adapters, grammars, manage)

        return served.open(FleetFrontend, make_loop, config, adapters)
    except BaseException:
        cluster.close()
        raise


def _common_model(loaded: list[ServedModel]) -> ServedModel:
    """The model that all replicas serve. Raises `FleetError` if they have loaded different ones."""
    first, *rest = (each.info for each in loaded)
    if any((info.vocab_size, info.page_size) != (first.vocab_size, first.page_size) for info in rest):
        raise FleetError("the replicas have not loaded the same model: do all nodes have the same files?")
    return replace(loaded[0], info=replace(first, max_model_len=min(each.info.max_model_len for each in loaded)))
