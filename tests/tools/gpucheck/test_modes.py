"""Ways of running: equal ones pass; an adapter that is lost and a grammar that is broken do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.gpucheck.modes import PLAIN, Bench, check_constrained
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings


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


def test_a_text_beside_its_grammar_fails(bench: Bench) -> None:
    asks = bench.constrained[:1]
    with pytest.raises(CheckFailed, match="does not fit its grammar"):
        check_constrained(bench.folder, asks, [[100, 200, 300]])
    with pytest.raises(CheckFailed, match="does not fit its grammar"):
        check_constrained(bench.folder, bench.constrained[1:2], [[100, 200, 300]])
