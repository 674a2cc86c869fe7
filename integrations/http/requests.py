"""Each HTTP request as operators see it: counted by path and status, logged in one line, and timed for Retry-After."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter, deque
from statistics import fmean
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncengine.integrations.http.problems import problem_of
from asyncengine.outputs import Timings, Usage

log = logging.getLogger("asyncengine.serve.requests")
MAX_WAIT = 30
"""Most seconds of a Retry-After header."""
LEFT = 499
"""The status that is counted for a client that left before its answer began, as nginx has it."""
FACTS, KEY = "asyncengine.facts", "asyncengine.key"
"""Facts and the key of a request in its scope."""


def facts_of(scope: Scope) -> dict[str, Any]:
    """The facts of a request that its log line tells: no text of a prompt, an answer or a header."""
    return scope.setdefault(FACTS, {})


def path_of(scope: Scope) -> str:
    """The path within this app, which may be mounted below another's."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(root + "/") else path


def measured(usage: Usage | None, timings: Timings | None = None) -> dict[str, Any]:
    """The facts in token counts and times (seconds)."""
    tokens = ("prompt_tokens", "cached_tokens", "completion_tokens")
    facts = {name: getattr(usage, name) for name in tokens} if usage is not None else {}
    return facts if timings is None else {**facts, "queued": timings.queued, "first_token": timings.first_token}


class Requests:
    """Counts, times and log lines of all requests of an app."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str, str]]()
        """Requests by path template, method and status."""
        self.paths: dict[Any, str] = {}
        """Path templates by endpoint."""
        self._ends: dict[str, tuple[float, deque[float]]] = {}
        """Time of the last end of a request of each model, and the times between the last 64."""

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Call `app`; then count and log the request, or the one answer over a WebSocket, which has its own facts."""
        if scope["type"] != "http" and FACTS not in scope:
            return await app(scope, receive, send)
        begun, status, facts = time.monotonic(), LEFT, facts_of(scope)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, noting)
        except Exception as error:
            problem = problem_of(error)
            status = problem.status if status == LEFT else status
            raise problem from error
        finally:
            facts["total"] = time.monotonic() - begun
            if "completion_tokens" in facts:
                self._ended(facts["model"], facts["total"])
            if (key := scope.get(KEY)) is not None:
                key.charge(facts)
            self._note(scope, status, facts)

    def _note(self, scope: Scope, status: int, facts: dict[str, Any]) -> None:
        path, method = path_of(scope), scope.get("method", "WEBSOCKET")
        # the template of a route, as paths that clients make up would be counters without end
        path = self.paths.get(scope.get("endpoint")) or (path if path in self.paths.values() else "other")
        self.counts[path, method if method.isalpha() and len(method) < 10 else "other", str(status)] += 1
        if log.isEnabledFor(logging.INFO):
            facts = {"method": method, "path": path, "status": status, **facts}
            line = {name: round(value, 4) if isinstance(value, float) else value for name, value in facts.items()}
            line = {name: value for name, value in line.items() if value is not None}
            log.info(" ".join(f"{name}={value}" for name, value in line.items()), extra={"facts": line})

    def _ended(self, model: str, seconds: float) -> None:
        """Note the end of a request of `model`, after `seconds`. A gap between two ends is at most that: before it
        began, the server may have been idle."""
        now = time.monotonic()
        last, gaps = self._ends.get(model, (-math.inf, deque[float](maxlen=64)))
        gaps.append(min(seconds, now - last))
        self._ends[model] = now, gaps

    def retry_after(self, model: str | None, waiting: int) -> int:
        """Seconds, 1 to `MAX_WAIT`, until `waiting` requests have left the queue at the rate of the last 64 ends."""
        _, gaps = self._ends.get(model or "", (0.0, ()))
        return max(1, min(MAX_WAIT, math.ceil(waiting * fmean(gaps)))) if gaps else 1


class JsonLines(logging.Formatter):
    """Log records as JSON, one a line: a request's facts, or the message of another record with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": record.created, "level": record.levelname.lower(), "logger": record.name}
        line |= getattr(record, "facts", None) or {"message": super().format(record)}
        return json.dumps(line, ensure_ascii=False, default=str)
