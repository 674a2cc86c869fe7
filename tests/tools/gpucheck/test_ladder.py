"""The ladder of speed: it runs from end to end, and the sums behind its figures are right."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_gpu import fake_gpu

from asyncengine import AsyncEngine
from asyncengine.config import EngineConfig
from asyncengine.models.fallback.dummy import count_elements
from tools.gpucheck import environment, kernel_table, ladder
from tools.gpucheck.__main__ import main
from tools.gpucheck.ladder import ENGINES, Ladder
from tools.gpucheck.report import CheckFailed, Figure
from tools.gpucheck.session import Session, Settings
from tools.gpucheck.shapes import LARGE, SMALL, TINY, Shape
from tools.gpucheck.workloads import Burst, Collections, burst, quantile, random_lengths

CPU = Settings("cpu", "flashinfer", quick=True, seed=4)
FEW = Shape("few", 32, 48, 2, 2, 1, tied=True, head_dim=16, vocab=128)


def test_it_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU's stand-ins, with tiny shapes and short loads; the peer is tried on its own."""
    calls = fake_gpu(monkeypatch)
    monkeypatch.setattr(environment, "flashinfer_missing", lambda: None)
    monkeypatch.setattr(environment, "_flashinfer", lambda: "a stand-in")
    monkeypatch.setattr(Ladder, "_tokens", lambda self, count: max(2, count // 128))
    file = tmp_path / "ladder.json"
    code = main(["ladder", "--quick", "--skip", "peer", "--out", str(file)], CPU)
    said = capsys.readouterr().out
    assert code == 0, said
    report = json.loads(file.read_text(encoding="utf-8"))
    assert report["complete"]
    sections = [section.name for section in Ladder(Session(CPU, tmp_path)).sections() if section.name != "peer"]
    assert list(report["facts"]["section_seconds"]) == sections
    absent = [figure["name"] for figure in report["figures"] if figure["value"] is None]
    assert all("kernels a step" in name for name in absent), "nothing launches a kernel here"
    assert {figure["section"] for figure in report["figures"]} == set(sections)
    assert all(f"{figure['name']}: " in said for figure in report["figures"])
    assert any("long step: " in line for line in report["lines"])
    loaded = [figure["note"] for figure in report["figures"] if figure["name"].endswith("loading")]
    assert len(loaded) >= len(ENGINES)
    assert all("attention: flashinfer" in note for note in loaded)
    assert calls["graphs"] > 20


def test_a_section_that_fails_ends_its_engine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "single", None)
    with Ladder(session := Session(CPU, tmp_path)) as made:
        sections = {section.name: section for section in made.sections()}
        report = session.run([sections["sampled"], sections["nano"]])
    assert [(check.section, check.status) for check in report.checks] == [("sampled", "fail")]
    assert [figure.section for figure in report.figures] == ["sampled", "nano", "nano"], "loaded again"


async def test_a_peer_that_gives_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder.sys, "executable", "/bin/echo")
    session = Session(CPU, tmp_path)
    with pytest.raises(CheckFailed, match="no figure"):
        await Ladder(session).peer()
    assert "benchmarks.transformers_on_gpu" in session.report.lines[0]


def test_how_much_of_the_memory_is_used(tmp_path: Path) -> None:
    session = Session(Settings("cpu"), tmp_path)
    took = Burst([(10, 5)], seconds=2.0, steps=5)
    measuring = Ladder(session)
    assert measuring._share(FEW, took) == "", "that needs the bandwidth of this run"
    session.report.figures.append(Figure("environment", environment.BANDWIDTH, 1e-4, "GB/s"))
    assert measuring._share(FEW, took) == f"; {FEW.bytes_read(5, [(10, 5)]) / 1e5 / 2.0:.0%} of what memory allows"


async def test_kernels_are_counted_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels that overlap, and one on the host, which is none."""
    device, host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name: str, begin: float, end: float, kind: Any = device) -> Any:
        span = SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin)
        return SimpleNamespace(name=name, device_type=kind, time_range=span)

    class Profile:
        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def events(self) -> list[Any]:
            return [event("a", 0, 400), event("b", 300, 600), event("a", 900, 1000), event("host", 0, 9, host)]

    async def taken(*_: Any) -> Burst:
        return Burst([(1, 1)], 0.004, 2)

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(kernel_table, "burst", taken)
    monkeypatch.setattr(kernel_table, "wait_for", lambda _: None)
    session = Session(Settings("cuda:0"), tmp_path)
    await kernel_table.kernel_table(session, None, "x", [(1, 1)])  # type: ignore[arg-type]
    (figure,) = session.report.figures
    assert (figure.name, figure.value) == ("x, kernels a step", 1.5)
    assert "2.000 ms a step, GPU busy 0.350 ms = 18%" in figure.note
    assert session.report.lines[0].split() == ["250.0", "us", "a", "step,", "1.0", "x", "250.0", "us", "a"]


@pytest.mark.parametrize("shape", [FEW, SMALL, LARGE, TINY[SMALL.name]])
def test_weights_of_a_shape(shape: Shape) -> None:
    elements = count_elements(shape.config, EngineConfig(), torch.bfloat16)
    unread = 0 if shape.tied else shape.vocab * shape.hidden
    assert shape.weights_read == 2 * (elements - unread)


def test_bytes_read() -> None:
    assert (SMALL.kv_bytes, LARGE.kv_bytes) == (112 * 1024, 144 * 1024)
    by_hand = sum(prompt + made for prompt, output in [(7, 4), (1, 1)] for made in range(1, output))
    assert FEW.bytes_read(9, [(7, 4), (1, 1)]) == 9 * FEW.weights_read + by_hand * FEW.kv_bytes


def test_the_workload_is_nano_vllms() -> None:
    lengths = random_lengths(256, 100, 1024, 1)
    assert len(lengths) == 256
    assert {100 <= value <= 1024 for pair in lengths for value in pair} == {True}
    assert 120_000 < sum(output for _, output in lengths) < 170_000


async def test_fewer_tokens_than_asked_for_fail() -> None:
    async with await AsyncEngine.from_pretrained("demo", device="cpu", kv_cache_memory="16MiB") as engine:
        generate = engine.generate

        async def shorter(prompt: Any, params: Any, **more: Any) -> Any:
            return await generate(prompt, params.replace(max_tokens=params.max_tokens - 1), **more)

        engine.generate = shorter  # type: ignore[method-assign, assignment]
        with pytest.raises(CheckFailed, match="fewer tokens"):
            await burst(engine, [(4, 5)], 1)


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


def test_what_collecting_garbage_takes_is_told_apart() -> None:
    with Collections() as collections:
        gc.collect()
    taken = collections.seconds
    assert taken > 0
    gc.collect()
    assert collections.seconds == taken, "no longer"
    assert str(Burst([(1, 1)], 2.0, 4, 0.5)) == "2.00 s, 4 steps of 500.00 ms; 0.50 s collecting garbage"
    assert str(Burst([(1, 1)], 2.0, 4, 0.001)) == "2.00 s, 4 steps of 500.00 ms"
