"""Each HTTP request as operators see it: counted by path and status, logged in one line, and timed for Retry-After."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Collection
from statistics import fmean
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncengine.outputs import Timings, Usage
from asyncengine.serve.problems import problem_of

log = logging.getLogger("asyncengine.serve.requests")
MAX_WAIT = 30
"""Most seconds of a Retry-After header."""
RECENT = 64
"""Requests whose ends say how fast a model's queue moves."""
LEFT = 499
"""The status that is counted for a client that left before its answer began, as nginx has it."""
FACTS = "asyncengine.facts"


def facts_of(scope: Scope) -> dict[str, Any]:
    """The facts of a request that its log line tells: no text of a prompt, an answer or a header."""
    facts: dict[str, Any] = scope.setdefault(FACTS, {})
    return facts


def path_of(scope: Scope) -> str:
    """The path within this app, which may be mounted below another's."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path


def measured(usage: Usage | None, timings: Timings | None = None) -> dict[str, Any]:
    """The facts in token counts and times (seconds)."""
    facts: dict[str, Any] = {}
    if usage is not None:
        facts |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        facts |= {"completion_tokens": usage.completion_tokens}
    if timings is not None:
        facts |= {"queued": timings.queued, "first_token": timings.first_token}
    return facts


class Requests:
    """Counts, times and log lines of all requests of an app."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str, str]]()
        """Requests by path template, method and status."""
        self.paths: dict[Any, str] = {}
        """Path templates by endpoint."""
        self._gaps: dict[str, deque[float]] = {}
        self._last: dict[str, float] = {}

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have `app` answer a request, and note what comes of it."""
        begun, status = time.monotonic(), 0
        facts = facts_of(scope)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, noting)
        except Exception as error:
            problem = problem_of(error)
            status = status or problem.status
            raise problem from error
        finally:
            facts["total"] = time.monotonic() - begun
            if "completion_tokens" in facts:
                self._ended(facts["model"], facts["total"])
            self._tell(scope, status or LEFT, facts)

    def _tell(self, scope: Scope, status: int, facts: dict[str, Any]) -> None:
        path, method = self._template(scope), scope.get("method", "WEBSOCKET")
        self.counts[path, method if method.isalpha() and len(method) < 10 else "other", str(status)] += 1
        if log.isEnabledFor(logging.INFO):
            known = {name: value for name, value in facts.items() if value is not None}
            rounded = {name: round(each, 4) if isinstance(each, float) else each for name, each in known.items()}
            line = {"method": method, "path": path, "status": status, **rounded}
            log.info(" ".join(f"{name}={value}" for name, value in line.items()), extra={"facts": line})

    def _template(self, scope: Scope) -> str:
        """The path as a route has it: names that clients choose would make no end of counters, and lines of a log."""
        path = path_of(scope)
        return self.paths.get(scope.get("endpoint")) or (path if path in self.paths.values() else "other")

    def _ended(self, model: str, seconds: float) -> None:
        """A request of `model` has ended, after so long. What lies between two ends counts as far as one was there."""
        now = time.monotonic()
        gaps = self._gaps.setdefault(model, deque(maxlen=RECENT))
        gaps.append(min(seconds, now - self._last.get(model, -math.inf)))
        self._last[model] = now

    def retry_after(self, model: str | None, waiting: int) -> int:
        """Seconds, 1 to `MAX_WAIT`, in which so many requests leave the queue, as they did lately."""
        gaps = self._gaps.get(model or "", ())
        return max(1, min(MAX_WAIT, math.ceil(waiting * fmean(gaps)))) if gaps else 1


class Recording:
    """ASGI middleware around all others, which notes every request."""

    def __init__(self, app: ASGIApp, requests: Requests, paths: Collection[tuple[Any, str]]) -> None:
        self._app, self._requests = app, requests
        requests.paths |= dict(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            return await self._requests.run(self._app, scope, receive, send)
        return await self._app(scope, receive, send)


class JsonLines(logging.Formatter):
    """Log records as JSON, one a line."""

    def format(self, record: logging.LogRecord) -> str:
        """A request's facts, or the message of another record with its traceback."""
        line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name}
        line |= getattr(record, "facts", None) or {"message": super().format(record)}
        return json.dumps(line, ensure_ascii=False, default=str)
