"""The connection that tells the end of a process."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from asyncengine.cluster.fleet import lifeline
from asyncengine.cluster.fleet.lifeline import until_gone

HERE = "127.0.0.1"


def listening() -> socket.socket:
    """A process's end, as its kernel has it: connections are made, and nobody accepts them."""
    return socket.create_server((HERE, 0))


async def watched(end: socket.socket) -> asyncio.Task[bool]:
    """Somebody who waits for its end, connected."""
    watching = asyncio.create_task(until_gone(HERE, end.getsockname()[1]))
    while not pending(end):  # noqa: ASYNC110  # the kernel makes the connection
        await asyncio.sleep(0.001)
    return watching


def pending(end: socket.socket) -> bool:
    """Whether a connection waits to be accepted."""
    return bool(select.select([end], [], [], 0)[0])


async def test_the_end_of_the_other_process_is_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's sockets are closed by the kernel when it ends, as this one is here: no time has to pass."""
    for waits in ("BEAT_SECONDS", "UNANSWERED_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(lifeline, waits, 3600.0)
    end = listening()
    watching = await watched(end)
    await asyncio.sleep(0.05)
    assert not watching.done()
    end.close()
    assert await asyncio.wait_for(watching, 120) is True


async def test_a_connection_that_breaks_alone_is_made_again() -> None:
    end = listening()
    watching = await watched(end)
    for _ in range(3):
        end.accept()[0].close()
        while not pending(end):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not watching.done()
    end.close()
    assert await asyncio.wait_for(watching, 120) is True


async def test_a_loop_that_stands_still_declares_nobody_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a new connection comes about, the loop is away for longer than it may take: first so that no answer came
    meanwhile (the whole machine was away), then so that one is there when the time is up."""
    end = listening()
    watching = await watched(end)
    loop, tries = asyncio.get_running_loop(), []
    connect = loop.sock_connect

    async def stalled(connection: socket.socket, address: Any) -> None:
        tries.append(address)
        connecting = asyncio.ensure_future(connect(connection, address)) if len(tries) == 2 else None
        await asyncio.sleep(0)
        time.sleep(3 * lifeline.RETRY_SECONDS)  # noqa: ASYNC251  # that is the point
        if len(tries) == 1:
            raise TimeoutError
        await (connecting or connect(connection, address))

    monkeypatch.setattr(loop, "sock_connect", stalled)
    first, _ = end.accept()
    first.close()
    while len(tries) < 2 or not pending(end):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    assert not watching.done()
    watching.cancel()
    end.close()


async def test_what_cannot_be_reached_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    end = listening()
    port = end.getsockname()[1]
    end.close()
    assert await until_gone(HERE, port) is False
    assert f"no connection to port {port} of {HERE}" in caplog.text


OTHER_SIDE = """
import asyncio
from asyncengine.cluster.fleet import lifeline

async def main():
    server = await lifeline.listen("127.0.0.1")
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_process_that_stands_still_lives_and_a_killed_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel acknowledges for it."""
    monkeypatch.setattr(lifeline, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lifeline, "UNANSWERED_SECONDS", 0.05)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", OTHER_SIDE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    watching = asyncio.create_task(until_gone(HERE, int(await process.stdout.readline())))
    await asyncio.sleep(0.1)
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.6)
    assert not watching.done()
    process.kill()
    assert await asyncio.wait_for(watching, 120) is True
    await process.wait()


NETWORK_CUT = """
import asyncio, fcntl, json, socket, struct, time
from asyncengine.cluster.fleet import lifeline

def loopback(up):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        name, flags = struct.unpack("16sh", fcntl.ioctl(control, 0x8913, struct.pack("16sh", b"lo", 0)))
        fcntl.ioctl(control, 0x8914, struct.pack("16sh", name, flags | 1 if up else flags & ~1))

async def note_lateness(late):
    while True:
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        late.append(time.monotonic() - due)

async def main():
    loopback(True)
    servers = [await lifeline.listen("127.0.0.1") for _ in range(4)]
    watching = []
    for server in servers:  # cut in different moments between two bytes
        watching.append(asyncio.create_task(lifeline.until_gone("127.0.0.1", server.sockets[0].getsockname()[1])))
        await asyncio.sleep(lifeline.BEAT_SECONDS / 4)
    await asyncio.sleep(1.3)
    assert not any(task.done() for task in watching)
    began, times, late = time.monotonic(), [], []
    noting = asyncio.create_task(note_lateness(late))
    loopback(False)
    for task in asyncio.as_completed(watching):
        assert await task
        times.append(time.monotonic() - began)
    print(json.dumps([times, sum(each for each in late if each > 0.01)]))

asyncio.run(main())
"""


def test_a_machine_whose_network_is_cut_is_given_up_within_two_seconds() -> None:
    """In a network of its own, whose only interface goes down. A try to connect again fails at once there; on a real
    network it takes `RETRY_SECONDS`."""
    alone = ["unshare", "--map-root-user", "--net"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system gives a program no network of its own")
    cut = [*alone, sys.executable, "-c", NETWORK_CUT]
    run = subprocess.run(cut, check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    times, late = json.loads(run.stdout)  # late: seconds that a busy machine gave to others
    print("heard after", times, "late", late)
    assert len(times) == 4
    assert max(times) - late + lifeline.RETRY_SECONDS < 2
