"""The connection between a fleet and a replica: who may speak on it, in which order, how it ends and what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import until

from asyncengine.errors import FleetError
from asyncengine.integrations.fleet import connection
from asyncengine.integrations.fleet.connection import Connection, Door, new_context
from asyncengine.integrations.fleet.replica import Replica

zmq = pytest.importorskip("zmq", reason='needs pyzmq: pip install "asyncengine[cluster]"')

HERE = "127.0.0.1"
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer for a connection than a fleet waits for one before it uses Ray's calls."""
    monkeypatch.setattr(connection, "OPEN_SECONDS", PATIENCE)


class Host:
    """A replica's process as the fleet's end reaches it; its own end runs in this process. `fails`: what its `listen`
    raises. `port`: where it says that it listens, if not the truth."""

    name = "r"
    carry: Any = Replica.carry

    def __init__(self, *, fails: Exception | None = None, port: int | None = None) -> None:
        self.fails, self.port = fails, port
        self.end: Door | None = None
        self.taken: list[bytes] = []
        self.says: asyncio.Queue[bytes] = asyncio.Queue()
        self.posted_by_ray: list[bytes] = []
        self.running: asyncio.Task[None] | None = None

    async def call(self, method: str, address: str, key: bytes, *, timeout: float) -> tuple[int, bytes]:
        assert method == "listen"
        if self.fails is not None:
            raise self.fails
        self.end = end = Door(address, [key])
        self.running = asyncio.create_task(self.carry(end.receive, end.socket.send))
        self.running.add_done_callback(lambda done: end.close())
        return self.port or end.port, end.public_key

    async def post(self, body: bytes) -> None:
        if body == b"?":
            raise ValueError(body)
        self.taken.append(body)

    async def updates(self) -> AsyncIterator[bytes]:
        while True:
            yield await self.says.get()

    def post_by_ray(self, commands: bytes) -> None:
        self.posted_by_ray.append(commands)

    async def updates_by_ray(self) -> AsyncIterator[bytes]:
        yield b"by Ray"

    async def close(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.gather(self.running, return_exceptions=True)


@contextlib.asynccontextmanager
async def connected(
    host: Host, silence_limit: float = PATIENCE, context: Any = None
) -> AsyncIterator[tuple[Connection, Any]]:
    """The fleet's end and what it hears. Both ends are closed afterwards, wherever they are, and so is the fleet's
    context, unless it is given."""
    own = new_context() if context is None else context
    fleet_end = Connection(host, HERE, silence_limit, own)
    try:
        async with contextlib.aclosing(fleet_end.updates()) as told:
            yield fleet_end, told
    finally:
        await host.close()
        if context is None:
            own.destroy(linger=0)


async def heard(told: Any) -> bytes:
    return bytes(await asyncio.wait_for(anext(told), PATIENCE))


async def test_both_ways_everything_arrives_once_and_in_order() -> None:
    """Messages may have been posted before there was a connection, and be longer than the kernel's buffers."""
    host = Host()
    orders = [b"%d" % number * (1 if number % 50 else 200_000) for number in range(1, 500)]
    async with connected(host) as (fleet_end, told):
        for order in orders[:100]:
            fleet_end.post(order)
            host.says.put_nowait(order)
        found = [await heard(told)]
        for order in orders[100:]:
            fleet_end.post(order)
            host.says.put_nowait(order)
        found += [await heard(told) for _ in orders[1:]]
        assert found == orders
        await until(lambda: len(host.taken) >= len(orders), "all orders")
        assert host.taken == orders


async def test_a_fleet_that_takes_nothing_is_sent_a_bounded_amount() -> None:
    host = Host()
    async with connected(host) as (_, told):
        host.says.put_nowait(b"first")
        assert await heard(told) == b"first"
        for _ in range(1000):
            host.says.put_nowait(bytes(100_000))
        await until(lambda: host.says.qsize() < 1000, "an update that is sent")
        left = 1000
        while (now := host.says.qsize()) < left:  # until nothing more is taken
            left = now
            await asyncio.sleep(0.2)
        assert 1000 - left < 100
        assert [len(await heard(told)) for _ in range(1000)] == [100_000] * 1000


# ---------------------------------------------------------------- who may speak


async def test_whoever_does_not_have_the_fleets_key_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    """A stranger is told nothing either, and the fleet does not notice."""
    host = Host()
    async with connected(host) as (fleet_end, told), contextlib.AsyncExitStack() as undo:
        host.says.put_nowait(b"a")
        assert await heard(told) == b"a"
        assert host.end is not None
        context = new_context()
        undo.callback(context.destroy, linger=0)
        mine, secret = zmq.curve_keypair()
        stranger, plain = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = host.end.public_key, mine, secret
        for one in (stranger, plain):
            one.connect(f"tcp://{HERE}:{host.end.port}")
            one.send(b"order")
        web = socket.create_connection((HERE, host.end.port))
        undo.callback(web.close)
        web.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        await until(lambda: "a stranger was refused" in caplog.text, "a refusal")
        for number in range(100):
            host.says.put_nowait(b"%d" % number)
            fleet_end.post(b"%d" % number)
        assert [await heard(told) for _ in range(100)] == [b"%d" % number for number in range(100)]
        await until(lambda: len(host.taken) >= 100, "the fleet's commands")
        assert host.taken == [b"%d" % number for number in range(100)]
        for one in (stranger, plain):
            assert not await one.poll(0)


async def test_without_its_handler_nobody_is_admitted() -> None:
    host = Host()
    made = connection.zmq.auth.asyncio.AsyncioAuthenticator.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            connection.zmq.auth.asyncio.AsyncioAuthenticator,
            "start",
            lambda self: (made(self), self.zap_socket.unbind("inproc://zeromq.zap.01")),
        )
        async with connected(host) as (_, told):
            assert await heard(told) == b"by Ray"


