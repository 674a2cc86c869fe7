import pytest
from support.checkpoints import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def no_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each check they free device memory. Here there is none, and a process full of modules."""
    monkeypatch.setattr("tools.gpucheck.session.release", lambda _: None)
