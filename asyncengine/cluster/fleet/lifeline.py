"""A connection that says nothing and breaks when the process at its other end is gone.

Ray needs one to three seconds to tell the death of an actor: its process looks only every second whether its node still
lives, and the caller then waits a second for the reason. A socket is closed by the kernel in the moment in which its
process ends. Where the whole machine is gone nobody closes anything: the kernel here asks the kernel there (TCP
keepalive), which answers whatever the process does, and gives up after two seconds.

A connection can break alone. Only if no new one comes about is the process gone; whoever comes back within a quarter of
a second has not been lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys

logger = logging.getLogger("asyncengine")

RETRY_SECONDS = 0.25
"""Until a new connection must be there."""
FIRST_SECONDS = 5.0
"""The same for the first one: a firewall that says nothing."""
_QUIET, _BETWEEN, _UNANSWERED = 1, 1, 1
"""Seconds of silence before the kernel asks, seconds until it asks again, and how often it does in vain."""


def listen(address: str) -> socket.socket:
    """The end that ends with this process, at a port of the system's choice. Nobody needs to accept: connections are
    made and answered by the kernel, as many as may wait. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=64)


async def until_gone(address: str, port: int) -> bool:
    """Returns when the process that listens there is gone. False, at once: it cannot be reached from here at all."""
    connection = await _connect(address, port, FIRST_SECONDS)
    if connection is None:
        logger.warning("no connection to port %d of %s: Ray alone will tell the loss of a replica there", port, address)
        return False
    while connection is not None:
        reader, writer = connection
        try:
            with contextlib.suppress(OSError):  # reset, or unanswered
                await reader.read(1)
        finally:
            writer.close()
        connection = await _connect(address, port, RETRY_SECONDS)
    return True


async def _connect(address: str, port: int, timeout: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        return None
    keep_alive(writer.get_extra_info("socket"))
    return reader, writer


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel ask for the other end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform.startswith("linux"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _QUIET)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _UNANSWERED)
