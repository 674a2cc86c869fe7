"""A replica: one engine in a process of its own, on some machine. Does not import Ray.

Requests come as specifications that the fleet has checked, and are posted to the engine as they are. The output of all
requests leaves through one outbox: an update carries everything new since the last one, each sample's chunks merged.
The slower the reader, the fewer and larger the updates; the output that waits is bounded by the requests' `max_tokens`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from asyncengine import AdapterInfo, AsyncEngine, EngineConfig, PrefixCacheReset, __version__
from asyncengine.assembly.relay import Outbox
from asyncengine.assembly.served_model import ServedModel
from asyncengine.engine.peers import Tasks
from asyncengine.errors import AdapterNotFound, EngineError, FleetError
from asyncengine.execution.runner.stage_host import KEY
from asyncengine.integrations.fleet.connection import MAX_MESSAGE_BYTES, UNSENT, Door, new_socket, zmq
from asyncengine.integrations.fleet.messages import VERSION, Loaded, Submit, Tell, Update
from asyncengine.integrations.fleet.processes import packed
from asyncengine.outputs import Chunk
from asyncengine.request_output import RequestOutput
from asyncengine.request_spec import Peer, RequestSpec
from asyncengine.scheduler import Output
from asyncengine.stats import EngineStats

# The connections between replicas, over which one pulls a prefix from another: ZeroMQ with CURVE, as to the fleet.

MOST_QUESTIONS = 8
"""Questions of all peers that are answered at a time; others wait in their senders' sockets."""


