"""Measuring: every figure is there, absent ones say why, and the sums behind them are right."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncengine.config import EngineConfig
from asyncengine.models.fallback.dummy import count_elements
from tools.gpucheck import environment, speed
from tools.gpucheck.report import CheckFailed, Figure, Skipped
from tools.gpucheck.session import Session, Settings
from tools.gpucheck.shapes import LARGE, SMALL, Shape
from tools.gpucheck.workloads import Burst, burst, quantile, random_lengths

TINY = Shape("tiny", 32, 48, 2, 2, 1, tied=True, head_dim=16, vocab=128)
CPU = Settings("cpu", "torch", quick=True, seed=4)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(speed, "BATCH", 6)
    monkeypatch.setattr(speed, "SMALL", TINY)
    monkeypatch.setattr(speed, "LARGE", TINY)
    monkeypatch.setattr(speed, "PEER_LENGTHS", (16, 12))
    monkeypatch.setattr(speed, "_MEAN_OUTPUT", 16)
    monkeypatch.setattr(speed, "random_lengths", lambda count, low, high, seed: [(20, 10), (4, 15)] * (count // 2))
    made = Session(CPU, tmp_path)
    made.report.figures.append(Figure("environment", environment.BANDWIDTH, 10.0, "GB/s"))
    return made


def figures(session: Session) -> dict[str, Figure]:
    return {figure.name: figure for figure in session.report.figures}


async def test_small_model(session: Session) -> None:
    await speed.measure_small(session, TINY)
    found = figures(session)
    assert set(found) == {
        "copy bandwidth", "tiny, loading", "tiny, graph capture", "tiny, memory of graphs", "tiny, batch 1",
        "tiny, batch 1, of roofline", "tiny, 6 x 16/12", "tiny, 6 x 16/12, of roofline",
        "tiny, host time per step at batch 6", "tiny, nano-vllm workload, shortened",
        "tiny, nano-vllm workload, shortened, of roofline", "tiny, batch 1, sampled", "tiny, 6 x 16/12, sampled",
    }  # fmt: skip
    graphs = {"tiny, graph capture", "tiny, memory of graphs"}
    assert {name for name, figure in found.items() if figure.value is None} == graphs
    assert all("no CUDA graphs" in found[name].note for name in graphs)
    assert all(figure.value > 0 for name, figure in found.items() if name not in graphs and figure.value is not None)
    assert found["tiny, batch 1"].aim == 700
    assert found["tiny, 6 x 16/12, sampled"].note == "temperature 0.6, top-k 20, top-p 0.95"
    host = found["tiny, host time per step at batch 6"]
    assert (host.aim, host.at_most) == (1.0, True)
    assert all(part in host.note for part in ("schedule", "deliver", "commit", "launch"))


async def test_large_model_and_aims(session: Session) -> None:
    await speed.measure_large(session, TINY)
    assert figures(session)["tiny, batch 1"].aim == 200
    assert figures(session)["tiny, 6 x 128/128"].aim is None, "a shortened load has no aim"


async def test_arrivals(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = speed.poisson

    async def short(engine: Any, rate: float, seconds: float, seed: int) -> Any:
        return await kept(engine, 40.0, 0.2, seed)

    monkeypatch.setattr(speed, "poisson", short)
    await speed.measure_arrivals(session, TINY)
    names = [name for name in figures(session) if name != "copy bandwidth"]
    assert len(names) == 7
    assert all(figures(session)[name].value is not None for name in names)


def test_a_model_too_large_for_the_device_is_skipped(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncengine.models.loading.free_bytes", lambda _: 10)
    speed.run_large(session)
    (check,) = session.report.checks
    assert check.status == "skip"
    assert "the weights take" in check.detail


def test_a_roofline_needs_a_bandwidth(tmp_path: Path) -> None:
    took = Burst([(10, 5)], seconds=2.0, steps=5)
    bare = Session(CPU, tmp_path)
    speed.roofline(bare, TINY, took, "x")
    assert bare.report.figures[0].verdict == "absent"
    bare.report.figures.append(Figure("environment", environment.BANDWIDTH, 0.001, "GB/s"))
    speed.roofline(bare, TINY, took, "y")
    least = TINY.bytes_read(5, [(10, 5)]) / 1e6
    assert bare.report.figure("y, of roofline") == pytest.approx(100 * least / 2.0)


@pytest.mark.parametrize("shape", [TINY, SMALL, LARGE])
def test_weights_of_a_shape(shape: Shape) -> None:
    elements = count_elements(shape.config, EngineConfig(), torch.bfloat16)
    unread = 0 if shape.tied else shape.vocab * shape.hidden
    assert shape.weights_read == 2 * (elements - unread)


def test_bytes_read() -> None:
    assert (SMALL.kv_bytes, LARGE.kv_bytes) == (112 * 1024, 144 * 1024)
    by_hand = sum(prompt + made for prompt, output in [(7, 4), (1, 1)] for made in range(1, output))
    assert TINY.bytes_read(9, [(7, 4), (1, 1)]) == 9 * TINY.weights_read + by_hand * TINY.kv_bytes


def test_the_workload_is_nano_vllms() -> None:
    lengths = random_lengths(256, 100, 1024, 1)
    assert len(lengths) == 256
    assert {100 <= value <= 1024 for pair in lengths for value in pair} == {True}
    assert 120_000 < sum(output for _, output in lengths) < 170_000


async def test_fewer_tokens_than_asked_for_fail(session: Session) -> None:
    async with speed.loaded(session, TINY, told=False) as engine:
        generate = engine.generate

        async def shorter(prompt: Any, params: Any) -> Any:
            return await generate(prompt, params.replace(max_tokens=params.max_tokens - 1))

        engine.generate = shorter  # type: ignore[method-assign, assignment]
        with pytest.raises(CheckFailed, match="fewer tokens"):
            await burst(engine, [(4, 5)], 1)


def test_what_the_runner_logs_is_read() -> None:
    logger = logging.getLogger("asyncengine")
    before = logger.level
    with speed.CaptureLog() as log:
        logger.info("captured %d CUDA graphs in %.1f s; they take %.0f MiB", 36, 4.2, 812.5)
        logger.info("something else")
    assert log.mebibytes == 812.5
    assert logger.level == before
    source = Path(speed.__file__).parents[2] / "asyncengine" / "runner" / "building.py"
    assert '"captured %d CUDA graphs in %.1f s; they take %.0f MiB"' in source.read_text(encoding="utf-8")


def test_quantiles() -> None:
    assert quantile([], 0.5) is None
    assert quantile(range(101), 0.5) == 50
    assert quantile([1.0, 2.0], 0.99) == 2.0


def test_environment(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n")
    assert environment.driver_version(version) == "580.65.06"
    assert environment.driver_version(tmp_path / "none") == "unknown"
    cpu = torch.device("cpu")
    assert environment.copy_bandwidth(cpu, 2**16, 2) > 0
    assert environment.matrix_rate(cpu, 16, 2) > 0
    facts = environment.facts(Session(CPU, tmp_path))
    assert facts["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert facts["seed"] == 4


def test_missing_compilers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "flashinfer_missing", lambda: None)
    monkeypatch.setattr(environment.importlib.metadata, "version", lambda _: "0.7.2")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    here: dict[str, str] = {}
    monkeypatch.setattr(environment.shutil, "which", lambda name, path=None: here.get(f"{path or 'PATH'}:{name}"))
    assert environment._flashinfer().startswith("version 0.7.2; no ninja and no nvcc: kernels that are not")
    assert environment.facts(Session(CPU, tmp_path))["ninja"] == "missing"
    here["PATH:ninja"] = "/bin/ninja"
    assert "; no nvcc: " in environment._flashinfer()
    here["/opt/cuda/bin:nvcc"] = "/opt/cuda/bin/nvcc"
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert environment._flashinfer() == "version 0.7.2"
    assert environment.facts(Session(CPU, tmp_path))["nvcc"] == "/opt/cuda/bin/nvcc"


def test_a_skipped_load_is_no_crash(session: Session) -> None:
    async def away() -> str:
        raise Skipped("no room")

    assert session.check("x", lambda: asyncio.run(away()))
    assert session.report.checks[0].status == "skip"
