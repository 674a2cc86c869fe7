"""The KV pool's share of a GPU, and errors where something does not fit: with a device of numbers only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncengine.assembly import wiring
from asyncengine.config import EngineConfig
from asyncengine.errors import OutOfMemory
from asyncengine.execution import api
from asyncengine.execution.models.memory.caches import PoolSizes
from asyncengine.execution.runner import building, stages
from asyncengine.execution.runner.building import build_runner

CUDA = torch.device("cuda", 0)
MIB = 2**20
TOTAL, WEIGHTS, LEFT_BY_LOADING, WORKSPACE, STEP, TRIAL_POOL, GRAPHS = (
    MIB * count for count in (10_000, 3000, 1500, 130, 400, 90, 250)
)


class Device:
    """A GPU under torch's allocator: what is given back stays torch's until its cache is emptied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.reserved = self.peak = 0
        self.total = TOTAL
        for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.total - self.reserved, self.total))

    def take(self, count: int) -> None:
        if self.used + count > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it.\nOf the allocated memory ...")
        self.used += count
        self.reserved, self.peak = max(self.reserved, self.used), max(self.peak, self.used)

    def give(self, count: int) -> None:
        self.used -= count

    def memory_allocated(self, _: Any) -> int:
        return self.used

    def max_memory_allocated(self, _: Any) -> int:
        return self.peak

    def reset_peak_memory_stats(self, _: Any) -> None:
        self.peak = self.used

    def empty_cache(self) -> None:
        self.reserved = self.used


class Runner:
    """A stand-in for a `ModelRunner` that takes what it is said to."""

    device: Device
    may_cut, mtp = False, None

    def __init__(self, model: Any, backend: Any, max_num_seqs: int, **_: Any) -> None:
        self.model = model
        self.backend, self.kv_bytes, self.state_bytes = backend, backend.kv_bytes, 0
        self.attention_backend = "flashinfer"
        self.graphs = False

    def profile_run(self, batch: Any) -> None:
        self.device.take(STEP)
        self.device.give(STEP)

    def use_graphs(self, sizes: Any, capture: Any, told: Callable[[], None]) -> Any:
        self.device.take(GRAPHS)
        self.graphs = True
        return SimpleNamespace(seconds=1.0)

    def close(self) -> None:
        self.device.give(self.kv_bytes + WORKSPACE)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(monkeypatch)

    @contextmanager
    def current(wanted: torch.device) -> Iterator[None]:
        yield

    def make_backend(config: Any, layers: Any, pages: int, *_: Any, **__: Any) -> Any:
        kv_bytes = TRIAL_POOL if pages != 77 else 5 * MIB
        made.take(kv_bytes + WORKSPACE + GRAPHS)  # kernels are tried; what that took stays in torch's cache
        made.give(GRAPHS)
        return SimpleNamespace(name="flashinfer", kv_bytes=kv_bytes, graphs=True)

    Runner.device = made
    for module in (building, stages):
        monkeypatch.setattr(module, "ModelRunner", Runner)
    monkeypatch.setattr(building, "make_backend", make_backend)
    monkeypatch.setattr(building, "CudaCapture", lambda: None)
    monkeypatch.setattr(building, "on_device", current)
    made.take(WEIGHTS + LEFT_BY_LOADING)
    made.give(LEFT_BY_LOADING)
    return made


MODEL: Any = SimpleNamespace(
    device=CUDA,
    layers=[],
    states=(),
    unsteady=None,
    max_model_len=512,
    dtype=torch.bfloat16,
    mapped_bytes=0,
    weights_bytes=WEIGHTS,
    fused=[],
    head=None,
)
CONFIG = EngineConfig(max_num_seqs=8, show_progress=False)


def built(monkeypatch: pytest.MonkeyPatch, config: EngineConfig = CONFIG, lora: Any = None) -> tuple[Any, int]:
    """A runner, and how many bytes were said to be free for its pool."""
    seen: list[int] = []

    def sizes(*arguments: Any, **_: Any) -> PoolSizes:
        seen.append(arguments[-1])
        return PoolSizes(77)

    monkeypatch.setattr(building, "pool_sizes", sizes)
    return build_runner(MODEL, config, lora=lora).runner, seen[0]


def test_the_pool_is_cut_from_what_is_really_free(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that loading and the profile run left in torch's cache is not counted, nor is the latter's pool."""
    runner, free = built(monkeypatch)
    assert free == TOTAL - WEIGHTS - WORKSPACE - STEP
    assert runner.graphs


def test_a_step_that_does_not_fit_is_said_in_words(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    device.total = WEIGHTS + TRIAL_POOL + WORKSPACE + STEP - 1
    with pytest.raises(OutOfMemory, match=r"beside the weights does not fit on cuda:0, where \d+ MiB") as raised:
        built(monkeypatch)
    assert "Lower max_num_batched_tokens" in str(raised.value)
    assert "Of the allocated memory" not in str(raised.value), "torch's advice is not ours"
    assert device.reserved == device.used == WEIGHTS, "everything else can be taken again while the error is handled"
    assert raised.value.__context__ is None


def test_without_memory_for_graphs_there_are_none(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(self: Runner, *_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Runner, "use_graphs", none_left)
    runner, _ = built(monkeypatch)
    assert not runner.graphs
    assert "without CUDA graphs: CUDA out of memory." in caplog.text


def test_a_model_that_does_not_fit_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(api, "load_model", no_room)
    with pytest.raises(OutOfMemory, match=r"the model does not fit on cpu, where .* Take a smaller model"):
        wiring.load_frontend("demo", EngineConfig(device="cpu"))
