"""The demo model behind an app, once for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.held_steps import HeldSteps
from support.http_server import serving_models

from asyncengine import AsyncEngine


@pytest.fixture(scope="module")
def demo_app() -> Iterator[tuple[str, AsyncEngine]]:
    """Base URL of an app that answers with the demo model, whatever name it is asked for, and the app's engine."""
    with serving_models({"demo": "demo"}, aliases={"*": "demo"}) as (url, engines):
        yield url, engines["demo"]


@pytest.fixture(scope="module")
def demo_url(demo_app: tuple[str, AsyncEngine]) -> str:
    return demo_app[0]


@pytest.fixture
def held(demo_app: tuple[str, AsyncEngine]) -> Iterator[None]:
    """The engine holds an answer up until that is left."""
    with HeldSteps(demo_app[1], after=20, until_left=True):
        yield
