"""Ways of running: equal ones pass, and what a graph, an adapter or a grammar loses is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from support.fake_gpu import Again, fake_gpu

from asyncengine.execution.runner.graphs import DecodeGraphs
from tools.gpucheck.modes import PLAIN, WAYS, Bench, check_constrained
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings

ALL_ON = WAYS["graphs and overlap"]


def make_bench(folder: Path, kernels: Literal["torch", "flashinfer"], seed: int, want: int) -> Bench:
    made = Bench(Session(Settings("cpu", kernels, quick=True, seed=seed), folder))
    made.want = want
    made.plain = [replace(ask, want=want) for ask in made.plain]
    made.adapted = [replace(ask, want=want) for ask in made.adapted]
    return made


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("modes"), "flashinfer", 2, 12)


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


# ---------------------------------------------------------------- without graphs, against transformers


@pytest.fixture(scope="module")
def on_torch(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("torch"), "torch", 9, 16)


async def test_adapters_equal_transformers_with_merged_weights(on_torch: Bench) -> None:
    asks = on_torch.adapted
    assert {ask.adapter for ask in asks} == {"a0", "a1", "a2", None}
    assert "tokens the same" in await on_torch.held_against(PLAIN, asks, on_torch.transformers(asks))


async def test_a_lost_adapter_fails(on_torch: Bench) -> None:
    expected = on_torch.transformers(on_torch.adapted)
    without = [replace(ask, adapter=None) for ask in on_torch.adapted]
    with pytest.raises(CheckFailed, match="outputs differ"):
        await on_torch.held_against(PLAIN, without, expected)


def test_a_text_beside_its_grammar_fails(on_torch: Bench) -> None:
    asks = on_torch.constrained[:1]
    with pytest.raises(CheckFailed, match="does not fit its grammar"):
        check_constrained(on_torch.folder, asks, [[100, 200, 300]])
    with pytest.raises(CheckFailed, match="does not fit its grammar"):
        check_constrained(on_torch.folder, on_torch.constrained[1:2], [[100, 200, 300]])
