"""A connection between a fleet's door and one replica: orders one way, deliveries the other.

Ray carries the same with an actor's calls and a streaming generator, which take milliseconds where a socket takes
fractions of one: each passes several threads on both sides. Ray still starts and ends the processes, and hands the
replica the line's token. Where no line can be made (a firewall, a Ray that encrypts what it sends) Ray carries all.

A line that breaks while both processes live is made again, and loses and doubles nothing (`frames`). Whether the
process at the other end lives its lifeline tells (`lifeline`), or its silence; a line knows only that one is gone whose
port refuses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from asyncengine.cluster.fleet.frames import BrokenLine, Ledger, Unpacker
from asyncengine.cluster.fleet.handshake import NoProof, admit, greet
from asyncengine.errors import FleetError

logger = logging.getLogger("asyncengine")

UNSENT = 4
"""Deliveries that may be on their way before a replica gathers instead of sending."""
READ_BYTES = 1 << 18
GREETING_SECONDS = 5.0
"""Until whoever connects must have proved who it is."""
AGAIN_SECONDS = 0.05
"""Between two attempts to make a line anew."""


class Session:
    """One end of a line, over all its connections."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._writer: asyncio.StreamWriter | None = None

    def attach(self, writer: asyncio.StreamWriter, heard: int) -> None:
        """Speak through this connection from now on; the other end has heard so much. Raises `BrokenLine`."""
        self.ledger.hears(heard)
        self.close()
        self._writer = writer
        self._write(self.ledger.again())

    def send(self, body: bytes) -> None:
        """Now, or with the next connection."""
        self._write(self.ledger.add(body))

    def say_heard(self) -> None:
        """Tell what came, in case the other end waits for it."""
        self._write(self.ledger.word())

    async def receive(self, reader: asyncio.StreamReader, unpacker: Unpacker) -> list[bytes]:
        """The next messages; none if only news of what was heard came. Raises `OSError` when the connection is over."""
        data = await reader.read(READ_BYTES)
        if not data:
            raise BrokenLine("the other end has closed it")
        return [message.body for message in unpacker.feed(data) if self.ledger.take(message)]

    def _write(self, data: bytes) -> None:
        if self._writer is not None and data and not self._writer.is_closing():
            self._writer.write(data)

    def close(self) -> None:
        """Idempotent."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()


class Line:
    """The door's end. Lives on the fleet's loop, but for its making."""

    def __init__(self, name: str, token: bytes) -> None:
        self._name, self._token = name, token
        self._session = Session()
        self._where = ("", 0)
        self._reader: asyncio.StreamReader | None = None

    def post(self, body: bytes) -> None:
        """Hand over without waiting, in order. Before there is a connection it is kept."""
        self._session.send(body)

    @property
    def unheard(self) -> list[bytes]:
        """What was posted and has not arrived."""
        return self._session.ledger.unheard

    async def open(self, address: str, port: int, seconds: float) -> bool:
        """Connect. False: nobody there has the token, or answers within `seconds`."""
        self._where = (address, port)
        try:
            async with asyncio.timeout(seconds):
                self._reader = await self._connect()
        except OSError as error:  # one that takes too long is one, too
            logger.warning("no line to port %d of %s, Ray carries all: %s", port, address, error or "no answer")
            return False
        return True

    async def deliveries(self) -> AsyncGenerator[bytes, None]:
        """What the replica says, each once, until it is gone: raises `FleetError`. Open it first."""
        session = self._session
        try:
            while True:
                reader, unpacker = self._reader or await self._again(), Unpacker()
                self._reader = None
                while True:
                    try:
                        bodies = await session.receive(reader, unpacker)
                    except OSError as error:
                        logger.debug("the line to replica %s broke: %s", self._name, error)
                        break
                    for body in bodies:
                        yield body
                    if session.ledger.heard - session.ledger.told >= UNSENT // 2:
                        session.say_heard()
        finally:
            session.close()

    async def _again(self) -> asyncio.StreamReader:
        """A new connection, however long it takes. Raises `FleetError` if the process is gone."""
        while True:
            try:
                async with asyncio.timeout(GREETING_SECONDS):
                    return await self._connect()
            except (ConnectionRefusedError, NoProof) as error:
                raise FleetError(f"replica {self._name} was lost: {error}") from error
            except OSError as error:
                logger.debug("no line to replica %s yet: %s", self._name, error)
            await asyncio.sleep(AGAIN_SECONDS)

    async def _connect(self) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*self._where, limit=READ_BYTES)
        try:
            self._session.attach(writer, await greet(reader, writer, self._token, self._session.ledger.heard))
        except BaseException:
            writer.transport.abort()
            raise
        return reader


class LineEnd:
    """The replica's end: it listens. Lives on the engine's loop. `take` gets each of the door's messages, in order."""

    def __init__(self, token: bytes, take: Callable[[bytes], None]) -> None:
        self._token, self._take = token, take
        self._session = Session()
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.StreamWriter, None] = {}
        self._room, self._quiet = asyncio.Event(), asyncio.Event()
        self._quiet.set()
        self._over = False

    async def listen(self, address: str) -> int:
        """The port, of the system's choice. Raises `OSError`."""
        self._server = await asyncio.start_server(self._serve, address, 0, limit=READ_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def room(self) -> None:
        """Until there is a door, and it has taken all but a few of the deliveries."""
        await self._room.wait()

    def send(self, body: bytes) -> None:
        """A delivery. Wait for `room` first: what is not heard is kept."""
        self._session.send(body)
        self._look()

    def close(self) -> None:
        """Nobody is heard any more. Idempotent."""
        self._over = True
        if self._server is not None:
            self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    async def closed(self) -> None:
        """The same, until nothing is left of any connection."""
        self.close()
        await asyncio.sleep(0)  # what was accepted a moment ago begins now
        await self._quiet.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end. Whoever comes last with the token is the door."""
        session, unpacker = self._session, Unpacker()
        self._connections[writer] = None
        self._quiet.clear()
        if self._over:
            writer.transport.abort()
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                heard = await admit(reader, writer, self._token, session.ledger.heard)
            session.attach(writer, heard)
            while not self._over:
                self._look()
                for body in await session.receive(reader, unpacker):
                    self._take(body)
        except NoProof as error:
            logger.warning("a stranger at this replica's line, %s: %s", writer.get_extra_info("peername"), error)
        except OSError as error:  # the door comes again, if it lives
            logger.debug("a connection to this replica ended: %s", error)
        except Exception:  # the door must not wait for what was not understood
            logger.exception("a fleet's orders were not understood")
            self.close()
        finally:
            writer.transport.abort()
            del self._connections[writer]
            if not self._connections:
                self._quiet.set()

    def _look(self) -> None:
        if self._session.ledger.num_unheard < UNSENT:
            self._room.set()
        else:
            self._room.clear()
