"""A connection that breaks when the process at its other end, or its machine, is gone.

Ray needs one to three seconds to tell the death of an actor: its process looks only every second whether its node still
lives, and the caller then waits a second for the reason. A socket is closed by the kernel in the moment in which its
process ends. Where the whole machine is gone nobody closes anything: a byte goes over every quarter of a second, the
kernel there acknowledges it whatever the process does, and the kernel here gives up what nobody acknowledges (TCP's
user timeout, RFC 5482). Whoever is late in sending sends nothing that could be missed, so that a program whose loop
stands still blames nobody.

A connection can break alone. Only if no new one comes about is the process gone; whoever comes back within a quarter of
a second has not been lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

logger = logging.getLogger("asyncengine")

BEAT_SECONDS = 0.25
"""Between two bytes."""
UNANSWERED_SECONDS = 0.6
"""That the kernel sends a byte again and again. Linux counts from the first time, 0.2 s after the byte, and looks when
the next is due: 1.0 to 1.2 s after the byte all in all."""
RETRY_SECONDS = 0.25
"""Until a new connection must be there."""
FIRST_SECONDS = 5.0
"""The same for the first one: a firewall that says nothing."""


async def listen(address: str) -> asyncio.Server:
    """The end that ends with this process, at a port of the system's choice. Raises `OSError`."""
    return await asyncio.start_server(_swallow, address, 0)


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes that mean nothing: the kernel has acknowledged them long ago, and keeps them until they are read."""
    with contextlib.suppress(OSError):
        while await reader.read(1024):
            pass
    writer.close()


async def until_gone(address: str, port: int) -> bool:
    """Returns when the process that listens there is gone. False, at once: it cannot be reached from here at all."""
    connection = await _connect(address, port, FIRST_SECONDS)
    if connection is None:
        logger.warning("no connection to port %d of %s: Ray alone will tell the loss of a replica there", port, address)
        return False
    while connection is not None:
        reader, writer = await asyncio.open_connection(sock=connection)
        beating = asyncio.create_task(_beat(writer))
        try:
            with contextlib.suppress(OSError):  # reset, or unanswered
                await reader.read(1)
        finally:
            beating.cancel()
            writer.close()
        connection = await _connect(address, port, RETRY_SECONDS)
    return True


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"\0")
        await asyncio.sleep(BEAT_SECONDS)


async def _connect(address: str, port: int, seconds: float) -> socket.socket | None:
    """Connected; None if nobody answers for so long, or says no."""
    while True:
        began = time.monotonic()
        connection = await _try_once(address, port, seconds)
        # Half of that time this loop stood still, or the whole machine: an answer had none to come.
        if connection is not None or time.monotonic() - began < 2 * seconds:
            return connection


async def _try_once(address: str, port: int, seconds: float) -> socket.socket | None:
    with contextlib.ExitStack() as undo, contextlib.suppress(OSError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        connection.setblocking(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_connect(connection, (address, port))
        connection.getpeername()  # the kernel has made it or not, however late this loop looks
        give_up_soon(connection)
        undo.pop_all()
        return connection
    return None


def give_up_soon(connection: socket.socket) -> None:
    """Have the kernel break it when the other end acknowledges nothing. Elsewhere than on Linux Ray tells."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNANSWERED_SECONDS * 1e3))
