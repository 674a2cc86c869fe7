"""Protocol of a driver: one system, loaded in this process, that runs requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.workloads import Request, Trace


class Absent(Exception):
    """The system cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The same for every system of a run."""

    checkpoint: str
    dtype: str
    threads: int
    quantization: str
    """"none", "int8" or "int4"."""
    kv_tokens: int
    """Tokens that the KV cache shall hold, where that can be said."""
    kv_bytes: int
    """The same in bytes."""
    max_len: int
    """Prompt and output of one request, at most."""
    max_seqs: int
    gguf: str
    """The checkpoint as GGUF, for the systems that need it."""
    server: str
    """Path of llama-server."""
    scratch: str
    """Folder for what a system writes."""

    @property
    def weights(self) -> int:
        from benchmarks.peers.shapes import weight_bytes

        return weight_bytes(Path(self.checkpoint))

    @property
    def gguf_bytes(self) -> int:
        return Path(self.gguf).stat().st_size


class Driver(Protocol):
    async def load(self, settings: Settings) -> dict[str, Any]:
        """Facts: "weights" and "kv" in bytes (None: not known), "note". Raises `Absent`."""

    async def run(self, requests: list[Request], way: str) -> list[Trace]:
        """`way`: "batch" (answers are wanted whole), "stream" (token by token) or "chat" (through LangChain)."""

    async def close(self) -> None: ...


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._began

    async def until(self, at: float) -> None:
        if at > 0:
            await asyncio.sleep(max(0.0, at - self()))


async def at_once(requests: list[Request], one: Callable[[Request, Clock], Awaitable[Trace]]) -> list[Trace]:
    """Every request in a task of its own, from its moment on."""
    clock = Clock()

    async def start(request: Request) -> Trace:
        await clock.until(request.at)
        return await one(request, clock)

    return list(await asyncio.gather(*map(start, requests)))
