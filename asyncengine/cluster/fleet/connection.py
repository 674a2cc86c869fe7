"""The connection on which commands go to a replica and updates come back: ZeroMQ with CURVE, else Ray's calls.

What goes over it is unpickled, so each end must know the other. CURVE (CurveZMQ, RFC 26) encrypts, and authenticates by
keys: each end makes a pair of its own, and the call that opens the connection tells each the other's public one, over
Ray. The replica's ZAP handler (RFC 27) admits that one alone; who takes a lost replica's port does not have its key.

A connection that breaks is not made again, as it is not known what was lost with it: its replica counts as lost. It
breaks when the process at its other end ends, or the kernel there acknowledges nothing (TCP's user timeout, RFC 5482).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from asyncengine.errors import FleetError

logger = logging.getLogger("asyncengine")

OPEN_SECONDS = 3.0
"""Seconds until a replica's connection must be there; while it is not, commands wait."""
UNSENT = 4
"""Updates that may wait at each end before a replica merges instead of sending."""
BUFFER_BYTES = 1 << 16
"""Size of the kernels' buffers for updates: so much may be on its way beside these."""
MAX_MESSAGE_BYTES = 1 << 30
"""Length of the longest message that a replica takes: a stranger's claim does not make it wait for more."""
HEARTBEAT_MS, UNANSWERED_MS = 250, 600
"""Milliseconds between two heartbeats, which the other end's kernel acknowledges, however busy its process is; and for
which this end repeats one. Linux counts from the first repetition, and looks at the next: 1.0 to 1.2 s all in all."""


def _load_zmq() -> Any:
    """The package zmq; None where it is missing, and on Windows, whose event loop it does not work with."""
    try:
        import zmq.asyncio
        import zmq.auth.asyncio
        import zmq.utils.monitor
    except ImportError:
        return None
    return zmq if sys.platform != "win32" else None


zmq = _load_zmq()


def new_context() -> Any:
    """A ZeroMQ context, which has threads from its first socket to its own end; None without pyzmq."""
    return None if zmq is None else zmq.asyncio.Context()


def new_socket(context: Any, address: str, kind: int | None = None, **options: Any) -> tuple[Any, str]:
    """A socket with these options, a dealer if not of another `kind`, and the beginning of its URL."""
    socket = context.socket(zmq.DEALER if kind is None else kind)
    for name, value in {"linger": 0, "ipv6": ":" in address, **options}.items():
        setattr(socket, name, value)
    return socket, f"tcp://[{address}]:" if socket.ipv6 else f"tcp://{address}:"


