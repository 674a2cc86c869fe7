"""`Session`: a conversation, or an agent's work, of many requests, whose branches in the prefix cache are its own."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from asyncengine.checks import as_seconds
from asyncengine.errors import InvalidParameter
from asyncengine.scheduler.messages import SessionEvent

if TYPE_CHECKING:
    from asyncengine.async_engine import AsyncEngine
    from asyncengine.sync_engine import Engine

CALLS = ("generate", "stream", "chat", "stream_chat", "decide", "fork", "pin", "embed")


class Session:
    """An engine's calls, made in one session.

        async with engine.session() as session:
            answer = await session.chat(messages, tools=tools)

    Answers are the same to the bit as without. The engine knows which branches of the prefix cache the session has
    made: one that a turn supersedes (an edited message, dropped thoughts, a summary) is the first to be evicted, and
    those of a closed session are. `generate`, `stream`, `chat`, `stream_chat`, `decide`, `fork`, `pin` and `embed` are
    those of the engine (of an `Engine`, blocking ones). Everything may be called from any thread.
    """

    def __init__(
        self, engine: AsyncEngine | Engine, name: str | None = None, ttl: float | None = None,
        parent: Session | None = None,
    ) -> None:  # fmt: skip
        """See `AsyncEngine.session` and `child`."""
        if name is not None and (not isinstance(name, str) or not name):
            raise InvalidParameter("name", "must be a str that is not empty, or None", name)
        self.engine, self.parent = engine, parent
        self.name = name or f"session-{secrets.token_hex(8)}"
        self.closed = False
        self._children: list[Session] = []
        if ttl is not None:
            self._tell("open", as_seconds("ttl", ttl))
        else:
            engine.core.client.check_open()

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(f"a session has no {name!r}")
        call = getattr(self.engine, name)
        return call if name == "embed" else partial(call, session=self.name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *CALLS]

    def child(self, name: str | None = None, ttl: float | None = None) -> Session:
        """A session for a part of the work (a subagent): it shares this one's cached prefixes and is closed with it."""
        child = Session(self.engine, name, ttl, self)
        self._children.append(child)
        return child

    def waiting(self, seconds: float) -> None:
        """Say that the next request will come in `seconds`: of idle sessions, the one that is back last loses pages
        first. Answers that call tools say so by themselves, once the tools' times have been measured. Raises
        `InvalidParameter`."""
        self._tell("waiting", as_seconds("seconds", seconds))

    def close(self) -> None:
        """Give up pages that only this session and its children have. Running requests go on. Idempotent."""
        self.closed = True
        children, self._children = self._children, []
        for child in children:
            child.close()
        if self.parent is not None and self in self.parent._children:
            self.parent._children.remove(self)
        self.engine.core.loop.inbox.post(SessionEvent(self.name, "close"))

    def _tell(self, change: Any, seconds: float) -> None:
        core = self.engine.core
        core.client.check_open()
        core.loop.inbox.post(SessionEvent(self.name, change, core.loop.clock.now(), seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session {self.name!r}{' (closed)' if self.closed else ''} of {self.engine!r}>"
