"""An engine whose later stages are hosted elsewhere: here by threads that listen at ports of this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from typing import Any

import psutil
import pytest
from support.fake_engine import until

from asyncengine import AsyncEngine, EngineConfig, InvalidParameter
from asyncengine.errors import EngineError, ModelNotFound
from asyncengine.execution.device import shared_gather
from asyncengine.execution.runner import stage_host

from .rank_processes import load, mapped
from .test_processes import killed_in_mid_answer, scores

pytestmark = pytest.mark.skipif(shared_gather.missing() is not None, reason=str(shared_gather.missing()))


def serve(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed
        stage_host.serve_stages(listening, stage_host.stage_key())


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Addresses of two hosts with this process's key."""
    monkeypatch.setenv(stage_host.KEY, "a key of both")
    listening = [stage_host.listen("127.0.0.1:0") for _ in range(2)]
    for each in listening:
        threading.Thread(target=serve, args=(each,), daemon=True).start()
    yield [f"127.0.0.1:{each.getsockname()[1]}" for each in listening]
    for each in listening:
        each.shutdown(socket.SHUT_RDWR)  # who waits for a connection is woken
        each.close()


async def test_stages_elsewhere_answer_as_one_process(hosts: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Two stages of two ranks each, through sleep; then three stages, one of which is killed."""
    async with await load(1) as engine:
        expected = await scores(engine)
    settings = {"tensor_parallel": 2, "pipeline_parallel": 2, "stage_hosts": hosts[0]}
    async with await load(**settings) as engine:
        assert "4 processes" in engine.info.in_words
        assert await scores(engine) == expected
        await engine.sleep()
        await engine.wake()
        assert await scores(engine) == expected
        with pytest.raises(EngineError, match="export_prefix"):
            await engine.export_prefix(list(range(50, 90)), "/nowhere")
    async with await load(3, "pipeline_parallel", stage_hosts=hosts) as engine:  # the host is free again
        assert await scores(engine) == expected
        named = f"stage at {hosts[1]}"
        with caplog.at_level(logging.CRITICAL, "asyncengine"):
            await killed_in_mid_answer(engine, 3, rank=2, named=named)
    await until(lambda: not workers(), "the end of all ranks")
    del engine
    await until(lambda: not mapped(), "the end of all shared memory")


async def test_what_cannot_be_hosted_elsewhere_is_named(
    hosts: list[str], checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"pipeline_parallel": 2, "show_progress": False, "num_threads": 1}
    with pytest.raises(InvalidParameter, match="stage_hosts: must be 1, one for each stage"):
        EngineConfig(stage_hosts=hosts, **one)
    for wrong in ("nowhere", "host:0", "host:70000", [5]):
        with pytest.raises(InvalidParameter, match='stage_hosts: must be addresses "HOST:PORT"'):
            EngineConfig(stage_hosts=wrong, **one)
    with pytest.raises(InvalidParameter, match="kv_cache_dir: must be None with stage_hosts"):
        await AsyncEngine.from_pretrained("demo", stage_hosts=hosts[0], kv_cache_dir=True, **one)
    with pytest.raises(InvalidParameter, match="stage_hosts: this model cannot be split: layers read keys of layers"):
        await AsyncEngine.from_pretrained(str(checkpoint("gemma4")), stage_hosts=hosts[0], **one)
    only_here = os.open(checkpoint("llama"), os.O_RDONLY)  # a path of this process alone, as on another machine
    with pytest.raises(ModelNotFound, match=f"stage at {hosts[0]}: no folder '/proc/self/fd/{only_here}'"):
        await AsyncEngine.from_pretrained(f"/proc/self/fd/{only_here}", stage_hosts=hosts[0], **one)
    os.close(only_here)
    other = stage_host._connect(hosts[0], stage_host.stage_key())
    other.send(("0.0", 1, 2, 2))
    assert "and the engine 0.0" in other.recv()
    other.close()
    half = stage_host._connect(hosts[0], stage_host.stage_key())
    half.send((stage_host.release(), 1, 2, 2))
    assert not half.recv()
    with pytest.raises(AuthenticationError):  # a stranger comes between an engine's connections
        stage_host._connect(hosts[0], b"another")
    half.close()
    stage_host._connect(hosts[0], stage_host.stage_key()).close()  # the host is there still
    monkeypatch.setenv(stage_host.KEY, "another")
    with pytest.raises(EngineError, match=f"no free host of a stage with the same {stage_host.KEY} answers at"):
        await AsyncEngine.from_pretrained("demo", stage_hosts=hosts[0], **one)
    monkeypatch.delenv(stage_host.KEY)
    with pytest.raises(EngineError, match=f"set {stage_host.KEY} here and there"):
        await AsyncEngine.from_pretrained("demo", stage_hosts=hosts[0], **one)


def workers() -> int:
    """Ranks that the hosts, which are of this process, have started and not ended yet."""
    count = 0
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            count += "rank_worker" in " ".join(each.cmdline())
    return count


async def test_a_host_ends_its_ranks_when_the_engine_is_gone(hosts: list[str]) -> None:
    stage = stage_host.connect_stage(hosts[0], 1, 2, 2)
    await until(lambda: workers() == 1, "a rank of the stage")
    stage.child.life.close()
    await until(lambda: not workers(), "its end")
