"""The compiled backend against the torch one, and against itself in other company."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_pair import Inputs, Pair
from support.data import cases_of
from support.teams import team_of

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.execution.attention import factory
from asyncengine.execution.attention.base import LayerSpec, MergedHeads, StepView
from asyncengine.execution.attention.torch_paged import TorchPagedBackend, masked_attention
from asyncengine.execution.models.memory.caches import page_bytes

pytest.importorskip("numba")

from asyncengine.execution.attention.cpu import CompiledBackend, StepPlan

CPU = torch.device("cpu")
BASE = LayerSpec(index=0, num_heads=4, num_kv_heads=2, key_dim=64, value_dim=64, scale=0.125)
SHAPES = {
    "group of 1, 16 dimensions": replace(BASE, num_heads=3, num_kv_heads=3, key_dim=16, value_dim=16),
    "group of 2": BASE,
    "group of 3, 80 dimensions": replace(BASE, num_heads=6, key_dim=80, value_dim=80),
    "group of 7, 128 dimensions": replace(BASE, num_heads=7, num_kv_heads=1, key_dim=128, value_dim=128, scale=0.08),
    "group of 8, 256 dimensions": replace(BASE, num_heads=8, num_kv_heads=1, key_dim=256, value_dim=256, scale=0.06),
    "group of 70": replace(BASE, num_heads=70, num_kv_heads=1, key_dim=16, value_dim=16),
    "odd dimensions": replace(BASE, key_dim=37, value_dim=53),
    "wider keys": replace(BASE, key_dim=192, value_dim=128, scale=0.07),
    "window": replace(BASE, window=21),
    "window of one": replace(BASE, window=1),
    "chunks": replace(BASE, chunk=50),
    "chunks smaller than a tile": replace(BASE, num_heads=6, chunk=7),
    "chunks and a window": replace(BASE, chunk=64, window=40),
    "soft-cap": replace(BASE, softcap=3.0),
    "sinks": replace(BASE, sinks=torch.tensor([0.5, -1.0, 2.0, 40.0])),
    "latent": replace(BASE, num_heads=16, num_kv_heads=1, key_dim=576, value_dim=512, latent=True),
    "latent, of uneven sizes": replace(BASE, num_heads=5, num_kv_heads=1, key_dim=50, value_dim=44, latent=True),
    "all": replace(BASE, window=70, softcap=1.1, sinks=torch.tensor([3.0, -1.0, 0.2, 0.0])),
}
STEPS = ((15, 16, 17, 1, 130), (1, 1, 1, 1, 1), (1, 31, 1, 3, 69), (1, 1, 1, 1, 1))
"""New tokens of each row: decodes and chunks, at the edges of pages and within them."""


class BytesPair(Pair):
    """The reference is given what bytes can keep."""

    def expected(self, spec: LayerSpec, inputs: Inputs) -> torch.Tensor:
        query, key, value = (part.float() for part in inputs)
        return super().expected(spec, (query, spread(in_bytes(spread(key))), in_bytes(value)))


def make_pair(spec: LayerSpec, dtype: torch.dtype, page_size: int = 16, kept: torch.dtype | None = None) -> Pair:
    """A pair whose compiled backend's pages hold NaN before they are written."""
    backend = CompiledBackend([spec], 1 + 5 * -(-201 // page_size), page_size, dtype, kv_dtype=kept)
    for pool in backend.page_pools():
        pool.memory.fill_(0xFF)
    if kept is None:
        return Pair(backend, [spec], rows=5, dtype=dtype, most=201)
    return BytesPair(backend, [spec], rows=5, dtype=dtype, stored=torch.float32, most=201)


def results(pair: Pair) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(found, expected) of each of `STEPS`."""
    for counts in STEPS:
        parts = [*enumerate(counts)]
        pair.plan(parts)
        query, key, value = pair.inputs(pair.layers[0], sum(counts))
        pair.tested.write(0, key, value)
        yield pair.tested.attend(0, query).float(), pair.expected(pair.layers[0], (query, key, value))
        pair.advance(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_torch(shape: str, dtype: torch.dtype) -> None:
    for found, expected in results(make_pair(SHAPES[shape], dtype)):
        limit = 1e-5 if dtype == torch.float32 else 2**-6
        assert float((found - expected).abs().max()) < limit * (1 + float(expected.abs().max()))


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """x as 8 bits with a scale for each token and head keep it."""
    unit = x.abs().amax(-1, keepdim=True) / 127
    return (x / unit).round() * unit


def spread(x: torch.Tensor) -> torch.Tensor:
    """x times Hadamard's matrix, its own inverse, in blocks of the largest power of two that divides its size."""
    size = x.shape[-1] & -x.shape[-1]
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (x.unflatten(-1, (-1, size)) @ matrix).flatten(-2) / math.sqrt(size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [name for name, spec in SHAPES.items() if not spec.latent])
def test_bytes_against_torch(shape: str, dtype: torch.dtype) -> None:
    """Products of int8 keys and values are those of the numbers they stand for; a few lie between two steps."""
    for found, expected in results(make_pair(SHAPES[shape], dtype, kept=torch.int8)):
        far = (found - expected).abs() / (1 + float(expected.abs().max()))
        assert float(far.max()) < (2e-3 if dtype == torch.float32 else 2**-6)
        assert float(far.mean()) < (3e-5 if dtype == torch.float32 else 2**-8)


def test_bytes_of_large_dimensions_do_not_spoil_the_others() -> None:
    """Keys of real models have a few dimensions that are tens of times larger than others."""
    pair = make_pair(BASE, torch.float32, kept=torch.int8)
    query, key, value = pair.inputs(BASE, sum(STEPS[0]))
    key[..., 5] += 60
    pair.plan([*enumerate(STEPS[0])])
    pair.tested.write(0, key, value)
    found = pair.tested.attend(0, query)
    exact = Pair.expected(pair, BASE, (query, key, value))
    plain = Pair.expected(pair, BASE, (query, in_bytes(key), in_bytes(value)))
    assert (found - exact).norm() < 0.5 * (plain - exact).norm()


@pytest.mark.parametrize("page_size", [1, 4, 32])
def test_other_pages(page_size: int) -> None:
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2**-5)):
        if dtype == torch.bfloat16 and page_size == 1:
            continue  # lanes of one: float32 covers them
        for shape in ("all", "latent, of uneven sizes"):
            for found, expected in results(make_pair(SHAPES[shape], dtype, page_size)):
                assert float((found - expected).abs().max()) < limit


