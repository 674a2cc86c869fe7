"""The machine itself as a system: what `benchmarks.peers.roofline` measures, between the turns of the others."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.drivers.base import Settings
from benchmarks.peers.roofline import Machine
from benchmarks.peers.workloads import Request, Trace


class MachineDriver:
    async def load(self, settings: Settings) -> dict[str, Any]:
        self._machine = Machine(settings.threads, settings.dtype)
        return {}

    async def run(self, requests: list[Request], way: str) -> list[Trace]:
        raise NotImplementedError("a machine answers no requests")

    def measure(self) -> dict[str, float]:
        return {"bandwidth": self._machine.bandwidth(), "rate": self._machine.rate()}

    async def close(self) -> None:
        pass


make = MachineDriver