async def test_whoever_has_taken_a_replicas_port_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """A fleet unpickles what it reads: that must come from the key that Ray's call told."""
    context = new_context()
    other, secret = zmq.curve_keypair()
    plain, keyed = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    keyed.curve_server, keyed.curve_publickey, keyed.curve_secretkey = True, other, secret
    try:
        for impostor in (plain, keyed):
            port = impostor.bind_to_random_port(f"tcp://{HERE}")
            sent = impostor.send(b"update")
            host = Host(port=port)
            async with connected(host, silence_limit=1.0) as (fleet_end, told):
                fleet_end.post(b"order")
                assert await heard(told) == b"by Ray"
            assert host.posted_by_ray == [b"order"]
            assert not await impostor.poll(0)
            sent.cancel()
        assert caplog.text.count("no connection to replica r, Ray carries all") == 2
    finally:
        context.destroy(linger=0)


async def test_a_heartbeat_before_all_commands_ends_nothing() -> None:
    """A fleet that is slow to begin sends heartbeats already; libzmq then calls the replica's end readable."""
    context, (mine, secret) = new_context(), zmq.curve_keypair()
    end = Door(HERE, [mine])
    socket, url = connection.new_socket(
        context, HERE, heartbeat_ivl=1, curve_serverkey=end.public_key, curve_publickey=mine, curve_secretkey=secret
    )
    try:
        socket.connect(f"{url}{end.port}")
        assert await end.socket.poll(1000 * PATIENCE)
        received = asyncio.ensure_future(end.receive())
        await asyncio.sleep(0)  # it looks, and finds nothing
        socket.send(b"order")
        assert await asyncio.wait_for(received, PATIENCE) == b"order"
    finally:
        end.close()
        context.destroy(linger=0)


# ---------------------------------------------------------------- where there is none


@pytest.mark.parametrize("why", ["no port", "nobody there", "silence", "no pyzmq there"])
async def test_where_no_connection_can_be_made_ray_carries_all(caplog: pytest.LogCaptureFixture, why: str) -> None:
    with socket.create_server((HERE, 0)) as silent:
        port = silent.getsockname()[1] if why == "silence" else 1
        fails = {"no port": PermissionError("no ports here"), "no pyzmq there": OSError("pyzmq is missing there")}
        host = Host(fails=fails.get(why), port=port)
        async with connected(host, silence_limit=1.0) as (fleet_end, told):
            fleet_end.post(b"early")
            assert await heard(told) == b"by Ray"
            fleet_end.post(b"late")
        assert host.posted_by_ray == [b"early", b"late"]
        assert "no connection to replica r, Ray carries all" in caplog.text


async def test_a_replica_without_pyzmq_or_a_port_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="Cannot assign"):
        Door("192.0.2.1", [b"k" * 40])  # an address that no machine has (RFC 5737)
    monkeypatch.setattr(connection, "zmq", None)
    assert new_context() is None
    with pytest.raises(OSError, match="pyzmq is missing"):
        Door(HERE, [b"k" * 40])


# ---------------------------------------------------------------- how it ends


