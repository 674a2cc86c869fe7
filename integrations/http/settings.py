"""Settings of a server. Each is a flag of `asyncengine serve` and a field of [server] in its configuration file."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from asyncengine.checks import CacheMemory, Memory, Positive, Seconds, Settings, as_items, integer_in
from asyncengine.config import parse_keep_alive
from asyncengine.errors import InvalidParameter

KEY_VARIABLE = "ASYNCENGINE_API_KEY"


def as_key(name: str, value: Any) -> str:
    """A text that a header can have. Raises `InvalidParameter`, without the text."""
    if not isinstance(value, str) or not (value.isascii() and value.isprintable() and value.strip() == value != ""):
        raise InvalidParameter(name, "must be printable ASCII without spaces around it")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    return tuple(as_key(name, text) for text in ((value,) if isinstance(value, str) else as_items(name, value)))


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    """Settings of a server."""

    host: str = "127.0.0.1"
    """Address to listen on. Others than this machine's own need a key, or `insecure`."""
    port: Annotated[int, integer_in(0, 65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on, in place of an address."""
    ssl_certfile: str | None = None
    """File with a certificate and its chain (PEM): requests come over TLS, at https."""
    ssl_keyfile: str | None = None
    """File with the private key, where it is not in `ssl_certfile`."""
    api_key: Annotated[Sequence[str], _texts] = ()
    """A key of which requests must show one. `ps` shows flags to everybody: better a file, or ASYNCENGINE_API_KEY."""
    api_key_file: str | None = None
    """File with a key on each line."""
    insecure: bool = False
    """Serve everybody who reaches the address, without a key and under any host name."""
    allow_adapters: bool = False
    """Let requests load and unload adapters although they show no key."""
    cors: Annotated[Sequence[str], _texts] = ()
    """Origin of web pages that may ask, such as https://chat.example; "*" for all."""
    strict: bool = False
    """Refuse the fields of requests that would change nothing."""
    max_body: Positive = 32 << 20
    """Bytes of the longest request."""
    response_memory: CacheMemory = "64MiB"
    """Bytes of responses that clients of /v1/responses may come back to. None: none."""
    memory: Memory | None = None
    """Memory for all models together ("8GiB"). With `keep_alive` they share it in turns where it is too small for all.
    """
    keep_alive: Annotated[float | str, parse_keep_alive] | None = None
    """Load each model at its first request, and close it after this time without one ("5m", seconds, -1 for never).
    Without the flag all are loaded at the start; those of a configuration file are kept for "5m"."""
    batch_dir: str | None = None
    """Folder of /v1/files and /v1/batches, whose batches go on after any end. None: these are refused."""
    telemetry: bool = False
    """Make spans of OpenTelemetry for requests, for the tracer provider that `opentelemetry-instrument` sets up."""
    default_model: str | None = None
    """Model that answers requests which name none; None: the only one that can."""
    drain_timeout: Seconds = 30.0
    """Seconds that requests have to end after SIGTERM."""
    log_level: Literal["error", "warning", "info", "debug"] = "warning"
    """Least weight of what is logged; "info" has a line for each request, without a word of its texts."""
    log_json: bool = False
    """Write the log as JSON, one object a line."""

    @property
    def local(self) -> bool:
        """Only programs of this machine reach it."""
        try:
            return self.uds is not None or self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """Host names to which it answers; None: all. Where neither a key nor an address keeps others away, a web page
        can have its own host name resolve to this machine, and then ask with the rights of its visitor's browser."""
        if self.insecure or self.uds or not self.local:  # no web page reaches a Unix socket
            return None
        return ("localhost", "127.0.0.1", "[::1]", f"[{self.host}]" if ":" in self.host else self.host)

    def keys(self, named_keys: Collection[str] = ()) -> tuple[str, ...]:
        """The keys without a name, from flags, the file and the environment. `named_keys`: those that have a name.

        Raises `InvalidParameter` for a file that cannot be read or holds no key, and for an address that other machines
        reach where there is no key at all.
        """
        keys = [*self.api_key, *_texts(KEY_VARIABLE, [key] if (key := os.environ.get(KEY_VARIABLE)) else [])]
        if self.api_key_file is not None:
            try:
                lines = Path(self.api_key_file).expanduser().read_text(encoding="ascii").split()
            except (OSError, ValueError) as error:
                raise InvalidParameter("api_key_file", f"cannot be read: {error}") from error
            if not lines:
                raise InvalidParameter("api_key_file", "holds no key", self.api_key_file)
            keys += lines
        if not (keys or named_keys or self.local or self.insecure):
            need = f"api_key, api_key_file or {KEY_VARIABLE}; insecure serves everybody"
            raise InvalidParameter("host", f"is reached from other machines, so a key is needed ({need})", self.host)
        return tuple(keys)
