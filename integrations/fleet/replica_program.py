"""The program of a replica on the fleet's own machine: a `Replica` that `frontend` reaches over two sockets.

One carries calls and their answers, the other commands and updates, which wait here until the fleet takes them. Each
message follows its length, and is unpickled: the sockets are pairs without an address, so no other process can connect.
"""

from __future__ import annotations

import asyncio
import pickle
import socket

from asyncengine.execution.device.child import run
from asyncengine.integrations.fleet.replica import Replica

LENGTH = 8
"""Bytes of a message's length."""


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH) + message


async def received(reader: asyncio.StreamReader) -> bytes:
    """The next message. Raises `EOFError` at the end, `OSError`."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH)))


def main(fleet: int, life: int, calls: int, updates: int) -> None:
    """Serve the process `fleet` by sockets of these descriptors (`device.child.run`)."""
    run(lambda: asyncio.run(_serve(calls, updates)), fleet, life)


async def _serve(calls: int, updates: int) -> None:
    """Answer calls concurrently, as Ray's actors do, and carry commands and updates. The first task that fails ends the
    process, by which the fleet notices."""
    replica = Replica()
    calls_in, answers = await asyncio.open_unix_connection(sock=socket.socket(fileno=calls))

    async def answer(number: int, method: str, arguments: bytes) -> None:
        answers.write(framed(pickle.dumps((number, await replica.answer(method, arguments)))))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_carry(replica, updates))
        while True:
            tasks.create_task(answer(*pickle.loads(await received(calls_in))))


async def _carry(replica: Replica, descriptor: int) -> None:
    commands, updates = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))

    async def send(update: bytes) -> None:
        updates.write(framed(update))
        await updates.drain()

    await replica.carry(lambda: received(commands), send)
