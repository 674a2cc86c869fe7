"""The line between a fleet's door and a replica: nothing is lost or doubled, and no stranger is heard."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fake_engine import until

from asyncengine.cluster.fleet import carrier, frames, handshake, line
from asyncengine.cluster.fleet.frames import HEADER, BrokenLine, Ledger, Message, Unpacker, packed
from asyncengine.cluster.fleet.handshake import NoProof, admit, greet
from asyncengine.cluster.fleet.line import UNSENT, Line, LineEnd
from asyncengine.errors import FleetError

HERE = "127.0.0.1"
TOKEN = b"t" * handshake.TOKEN_BYTES
PATIENCE = 60.0


@contextlib.asynccontextmanager
async def replica_end(taken: list[bytes] | None = None, token: bytes = TOKEN) -> AsyncIterator[tuple[LineEnd, int]]:
    """A replica's end that keeps what it is told in `taken`, and its port."""
    end = LineEnd(token, ([] if taken is None else taken).append)
    port = await end.listen(HERE)
    try:
        yield end, port
    finally:
        await end.closed()


@contextlib.asynccontextmanager
async def heard(door: Line) -> AsyncIterator[list[bytes]]:
    """What a door hears, as it comes."""
    found: list[bytes] = []

    async def listen() -> None:
        async with contextlib.aclosing(door.deliveries()) as told:
            async for item in told:
                found.append(item)

    listening = asyncio.create_task(listen())
    try:
        yield found
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize("seed", range(4))
def test_messages_arrive_whole_however_their_bytes_are_cut(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(frames, "PART_BYTES", 50)
    rng = random.Random(seed)
    sent = [Message(serial, serial // 3, rng.randbytes(rng.choice([0, 1, 49, 50, 51, 333]))) for serial in range(1, 60)]
    sent.insert(20, Message(0, 19, b""))
    data, unpacker = b"".join(packed(message) for message in sent), Unpacker()
    got: list[Message] = []
    while data:
        size = rng.choice([1, 7, HEADER.size, 200])
        got += unpacker.feed(data[:size])
        data = data[size:]
    assert got == sent


@pytest.mark.parametrize(
    "head",
    [
        HEADER.pack(frames.PART_BYTES + 1, 0, 1, 0),
        HEADER.pack(2**32 - 1, 1, 1, 0),
        HEADER.pack(5, 2, 1, 0),
        HEADER.pack(5, 0, 0, 0),
        HEADER.pack(0, 1, 0, 0),
        HEADER.pack(1, 1, 7, 0) + b"x" + HEADER.pack(1, 0, 8, 0),
    ],
    ids=["over-long", "endless", "flag", "nameless", "nameless part", "within another"],
)
def test_what_is_no_frame_is_refused_by_its_header(head: bytes) -> None:
    """Before a byte of what it announces is waited for."""
    with pytest.raises(BrokenLine):
        list(Unpacker().feed(head))


def test_a_ledger_keeps_what_was_not_heard_and_drops_what_came_twice() -> None:
    ours, theirs = Ledger(), Ledger()
    (first,), (second,) = ([*Unpacker().feed(ours.add(body))] for body in (b"a", b"b"))
    assert theirs.take(first)
    assert not theirs.take(first)
    assert ours.unheard == [b"a", b"b"]
    (word,) = Unpacker().feed(theirs.word())
    assert not ours.take(word)
    assert ours.unheard == [b"b"]
    assert [message.body for message in Unpacker().feed(ours.again())] == [b"b"]
    assert theirs.take(second)
    with pytest.raises(BrokenLine, match="message 4 came after message 2"):
        theirs.take(Message(4, 0, b""))
    with pytest.raises(BrokenLine, match="message 3 was heard, of 2 sent"):
        ours.hears(3)


# ---------------------------------------------------------------- who may speak


async def test_whoever_has_not_the_token_is_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[bytes] = []
    async with replica_end(taken) as (end, port):
        stranger = Line("r", b"s" * handshake.TOKEN_BYTES)
        stranger.post(b"order")
        assert await stranger.open(HERE, port, PATIENCE) is False
        assert "the replica has not the token" in caplog.text
        assert stranger.unheard == [b"order"]
        web = b"GET / HTTP/1.1\r\n\r\n" + b" " * 99
        guess = handshake.MAGIC + bytes(32) + bytes(40) + packed(Message(1, 0, b"order"))
        for said in (web, guess):
            reader, writer = await asyncio.open_connection(HERE, port)
            writer.write(said)
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
            writer.close()
        await until(lambda: "the door has not the token" in caplog.text, "a refusal")
        assert "somebody else's greeting" in caplog.text
        assert not taken
        assert not end._room.is_set()


async def _between(port: int, change: Any) -> tuple[asyncio.Server, int]:
    """A machine in the middle that knows no token: answers the door's greeting as `change` says, given a connection to
    the replica."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await change(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, HERE, 0)
    return server, int(server.sockets[0].getsockname()[1])


async def test_nobody_can_take_a_replicas_place() -> None:
    """What a door hears is unpickled: neither its own words nor a proof of another time make a replica."""
    proofs: list[bytes] = []

    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = await reader.readexactly(len(handshake.MAGIC) + handshake.CHALLENGE_BYTES)
        writer.write(greeting[len(handshake.MAGIC) :] + bytes(8) + greeting[-32:])
        await reader.read()

    async def recorder(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = await reader.readexactly(len(handshake.MAGIC) + handshake.CHALLENGE_BYTES)
        if not proofs:
            there, to = await asyncio.open_connection(HERE, port)
            to.write(greeting)
            proofs.append(await there.readexactly(handshake.CHALLENGE_BYTES + 8 + handshake.PROOF_BYTES))
            to.close()
        writer.write(proofs[0])
        await reader.read()

    async with replica_end() as (_, port):
        for change, first in ((mirror, False), (recorder, True)):
            server, other = await _between(port, change)
            async with server:
                door = Line("r", TOKEN)
                assert await door.open(HERE, other, PATIENCE) is first  # the first proof is true, and no use again
                door._session.close()
                assert await Line("r", TOKEN).open(HERE, other, PATIENCE) is False


async def test_a_port_that_somebody_else_has_taken_means_a_lost_replica() -> None:
    async with replica_end() as (end, port):
        door = Line("r", TOKEN)
        assert await door.open(HERE, port, PATIENCE)
        told = door.deliveries()
        waiting = asyncio.ensure_future(anext(told))
        await end.room()
        async with replica_end(token=b"o" * handshake.TOKEN_BYTES) as (_, other):
            door._where = (HERE, other)
            await end.closed()
            with pytest.raises(FleetError, match="replica r was lost: the replica has not the token"):
                await asyncio.wait_for(waiting, PATIENCE)


async def test_the_proofs_are_of_both_ends_and_of_what_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    (one, to_one), (other, to_other) = [await asyncio.open_connection(sock=end) for end in (ours, theirs)]
    found = await asyncio.gather(greet(one, to_one, TOKEN, 3), admit(other, to_other, TOKEN, 5))
    assert tuple(found) == (5, 3)
    forged, write = struct.pack("!Q", 9), to_other.write

    def forging(data: Any) -> None:
        write(data[:32] + forged + data[40:])

    monkeypatch.setattr(to_other, "write", forging)
    admitting = asyncio.create_task(admit(other, to_other, TOKEN, 5))
    with pytest.raises(NoProof):
        await greet(one, to_one, TOKEN, 3)
    to_one.close()
    with pytest.raises(BrokenLine, match="ended in the handshake"):
        await admitting
    to_other.close()


# ---------------------------------------------------------------- lines that break


class Scissors:
    """Stands between a door and a replica and cuts each connection after some bytes, in the middle of a frame as likely
    as not."""

    def __init__(self, port: int, rng: random.Random, most: int) -> None:
        self._port, self._rng, self._most = port, rng, most
        self.cuts = 0
        self.server: asyncio.Server

    async def listen(self) -> int:
        self.server = await asyncio.start_server(self._serve, HERE, 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection(HERE, self._port)
        left = self._rng.randrange(self._most)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            nonlocal left
            with contextlib.suppress(ConnectionError):
                while left > 0 and (data := await source.read(min(left, 4096))):
                    left -= len(data)
                    target.write(data)
                    await target.drain()
            self.cuts += left <= 0
            left = 0
            for end in (writer, to):
                end.close()

        await asyncio.gather(pump(reader, to), pump(there, writer))


@pytest.mark.parametrize("seed", range(3))
async def test_a_line_that_is_cut_again_and_again_loses_and_doubles_nothing(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(line, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(frames, "PART_BYTES", 500)
    rng = random.Random(seed)
    orders = [rng.randbytes(rng.choice([1, 30, 900])) for _ in range(120)]
    deliveries = [rng.randbytes(rng.choice([1, 40, 1200])) for _ in range(120)]
    taken: list[bytes] = []
    async with replica_end(taken) as (end, port):
        scissors = Scissors(port, rng, 6000)
        between = await scissors.listen()
        door = Line("r", TOKEN)
        while not await door.open(HERE, between, PATIENCE):
            pass

        async def say() -> None:
            for body in deliveries:
                await end.room()
                end.send(body)

        async with heard(door) as found:
            saying = asyncio.create_task(say())
            for order in orders:
                door.post(order)
                await asyncio.sleep(0)
            await until(lambda: len(found) >= len(deliveries) and len(taken) >= len(orders), "everything", PATIENCE)
            await saying
            assert found == deliveries
            assert taken == orders
        assert scissors.cuts > 5
        scissors.server.close()


async def test_a_door_that_takes_nothing_is_sent_no_more_than_a_few() -> None:
    """And one that dies leaves no more behind."""
    async with replica_end() as (end, port):
        door = Line("r", TOKEN)
        assert await door.open(HERE, port, PATIENCE)
        for number in range(UNSENT):
            await end.room()
            end.send(b"%d" % number)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(end.room(), 0.05)
        told = door.deliveries()
        assert [await anext(told) for _ in range(UNSENT - 1)] == [b"0", b"1", b"2"]
        await until(lambda: not end._room.is_set(), "nothing: what is being read is not heard yet")
        assert await anext(told) == b"3"
        reading = asyncio.ensure_future(anext(told))
        await asyncio.wait_for(end.room(), PATIENCE)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: not end._connections, "the end of a connection whose door has died")
        for _ in range(UNSENT):
            await end.room()
            end.send(b"x")
        assert end._session.ledger.num_unheard == UNSENT
        assert not end._room.is_set()


async def test_of_two_doors_the_first_one_stays() -> None:
    """A line is one conversation: another one with the same token that begins anew gets none, and takes nothing."""
    taken: list[bytes] = []
    async with replica_end(taken) as (end, port):
        first, second = Line("r", TOKEN), Line("r", TOKEN)
        first.post(b"a")
        assert await first.open(HERE, port, PATIENCE)
        async with heard(first) as found:
            await until(lambda: taken == [b"a"], "an order")
            assert await second.open(HERE, port, PATIENCE) is False
            for number in range(20):
                first.post(b"%d" % number)
                await end.room()
                end.send(b"%d" % number)
            wanted = [b"%d" % number for number in range(20)]
            await until(lambda: found == wanted and taken == [b"a", *wanted], "everything", PATIENCE)


async def test_a_port_that_refuses_is_the_end_and_one_that_is_silent_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "GREETING_SECONDS", 0.05)
    taken: list[bytes] = []
    end = LineEnd(TOKEN, taken.append)
    port = await end.listen(HERE)
    door = Line("r", TOKEN)
    assert await door.open(HERE, port, PATIENCE)
    told = door.deliveries()
    waiting = asyncio.ensure_future(anext(told))
    with socket.create_server((HERE, 0)) as silent:  # a process that stands still: its kernel makes connections
        door._where = silent.getsockname()
        await end.closed()
        assert not (await asyncio.wait([waiting], timeout=0.3))[0]
    with pytest.raises(FleetError, match=r"replica r was lost: .*Connect call failed"):
        await asyncio.wait_for(waiting, PATIENCE)
    assert await Line("r", TOKEN).open(HERE, port, PATIENCE) is False


async def test_orders_that_are_not_understood_end_the_line(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever waits for what comes of them must not wait for ever."""

    def take(body: bytes) -> None:
        raise ValueError(body)

    end = LineEnd(TOKEN, take)
    door = Line("r", TOKEN)
    assert await door.open(HERE, await end.listen(HERE), PATIENCE)
    door.post(b"?")
    with pytest.raises(FleetError, match="was lost"):
        await asyncio.wait_for(anext(door.deliveries()), PATIENCE)
    assert "orders were not understood" in caplog.text
    await end.closed()


@pytest.mark.parametrize(("said", "encrypts"), [("1", True), ("true", True), ("0", False), (None, False)])
def test_a_ray_that_encrypts_is_not_gone_around(
    monkeypatch: pytest.MonkeyPatch, said: str | None, encrypts: bool
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    if said is not None:
        monkeypatch.setenv("RAY_USE_TLS", said)
    assert carrier._encrypts() is encrypts
