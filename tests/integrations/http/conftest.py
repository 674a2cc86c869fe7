"""The demo model behind an app, once for each module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from support.http_server import serving_thread

from asyncengine import AsyncEngine
from asyncengine.integrations.http import app


@asynccontextmanager
async def demo_app() -> AsyncIterator[Starlette]:
    async with await AsyncEngine.from_pretrained("demo", show_progress=False) as engine:
        yield app(engine, aliases={"*": "demo"})


@pytest.fixture(scope="module")
def demo_url() -> Iterator[str]:
    """Base URL of an app that answers with the demo model, whatever name it is asked for."""
    with serving_thread(demo_app) as url:
        yield url
