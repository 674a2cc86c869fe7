"""The HTTP server of `asyncengine serve`: uvicorn with limits on idle connections, and a shutdown that lets requests
end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from asyncengine.engine_group import EngineGroup
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.models import Models
from asyncengine.integrations.http.settings import ServerSettings

HEADER_BYTES = 1 << 16
IDLE_SECONDS = 60.0
"""A connection without a request, or with half the head of one, is closed after this long."""
WRITE_SECONDS = 60.0
"""A connection whose client takes nothing of its answer is closed after this long."""
SEND_BYTES = 1 << 17
"""Bytes of an answer in a socket's send buffer. Without a limit it takes megabytes, and a client that reads nothing
looks like one that does."""
ABORT_SECONDS = 5
"""Time for streams to tell their clients that they were ended."""


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is closed after `IDLE_SECONDS` without a whole request, even if a byte comes now and then, and
    at once where a request's head has more than `HEADER_BYTES`.

    uvicorn itself closes idle connections only after their first request, and httptools reads any number of headers. A
    request that offers another protocol than WebSocket is served as if it had not: every client on the JVM offers h2c
    at http://, and httptools reads no body behind such a head (uvicorn's issue 2722).
    """

    parser: Any

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._unread: asyncio.TimerHandle | None = None
        self._waiting_since: float | None = None
        self._head_bytes = 0
        self._wait()

    def data_received(self, data: bytes) -> None:
        self._data = data  # kept for `_unsupported_upgrade_warning`, which reads it once more
        super().data_received(data)
        self._head_bytes += len(data)
        self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    @property
    def _declines_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self._get_upgrade() is not None and not self._should_upgrade()

    def on_headers_complete(self) -> None:
        if not self._declines_upgrade:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._declines_upgrade:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Read the request again, without its offer. Called while httptools' `HttpParserUpgrade` is handled, which says
        where in the data the body begins."""
        upgrade, method = sys.exception(), self.parser.get_method()
        if upgrade is None or self._get_upgrade() is None:  # CONNECT, which is answered as any unknown method
            return
        head = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = type(self.parser)(self)
        super().data_received(b"\r\n".join([*head, b"", b""]) + self._data[upgrade.args[0] :])

    def _wait(self) -> None:
        if self.transport.get_protocol() is not self:
            return  # the connection has become a WebSocket, which has its own timeouts
        if self.cycle is not None and not self.cycle.response_complete:
            self._waiting_since, self._head_bytes = None, 0
        elif self._head_bytes > (self.config.ws_max_size if self.cycle and self.cycle.more_body else HEADER_BYTES):
            # after an early answer, such as 401, the rest of a body goes by first
            self.send_400_response(f"The head of a request has more than {HEADER_BYTES} bytes.")
        elif self.timeout_keep_alive_task is None:
            self._waiting_since = self._waiting_since or self.loop.time()
            until = self._waiting_since + IDLE_SECONDS
            self.timeout_keep_alive_task = self.loop.call_at(until, self.timeout_keep_alive_handler)


class Server(uvicorn.Server):
    """A server that calls `ready` when it listens, and leaves signals to `until_stopped`."""

    def __init__(self, app: Starlette, settings: ServerSettings, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app, http=Connection, lifespan="auto", server_header=False,
            log_config=None, log_level=settings.log_level, access_log=False,
            h11_max_incomplete_event_size=HEADER_BYTES, timeout_keep_alive=int(IDLE_SECONDS),
            ws_max_size=settings.max_body, ssl_certfile=settings.ssl_certfile, ssl_keyfile=settings.ssl_keyfile,
        )  # fmt: skip
        super().__init__(config)
        self.drain_timeout = settings.drain_timeout
        self._ready = ready
        self.models: Models | None = getattr(app.state, "models", None)  # another app may be around ours

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # uvicorn's own handlers would end the server before answers have ended

    def cut_connections(self, *, unfinished: bool = False) -> None:
        """Close every connection, or those whose request has not come to its end."""
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if connection.transport is not None and (not unfinished or (cycle is not None and cycle.more_body)):
                connection.transport.abort()


async def until_stopped(server: Server, listener: socket.socket, group: EngineGroup) -> int:
    """Serve until a signal. SIGTERM lets requests end, for a time; Ctrl-C ends them, and a second one this process.

    Returns the signal's number; 0 where there was none.
    """
    loop, got = asyncio.get_running_loop(), list[int]()
    endings: list[asyncio.Task[None]] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if signal.SIGINT in got:
            os.write(2, b"interrupted\n")
            os._exit(128 + number)
        got.append(number)
        loop.call_soon_threadsafe(begin, number)

    def begin(number: int) -> None:
        if number == signal.SIGTERM:
            loop.call_later(server.drain_timeout, begin, signal.SIGINT)
            if server.models is None:
                server.should_exit = True
            else:  # the port stays open until answers have ended, and health says so
                server.models.drain(server.drain_timeout, partial(begin, signal.SIGINT))
        elif not endings:
            server.should_exit = True
            endings.append(loop.create_task(group.aclose()))
            server.cut_connections(unfinished=True)
            loop.call_later(ABORT_SECONDS, server.cut_connections)  # clients that do not read the last frame

    numbers = [signum for signum in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, stop) for signum in numbers}
    try:
        await server.serve([listener])
        await asyncio.gather(*endings)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return got[0] if got else 0


def bind(settings: ServerSettings) -> socket.socket:
    """A socket bound to the address, which does not listen yet. Raises `InvalidParameter` for an address or a
    certificate that cannot be used."""
    try:
        if settings.ssl_certfile or settings.ssl_keyfile:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(settings.ssl_certfile or "", settings.ssl_keyfile)
    except OSError as error:
        raise InvalidParameter("ssl_certfile", f"cannot be used: {error}", settings.ssl_certfile) from error
    if settings.uds is not None:
        return _bind_unix(settings.uds)
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidParameter("host", f"is no address of this machine: {error.strerror}", settings.host) from error
    # asyncio sets TCP_NODELAY only where the protocol is named; without it an answer's body waits for the client's
    # delayed acknowledgement of its head, 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise InvalidParameter("port", f"cannot be listened on: {error.strerror}", address) from error
    return listener


def _bind_unix(path: str) -> socket.socket:
    """A Unix socket, in place of one that a server left there which is gone. Raises `InvalidParameter`."""
    try:
        listener, probe = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
        with probe:
            if probe.connect_ex(path) == errno.ECONNREFUSED:
                os.unlink(path)
        listener.bind(path)
    except (OSError, AttributeError) as error:  # the latter on a system that has none
        raise InvalidParameter("uds", f"cannot be listened on: {error}", path) from error
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """The base URL at which a socket is reached."""
    if isinstance(name := listener.getsockname(), str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard one: each connection is an open file."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
