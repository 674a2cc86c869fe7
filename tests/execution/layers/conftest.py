from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    """Random numbers are the same whichever tests run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
