"""The FlashInfer backend on a real GPU: every kernel path against the torch backend on fresh random data.

Skipped without an NVIDIA GPU or without `asyncengine[cuda]`. The first run on a machine compiles kernels for minutes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_pair import Pair, plan_graph, prepare
from support.drive import Driver, prompts
from support.tiny_models import VOCAB
from support.wide_models import WIDE, make_wide

from asyncengine.attention.base import LayerSpec
from asyncengine.attention.flashinfer import FlashInferBackend
from asyncengine.attention.flashinfer_plan import LayerGroup, float_workspace_bytes
from asyncengine.config import EngineConfig
from asyncengine.device.pinned import is_hopper
from asyncengine.models.loading import load_model
from asyncengine.runner.building import build_runner
from asyncengine.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
    reason="needs an NVIDIA GPU and asyncengine[cuda]",
)

BASE = LayerSpec(index=0, num_heads=8, num_kv_heads=4, key_dim=128, value_dim=128, scale=0.09)
VARIANTS = {
    "group of 1": replace(BASE, num_kv_heads=8),
    "group of 2": BASE,
    "group of 3": replace(BASE, num_heads=6, num_kv_heads=2),
    "group of 4": replace(BASE, num_kv_heads=2),
    "group of 7": replace(BASE, num_heads=14, num_kv_heads=2, key_dim=64, value_dim=64),
    "group of 8": replace(BASE, num_kv_heads=1),
    "64 dimensions": replace(BASE, key_dim=64, value_dim=64, scale=0.125),
    "256 dimensions": replace(BASE, key_dim=256, value_dim=256, scale=0.06),
    "window": replace(BASE, window=21),
    "softcap": replace(BASE, softcap=20.0),
    "sinks": replace(BASE, sinks=torch.linspace(-2, 6, 8)),
    "group of 8, window and sinks": replace(
        BASE, num_heads=16, num_kv_heads=2, key_dim=64, value_dim=64, window=21, sinks=torch.linspace(-2, 6, 16)
    ),
    "window and softcap": replace(BASE, window=21, softcap=20.0, num_kv_heads=2),
}
GEMMA = [replace(BASE, window=33, softcap=20.0), replace(BASE, index=1, softcap=20.0)]
TOLERANCE = {torch.bfloat16: 0.06, torch.float16: 0.01}


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def make(layers: list[LayerSpec], device: torch.device, dtype: torch.dtype, **changes: Any) -> FlashInferBackend:
    options: dict[str, Any] = {"max_rows": 64, "max_pages_per_row": 64, **changes}
    return FlashInferBackend(layers, 600, options.pop("page_size", 16), dtype, device, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_torch_backend(variant: str, device: torch.device) -> None:
    spec = VARIANTS[variant]
    layers = [spec if spec.sinks is None else replace(spec, sinks=spec.sinks.to(device))]
    for page_size, dtype in ((16, torch.bfloat16), (5, torch.float16)):
        pair = Pair(make(layers, device, dtype, page_size=page_size), layers, 4, dtype=dtype, device=device, most=500)
        limit = TOLERANCE[dtype]
        assert pair.step([(0, 3), (1, 130), (3, 17)]) < limit, "prompts"
        assert pair.step([(1, 1), (0, 1), (3, 1)]) < limit, "decodes"
        assert pair.step([(2, 9), (1, 1), (0, 70), (3, 1)]) < limit, "all together"
        assert pair.step([(1, 300)]) < limit, "a chunk behind others"
        for _ in range(20):
            assert pair.step([(row, 1) for row in (3, 2, 1, 0)]) < limit


def test_the_comparison_can_fail(device: torch.device) -> None:
    wrong = [replace(BASE, scale=0.12)]
    pair = Pair(make(wrong, device, torch.float16), [BASE], 1, dtype=torch.float16, device=device)
    assert pair.step([(0, 90)]) > TOLERANCE[torch.float16]


def test_captured_graphs(device: torch.device) -> None:
    """Captured once per size, padded, replayed over page boundaries, against the torch backend."""
    dtype = torch.bfloat16
    backend = make(GEMMA, device, dtype)
    backend.warm_up()
    pair = Pair(backend, GEMMA, 8, dtype=dtype, device=device, most=400)
    assert pair.step([(row, 2 + 31 * row) for row in range(8)]) < TOLERANCE[dtype]
    graphs: dict[int, Any] = {}
    pool = torch.cuda.graph_pool_handle()
    pair.fixed = prepare(backend, 16, 8, 2)
    for size in (16, 8, 2):
        inputs = [pair.inputs(spec, size) for spec in GEMMA]
        pair.plan([], padded=size)
        graph, outs = torch.cuda.CUDAGraph(), []
        for keep in (False, True):  # once to warm up
            run = torch.cuda.graph(graph, pool=pool) if keep else torch.cuda.stream(torch.cuda.current_stream())
            with run:
                outs = []
                for spec, (query, key, value) in zip(GEMMA, inputs, strict=True):
                    backend.write(spec.index, key, value)
                    outs.append(backend.attend(spec.index, query))
        graphs[size] = (graph, inputs, outs)
    for step in range(60):
        size, count = ((16, 8), (8, 5), (2, 1), (8, 8))[step % 4]
        rows = [(row, 1) for row in range(count)]
        graph, inputs, outs = graphs[size]
        for parts, spec in zip(inputs, GEMMA, strict=True):
            for fixed, fresh in zip(parts, pair.inputs(spec, size), strict=True):
                fixed.copy_(fresh)
        pair.plan(rows, padded=size)
        graph.replay()
        for spec, parts, out in zip(GEMMA, inputs, outs, strict=True):
            wanted = pair.expected(spec, parts)[:count].float()
            assert float((out[:count].float() - wanted).abs().max()) < TOLERANCE[dtype], f"step {step}"
        pair.advance(rows)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_long_prompts_on_hopper(heads: int, device: torch.device) -> None:
    """By FlashAttention-3's kernels: whole prompts, parts of pages, chunks behind others."""
    if not is_hopper(device):
        pytest.skip("needs compute capability 9")
    layers = [replace(BASE, num_heads=heads), replace(BASE, index=1, num_heads=heads, window=21)]
    backend = make(layers, device, torch.bfloat16, max_pages_per_row=100)
    backend.warm_up()
    assert backend._long[LayerGroup.of(layers[0])] is not backend._prefill[LayerGroup.of(layers[0])]
    assert backend._long[LayerGroup.of(layers[1])] is backend._prefill[LayerGroup.of(layers[1])]
    pair = Pair(backend, layers, 3, dtype=torch.bfloat16, device=device, most=1600)
    for parts in ([(0, 128)], [(1, 129), (2, 900)], [(0, 1000)], [(1, 1), (2, 1), (0, 257)], [(0, 1), (1, 1)]):
        assert pair.step(parts) < TOLERANCE[torch.bfloat16], parts


