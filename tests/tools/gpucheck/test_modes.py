"""Ways of running: equal ones pass; an adapter that is lost, a grammar that is broken and other tokens do not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.gpucheck import modes
from tools.gpucheck.compare import Ask
from tools.gpucheck.modes import PLAIN, WAYS, Bench, check_constrained
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings

OVERLAP = WAYS["overlap"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    session = Session(Settings("cpu", "torch", quick=True, seed=9), tmp_path_factory.mktemp("modes"))
    made = Bench(session)
    made.want = 16
    made.adapted = [replace(ask, want=16) for ask in made.adapted]
    return made


async def test_adapters_equal_transformers_with_merged_weights(bench: Bench) -> None:
    asks = bench.adapted
    assert {ask.adapter for ask in asks} == {"a0", "a1", "a2", None}
    assert "tokens the same" in await bench.held_against(PLAIN, asks, bench.transformers(asks))


async def test_a_lost_adapter_fails(bench: Bench) -> None:
    expected = bench.transformers(bench.adapted)
    without = [replace(ask, adapter=None) for ask in bench.adapted]
    with pytest.raises(CheckFailed, match="outputs differ"):
        await bench.held_against(PLAIN, without, expected)


async def test_overlap_equals_the_plain_way(bench: Bench) -> None:
    asks = bench.kinds["with grammars"]
    base = await bench.answers(PLAIN, asks)
    assert check_constrained(bench.folder, asks, base) == "6 of 13 outputs constrained, all fit"
    assert "tokens the same" in await bench.held_against(OVERLAP, asks, base)


async def test_other_tokens_fail(bench: Bench) -> None:
    asks = bench.adapted[:3]
    base = await bench.answers(PLAIN, asks)
    base[1][7] = (base[1][7] + 5) % 2048
    with pytest.raises(CheckFailed, match="request 1 with adapter a1, token 7"):
        await bench.held_against(OVERLAP, asks, base)


def test_a_text_beside_its_grammar_fails(bench: Bench) -> None:
    asks = bench.constrained[:1]
    with pytest.raises(CheckFailed, match="does not fit its grammar"):
        check_constrained(bench.folder, asks, [[100, 200, 300]])
    with pytest.raises(CheckFailed, match="does not fit its grammar"):
        check_constrained(bench.folder, bench.constrained[1:2], [[100, 200, 300]])


def test_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On against off for every way and kind; ways with graphs are skipped where there are none."""

    async def answers(self: Bench, way: dict[str, Any], asks: Sequence[Ask]) -> list[list[int]]:
        return [[1]] * len(asks)

    monkeypatch.setattr(Bench, "transformers", lambda self, asks: [[1]] * len(asks))
    monkeypatch.setattr(Bench, "answers", answers)
    monkeypatch.setattr(modes, "check_constrained", lambda *_: "all fit")

    async def compare(*_: Any) -> Any:
        return modes_tally

    @asynccontextmanager
    async def small_engine(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(core=SimpleNamespace(loop=SimpleNamespace(runner=SimpleNamespace(executor=None))))

    async def scores(*_: Any) -> str:
        return "near"

    modes_tally = type("Same", (), {"verdict": lambda self: "same"})()
    monkeypatch.setattr(modes, "compare", compare)
    monkeypatch.setattr(modes, "small_engine", small_engine)
    monkeypatch.setattr(modes, "scores", scores)
    session = Session(Settings("cpu", "torch", quick=True), tmp_path)
    modes.run(session)
    assert len(session.report.checks) == 2 + 3 * (1 + len(WAYS))
    skipped = [check.name for check in session.report.checks if check.status == "skip"]
    assert len(skipped) == 9
    assert all("graphs" in name for name in skipped)
    assert not session.report.failed
