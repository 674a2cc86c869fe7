"""Ways of running that must not change an answer: CUDA graphs, overlap, adapters in the batch, grammars in the batch.

All requests run together; the plain way (no graphs, one step in flight) is held against transformers, and every other
way against the plain one. With two GPUs a model over both is held against one.
"""

from __future__ import annotations

import pytest
import torch
from gpu.bench import PLAIN, WAYS, Bench, Output, check_constrained
from gpu.engines import ON_GPU

pytestmark = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU")
KINDS = ("plain", "with adapters", "with grammars")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def plain(bench: Bench) -> dict[str, list[Output]]:
    """Outputs of the plain way by kind, filled by the tests that ask first."""
    return {}


async def plain_way(bench: Bench, kind: str, known: dict[str, list[Output]]) -> list[Output]:
    if kind not in known:
        known[kind] = await bench.answers(PLAIN, bench.kinds[kind])
        check_constrained(bench.folder, bench.kinds[kind], known[kind])
    return known[kind]


@pytest.mark.parametrize("kind", KINDS[:2])
async def test_the_plain_way_answers_as_transformers(kind: str, bench: Bench) -> None:
    asks = bench.kinds[kind]
    await bench.held_against(PLAIN, asks, bench.transformers(asks))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_other_ways_answer_as_the_plain_one(
    kind: str, way: str, bench: Bench, plain: dict[str, list[Output]]
) -> None:
    await bench.held_against(WAYS[way], bench.kinds[kind], await plain_way(bench, kind, plain))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", KINDS)
async def test_two_gpus_answer_as_one(kind: str, bench: Bench, plain: dict[str, list[Output]]) -> None:
    expected = await plain_way(bench, kind, plain)
    await bench.held_against({**PLAIN, "tensor_parallel": 2}, bench.kinds[kind], expected)