class Connection:
    """The fleet's end of the connection to one replica. Lives on the fleet's loop, but for its making."""

    def __init__(self, process: Any, address: str, silence_limit: float, context: Any) -> None:
        """`process`: the replica's `ReplicaProcess`, at `address`. `context`: a `new_context`; None: Ray's calls."""
        self._process, self.address, self._silence_limit, self._context = process, address, silence_limit, context
        self._kept: list[bytes] = []
        self._socket: Any = None
        self._states: Any = None
        self.post: Callable[[bytes], object] = self._kept.append
        """Send commands without waiting; in order."""

    async def updates(self) -> AsyncGenerator[bytes, None]:
        """Open the connection and read all updates. Raises `FleetError` when the replica's process or node is gone."""
        try:
            connected = self._context is not None and await self._open()
            self.post = self._socket.send if connected else self._process.post_by_ray
            for commands in self._kept:
                self.post(commands)
            source = self._received() if connected else self._process.updates_by_ray()
            async with contextlib.aclosing(source) as updates:
                async for update in updates:
                    yield update
        finally:
            self._close()

    async def _open(self) -> bool:
        """Connect. False if the replica cannot listen or be reached: then Ray's calls are used."""
        mine, secret = zmq.curve_keypair()
        try:
            port, theirs = await self._process.call("listen", self.address, mine, timeout=self._silence_limit)
            self._socket, url = new_socket(
                self._context, self.address, sndhwm=0, rcvhwm=UNSENT, rcvbuf=BUFFER_BYTES, reconnect_ivl=-1,
                heartbeat_ivl=HEARTBEAT_MS, heartbeat_timeout=0, tcp_maxrt=UNANSWERED_MS,  # the kernel alone gives up
                curve_serverkey=theirs, curve_publickey=mine, curve_secretkey=secret,
            )  # fmt: skip
            over = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
            self._states = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | over)
            self._socket.connect(f"{url}{port}")
            async with asyncio.timeout(min(OPEN_SECONDS, self._silence_limit / 2)):
                if not await self._becomes_open():
                    raise ConnectionError("refused")
            self._socket.send(b"")  # the replica speaks from now on
        except (OSError, zmq.ZMQError) as error:
            logger.warning("no connection to replica %s, Ray carries all: %s", self._process.name, error or "no answer")
            self._close()
            return False
        return True

    async def _becomes_open(self) -> bool:
        """Wait for the next change of the connection. True if it is open now, False if it has ended."""
        change = await zmq.utils.monitor.recv_monitor_message(self._states)
        return bool(change["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)

    async def _received(self) -> AsyncGenerator[bytes, None]:
        over = asyncio.create_task(self._becomes_open())
        try:
            while True:
                arriving = self._socket.recv()
                await asyncio.wait((arriving, over), return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done():
                    raise FleetError(f"replica {self._process.name} was lost: the connection to its process has ended")
                yield arriving.result()
        finally:
            over.cancel()
            await asyncio.gather(over, return_exceptions=True)

    def _close(self) -> None:
        """Close the sockets. Commands posted later are dropped."""
        self.post = lambda commands: None
        if self._states is not None and not self._states.closed:
            # First: libzmq's thread would wait for ever to report a change of state that nothing reads any more, and
            # with it all connections of the context.
            self._socket.disable_monitor()
            self._states.close(linger=0)
        if self._socket is not None:
            self._socket.close(linger=0)


class Door:
    """A port that admits the owners of some public keys alone. Lives on one loop."""

    def __init__(self, address: str, keys: Iterable[bytes], kind: int | None = None, **options: Any) -> None:
        """Listen, with a socket of these `options`, for the owners of `keys`. Raises `OSError` without pyzmq or a
        port."""
        self._context, self.keys = new_context(), tuple(keys)
        if self._context is None:
            raise OSError("pyzmq is missing there")
        self.public_key, self._secret = zmq.curve_keypair()
        self._zap = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
        self._zap.configure_curve_callback("fleet", credentials_provider=self)
        self._zap.start()
        self._socket, url = new_socket(
            self._context, address, kind, maxmsgsize=MAX_MESSAGE_BYTES, curve_server=True,
            curve_secretkey=self._secret, zap_domain=b"fleet", zap_enforce_domain=True, **options,
        )  # fmt: skip
        try:
            self._socket.bind(f"{url}*")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, str(error)) from error
        self.port = int(self._socket.last_endpoint.rstrip(b"\0").rpartition(b":")[2])

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell ZAP whether the owner of this public key may connect."""
        known = any(hmac.compare_digest(key, each) for each in self.keys)
        if not known:
            logger.warning("a stranger was refused at this replica's port")
        return known

    def close(self) -> None:
        """Close the port, which the other end notices as it does the end of a process. Idempotent."""
        if not self._context.closed:
            self._zap.stop()
            self._socket.close()
            self._context.term()


class Listener(Door):
    """The replica's end of the connection: it listens. Lives on the engine's loop."""

    def __init__(self, address: str, fleet_key: bytes) -> None:
        """Listen for the owner of the public key `fleet_key`. Raises `OSError` without pyzmq or a port."""
        super().__init__(address, [fleet_key], sndhwm=UNSENT, rcvhwm=0, sndbuf=BUFFER_BYTES)

    async def run(self, post: Callable[[bytes], Awaitable[None]], updates: AsyncIterator[bytes]) -> None:
        """Give commands to `post` and send `updates` (see `carry`)."""
        await carry(post, updates, self._socket.recv, self._socket.send)


async def carry(
    post: Callable[[bytes], Awaitable[None]],
    updates: AsyncIterator[bytes],
    receive: Callable[[], Awaitable[bytes]],
    send: Callable[[bytes], Awaitable[object]],
) -> None:
    """Give what is received to `post` and send `updates`, both in order, until cancelled or one of them fails."""

    async def send_all() -> None:
        async for update in updates:
            await send(update)

    await receive()  # before the fleet's end is there, no update may be taken
    async with asyncio.TaskGroup() as both:
        both.create_task(send_all())
        while True:
            await post(await receive())
