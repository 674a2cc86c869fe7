"""The state of one app, which its endpoints share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from asyncengine.serve.models import Models


@dataclass(slots=True)
class Serving:
    """Models and limits of an app."""

    models: Models
    strict: bool = False
    """Fields that change nothing are refused rather than listed in a header."""
    max_body: int = 32 << 20
    """Bytes of the longest body that is read."""
    api_keys: tuple[str, ...] = ()
    """Keys of which a request must show one; none: every request is served."""
    response_memory: int = 64 << 20
    """Bytes of the responses that clients can come back to."""
    hosts: Collection[str] | None = None
    """Names in the Host header that are answered without a key; None: all."""
    cors: Sequence[str] = ()
    """Origins of web pages that may ask."""
    telemetry: bool = False
    """Requests get spans of OpenTelemetry."""
    allow_adapters: bool = False
    """Requests without a key may load and unload adapters."""