BLOCKS = ((0, 3, 30), (0, 30, 41), (1, 0, 20), (2, 28, 40), (4, 60, 61))
"""(row, first, end) of what attends both ways: next to each other, from the beginning, begun in an earlier step."""


@pytest.mark.parametrize("shape", ["group of 2", "group of 3, 80 dimensions", "soft-cap", "window of 40"])
@pytest.mark.parametrize("backend", ["compiled", "torch"])
@pytest.mark.parametrize("near", [False, True], ids=["everywhere", "in windows"])
def test_blocks_are_attended_to_both_ways(shape: str, backend: str, near: bool) -> None:
    """Results equal the softmax written out, over chunks of which some begin within a block."""
    spec = replace(BASE, window=40) if shape == "window of 40" else SHAPES[shape]
    lengths = (50, 20, 45, 1, 600)
    rows = Lengths(spec, list(lengths))
    if backend == "torch":
        rows.backend = TorchPagedBackend([spec], rows.backend.num_pages, 16, torch.float32, CPU)  # type: ignore[assignment]
    first = [(0, 0, 3), (2, 0, 35), (4, 0, 60)]
    rows.attend(first)
    parts = [(0, 3, 50), (1, 0, 20), (2, 35, 45), (3, 0, 1), (4, 60, 600)]
    found = rows.attend(parts, blocks=BLOCKS, near_blocks=near)
    for index, (row, start, end) in enumerate(parts):
        token = int(rows.token[row])
        span = slice(token, token + end)
        queries, keys = torch.arange(start, end)[:, None], torch.arange(end)
        seen = keys <= queries
        if spec.window is not None:
            seen &= keys > queries - spec.window
        for own, low, high in BLOCKS:
            if own == index and (spec.windowed or not near):
                seen |= (queries >= low) & (queries < high) & (keys >= low) & (keys < high)
        bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        groups = spec.num_heads // spec.num_kv_heads
        query = rows.query[token + start : token + end].transpose(0, 1)
        key, value = (part[span].transpose(0, 1).repeat_interleave(groups, 0) for part in (rows.key, rows.value))
        expected = masked_attention(spec, query, key, value, bias, None).transpose(0, 1)
        assert float((found[index] - expected).abs().max()) < 1e-5, f"row {row}"


