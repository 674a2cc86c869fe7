"""The connections between replicas, over which one pulls a prefix from another: ZeroMQ with CURVE, as to the fleet.

A replica has one pair of keys. The fleet tells each replica the public keys of all, over the connection that it has to
it, and which of them may be asked. Nothing that goes over these connections is unpickled, and what comes is checked
like the content of a disk (`engine.peers`). A connection that breaks is made again by ZeroMQ; who waits for an answer
that was lost with it has a limit of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from asyncengine.engine.tasks import Tasks
from asyncengine.integrations.fleet.connection import MAX_MESSAGE_BYTES, UNSENT, Door, new_socket, zmq
from asyncengine.request_spec import Peer

logger = logging.getLogger("asyncengine")

MOST_QUESTIONS = 8
"""Questions of all peers that are answered at a time; others wait where they were sent."""


class PeerConnections(Door):
    """One replica's port for its peers, and its connections to theirs. Lives on the engine's loop."""

    def __init__(self, address: str) -> None:
        """Listen. Raises `OSError` without pyzmq or a port."""
        kind = None if zmq is None else zmq.ROUTER
        super().__init__(address, (), kind, rcvhwm=UNSENT, sndbuf=-1)  # the kernel's own size: pages are large
        self._address = address
        self.sockets: dict[bytes, Any] = {}
        """Sockets to peers, by the peer's key."""
        self.waiting: dict[bytes, tuple[bytes, asyncio.Future[bytes]]] = {}
        """Answers that are waited for, each with the peer's key, by the question's number."""
        self._numbers = itertools.count()
        self._tasks = Tasks()

    @property
    def url(self) -> str:
        """The address at which it listens."""
        return str(self.socket.last_endpoint.rstrip(b"\0").decode())

    def admit(self, keys: Iterable[bytes]) -> None:
        """Admit the owners of these public keys from now on, and forget connections to others: who waits for their
        answers waits no longer."""
        self.keys = tuple(keys)
        for key in [key for key in self.sockets if key not in self.keys]:
            self.sockets.pop(key).close()
            for asked, answer in self.waiting.values():
                if asked == key and not answer.done():
                    answer.set_exception(ConnectionError("it is gone"))

    async def call(self, peer: Peer, question: bytes) -> bytes:
        """The answer of a peer; waits as long as it is waited for. Raises `ConnectionError` for one that is not, or no
        more, admitted."""
        if peer.key not in self.keys:
            raise ConnectionError("it is not admitted")
        number = b"%d" % next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiting[number] = peer.key, answer
        sent = self._socket_to(peer).send_multipart([number, question])
        try:
            return await answer  # not `sent`, which a socket that is closed cancels: that would look like a leaver
        finally:
            sent.cancel()
            del self.waiting[number]

    async def serve(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer questions until cancelled; with nothing those that `answer` raises for."""

        async def work() -> None:
            while True:
                sender, number, question = await self.socket.recv_multipart()
                said = b""
                try:
                    said = await answer(question)
                except Exception as error:
                    logger.info("a peer's question has no answer: %r", error)
                with contextlib.suppress(zmq.ZMQError):  # one who cannot be answered takes no answer from others
                    await self.socket.send_multipart([sender, number, said])

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(MOST_QUESTIONS):
                    workers.create_task(work())
        finally:
            await self._tasks.end()
            self.close()

    def _socket_to(self, peer: Peer) -> Any:
        socket = self.sockets.get(peer.key)
        if socket is None:
            socket, _ = new_socket(
                self._context, self._address, sndhwm=UNSENT, rcvhwm=UNSENT, maxmsgsize=MAX_MESSAGE_BYTES,
                curve_serverkey=peer.key, curve_publickey=self.public_key, curve_secretkey=self._secret,
            )  # fmt: skip
            socket.connect(peer.url)
            self.sockets[peer.key] = socket
            self._tasks.start(self._read(socket))
        return socket

    async def _read(self, socket: Any) -> None:
        """Take answers until the socket is closed."""
        with contextlib.suppress(zmq.ZMQError):
            while True:
                number, said = await socket.recv_multipart()
                _, answer = self.waiting.get(number, (b"", None))
                if answer is not None and not answer.done():
                    answer.set_result(said)

    def close(self) -> None:
        """Close the port and all connections. Idempotent."""
        while self.sockets:
            self.sockets.popitem()[1].close()
        super().close()
