"""The FlashInfer backend against the torch backend, on a fake module that checks every call it gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention_pair import Pair, make_flashinfer, prepare
from support.fake_flashinfer import FakeFlashInfer, FakeMemory

from asyncengine.execution.attention.base import LayerSpec, page_bytes
from asyncengine.execution.attention.flashinfer_plan import in_chunks

BASE = LayerSpec(index=0, num_heads=4, num_kv_heads=2, key_dim=64, value_dim=64, scale=0.3)
VARIANTS = {
    "group of 1": replace(BASE, num_kv_heads=4),
    "group of 2": BASE,
    "group of 4": replace(BASE, num_kv_heads=1),
    "group of 7": replace(BASE, num_heads=14),
    "128 dimensions": replace(BASE, key_dim=128, value_dim=128, scale=0.05),
    "512 dimensions": replace(BASE, key_dim=512, value_dim=512, scale=0.02),
    "window": replace(BASE, window=6),
    "window of one": replace(BASE, window=1),
    "softcap": replace(BASE, softcap=0.7),
    "chunks": replace(BASE, chunk=16),
    "chunks and a window": replace(BASE, chunk=32, window=5),
    "sinks": replace(BASE, sinks=torch.tensor([0.5, -1.0, 2.0, 40.0])),
    "sinks, window and softcap": replace(BASE, window=9, softcap=1.1, sinks=torch.tensor([3.0, -1.0, 0.2, 0.0])),
    "window and softcap": replace(BASE, window=9, softcap=1.1),
}
GEMMA = [
    replace(BASE, window=6, softcap=2.0),
    replace(BASE, index=1, softcap=2.0),
    replace(BASE, index=2, window=6, softcap=2.0),
]
LLAMA4 = [
    replace(BASE, chunk=8), replace(BASE, index=1), replace(BASE, index=2, chunk=8), replace(BASE, index=3, chunk=12),
]  # fmt: skip


@pytest.fixture
def fake() -> FakeFlashInfer:
    return FakeFlashInfer(FakeMemory())


@pytest.mark.parametrize(
    ("variant", "page_size"),
    [*((name, 4) for name in VARIANTS), ("group of 2", 1), ("window", 16), ("chunks and a window", 1), ("chunks", 16)],
)
def test_equals_the_torch_backend(variant: str, page_size: int, fake: FakeFlashInfer) -> None:
    layers = [VARIANTS[variant]]
    backend = make_flashinfer(layers, fake, page_size=page_size, num_pages=420)
    pair = Pair(backend, layers, rows=4)
    assert pair.step([(0, 3), (1, 30), (3, 17)]) < 1e-5, "prompts"
    assert pair.step([(1, 1), (0, 1), (3, 1)]) < 1e-5, "decodes of different lengths"
    assert pair.step([(2, 9), (1, 1), (0, 7), (3, 1)]) < 1e-5, "a prompt, chunks and decodes together"
    for _ in range(3):
        assert pair.step([(row, 1) for row in (3, 2, 1, 0)]) < 1e-5
    assert fake.calls["prefill"] == 2
    assert fake.calls["decode"] == 4


def test_eight_bit_keys_and_values(fake: FakeFlashInfer) -> None:
    backend = make_flashinfer([BASE], fake, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert backend.kv_bytes == 140 * page_bytes([BASE], 4, torch.float8_e4m3fn)
    pair = Pair(backend, [BASE], rows=2, dtype=torch.bfloat16)
    assert 0 < pair.step([(0, 20), (1, 3)]) < 0.5
    assert 0 < pair.step([(0, 1), (1, 1)]) < 0.5
    backend.write(0, torch.full((2, 2, 64), 1e4, dtype=torch.bfloat16), torch.zeros(2, 2, 64, dtype=torch.bfloat16))
    stored = backend.pools[0][pair.tables[0][20 // 4], 0, 0].float()  # position 20 of row 0, planned last
    assert bool((stored == 448).all()), "too large values saturate"


def test_long_prompts_go_through_the_kernels_of_hopper() -> None:
    """Hopper's kernels are chosen by the mean of the step's rows, and only in groups of layers that they support."""
    wide = replace(BASE, key_dim=128, value_dim=128)
    layers = [wide, replace(wide, index=1, window=6)]
    fake = FakeFlashInfer(FakeMemory(hopper=True))
    backend = make_flashinfer(layers, fake, dtype=torch.bfloat16, num_pages=600)
    backend.warm_up()
    assert fake.calls == {"append": 6, "long": 1, "prefill": 3, "decode": 2}
    pair = Pair(backend, layers, rows=2, dtype=torch.bfloat16, most=1000)
    steps = ([(0, 127)], 0), ([(0, 128)], 1), ([(1, 240), (0, 1)], 0), ([(1, 1), (0, 1)], 0), ([(1, 129), (0, 127)], 1)
    for parts, long in steps:
        before = fake.calls["long"]
        assert pair.step(parts) < 0.1
        assert fake.calls["long"] - before == long, parts
    fake.memory.processors = lambda: 132  # too many for few queries behind many keys: these must be divided then
    pair.tested = make_flashinfer(layers, fake, dtype=torch.bfloat16, num_pages=600)
    for parts, long in (([(0, 130)], 0), ([(1, 140), (0, 140)], 0), ([(0, 600)], 1)):
        before = fake.calls["long"]
        pair.plan(parts)
        pair.tested.attend(0, pair.inputs(wide, sum(count for _, count in parts))[0])
        assert fake.calls["long"] - before == long, parts
    backend.close()


def test_a_prompt_is_cut_where_chunks_end(fake: FakeFlashInfer) -> None:
    """Rows of one token after the cut are still a prompt's, and what is before the chunk is not listed at all."""
    backend = make_flashinfer(LLAMA4, fake)
    pair = Pair(backend, LLAMA4, rows=2)
    assert pair.step([(0, 7), (1, 40)]) < 1e-5
    fake.calls.clear()
    assert pair.step([(0, 2)]) < 1e-5, "one token on either side"
    assert fake.calls["prefill"] == len(LLAMA4)
    assert pair.step([(1, 1)]) < 1e-5
    view = in_chunks(pair.view([(0, 20), (1, 1)]), 8, 4)
    assert view.starts.tolist() == [1, 0, 0, 1]
    assert view.counts.tolist() == [7, 8, 5, 1]
    assert view.page_tables[-1][:1].tolist() == pair.tables[1][10:11]