def test_a_block_is_the_same_bits_in_any_company() -> None:
    rows = Lengths(BASE, [50, 700])
    alone = rows.attend([(0, 0, 50)], blocks=((0, 3, 30),))[0]
    beside = rows.attend([(1, 0, 700), (0, 0, 50)], blocks=((1, 3, 30), (0, 8, 600)))[1]
    rows.attend([(0, 0, 3)])
    resumed = rows.attend([(0, 3, 50)], blocks=((0, 3, 30),))[0]
    assert torch.equal(alone, beside)
    assert torch.equal(alone[3:], resumed)


class Lengths:
    """Rows of fixed keys and values in one pool; any of them can be attended to in any company."""

    def __init__(self, spec: LayerSpec, lengths: list[int], kept: torch.dtype | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        pages = [-(-length // 16) for length in lengths]
        self.spec, self.lengths, self.first = spec, lengths, np.cumsum([1, *pages])
        self.backend = CompiledBackend([spec], int(self.first[-1]), 16, torch.float32, kv_dtype=kept)
        for pool in self.backend.page_pools():
            pool.memory.fill_(0xFF)
        self.query = torch.randn(sum(lengths), spec.num_heads, spec.key_dim, generator=generator)
        self.key = torch.randn(sum(lengths), spec.num_kv_heads, spec.key_dim, generator=generator)
        self.value = torch.randn(sum(lengths), spec.num_kv_heads, spec.value_dim, generator=generator)
        self.token = np.cumsum([0, *lengths])

    def attend(
        self,
        parts: list[tuple[int, int, int]],
        blocks: tuple[tuple[int, int, int], ...] = (),
        near_blocks: bool = False,
    ) -> list[torch.Tensor]:
        """parts: (row, first position, last position + 1)."""
        starts, counts = np.array([a for _, a, _ in parts]), np.array([b - a for _, a, b in parts])
        width = max(-(-b // 16) for _, _, b in parts)
        tables = np.array([self.first[row] + np.arange(width) for row, _, _ in parts], dtype=np.int32)
        slots = np.concatenate([self.first[row] * 16 + np.arange(a, b) for row, a, b in parts])
        tokens = torch.from_numpy(np.concatenate([self.token[row] + np.arange(a, b) for row, a, b in parts]))
        indptr = np.concatenate(([0], np.cumsum(counts)))
        self.backend.plan(
            StepView(starts, counts, indptr, tables, torch.from_numpy(slots), blocks=blocks, near_blocks=near_blocks)
        )
        self.backend.write(0, self.key[tokens], self.value[tokens])
        return list(self.backend.attend(0, self.query[tokens]).split(counts.tolist()))


@pytest.mark.parametrize("kept", [None, torch.int8])
@pytest.mark.parametrize("shape", ["group of 3, 80 dimensions", "window", "chunks", "all"])
def test_bit_for_bit_in_any_company(shape: str, kept: torch.dtype | None) -> None:
    """Rows run alone, among 64, on one or two threads, in chunks of any size; long rows are split when alone."""
    lengths = [1300, 17, 600, *[20 + row for row in range(61)]]
    rows = Lengths(SHAPES[shape], lengths, kept)
    whole = rows.attend([(row, 0, length) for row, length in enumerate(lengths)])
    for count in (1, 2, 3):
        with team_of(count):
            together = rows.attend([(row, length - 1, length) for row, length in enumerate(lengths)])
            for row in (0, 1, 2, 63):
                assert torch.equal(together[row][-1], whole[row][-1])
                alone = rows.attend([(row, lengths[row] - 1, lengths[row])])[0]
                assert torch.equal(alone[-1], whole[row][-1])
            for first, last in ((0, 7), (7, 600), (600, 1299), (1299, 1300)):
                chunk = rows.attend([(0, first, last), (1, 16, 17)])[0]
                assert torch.equal(chunk, whole[0][first:last])


def test_a_long_row_alone_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another load may change the default type meanwhile: transformers sets it while it makes a model, for the whole
    process."""
    planned: list[Any] = []
    fill = StepPlan.fill
    monkeypatch.setattr(StepPlan, "fill", lambda plan, *given: planned.append(given) or fill(plan, *given))
    rows = Lengths(replace(BASE, num_heads=2, num_kv_heads=1), [1300])
    with team_of(2):
        rows.attend([(0, 0, 1299)])
        torch.set_default_dtype(torch.bfloat16)
        try:
            rows.attend([(0, 1299, 1300)])
        finally:
            torch.set_default_dtype(torch.float32)
    work, *_, partials, _, _ = planned[-1]
    assert (len(work.costs), work.joins) == (3, [0, 0, 3])
    assert partials.numel()
    assert partials.dtype is torch.float32


@pytest.mark.parametrize("kept", [None, torch.int8])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_a_row_of_nan_stays_alone(part: str, kept: torch.dtype | None) -> None:
    rows = Lengths(BASE, [40, 33, 21], kept)
    before = rows.attend([(0, 0, 40), (1, 0, 33), (2, 0, 21)])
    getattr(rows, part)[rows.token[1] : rows.token[2]] = math.nan
    after = rows.attend([(0, 0, 40), (1, 0, 33), (2, 0, 21)])
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[2], before[2])
    assert bool(after[1].isnan().all())


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    return torch.cat((turned, kept), -1)


def normed(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.float()
    return (weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("norms", "rotary"), [(True, 64), (False, 64), (True, 32), (False, 0)])
def test_merged(norms: bool, rotary: int, dtype: torch.dtype) -> None:
    one, other, generator = make_pair(BASE, dtype), make_pair(BASE, dtype), torch.Generator().manual_seed(20)
    weights = [torch.randn(64, generator=generator).to(dtype).float() if norms else None for _ in range(2)]
    heads = MergedHeads(4, 2, 64, 64, *weights, epsilon=1e-6)
    for counts in STEPS:
        parts, tokens = [*enumerate(counts)], sum(counts)
        qkv = torch.randn(tokens, 8 * 64, generator=generator).to(dtype)
        angles = torch.rand(tokens, rotary, generator=generator) * 6
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        query, key, value = qkv.view(tokens, 8, 64).split((4, 2, 2), 1)
        query = rotated(normed(query, weights[0], 1e-6), cos, sin)
        key = rotated(normed(key, weights[1], 1e-6), cos, sin)
        for pair in (one, other):
            pair.plan(parts)
            pair.advance(parts)
        found = one.tested.attend_merged(0, qkv, heads, cos, sin)
        other.tested.write(0, key, value)
        expected = other.tested.attend(0, query).flatten(1)
        # a normed number that is rounded the other way shows where two cancel
        near = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=1.6e-2 if dtype == torch.bfloat16 else 1.3e-6, atol=near)


def test_views_are_read_where_they_lie() -> None:
    """The model hands over [1, heads, tokens, dim] turned around."""
    rows = Lengths(BASE, [37])
    expected = rows.attend([(0, 0, 37)])[0]
    query, key, value = (
        part.transpose(0, 1).contiguous().transpose(0, 1) for part in (rows.query, rows.key, rows.value)
    )
    rows.backend.write(0, key, value)
    assert torch.equal(rows.backend.attend(0, query), expected)


def test_the_choice() -> None:
    specs = [BASE]
    assert factory.make_backend(EngineConfig(), specs, 5, torch.bfloat16, CPU).name == "compiled"
    assert (
        factory.make_backend(EngineConfig(attention_backend="compiled"), specs, 5, torch.float32, CPU).name
        == "compiled"
    )
    assert factory.make_backend(EngineConfig(attention_backend="torch"), specs, 5, torch.bfloat16, CPU).name == "torch"
    assert factory.make_backend(EngineConfig(), specs, 5, torch.float16, CPU).name == "torch"
    with pytest.raises(InvalidParameter, match="read bfloat16 and float32, not float16") as caught:
        factory.make_backend(EngineConfig(attention_backend="compiled"), specs, 5, torch.float16, CPU)
    assert caught.value.field == "attention_backend"


@pytest.mark.parametrize(("field", "settings", "change", "dtype"), cases_of(__file__))
def test_bytes_are_refused_by_name(
    field: str, settings: dict[str, Any], change: dict[str, Any], dtype: str
) -> None:  # fmt: skip
    config = EngineConfig(kv_cache_dtype="int8", **settings)
    with pytest.raises(InvalidParameter, match=field) as caught:
        factory.make_backend(config, [replace(BASE, **change)], 5, getattr(torch, dtype), CPU)
    assert caught.value.field == "kv_cache_dtype"


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8])
def test_the_pool_is_as_large_as_counted(kept: torch.dtype) -> None:
    backend = CompiledBackend([BASE, replace(BASE, index=1)], 7, 16, torch.bfloat16, kv_dtype=kept)
    assert backend.kv_bytes == 7 * page_bytes([BASE, BASE], 16, kept)
    backend.close()
