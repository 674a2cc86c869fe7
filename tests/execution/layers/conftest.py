from collections.abc import Iterator

import pytest
import torch
from support.checkpoints import checkpoint, make_runner, one_thread
from support.panels import panels

__all__ = ["checkpoint", "make_runner", "one_thread", "panels"]


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Random numbers are the same whichever tests run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
