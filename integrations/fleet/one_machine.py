"""A fleet's processes on this machine alone, each bound to cores and memory of its own. In the place of a Ray cluster:
it needs neither Ray nor pyzmq."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import socket
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor

import anyio.to_thread

from asyncengine.config import EngineConfig
from asyncengine.demo import resolve_model
from asyncengine.errors import FleetError, InvalidParameter
from asyncengine.execution.device.child import Child, end_children, start_child
from asyncengine.execution.device.topology import Share, bind, divide, memory_nodes
from asyncengine.integrations.fleet import replica_program
from asyncengine.integrations.fleet.placing import read_claim, read_devices
from asyncengine.integrations.fleet.processes import Cluster, Process, ReplicaConnection
from asyncengine.integrations.fleet.replica_program import LENGTH, framed, received
from asyncengine.integrations.fleet.settings import FleetConfig
from asyncengine.kernels.api import can_start


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
        found = [str(index) for index in range(len(read_devices()))] if visible is None else visible.split(",")
        each = [gpu for gpu in found if gpu for _ in range(int(1 / self.config.num_gpus))]
        if len(each) < self.replicas:
            raise FleetError(f"no room for {self.replicas} replicas: {len(each)} fit on the GPUs of this machine")
        return each

    def prepare(self, model: str, config: EngineConfig) -> None:
        """Look whether the memory nodes are large enough. Raises `FleetError`, and what loading raises of the files."""
        smallest = min(self._shares, key=lambda share: share.memory)
        if smallest.nodes and not self.config.num_gpus and os.path.exists(path := resolve_model(model)):
            needed = read_claim(path, config, self.config).cpu_bytes or 0
            if needed > smallest.memory:
                raise FleetError(
                    f"no room for a replica ({needed / 2**30:.2f} GiB): memory nodes {list(smallest.nodes)} have "
                    f"{smallest.memory / 2**30:.2f} GiB; fewer replicas have more"
                )

    def spawn(self) -> LocalReplica:
        """Start a process for a replica on the share with fewest of them; of equals, on that whose last one is oldest:
        a round of restarts starts each successor beside its predecessor. Nothing is loaded there yet.

        Raises `FleetError`.
        """
        with self._lock:
            used = Counter(process.place for process in self._processes.values())
            place = min(range(self.replicas), key=lambda place: (used[place], self._latest[place]))
            if self.config.num_gpus and used[place]:
                raise FleetError("no room for a replica: every GPU has its own")
            self._latest[place] = number = next(self._serial)
            try:
                process = LocalReplica(f"{self.name}/{number}", place, self._shares[place], self._gpus[place])
            except OSError as error:
                raise FleetError(f"no process can be started for a replica: {error}") from error
            self._processes[process.name] = process
            return process

    def removal_scores(self) -> dict[str, float]:
        """Score of keeping each replica where it is, by name: those that share their cores are wanted least."""
        with self._lock:
            used = Counter(process.place for process in self._processes.values())
            return {name: 1 / used[process.place] for name, process in self._processes.items()}


class LocalReplica(Process):
    """A process of this machine that hosts a `Replica`."""

    node = "this machine"

    def __init__(self, name: str, place: int, share: Share, gpu: str) -> None:
        """Start it, bound to `share`, the machine's share of number `place`. It sees `gpu` alone. Raises `OSError`."""
        self.name, self.place = name, place
        self.threads = len(share.cores)
        self._numbers = itertools.count()
        self._asked: dict[int, Future[bytes]] = {}
        """Answers that are waited for, by the call's number."""
        self._lost = ""
        """The reason for which there are no more answers."""
        self._lock, self._sending = threading.Lock(), threading.Lock()
        (self._calls, calls), (updates, its_updates) = socket.socketpair(), socket.socketpair()
        self.connection = LocalConnection(self, updates)

        def start() -> Child:
            bind(share)  # this thread, which ends, and the process that it starts
            given, env = (calls.fileno(), its_updates.fileno()), {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            return start_child(replica_program.__name__, (), given, env)

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
        answer.set_running_or_notify_cancel()  # who gives up waiting does not cancel it
        number = next(self._numbers)
        with self._lock:
            if self._lost:
                raise self.loss()
            self._asked[number] = answer
        message = framed(pickle.dumps((number, method, arguments)))
        try:
            # on a thread: a process that stands still takes no more than the socket holds
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
                self._asked.pop(number).set_result(answer)
        words = next(iter(self.child.last_words().splitlines()), "")
        process = f"its process ({self.child.program.pid})"
        with self._lock:
            self._lost = f"{process} failed: {words}" if words else f"{process} was killed or has ended"
        for answer in self._asked.values():
            answer.set_exception(self.loss())

    def loss(self) -> FleetError:
        """The error of what waits for the process, which is gone. Blocks until the reason is known."""
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
        """Close what was not opened: the socket is its reader's otherwise."""
        mine, self._socket = self._socket, None
        if mine is not None:
            mine.close()
