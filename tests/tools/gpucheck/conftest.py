import pytest
from support.checkpoints import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def no_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks free no memory: here is no device's, and a process full of modules to go through."""
    monkeypatch.setattr("tools.gpucheck.session.release", lambda _: None)
