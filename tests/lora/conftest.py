"""Fixtures of tests of whole engines with adapters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.threads import no_new_engine_thread


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    with no_new_engine_thread():
        yield


@pytest.fixture(params=["owned", "hosted", "blocking"])
def kind(request: pytest.FixtureRequest) -> str:
    """The way in which the engine is hosted and called."""
    name: str = request.param
    return name


@pytest.fixture(params=[False, True], ids=["owned", "hosted"])
def hosted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
