"""Progress of a load: lines on stderr, and calls of `on_progress`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine, progress
from asyncengine.errors import EngineClosed, InvalidParameter
from asyncengine.execution.models.progress import LoadProgress


def test_a_long_load_tells_of_itself_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line in so many seconds, the first after as many; none of a quick load, nor where none are wanted."""
    times = iter([0.0, 3.0, 9.9, 10.1, 15.0, 20.2])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with LoadProgress(True) as load:
        load.stage("reading weights", 4)
        for _ in range(4):
            load.advance()
    assert capsys.readouterr().err.splitlines() == [
        "asyncengine: loading: reading weights (2 of 4)", "asyncengine: loading: reading weights (4 of 4)",
    ]  # fmt: skip
    times = iter([0.0, 50.0, 100.0])
    with progress.counted("embedding", 7) as advance:
        advance(3)
    assert capsys.readouterr().err == "asyncengine: embedding: 3 of 7\n"
    with LoadProgress(False) as load:
        load.stage("reading weights", 4)
    assert capsys.readouterr().err == ""


async def test_a_callback_hears_of_a_load_and_may_end_it() -> None:
    told: list[tuple[str, int, int | None]] = []
    small: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "show_progress": False}
    async with await AsyncEngine.from_pretrained("demo", on_progress=lambda *now: told.append(now), **small):
        stages = list(dict.fromkeys(stage for stage, _, _ in told))
        assert {"looking for the model", "reading weights", "running a first step"} <= set(stages)
        reading = [(done, total) for stage, done, total in told if stage == "reading weights"]
        assert reading[-1][0] == reading[-1][1]

    def give_up(stage: str, done: int, total: int | None) -> None:
        if stage == "reading weights":
            raise KeyError("enough")

    with pytest.raises(EngineClosed, match=r"on_progress gave the load up: KeyError\('enough'\)"):
        await AsyncEngine.from_pretrained("demo", on_progress=give_up, **small)
    with pytest.raises(InvalidParameter, match="on_progress: must be callable"):
        await AsyncEngine.from_pretrained("demo", on_progress=True, **small)  # type: ignore[arg-type]


async def test_one_that_could_not_be_loaded_says_so(tmp_path: Path) -> None:
    failed = AsyncEngine._unstarted(tmp_path, None, {}, hosted=False)
    with pytest.raises(Exception, match=r"config\.json|no model"):
        await failed.start()
    assert repr(failed) == f"<AsyncEngine {str(tmp_path)!r}: not loaded>"
