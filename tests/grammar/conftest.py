"""A small vocabulary for all grammar tests, for its tables take a while; a backend; a module's schemas, compiled."""

from __future__ import annotations

import pytest
from support.small_vocabulary import small_vocabulary

from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return small_vocabulary()


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> LlguidanceBackend:
    return LlguidanceBackend(vocabulary)


@pytest.fixture(scope="module")
def templates(request: pytest.FixtureRequest, backend: LlguidanceBackend) -> dict[str, LlgTemplate]:
    """The templates of the test module's `SCHEMAS`."""
    return {name: backend.compile(Grammar.json_schema(schema)) for name, schema in request.module.SCHEMAS.items()}
