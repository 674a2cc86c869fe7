"""No test here may leave a thread of the engine's behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.threads import no_new_engine_thread


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    with no_new_engine_thread():
        yield
