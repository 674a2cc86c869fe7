"""Pipeline stages on other machines: the program that hosts one there, and how the engine's process connects to it.

A host listens at one port. An engine opens several connections to it, one after the other: one whose end tells either
side that the other is gone, one for the commands of each rank, and one for the hidden states. Each begins with a proof
that both ends have the same key (`multiprocessing.connection`). Messages are pickled and not encrypted, so the network
between the machines must be trusted.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import NamedTuple

import asyncengine
from asyncengine.errors import EngineError
from asyncengine.execution.device.child import Child, end_children, start_child
from asyncengine.execution.device.shared_gather import make_memory
from asyncengine.execution.models.identity import digest_of_code

logger = logging.getLogger("asyncengine")

KEY = "ASYNCENGINE_STAGE_KEY"
"""Environment variable with the secret that an engine and the hosts of its stages share."""
_PATIENCE = 20
"""Seconds to wait for an answer while connecting: a host serves one engine at a time, and may be busy."""
_KEEPALIVE = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
"""Socket options by which a machine that loses power is given up after 11 s; it closes no connection."""


class HostedStage(NamedTuple):
    """One stage on another machine, as the engine knows it."""

    child: Child
    orders: Sequence[Connection]
    """A connection to each rank, for its commands."""
    rows: Connection


def stage_key() -> bytes:
    """The shared secret in the environment. Raises `EngineError` if there is none."""
    key = os.environ.get(KEY, "")
    if not key:
        raise EngineError(f"stages on other machines need a common secret: set {KEY} here and there")
    return key.encode()


@cache
def release() -> str:
    """Version and code digest of this installation. Both ends must have the same, to compute the same bits."""
    return f"{asyncengine.__version__} of code {digest_of_code()[:12]}"


def connect_stage(address: str, first_rank: int, size: int, stages: int) -> HostedStage:
    """Have the host at "HOST:PORT" start the ranks of one stage, from `first_rank` on, of `size` ranks in `stages`
    stages. Raises `EngineError` that names the address."""
    key = stage_key()
    with ExitStack() as undo:
        try:
            control = undo.enter_context(closing(_connect(address, key)))
            control.send((release(), first_rank, size, stages))
            if refusal := control.recv():
                raise EngineError(f"the stage's host at {address} refuses: {refusal}")
            connections = (_connect(address, key) for _ in range(size // stages + 1))
            *orders, rows = (undo.enter_context(closing(each)) for each in connections)
        except (OSError, EOFError, AuthenticationError) as error:
            raise EngineError(f"no free host of a stage with the same {KEY} answers at {address}: {error!r}") from error
        undo.pop_all()
    life = socket.socket(fileno=os.dup(control.fileno()))
    control.close()
    return HostedStage(Child(None, life, f"stage at {address}"), orders, rows)


def hang_up(connection: Connection) -> None:
    """Shut a connection down for both ends; a thread that reads it gets an error."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_RDWR)


def listen(address: str) -> socket.socket:
    """A socket that listens at "HOST:PORT"; port 0: any free port. Raises `OSError`."""
    host, port = socket_address(address)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def socket_address(address: str) -> tuple[str, int]:
    """(host, port) of "HOST:PORT"; an IPv6 host has brackets. Raises `ValueError`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def serve_stages(listening: socket.socket, key: bytes) -> None:
    """Host a stage for one engine after the other. Raises `OSError` when the socket is closed."""
    while True:
        listening.settimeout(None)
        opened, (peer, *_) = listening.accept()
        try:  # a failed or foreign connection must not end the host
            with closing(_proven(opened, key, asks=True)) as control:
                _host(control, listening, key)
        except (OSError, EOFError, AuthenticationError) as error:
            logger.warning("a connection of %s to this stage's host was refused or lost: %r", peer, error)


def _host(control: Connection, listening: socket.socket, key: bytes) -> None:
    """Start the ranks of a stage, and end them when one of them or the engine is gone."""
    engines, first_rank, size, stages = control.recv()
    if engines != release():
        control.send(f"it has asyncengine {release()}, and the engine {engines}")
        return
    control.send("")
    listening.settimeout(_PATIENCE)
    with ExitStack() as opened:
        *orders, rows = (
            opened.enter_context(closing(_proven(listening.accept()[0], key, asks=True)))
            for _ in range(size // stages + 1)
        )
        memory = make_memory(stages)
        opened.callback(os.close, memory)
        children = list[Child]()
        opened.callback(lambda: end_children(children))
        for number, one in enumerate(orders):
            numbers, given = (first_rank + number, size, 0, stages), [one.fileno(), memory]
            given += [] if number else [rows.fileno()]
            children.append(start_child("asyncengine.execution.runner.rank_worker", numbers, given))
        logger.info("this machine computes a stage: ranks %d to %d", first_rank, first_rank + len(orders) - 1)
        words = _until_one_ends(control, children)
        with suppress(OSError):
            os.write(control.fileno(), words.encode())


def _until_one_ends(control: Connection, children: Sequence[Child]) -> str:
    """Wait until a rank has ended or the engine is gone. Returns the rank's last words, "" if the engine is gone."""
    poll, lives = select.poll(), {child.life.fileno(): child for child in children}
    for each in (control.fileno(), *lives):
        poll.register(each, select.POLLIN)
    ended = [lives[number] for number, _ in poll.poll() if number in lives]
    return ended[0].last_words() if ended else ""


def _connect(address: str, key: bytes) -> Connection:
    return _proven(socket.create_connection(socket_address(address), _PATIENCE), key, asks=False)


def _proven(opened: socket.socket, key: bytes, *, asks: bool) -> Connection:
    """A connection over the socket, once both ends have proved that they have the key; the end that `asks` is the first
    to challenge the other. Raises `OSError`, `EOFError`, `AuthenticationError`."""
    steps = [deliver_challenge, answer_challenge] if asks else [answer_challenge, deliver_challenge]
    with opened:
        opened.settimeout(None)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():
            level = socket.SOL_SOCKET if name.startswith("SO") else socket.IPPROTO_TCP
            opened.setsockopt(level, getattr(socket, name), value)
        _limit_reads(opened, _PATIENCE)
        with ExitStack() as undo:
            connection = undo.enter_context(closing(Connection(os.dup(opened.fileno()))))
            for step in steps:
                step(connection, key)
            undo.pop_all()
        _limit_reads(opened, 0)
    return connection


def _limit_reads(opened: socket.socket, seconds: int) -> None:
    """Let reads of a blocking socket fail after `seconds`; 0: never."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))
