"""The peer on a GPU, without one: what is counted, and what is said when time is up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import transformers_on_gpu
from benchmarks.transformers_on_gpu import batched
from tools.gpucheck.shapes import Shape

TINY = Shape("tiny", 32, 48, 2, 2, 1, tied=True, head_dim=16, vocab=128)


class Manager:
    """Gives a token to each request in turn, up to `most` tokens in all; then nothing comes any more."""

    def __init__(self, most: int, error: str | None = None) -> None:
        self.most, self.error, self.cancelled = most, error, list[str]()
        self.wanted: dict[str, int] = {}
        self.made: dict[str, int] = {"an older one": 7}

    def add_request(self, prompt: list[int], max_new_tokens: int, streaming: bool) -> str:
        name = f"r{len(self.wanted)}"
        self.wanted[name], self.made[name] = max_new_tokens, 0
        return name

    def get_result(self, timeout: float) -> Any:
        if sum(self.made.values()) == 7:  # what was left over comes first
            self.made["an older one"] += 1
            return SimpleNamespace(request_id="an older one", error=None, generated_tokens=[0] * 8)
        open_ = [name for name, want in self.wanted.items() if self.made[name] < want]
        if self.most == 0 or not open_:
            return None
        self.most -= 1
        name = min(open_, key=self.made.__getitem__)
        self.made[name] += 1
        done = self.made[name] == self.wanted[name]
        return SimpleNamespace(
            request_id=name, error=self.error, generated_tokens=[0] * self.made[name], is_finished=lambda: done
        )

    def is_running(self) -> bool:
        return self.error is None

    def cancel_request(self, name: str) -> None:
        self.cancelled.append(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes at each look."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(transformers_on_gpu.time, "perf_counter", lambda: float(next(ticks)))


@pytest.mark.usefixtures("clock")
def test_all_tokens_are_counted() -> None:
    manager = Manager(100)
    rate, whole = batched(manager, [[1, 2]] * 3, 4, 1000.0)
    looks = 2 * (3 * 4 + 1)  # one by the loop and one at each result but the foreign one, and the first
    assert (rate, whole) == (pytest.approx(12 / (looks - 1)), True)
    assert not manager.cancelled


@pytest.mark.usefixtures("clock")
def test_what_came_in_time_counts_and_the_rest_is_cancelled() -> None:
    manager = Manager(100)
    rate, whole = batched(manager, [[1, 2]] * 3, 40, 20.0)
    assert not whole
    assert rate > 0
    assert sorted(manager.cancelled) == ["r0", "r1", "r2"]


def test_a_peer_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="no such kernel"):
        batched(Manager(5, "no such kernel"), [[1]], 3, 10.0)
    with pytest.raises(RuntimeError, match="its thread ended"):
        batched(Manager(0, "unused"), [[1]], 3, 10.0)


def test_loads_without_time_are_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And those with time have a line each."""
    manager = SimpleNamespace(stop=lambda **_: None)
    monkeypatch.setattr(transformers_on_gpu, "_manager", lambda *_: manager)
    monkeypatch.setattr(transformers_on_gpu, "batched", lambda *_: (12.0, False))
    cpu = torch.device("cpu")
    transformers_on_gpu.run(TINY, cpu, 0, 30.0, ((1, 4, 2), (2, 4, 2)))
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("transformers, generate, 1 x 4/2: ")
    assert [line.partition(": ")[0] for line in others] == [
        "transformers, continuous batching, 1 x 4/2", "transformers, continuous batching, 2 x 4/2",
    ]  # fmt: skip
    assert all("12 tokens/s, cut after" in line for line in others)
    transformers_on_gpu.run(TINY, cpu, 0, 0.0, ((1, 4, 2),))
    assert capsys.readouterr().out.splitlines()[1] == "transformers, 1 x 4/2: not begun, time was up"
