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

    async def call(self, method: str, *arguments: Any, timeout: float) -> Any: ...
    def kill(self) -> None: ...


class Cluster(Protocol):
    """Makers and keepers of one fleet's processes. Blocking calls; any thread. `prepare` comes first."""

    replicas: int
    """Replicas that the fleet begins with."""

    def prepare(self, model: str, config: EngineConfig) -> None: ...
    def spawn(self) -> Process: ...
    def removal_scores(self) -> Mapping[str, float]: ...
    def head_answers(self) -> bool: ...
    def end(self, process: Any, *, lost: bool = False) -> None: ...
    def close(self) -> None: ...
