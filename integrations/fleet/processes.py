"""The processes that host a fleet's replicas: base classes of Ray's (`ray_cluster`) and of this machine's
(`frontend`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Generic, TypeVar

from asyncengine.config import EngineConfig
from asyncengine.errors import FleetError
from asyncengine.integrations.fleet.settings import FleetConfig


class ReplicaConnection(ABC):
    """The fleet's end of the connection to a replica: commands go there and updates come back. Lives on the fleet's
    loop, but for its making."""

    def __init__(self, address: str) -> None:
        """`address`: that of the replica's machine."""
        self.address = address
        self._kept: list[bytes] = []
        self.post: Callable[[bytes], object] = self._kept.append
        """Send commands without waiting, in order. They are kept until the connection is open, and dropped once it has
        ended."""

    async def updates(self) -> AsyncGenerator[bytes, None]:
        """Open the connection and read all updates. Raises `FleetError` when the replica's process or node is gone."""
        try:
            self.post, source = await self.open()
            for commands in self._kept:
                self.post(commands)
            async with contextlib.aclosing(source) as updates:
                async for update in updates:
                    yield update
        finally:
            self.post = lambda commands: None
            self.close()

    @abstractmethod
    async def open(self) -> tuple[Callable[[bytes], object], AsyncGenerator[bytes, None]]:
        """Open it. Returns a function that sends commands, and the updates. Raises `FleetError`; so do the updates."""

    @abstractmethod
    def close(self) -> None:
        """Close it. Idempotent."""


class Process(ABC):
    """A process that hosts a `replica.Replica`."""

    name: str
    node: str
    threads: int | None = None
    """Threads of its engine where the settings leave them open; None: as many as torch uses there."""
    connection: ReplicaConnection

    async def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the replica. Raises what that raises, and `FleetError` if it does not answer."""
        try:
            async with asyncio.timeout(timeout):
                answer = await self.ask(method, pickle.dumps(arguments))
        except TimeoutError as error:
            raise FleetError(f"replica {self.name} did not answer {method} within {timeout:g} s") from error
        return unpack(answer)

    async def settings(self, config: EngineConfig) -> tuple[EngineConfig, bytes]:
        """(the engine's settings in this process, the key of its stages on other machines). Raises `FleetError`."""
        if config.num_threads is None and self.threads is not None:
            config = config.replace(num_threads=self.threads)
        return config, b""

    @abstractmethod
    async def ask(self, method: str, arguments: bytes) -> bytes:
        """The answer of `replica.Replica.answer`. Raises `FleetError` if the process is lost."""

    @abstractmethod
    def kill(self) -> None:
        """End the process. Idempotent."""


P = TypeVar("P", bound=Process)


class Cluster(ABC, Generic[P]):
    """The machines on which one fleet has its processes. Its calls block, from any thread. `prepare` comes first."""

    replicas: int
    """Replicas that the fleet begins with."""

    def __init__(self, config: FleetConfig, name: str) -> None:
        self.config, self.name = config, name
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._processes: dict[str, P] = {}

    @abstractmethod
    def prepare(self, model: str, config: EngineConfig) -> None:
        """Read what a replica of the model needs. Raises `FleetError`, and the errors that reading the files raises."""

    @abstractmethod
    def spawn(self) -> P:
        """Start a process for a replica. Nothing is loaded there yet. Raises `FleetError` where there is no room."""

    @abstractmethod
    def removal_scores(self) -> Mapping[str, float]:
        """Score of keeping each replica, by name: the lowest are removed first. Raises `FleetError`."""

    def head_answers(self) -> bool:
        """Tell whether the cluster's head answers; True where there is none that could be gone."""
        return True

    def end(self, process: P, *, lost: bool = False) -> None:
        """End a replica's process. Idempotent. `lost`: it ended by itself."""
        with self._lock:
            self._processes.pop(process.name, None)
        process.kill()

    def close(self) -> None:
        """End all processes. Idempotent."""
        with self._lock:
            processes = list(self._processes.values())
            self._processes.clear()
        for process in processes:
            process.kill()


def packed(outcome: Any, error: Exception | None = None) -> bytes:
    """An answer for `unpack`: a result, or the error that was raised instead, which keeps its type. This format does
    not change with `messages.VERSION`, so that another release's version can still be read."""
    return pickle.dumps((True, outcome) if error is None else (False, error))


def unpack(answer: bytes) -> Any:
    """The result in an answer. Raises the error if it has one instead."""
    fine, value = pickle.loads(answer)
    if fine:
        return value
    raise value
