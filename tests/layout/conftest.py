"""The trees that a file's tests look through, parsed once."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from support.trees import nodes_of


@pytest.fixture(autouse=True, scope="module")
def trees_forgotten() -> Iterator[None]:
    """A million nodes: collections of garbage would go through them here, and in the tests that follow."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    gc.enable()