def test_eight_bit_keys_and_values(device: torch.device) -> None:
    backend = make([BASE], device, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    pair = Pair(backend, [BASE], 2, dtype=torch.bfloat16, device=device)
    assert pair.step([(0, 60), (1, 3)]) < 0.5
    assert pair.step([(0, 1), (1, 1)]) < 0.5


@pytest.fixture
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_nothing_waits_for_the_device(device: torch.device, request: pytest.FixtureRequest) -> None:
    backend = make(GEMMA, device, torch.bfloat16)
    backend.warm_up()
    fixed = prepare(backend, 4)
    pair = Pair(backend, GEMMA, 4, dtype=torch.bfloat16, device=device)
    steps = [pair.view([(0, 9), (1, 1)]), pair.view([(row, 1) for row in range(3)]), pair.view([(0, 1)], padded=4)]
    inputs = [[pair.inputs(spec, len(step.kv_slots)) for spec in GEMMA] for step in steps]
    request.getfixturevalue("syncs_are_errors")
    for _ in range(3):
        for step, parts in zip(steps, inputs, strict=True):
            if step is steps[-1]:
                plan_graph(backend, fixed, step)
            else:
                backend.plan(step)
            for spec, (query, key, value) in zip(GEMMA, parts, strict=True):
                backend.write(spec.index, key, value)
                backend.attend(spec.index, query)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 4), (64, 8), (28, 4), (16, 8)])
def test_workspace_is_enough_for_long_prompts_and_wide_graphs(heads: int, kv_heads: int, device: torch.device) -> None:
    """Plans that split: FlashInfer raises when a workspace is too small."""
    spec = replace(BASE, num_heads=heads, num_kv_heads=kv_heads)
    backend = make([spec], device, torch.bfloat16, max_rows=256, max_pages_per_row=40)
    fixed = prepare(backend, 256)
    pair = Pair(backend, [spec], 1, dtype=torch.bfloat16, device=device, most=9500)
    for chunk in (8192, 512, 64):
        pair.plan([(0, chunk)])
        pair.advance([(0, chunk)])
    pair.fixed, pair.lengths = fixed, [600]
    pair.plan([(0, 1)] * 1, padded=256)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    assert backend._workspace.numel() == float_workspace_bytes([LayerGroup.of(spec)], 256, processors)


@pytest.mark.parametrize("name", WIDE)
def test_models_score_prompts_as_on_torch(name: str, tmp_path: Path, device: torch.device) -> None:
    """Through the runner, chunked: bfloat16 rounds differently, so log-probabilities are compared and not tokens."""
    path, scores = make_wide(name, tmp_path / name), []
    for backend in ("flashinfer", "torch"):
        config = EngineConfig(
            dtype="bfloat16", device=str(device), attention_backend=backend, kv_cache_memory="256MiB", max_num_seqs=8
        )
        runner = build_runner(load_model(str(path), config), config)
        assert runner.attention_backend == backend
        driver = Driver(runner)
        params = SamplingParams(temperature=0.0, prompt_logprobs=True, ignore_eos=True)
        jobs = [driver.job(prompt, 8, params) for prompt in prompts([60, 33, 5], VOCAB)]
        driver.run(jobs, chunk=16)
        scores.append([entry.logprob for job in jobs for entry in job.prompt_logprobs])
        runner.close()
    differences = [abs(one - two) for one, two in zip(*scores, strict=True)]
    assert sum(differences) / len(differences) < 0.1
    assert max(differences) < 1.0
