"""The checks as they run on a GPU, graphs and FlashInfer's host half included, and faults that only those can have."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_gpu import Again, fake_gpu

from asyncengine.attention.flashinfer import FlashInferBackend
from asyncengine.runner.graphs import DecodeGraphs
from tools.gpucheck import greedy
from tools.gpucheck.families import families
from tools.gpucheck.modes import PLAIN, WAYS, Bench
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings

GPU = Settings("cpu", "flashinfer", quick=True, seed=2)
ALL_ON = WAYS["graphs and overlap"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = Bench(Session(GPU, tmp_path_factory.mktemp("modes")))
    made.want = 12
    made.plain = [replace(ask, want=12) for ask in made.plain]
    made.adapted = [replace(ask, want=12) for ask in made.adapted]
    return made


@pytest.mark.parametrize("kind", ["plain", "with adapters", "with grammars"])
async def test_graphs_and_overlap_equal_the_plain_way(kind: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_gpu(monkeypatch)
    asks = bench.kinds[kind]
    base = await bench.answers(PLAIN, asks)
    assert not calls["graphs"]
    assert "tokens the same" in await bench.held_against(ALL_ON, asks, base)
    assert calls["graphs"] > 10


class Stale(Again):
    """A graph that is launched once and then forgotten."""

    def replay(self) -> None:
        pass


async def test_a_stale_graph_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, Stale)
    base = await bench.answers(PLAIN, bench.plain)
    with pytest.raises(CheckFailed, match="outputs differ"):
        await bench.held_against(WAYS["graphs"], bench.plain, base)


async def test_adapters_that_graphs_forget_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch)
    base = await bench.answers(PLAIN, bench.adapted)

    captured = DecodeGraphs._captured
    monkeypatch.setattr(DecodeGraphs, "_captured", lambda self, size, lora: captured(self, size, None))
    with pytest.raises(CheckFailed, match="outputs differ"):
        await bench.held_against(WAYS["graphs"], bench.adapted, base)


def test_a_kernel_that_is_a_little_off_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth too much in every output of attention."""
    fake_gpu(monkeypatch)
    attend = FlashInferBackend.attend
    monkeypatch.setattr(FlashInferBackend, "attend", lambda *arguments: attend(*arguments) * 1.05)
    with pytest.raises(CheckFailed):
        asyncio.run(greedy.check_family(Session(GPU, tmp_path), families()[0], "bfloat16", 24))