# ---------------------------------------------------------------- CUDA graphs


@pytest.mark.parametrize("layers", [GEMMA, LLAMA4], ids=["windows", "chunks"])
def test_padding_rows_change_nothing(layers: list[LayerSpec], fake: FakeFlashInfer) -> None:
    """Five rows in a graph of eight, over page boundaries, beside steps that are not padded."""
    backend = make_flashinfer(layers, fake)
    pair = Pair(backend, layers, rows=5)
    pair.fixed = prepare(backend, 8)
    assert pair.step([(row, 3 + 7 * row) for row in range(5)]) < 1e-5
    kept = [pool.clone() for pool in backend.pools]
    for count in (5, 4, 1, 5):
        for _ in range(3):
            assert pair.step([(row, 1) for row in range(count)], padded=8) < 1e-5
    assert pair.step([(row, 2) for row in range(5)]) < 1e-5
    used = {page for table in pair.tables for page in table}
    for pool, before in zip(backend.pools, kept, strict=True):
        unused = [page for page in range(1, 140) if page not in used]
        assert torch.equal(pool[unused].nan_to_num(), before[unused].nan_to_num()), "written to nobody's page"


@pytest.mark.parametrize("layers", [GEMMA, LLAMA4], ids=["windows", "chunks"])
def test_a_captured_graph_follows_the_plans(layers: list[LayerSpec], fake: FakeFlashInfer) -> None:
    """A graph is captured once per size and replayed over many steps: it reads fixed memory that each plan refills."""
    backend = make_flashinfer(layers, fake)
    pair = Pair(backend, layers, rows=8, most=68)
    assert pair.step([(row, 2 + 5 * row) for row in range(8)]) < 1e-5
    graphs = {}
    with torch.inference_mode():
        pair.fixed = prepare(backend, 8, 4, 1)
    for size in (8, 4, 1):
        inputs = [pair.inputs(spec, size) for spec in layers]
        pair.plan([], padded=size)
        with fake.capture() as graph:
            outs = []
            for spec, (query, key, value) in zip(layers, inputs, strict=True):
                backend.write(spec.index, key, value)
                outs.append(backend.attend(spec.index, query))
        graphs[size] = (graph, inputs, outs)
    for step, (size, count) in enumerate([(8, 5), (4, 4), (8, 8), (1, 1), (4, 3), (1, 1), (8, 6), (8, 7)] * 4):
        rows = [(row, 1) for row in range(step % 2, step % 2 + count) if row < 8]
        graph, inputs, outs = graphs[size]
        for parts, spec in zip(inputs, layers, strict=True):
            for fixed, fresh in zip(parts, pair.inputs(spec, size), strict=True):
                fixed.copy_(fresh)
        pair.plan(rows, padded=size)
        graph.replay()
        for spec, parts, out in zip(layers, inputs, outs, strict=True):
            wanted = pair.expected(spec, parts)
            assert torch.allclose(out[: len(rows)], wanted[: len(rows)], atol=1e-5), f"step {step}"
        pair.advance(rows)
