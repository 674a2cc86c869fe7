"""Keys that requests must show: some without a name, and named ones that have limits and figures of their own."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from starlette.requests import HTTPConnection

from asyncengine.checks import Positive, Settings
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.http.problems import Problem
from asyncengine.integrations.http.requests import KEY, facts_of, path_of
from asyncengine.integrations.http.settings import as_key

OPEN_PATHS = frozenset(("/", "/page.js", "/markdown.js", "/engine.js", "/page.css", "/health"))
"""Paths that need no key: the page, which asks for one itself, and what load balancers ask."""


@dataclass(frozen=True, kw_only=True)
class KeySettings(Settings):
    """A named key: a table [keys.NAME] of a configuration file."""

    key: Annotated[str, as_key]
    requests_per_minute: Positive | None = None
    """Requests that may be made in a minute; more are refused with 429, and told when to come back. None: no limit."""
    tokens_per_minute: Positive | None = None
    """Tokens of prompts and answers in a minute, counted as requests end: later ones wait until they are made up."""
    operator: bool = False
    """Its holder may load models and adapters, have engines sleep, stop requests and make profiles, as with a nameless
    key."""


class Key:
    """A key, counts of its use, and its limits: two token buckets that hold a minute's worth each."""

    def __init__(self, name: str, settings: KeySettings) -> None:
        """`name`: "" for a key without one."""
        self.name, self.operator = name, settings.operator
        self.digest = hashlib.sha256(settings.key.encode()).digest()
        self.counts = Counter[str]()
        """Requests, those "refused" for a limit, and tokens of prompts and answers."""
        limits = {"requests": settings.requests_per_minute, "tokens": settings.tokens_per_minute}
        self._limits = {unit: limit for unit, limit in limits.items() if limit is not None}
        self._left: dict[str, float] = {"requests": math.inf, "tokens": math.inf, **self._limits}
        self._at = time.monotonic()

    def _fill(self) -> None:
        now = time.monotonic()
        minutes, self._at = (now - self._at) / 60, now
        for unit, limit in self._limits.items():
            self._left[unit] = min(limit, self._left[unit] + minutes * limit)

    def admit(self) -> Problem | None:
        """Count a request. Returns the problem that refuses it, if a limit is reached."""
        self._fill()
        self.counts["requests"] += 1
        for unit, limit in self._limits.items():
            if (left := self._left[unit]) < 1:
                self.counts["refused"] += 1
                again = (("retry-after", str(math.ceil((1 - left) / limit * 60))),)
                why = f"the key {self.name!r} has {limit} {unit} a minute"
                return Problem(429, why, code="rate_limit_exceeded", headers=again)
        self._left["requests"] -= 1
        return None

    def charge(self, facts: Mapping[str, Any]) -> None:
        """Count the tokens of a request that has ended: the bucket may fall below 0, and then fills first."""
        self._fill()
        for name in ("prompt_tokens", "completion_tokens"):
            self.counts[name] += facts.get(name, 0)
            self._left["tokens"] -= facts.get(name, 0)


def keys_of(unnamed: Sequence[str], named: Mapping[str, Mapping[str, Any]]) -> list[Key]:
    """All keys. Raises `InvalidParameter` for one that is there under two names, and for settings that are wrong."""
    keys = [Key(name, KeySettings.from_dict(settings)) for name, settings in named.items()]
    keys += [Key("", KeySettings(key=key, operator=True)) for key in dict.fromkeys(unnamed)]
    if len({key.digest for key in keys}) < len(keys):
        raise InvalidParameter("keys", "must differ: one key is there under two names")
    return keys


def check(keys: Sequence[Key], connection: HTTPConnection) -> Problem | None:
    """Refuse a request without one of these keys, in `Authorization: Bearer KEY` or `x-api-key`, or beyond its limits.
    All are compared, in constant time: how long it takes says nothing of them. A batch's row comes with its key."""
    scheme, _, bearer = connection.headers.get("authorization", "").partition(" ")
    shown = bearer.strip() if scheme.lower() == "bearer" else connection.headers.get("x-api-key", "")
    digest = hashlib.sha256(shown.encode("utf-8", "surrogateescape")).digest()
    matching = [key for key in keys if hmac.compare_digest(digest, key.digest) or key is connection.scope.get(KEY)]
    if matching:
        key = connection.scope[KEY] = matching[0]
        facts = facts_of(connection.scope)
        facts |= {"key": key.name} if key.name else {}
        return key.admit() if connection.scope.get("method") == "POST" else None
    if path_of(connection.scope) in OPEN_PATHS:
        return None
    # a key in the query string is not accepted: proxies log addresses
    need = "a valid API key is needed, as Authorization: Bearer KEY or x-api-key"
    return Problem(401, need, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),))
