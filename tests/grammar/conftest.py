"""One small vocabulary for all grammar tests: building its tables takes a while."""

from __future__ import annotations

import pytest
from support.small_vocabulary import small_vocabulary

from asyncengine.grammar.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return small_vocabulary()
