"""Torch's settings of the thread that launches: an event loop's is used only where they are those of a new one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from asyncengine import DEMO_MODEL
from asyncengine.config import EngineConfig
from asyncengine.execution.device.transfer import is_plain_thread
from asyncengine.execution.layers.recorded import GREEDY
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.runner.building import build_runner
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Batch, Row

CPU = torch.device("cpu")


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


SETTINGS = {
    "a device": lambda: torch.device("meta"),
    "a default device": default_device,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a mode that sees operators": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_caller_has_set_is_seen_on_its_thread_alone(name: str) -> None:
    within: AbstractContextManager[object] = SETTINGS[name]()
    elsewhere: list[bool] = []
    assert is_plain_thread(CPU)
    with within:
        assert not is_plain_thread(CPU)
        thread = threading.Thread(target=lambda: elsewhere.append(is_plain_thread(CPU)))
        thread.start()
        thread.join()
    assert is_plain_thread(CPU)
    assert elsewhere == [True]


def test_a_runner_asks_the_thread_that_would_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(kv_cache_memory="8MiB", speculation="off", show_progress=False)
    runner = build_runner(load_model(str(DEMO_MODEL), config), config).runner
    monkeypatch.setattr(ModelRunner, "asynchronous", True)
    row = Row(RequestSpec(0, (1, 2), GREEDY, 3), 0, 0, 2, [1, 2], False, [1], True)
    assert runner.is_brief(Batch(0, (row,)))
    with torch.autocast("cpu", torch.bfloat16):
        assert not runner.is_brief(Batch(0, (row,)))
    runner.close()
