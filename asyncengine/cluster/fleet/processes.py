"""The processes that host a fleet's replicas, as the fleet uses them: Ray's (`ray_cluster`), this machine's
(`one_machine`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from asyncengine.config import EngineConfig


class Process(Protocol):
    """A process that hosts a `replica.Replica`."""

    name: str
    node: str
    threads: int | None
    """Threads of its engine where the settings leave them open; None: as many as torch uses there."""
    connection: Any
    """A `connection.Connection`, or what has its `address`, `post` and `updates`."""

    async def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the replica. Raises what that raises, and `FleetError` if it does not answer."""

    def kill(self) -> None:
        """End the process. Idempotent, blocking."""


class Cluster(Protocol):
    """Makers and keepers of one fleet's processes. Blocking calls; any thread."""

    replicas: int
    """Replicas that the fleet begins with."""

    def prepare(self, model: str, config: EngineConfig) -> None:
        """Find out what a replica needs. Comes first. Raises `FleetError`, and what loading raises of the files."""

    def spawn(self) -> Process:
        """Start a process for a replica. Nothing is loaded there yet. Raises `FleetError` where there is no room."""
        ...

    def removal_scores(self) -> Mapping[str, float]:
        """Score of keeping each replica where it is, by name. Raises `FleetError`."""
        ...

    def head_answers(self) -> bool:
        """Whether lost replicas can be replaced."""
        ...

    def end(self, process: Any, *, lost: bool = False) -> None:
        """End a process that `spawn` has started. Idempotent. `lost`: it ended by itself."""

    def close(self) -> None:
        """End all processes. Idempotent."""
