"""The connection on which commands go to a replica and updates come back: ZeroMQ with CURVE, else Ray's calls.

Messages are unpickled, so each end must authenticate the other. CURVE (CurveZMQ, RFC 26) encrypts, and authenticates by
keys: each end makes a key pair, and the call over Ray that opens the connection exchanges the public ones. A replica's
ZAP handler (RFC 27) admits the fleet's key alone; a process that takes a lost replica's port does not have its key.

A connection that breaks is not made again, as it is not known what was lost with it: its replica counts as lost. It
breaks when the process at its other end ends, or the kernel there acknowledges nothing (TCP's user timeout, RFC 5482).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from asyncengine.errors import FleetError
from asyncengine.integrations.fleet.processes import ReplicaConnection

logger = logging.getLogger("asyncengine")

OPEN_SECONDS = 3.0
"""Seconds until a replica's connection must be open; commands wait for it meanwhile."""
UNSENT = 4
"""Updates that may wait at each end before a replica merges instead of sending."""
BUFFER_BYTES = 1 << 16
"""Size of the kernels' buffers for updates: bytes that may be on their way besides `UNSENT` updates."""
MAX_MESSAGE_BYTES = 1 << 30
"""Length of the longest message that a replica takes: a sender that announces more is refused, not waited for."""
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


def new_socket(context: Any, address: str, socket_type: int | None = None, **options: Any) -> tuple[Any, str]:
    """A socket with these options, a dealer if not of another `socket_type`, and the beginning of its URL."""
    socket = context.socket(zmq.DEALER if socket_type is None else socket_type)
    for name, value in {"linger": 0, "ipv6": ":" in address, **options}.items():
        setattr(socket, name, value)
    return socket, f"tcp://[{address}]:" if socket.ipv6 else f"tcp://{address}:"


class Connection(ReplicaConnection):
    """The fleet's end of the connection to a replica of a Ray cluster."""

    def __init__(self, process: Any, address: str, silence_limit: float, context: Any) -> None:
        """`process`: the replica's `ReplicaProcess`, at `address`. `context`: a `new_context`; None: Ray's calls."""
        super().__init__(address)
        self._process, self._silence_limit, self._context = process, silence_limit, context
        self._opened = contextlib.ExitStack()

    async def open(self) -> tuple[Callable[[bytes], object], AsyncGenerator[bytes, None]]:
        """Connect; if the replica cannot listen or be reached, Ray's calls are used."""
        if self._context is not None:
            try:
                return await self._connect()
            except (OSError, zmq.ZMQError) as error:
                why = error or "no answer"
                logger.warning("no connection to replica %s, Ray carries all: %s", self._process.name, why)
                self.close()
        return self._process.post_by_ray, self._process.updates_by_ray()

    async def _connect(self) -> tuple[Callable[[bytes], object], AsyncGenerator[bytes, None]]:
        mine, secret = zmq.curve_keypair()
        port, theirs = await self._process.call("listen", self.address, mine, timeout=self._silence_limit)
        socket, url = new_socket(
            self._context, self.address, sndhwm=0, rcvhwm=UNSENT, rcvbuf=BUFFER_BYTES, reconnect_ivl=-1,
            heartbeat_ivl=HEARTBEAT_MS, heartbeat_timeout=0, tcp_maxrt=UNANSWERED_MS,  # the kernel alone gives up
            curve_serverkey=theirs, curve_publickey=mine, curve_secretkey=secret,
        )  # fmt: skip
        self._opened.callback(socket.close, linger=0)
        over = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
        states = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | over)
        self._opened.callback(states.close, linger=0)
        # Runs first when the stack is closed: libzmq's thread would wait for ever to report a change of state to a
        # socket that is not read any more, and all connections of the context with it.
        self._opened.callback(socket.disable_monitor)
        socket.connect(f"{url}{port}")
        async with asyncio.timeout(min(OPEN_SECONDS, self._silence_limit / 2)):
            change = await zmq.utils.monitor.recv_monitor_message(states)
        if change["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise ConnectionError("refused")
        socket.send(b"")  # the replica speaks from now on
        return socket.send, self._received(socket, states)

    async def _received(self, socket: Any, states: Any) -> AsyncGenerator[bytes, None]:
        over = asyncio.create_task(zmq.utils.monitor.recv_monitor_message(states))
        try:
            while True:
                arriving = socket.recv()
                await asyncio.wait((arriving, over), return_when=asyncio.FIRST_COMPLETED)
                if not arriving.done():
                    raise FleetError(f"replica {self._process.name} was lost: the connection to its process has ended")
                yield arriving.result()
        finally:
            over.cancel()
            await asyncio.gather(over, return_exceptions=True)

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._opened.close()


class Door:
    """A port that admits the owners of some public keys alone. Lives on one loop."""

    def __init__(self, address: str, keys: Iterable[bytes], socket_type: int | None = None, **options: Any) -> None:
        """Listen for the owners of `keys`, with a socket of these `options` beside those of a replica's for its fleet.
        Raises `OSError` without pyzmq or a port."""
        self._context, self.keys = new_context(), tuple(keys)
        if self._context is None:
            raise OSError("pyzmq is missing there")
        self.public_key, self._secret = zmq.curve_keypair()
        self._zap = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
        self._zap.configure_curve_callback("fleet", credentials_provider=self)
        self._zap.start()
        limits = {"sndhwm": UNSENT, "rcvhwm": 0, "sndbuf": BUFFER_BYTES, "maxmsgsize": MAX_MESSAGE_BYTES, **options}
        self.socket, url = new_socket(
            self._context, address, socket_type, curve_server=True, curve_secretkey=self._secret, zap_domain=b"fleet",
            zap_enforce_domain=True, **limits,
        )  # fmt: skip
        try:
            self.socket.bind(f"{url}*")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, str(error)) from error
        self.port = int(self.socket.last_endpoint.rstrip(b"\0").rpartition(b":")[2])

    async def receive(self) -> bytes:
        """The next message."""
        while True:
            with contextlib.suppress(zmq.Again):  # libzmq woke us for a heartbeat, which carries no message
                return bytes(await self.socket.recv())

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell ZAP whether the owner of this public key may connect."""
        if key not in self.keys:
            logger.warning("a stranger was refused at this replica's port")
        return key in self.keys

    def close(self) -> None:
        """Close the port, which the other end notices as it does the end of a process. Idempotent."""
        if not self._context.closed:
            self._zap.stop()
            self.socket.close()
            self._context.term()
