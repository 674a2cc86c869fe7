"""Looks from outside at what engines leave: events of requests' ends, profiles, and engines kept without a user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import greedy

import asyncengine
from asyncengine import AsyncEngine
from asyncengine.engine.process import PROCESS
from asyncengine.events import Event, RequestDone
from asyncengine.shared import _Registry
from asyncengine.testing import ManualClock

CALLER: ContextVar[str] = ContextVar("CALLER", default="nobody")
"""The context of a call, of which the event at its end is to be told in."""


def watch(engine: AsyncEngine) -> list[tuple[RequestDone, str]]:
    """(event, the caller whose context it was told in) of each request that ends from now on."""
    seen: list[tuple[RequestDone, str]] = []

    def hook(event: Event) -> None:
        if isinstance(event, RequestDone):
            seen.append((event, CALLER.get()))

    engine.on_event(hook)
    return seen


def read_profile(path: Path) -> list[dict[str, Any]]:
    """Events of a profile's file."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def named(events: list[dict[str, Any]], name: str, kind: str = "X") -> list[dict[str, Any]]:
    """Events of one name and phase."""
    return [event for event in events if event["name"] == name and event["ph"] == kind]


def assert_untouched(engine: AsyncEngine) -> None:
    """Checks that a profile has left nothing on the engine that it was made of."""
    loop = engine.core.loop
    executor: Any = loop.runner.executor  # type: ignore[attr-defined]
    assert not loop.hooks
    assert not {"schedule", "deliver", "commit", "apply_inbox"} & vars(loop).keys()
    assert not {"launch", "forward", "_sample"} & vars(executor).keys()


@contextmanager
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[ManualClock]:
    """The clock of a registry of shared engines that no other test has."""
    clock = ManualClock(1000.0)
    registry = _Registry(clock)
    monkeypatch.setattr("asyncengine.shared._REGISTRY", registry)
    monkeypatch.setattr(PROCESS, "make_room", registry.make_room)
    yield clock
    registry.make_room()


async def use_shared(**settings: Any) -> AsyncEngine:
    """A handle made, used and given back, as by a handler that makes a model object in each request."""
    handle = asyncengine.shared_engine("m", **settings)
    engine = await handle.aget()
    assert (await engine.generate([2, 3], greedy(3))).token_ids
    handle.close()
    return engine