async def test_orders_that_are_not_understood_end_the_connection() -> None:
    """A caller that waits for what comes of them must not wait for ever."""
    host = Host()
    async with connected(host) as (fleet_end, told):
        fleet_end.post(b"?")
        with pytest.raises(FleetError, match="was lost"):
            await heard(told)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux's /proc")
async def test_after_the_end_no_thread_no_task_and_no_descriptor_is_left() -> None:
    """Both ends of a replica's connection leave nothing while the fleet's context goes on; nor does the context."""

    def held() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())

    async def once(context: Any) -> None:
        host = Host()
        async with connected(host, context=context) as (fleet_end, told):
            fleet_end.post(b"order")
            host.says.put_nowait(b"a")
            assert await heard(told) == b"a"

    def no_more_than(before: tuple[int, int, int]) -> bool:
        return all(now <= then for now, then in zip(held(), before, strict=True))

    await once(None)
    at_first, context = held(), new_context()
    await once(context)
    with_context = held()
    for _ in range(5):
        await once(context)
    await until(lambda: no_more_than(with_context), "the end of both ends")
    context.destroy(linger=0)
    await until(lambda: no_more_than(at_first), "the end of a fleet")


OTHER_SIDE = """
import asyncio, sys
from asyncengine.integrations.fleet.connection import Door
from asyncengine.integrations.fleet.replica import Replica

class Speaker(Replica):
    async def updates(self):
        yield b"I live"
        await asyncio.Event().wait()

async def main():
    end = Door("127.0.0.1", [sys.argv[1].encode()])
    print(end.port, end.public_key.decode(), flush=True)
    await Speaker().carry(end.receive, end.socket.send)

asyncio.run(main())
"""


class Elsewhere(Host):
    """A replica in a process of its own."""

    process: asyncio.subprocess.Process

    async def call(self, method: str, address: str, key: bytes, *, timeout: float) -> tuple[int, bytes]:
        arguments = [sys.executable, "-c", OTHER_SIDE, key.decode()]
        self.process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        port, theirs = (await self.process.stdout.readline()).split()
        return int(port), theirs


async def test_a_process_that_stands_still_lives_and_a_killed_one_does_not() -> None:
    """Its kernel acknowledges for it; and closes its sockets when it ends."""
    host = Elsewhere()
    async with connected(host) as (_, told):
        assert await heard(told) == b"I live"
        waiting = asyncio.ensure_future(anext(told))
        host.process.send_signal(signal.SIGSTOP)
        done, _ = await asyncio.wait(
            [waiting], timeout=1e-3 * (4 * connection.HEARTBEAT_MS + 2 * connection.UNANSWERED_MS)
        )
        assert not done
        host.process.kill()
        with pytest.raises(FleetError, match="was lost"):
            await asyncio.wait_for(waiting, PATIENCE)
        await host.process.wait()


NETWORK_CUT = """
import asyncio, fcntl, json, socket, struct, sys, time
sys.path[:0] = sys.argv[1:]
from test_connection import FleetError, Host, connected, connection, heard

def loopback(up):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        name, flags = struct.unpack("16sh", fcntl.ioctl(control, 0x8913, struct.pack("16sh", b"lo", 0)))
        fcntl.ioctl(control, 0x8914, struct.pack("16sh", name, flags | 1 if up else flags & ~1))

async def main():
    loopback(True)
    connection.OPEN_SECONDS = 60.0
    host = Host()
    async with connected(host) as (_, told):
        host.says.put_nowait(b"a")
        assert await heard(told) == b"a"
        await asyncio.sleep(3 * connection.HEARTBEAT_MS / 1e3)
        began, late = time.monotonic(), 0.0
        loopback(False)
        waiting = asyncio.ensure_future(anext(told))
        while not waiting.done():
            due = time.monotonic() + 0.01
            await asyncio.wait([waiting], timeout=0.01)
            late += max(0.0, time.monotonic() - due - 0.01)
        took = time.monotonic() - began
        assert isinstance(waiting.exception(), FleetError), waiting
        print(json.dumps([took, late]), flush=True)

asyncio.run(main())
"""


def test_a_machine_whose_network_is_cut_is_given_up_within_two_seconds() -> None:
    """The program runs in a network of its own, whose only interface goes down."""
    alone = ["unshare", "--map-root-user", "--net"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system gives a program no network of its own")
    here = Path(__file__).parent
    cut = [*alone, sys.executable, "-c", NETWORK_CUT, str(here), str(here.parents[1])]
    run = subprocess.run(cut, check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    took, late = json.loads(run.stdout)  # late: seconds that a busy machine gave to others
    print("heard after", took, "late", late)
    assert took - late < 2
