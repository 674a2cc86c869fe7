"""The way orders go to a replica and deliveries come back: a line where one can be made, else calls carried by Ray."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from asyncengine.cluster.fleet.handshake import TOKEN_BYTES
from asyncengine.cluster.fleet.line import Line

logger = logging.getLogger("asyncengine")

LINE_SECONDS = 3.0
"""Until a replica's line must be there; while it is not, orders wait."""


class Carrying(Protocol):
    """A replica's process, as whoever started it reaches it."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """What the replica's `method` returns. Raises `FleetError` if it does not answer."""

    def carry(self, commands: bytes) -> None:
        """Call `post` there without waiting; in order."""

    def carried(self) -> AsyncGenerator[bytes, None]:
        """What `deliveries` there gives. Raises `FleetError` when it is gone."""


class Link:
    """Of one replica, at `address`. Lives on the fleet's loop, but for its making."""

    def __init__(self, host: Carrying, address: str, silence_limit: float, *, line: bool = True) -> None:
        self._host, self._address, self._silence_limit = host, address, silence_limit
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._line = Line(host.name, self._token) if line else None

    @property
    def has_line(self) -> bool:
        """Or may yet get one."""
        return self._line is not None

    def post(self, commands: bytes) -> None:
        """Hand over without waiting; in order."""
        if self._line is not None:
            self._line.post(commands)
        else:
            self._host.carry(commands)

    async def deliveries(self) -> AsyncGenerator[bytes, None]:
        """What the replica has to say, to its end. Raises `FleetError` when its process or node is gone."""
        if self._line is not None and not await self._open(self._line):
            line, self._line = self._line, None
            for commands in line.unheard:
                self._host.carry(commands)
        said = self._host.carried() if self._line is None else self._line.deliveries()
        async with contextlib.aclosing(said) as told:
            async for delivery in told:
                yield delivery

    async def _open(self, line: Line) -> bool:
        try:
            port = await self._host.call("line", self._address, self._token, timeout=self._silence_limit)
        except OSError as error:
            logger.warning("replica %s opens no line, Ray carries all: %s", self._host.name, error)
            return False
        return await line.open(self._address, port, min(LINE_SECONDS, self._silence_limit / 2))
