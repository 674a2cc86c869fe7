"""How the two ends of a line prove to each other that they have its token, without saying it.

    door     ──▶  magic · challenge                          replica
             ◀──  challenge · what was heard · proof
             ──▶  what was heard · proof

What goes over a line is unpickled, so each end must know the other: a port can be taken by somebody else. The proofs
are HMAC-SHA256 (RFC 2104) of who speaks, both challenges and what was heard, so that neither can be used again or sent
back. What comes afterwards is neither signed nor secret, like everything between the processes of a Ray cluster.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct

from asyncengine.cluster.fleet.frames import BrokenLine

MAGIC = b"AsyncEng"
CHALLENGE_BYTES = PROOF_BYTES = TOKEN_BYTES = 32
_SERIAL = struct.Struct("!Q")


class NoProof(BrokenLine):
    """The other end does not have the token."""


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, heard: int) -> int:
    """The door's side. The serial that the replica has heard. Raises `NoProof`, `BrokenLine`, `OSError`."""
    mine = secrets.token_bytes(CHALLENGE_BYTES)
    writer.write(MAGIC + mine)
    answer = await _read(reader, CHALLENGE_BYTES + _SERIAL.size + PROOF_BYTES)
    theirs, said, proof = _cut(answer, CHALLENGE_BYTES)
    _check(proof, token, b"replica", mine + theirs + said)
    saying = _SERIAL.pack(heard)
    writer.write(saying + _proof(token, b"door", mine + theirs + saying))
    return int(_SERIAL.unpack(said)[0])


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, heard: int) -> int:
    """The replica's side. The serial that the door has heard. Raises the same."""
    hello = await _read(reader, len(MAGIC) + CHALLENGE_BYTES)
    if not hello.startswith(MAGIC):
        raise NoProof("somebody else's greeting")
    theirs, mine, saying = hello[len(MAGIC) :], secrets.token_bytes(CHALLENGE_BYTES), _SERIAL.pack(heard)
    writer.write(mine + saying + _proof(token, b"replica", theirs + mine + saying))
    _, said, proof = _cut(await _read(reader, _SERIAL.size + PROOF_BYTES), 0)
    _check(proof, token, b"door", theirs + mine + said)
    return int(_SERIAL.unpack(said)[0])


def _cut(answer: bytes, challenge: int) -> tuple[bytes, bytes, bytes]:
    """Challenge, serial, proof."""
    end = challenge + _SERIAL.size
    return answer[:challenge], answer[challenge:end], answer[end:]


def _proof(token: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(token, who + said, "sha256")


def _check(proof: bytes, token: bytes, who: bytes, said: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(token, who, said)):
        raise NoProof(f"the {who.decode()} has not the token")


async def _read(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        raise BrokenLine("it ended in the handshake") from error