class PeerConnections(Door):
    """One replica's port for its peers, and its connections to theirs. Lives on the engine's loop."""

    def __init__(self, address: str) -> None:
        """Listen. Raises `OSError` without pyzmq or a port."""
        socket_type = None if zmq is None else zmq.ROUTER
        super().__init__(address, (), socket_type, rcvhwm=UNSENT, sndbuf=-1)  # the kernel's own size: pages are large
        self._address = address
        self.sockets: dict[bytes, Any] = {}
        """Sockets to peers, by the peer's key."""
        self.waiting: dict[bytes, tuple[bytes, asyncio.Future[bytes]]] = {}
        """Futures of answers, each with the peer's key, by the question's number."""
        self._numbers = itertools.count()
        self._tasks = Tasks()

    @property
    def url(self) -> str:
        """The address at which it listens."""
        return str(self.socket.last_endpoint.rstrip(b"\0").decode())

    def admit(self, keys: Iterable[bytes]) -> None:
        """Admit the owners of these public keys from now on, and close connections to others: calls that wait for their
        answers raise."""
        self.keys = tuple(keys)
        for key in [key for key in self.sockets if key not in self.keys]:
            self.sockets.pop(key).close()
            for peer_key, answer in self.waiting.values():
                if peer_key == key and not answer.done():
                    answer.set_exception(ConnectionError("it is gone"))

    async def call(self, peer: Peer, question: bytes) -> bytes:
        """The answer of a peer, without a timeout. Raises `ConnectionError` for a peer that is not, or no longer,
        admitted."""
        if peer.key not in self.keys:
            raise ConnectionError("it is not admitted")
        number = b"%d" % next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiting[number] = peer.key, answer
        sent = self._socket_to(peer).send_multipart([number, question])
        try:
            return await answer  # not `sent`: closing the socket cancels it, which would look like our caller's leaving
        finally:
            sent.cancel()
            del self.waiting[number]

    async def serve(self, answer: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer questions until cancelled. The reply is empty where `answer` raises."""

        async def work() -> None:
            while True:
                sender, number, question = await self.socket.recv_multipart()
                reply = b""
                try:
                    reply = await answer(question)
                except Exception as error:
                    logger.info("a peer's question has no answer: %r", error)
                with contextlib.suppress(zmq.ZMQError):  # a peer that is gone must not end this worker
                    await self.socket.send_multipart([sender, number, reply])

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
                number, reply = await socket.recv_multipart()
                _, answer = self.waiting.get(number, (b"", None))
                if answer is not None and not answer.done():
                    answer.set_result(reply)

    def close(self) -> None:
        """Close the port and all connections. Idempotent."""
        while self.sockets:
            self.sockets.popitem()[1].close()
        super().close()


logger = logging.getLogger("asyncengine")

ALIVE_SECONDS = 0.5
"""Seconds after which a replica that has nothing else to say sends an empty update."""
STATS_SECONDS = 0.1
"""Seconds between two statistics of a replica that works; making them takes milliseconds."""


class Replica:
    """One engine, and its connection to the fleet. All of it runs on one event loop."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self._engine: AsyncEngine | None = None
        self._cached: Any = None
        self._stopped = False
        self.tasks = Tasks()
        self._stats_at = 0.0
        self._changed = True
        """Whether there was output since the last statistics."""
        self._peers: PeerConnections | None = None

    # ---------------------------------------------------------------- called by the fleet

    async def answer(self, method: str, arguments: bytes) -> bytes:
        """Call `method` and pack its result, or the error that it raises."""
        try:
            outcome, error = await getattr(self, method)(*pickle.loads(arguments)), None
        except Exception as raised:
            outcome, error = None, raised
        try:
            return packed(outcome, error)
        except Exception as unsent:
            return packed(None, FleetError(f"a replica's answer cannot be sent: {unsent!r} ({error or outcome!r})"))

    async def hello(self) -> tuple[str, int]:
        """Release of this program, and version of the messages."""
        return __version__, VERSION

    async def listen(self, address: str, fleet_key: bytes) -> tuple[int, bytes]:
        """Listen for the fleet, which then uses the connection instead of `post` and `updates`. Returns the port, and
        the public key by which the fleet authenticates this end. Raises `OSError`."""
        door = Door(address, [fleet_key])
        # A callback and not `finally`: it runs also if the task is cancelled before it began, and tells the fleet so.
        self.tasks.start(self._serve(door)).add_done_callback(lambda done: door.close())
        return door.port, door.public_key

    async def start(self, model: str, config: EngineConfig, stage_key: bytes = b"") -> Loaded:
        """Load the model; `stage_key`: shared with the hosts of its stages. Raises what loading raises."""
        if stage_key:
            os.environ[KEY] = stage_key.decode()
        engine = await AsyncEngine.from_pretrained(model, config=config)
        kv = engine.core.loop.scheduler.kv
        self._cached = kv.tree.keep_log(kv.pool.capacity)
        self._engine = engine
        return Loaded(ServedModel.of(engine.core), engine.adapters())

    async def share(self, address: str) -> tuple[str, bytes]:
        """Let replicas ask each other for prefixes. Returns the URL at which this one listens, and its public key.
        Raises `OSError` without pyzmq or a port, `EngineError` where prefixes cannot be shared."""
        answer = await self.engine.core.prefixes.share(self._ask)
        self._peers = peers = PeerConnections(address)
        self.tasks.start(peers.serve(answer))
        return peers.url, peers.public_key

    async def _ask(self, peer: Peer, question: bytes) -> bytes:
        if self._peers is None:
            raise ConnectionError("there is no port")
        return await self._peers.call(peer, question)

    async def admit(self, keys: list[bytes]) -> None:
        """Admit the replicas of these public keys, and no others."""
        if self._peers is not None:
            self._peers.admit(keys)

    async def load_adapter(self, name: str, path: str, pinned: bool) -> AdapterInfo:
        return await self.engine.load_adapter(name, path, pinned=pinned)

    async def unload_adapter(self, name: str) -> None:
        await self.engine.unload_adapter(name, wait=True)

    async def reset_prefix_cache(self, namespace: str | None) -> PrefixCacheReset:
        return await self.engine.reset_prefix_cache(namespace)

    async def stats(self) -> EngineStats:
        return self.engine.stats()

    async def stop(self) -> None:
        """Close the engine, end the updates and close the connection."""
        if self._engine is not None:
            await self._engine.aclose()
        self._stopped = True
        self.outbox.post()
        await self.tasks.end()

    async def post(self, commands: bytes) -> None:
        """Take commands, in order. A request that is refused gets its error as output."""
        for command in pickle.loads(commands):
            if isinstance(command, Submit):
                try:
                    self._submit(command)
                except Exception as error:
                    self.outbox.post(_refusal(command, error))
            elif isinstance(command, Tell):
                self.outbox.tell(self.engine.core, command.message)
            else:
                self.engine.core.client.abort_tickets([command])

    async def updates(self) -> AsyncIterator[bytes]:
        """Updates with everything new; the next one is made once the fleet has taken the last."""
        while not self._stopped:
            await self.outbox.wait(STATS_SECONDS if self._changed else ALIVE_SECONDS)
            yield pickle.dumps(self._update())

    async def carry(
        self, receive: Callable[[], Awaitable[bytes]], send: Callable[[bytes], Awaitable[object]]
    ) -> None:  # fmt: skip
        """Take the commands that are received and send updates, both in order, until cancelled or one of them fails."""

        async def send_all() -> None:
            async for update in self.updates():
                await send(update)

        await receive()  # the fleet's first message: an update taken before that would be lost
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send_all())
            while True:
                await self.post(await receive())

    # ---------------------------------------------------------------- here

    @property
    def engine(self) -> AsyncEngine:
        if self._engine is None:
            raise FleetError("the replica has loaded no model")
        return self._engine

    async def _serve(self, door: Door) -> None:
        try:
            await self.carry(door.receive, door.socket.send)
        except Exception:  # closing the connection tells the fleet, which would wait for an answer otherwise
            logger.exception("a replica's connection is given up")

    def _submit(self, submit: Submit) -> None:
        """Post a request to the engine. Raises `EngineError` if the engine is closed, or its adapter has changed."""
        core, first = self.engine.core, submit.specs[0]
        core.client.check_open()
        self._check_adapter(first, submit.digest)
        specs = [_rebase(spec, core.loop.clock.now(), submit.sent_at) for spec in submit.specs]
        self.outbox.submit(core, submit.key, specs)

    def _check_adapter(self, spec: RequestSpec, digest: str) -> None:
        """Raise `AdapterNotFound` if the adapter's name stands for other content here, or for none yet."""
        name = spec.options.adapter
        if name is None:
            return
        current = next((info.digest for info in self.engine.adapters() if info.name == name), None)
        if current != digest:
            raise AdapterNotFound("adapter", "its content has changed while the request was on its way", name)

    def _update(self) -> Update:
        loop, now = self.engine.core.loop, asyncio.get_running_loop().time()
        outputs = self.outbox.take_outputs()
        update = Update(outputs, self._cached.news(loop.scheduler.kv.tree.nodes()) or None)
        self._changed = self._changed or bool(outputs)
        if now >= self._stats_at + (STATS_SECONDS if self._changed else ALIVE_SECONDS * 0.9):
            with contextlib.suppress(RuntimeError):  # a dict changed while it was read: the next update has them
                update.stats, self._stats_at, self._changed = self.engine.stats(), now, False
        if loop.failure is not None:
            update.dead = repr(loop.failure)
        return update


def _refusal(submit: Submit, error: Exception) -> RequestOutput:
    """Output of a request that the engine did not take."""
    if not isinstance(error, EngineError):
        error = FleetError(f"the replica took no request: {error!r}")
    if submit.specs[0].pooled is not None:
        return RequestOutput(submit.key, fault=(0, Output(submit.key, reason="error", error=error)))
    chunks = [Chunk("", [], "error", spec.index, error=str(error)) for spec in submit.specs]
    return RequestOutput(submit.key, chunks, cause=error)


def _rebase(spec: RequestSpec, now: float, sent_at: float) -> RequestSpec:
    """A specification with times of this process's clock. A resumed one has begun before: no waiting limit applies."""

    def here(moment: float | None) -> float | None:
        return None if moment is None else moment - sent_at + now

    return replace(
        spec, arrival=now if spec.resumed else spec.arrival - sent_at + now, deadline=here(spec.deadline),
        waiting_deadline=None if spec.resumed else here(spec.waiting_deadline),
    )  # fmt: skip
