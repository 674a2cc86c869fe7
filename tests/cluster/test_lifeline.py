"""The connection that tells the end of a process."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from asyncengine.cluster.fleet.lifeline import keep_alive, listen, until_gone

HERE = "127.0.0.1"


async def watched(end: socket.socket) -> asyncio.Task[bool]:
    """Somebody who waits for its end, connected."""
    watching = asyncio.create_task(until_gone(HERE, end.getsockname()[1]))
    while not pending(end):  # noqa: ASYNC110  # the kernel makes the connection
        await asyncio.sleep(0.001)
    return watching


def pending(end: socket.socket) -> bool:
    """Whether a connection waits to be accepted."""
    import select

    return bool(select.select([end], [], [], 0)[0])


async def test_the_end_of_the_other_process_is_heard_at_once() -> None:
    """A process's sockets are closed by the kernel when it ends, as this one is here. Nobody accepts or answers."""
    end = listen(HERE)
    watching = await watched(end)
    await asyncio.sleep(0.05)
    assert not watching.done()
    began = time.monotonic()
    end.close()
    assert await asyncio.wait_for(watching, 5) is True
    assert time.monotonic() - began < 0.4


async def test_a_connection_that_breaks_alone_is_made_again() -> None:
    end = listen(HERE)
    watching = await watched(end)
    for _ in range(3):
        end.accept()[0].close()
        while not pending(end):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not watching.done()
    end.close()
    assert await asyncio.wait_for(watching, 5) is True


async def test_what_cannot_be_reached_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    end = listen(HERE)
    port = end.getsockname()[1]
    end.close()
    assert await until_gone(HERE, port) is False
    assert f"no connection to port {port} of {HERE}" in caplog.text


def test_the_kernel_asks_for_a_machine_that_says_nothing() -> None:
    """Two seconds after its last word it is given up."""
    with socket.socket() as connection:
        keep_alive(connection)
        if not hasattr(socket, "TCP_KEEPIDLE"):
            pytest.skip("this system's keepalive has no settings here")
        asked = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in
                 (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)]  # fmt: skip
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert asked[0] + asked[1] * asked[2] <= 2
