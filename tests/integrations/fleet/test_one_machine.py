"""A fleet without Ray: replicas in processes of this machine, each bound to its share, what becomes of them, and what
is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.data import cases_of
from support.fake_engine import until
from support.local_fleet import ENGINE
from support.picture_models import chat, picture, save_picture_model, words

from asyncengine import AsyncEngine, EngineConfig, EngineDead, FleetError, InvalidParameter, ModelNotFound
from asyncengine.execution.device.topology import MemoryNode, divide, memory_nodes
from asyncengine.integrations.fleet import Fleet, FleetConfig, frontend
from asyncengine.integrations.fleet.frontend import OneMachine, runs_here
from asyncengine.sampling_params import SamplingParams

ROWS: dict[str, Any] = cases_of(__file__)

TEXTS = [f"Question {number}: what is the capital of the country numbered {number * 7}?" for number in range(8)]
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
PROMPT = [100 + (7 * place) % 300 for place in range(200)]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)


def processes() -> dict[int, psutil.Process]:
    """Replicas of fleets of this process, by process id."""
    return {
        each.pid: each for each in psutil.Process().children() if "replica_program" in " ".join(each.cmdline())
    }  # fmt: skip


def cores() -> list[list[int]]:
    return sorted(each.cpu_affinity() for each in processes().values())


async def test_two_replicas_of_half_the_machine() -> None:
    """They answer as one engine, keep prefixes, and one that is killed ends its own streams and is replaced where it
    was. Nothing is left of them."""
    settings = {**ENGINE, "num_threads": None}
    async with await AsyncEngine.from_pretrained("demo", **settings) as engine:
        right = [(await engine.generate(text, SAMPLED)).token_ids for text in TEXTS]
    async with await Fleet.from_pretrained("demo", replicas=2, **settings) as fleet:
        bound, mine = cores(), os.sched_getaffinity(0)
        shares = divide(memory_nodes(), 2)
        assert bound == sorted(sorted(share.cpus) for share in shares)
        answers = await asyncio.gather(*(fleet.generate(text, SAMPLED) for text in TEXTS))
        assert [answer.token_ids for answer in answers] == right
        assert os.sched_getaffinity(0) == mine, "this process is as free as before"
        stats = await fleet.replica_stats()
        assert sorted(each.threads.most for each in stats.values()) == sorted(len(share.cores) for share in shares)
        assert all(each.finished["length"] for each in stats.values()), "both have work"

        assert (await fleet.generate(PROMPT, SAMPLED)).usage.cached_tokens == 0
        await until(lambda: fleet.stats().pages.cached >= len(PROMPT) // 16, "news of a cache")
        again = await asyncio.gather(*(fleet.generate([*PROMPT, number], SAMPLED) for number in range(3)))
        assert [answer.usage.cached_tokens for answer in again] == [len(PROMPT) // 16 * 16] * 3

        replicas = fleet.core.fleet.dispatcher.replicas  # type: ignore[attr-defined]
        victim = replicas[next(iter(replicas))]
        killed = victim.process.child.program.pid
        os.kill(killed, signal.SIGSTOP)  # what it is sent from now on has no end when it is killed
        streams = [fleet.stream(text, SAMPLED) for text in TEXTS]
        for stream in streams:
            await stream.__aenter__()
        await until(lambda: fleet.stats().loads.get(victim.name, 0) == len(TEXTS) / 2, "half of them there")
        doomed = {request.spec.prompt for request in victim.requests.values()}
        os.kill(killed, signal.SIGKILL)
        for text, stream, tokens in zip(TEXTS, streams, right, strict=True):
            if tuple(fleet.tokenize(text)) in doomed:
                with pytest.raises(EngineDead, match=rf"was lost: its process \({killed}\) was killed"):
                    await stream.result()
            else:
                assert (await stream.result()).token_ids == tokens
        assert len(doomed) == len(TEXTS) / 2
        await until(lambda: len(replicas) == 2, "a replacement")
        assert cores() == bound
        assert killed not in processes()
        assert (await fleet.generate(TEXTS[0], SAMPLED)).token_ids == right[0]
    assert not processes()


async def test_pictures_are_read_where_their_requests_are_computed(tmp_path: Path) -> None:
    """Answers of one engine, by replicas in other processes; also by one that goes on after another was killed, and
    about a picture that this process knows already."""
    save_picture_model("qwen3_vl", tmp_path)
    settings = {**ENGINE, "max_image_side": 300}
    chats = [chat(words(number, 5), picture(number % 3), "what?") for number in range(6)]
    async with await AsyncEngine.from_pretrained(tmp_path, **settings) as engine:
        right = [(await engine.chat(each, SAMPLED)).token_ids for each in chats]
        longest = (await engine.chat(chats[0], SAMPLED.replace(max_tokens=400))).token_ids
    assert len({tuple(each) for each in right}) == len(chats)
    async with await Fleet.from_pretrained(tmp_path, replicas=2, on_loss="resume", **settings) as fleet:
        assert fleet.info.no_images is None
        for _ in range(2):
            answers = await asyncio.gather(*(fleet.chat(each, SAMPLED) for each in chats))
            assert [answer.token_ids for answer in answers] == right
        stats = await fleet.replica_stats()
        assert all(each.images.encoded for each in stats.values()), "both have work"
        while not fleet.stats().resumed:  # on a busy machine the answer may be whole before its process is killed
            stream = fleet.stream_chat(chats[0], SAMPLED.replace(max_tokens=400))
            await anext(stream)
            await fleet.kill_one()
            assert (await stream.result()).token_ids == longest


async def test_errors_of_a_process_keep_their_types_and_its_end_its_reason() -> None:
    machine = OneMachine(FleetConfig(), "fleet")
    try:
        process = machine.spawn()
        with pytest.raises(ModelNotFound):
            await process.call("start", "no/such/folder", EngineConfig(), timeout=60)
        with pytest.raises(FleetError, match="did not answer hello within 0 s"):
            await process.call("hello", timeout=0)
        process.connection.post(b"not a list of commands")
        with pytest.raises(FleetError, match=r"fleet/0 was lost: its process \(\d+\) failed: .*UnpicklingError"):
            async for _ in process.connection.updates():
                pass
        with pytest.raises(FleetError, match=r"failed: .*UnpicklingError"):
            await process.call("hello", timeout=60)
    finally:
        machine.close()
    assert not processes()


ABANDONED = """
import asyncio
from asyncengine.integrations.fleet import FleetConfig
from asyncengine.integrations.fleet.frontend import OneMachine
process = OneMachine(FleetConfig(), "fleet").spawn()
asyncio.run(process.call("hello", timeout=60))
print(process.child.program.pid, flush=True)
input()
"""


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ended without closing"])
def test_a_fleet_that_is_gone_leaves_no_process(killed: bool) -> None:
    """Replicas see by themselves that their fleet is gone: nobody is there to end them."""
    start = [sys.executable, "-c", ABANDONED]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        replica = psutil.Process(int(program.stdout.readline()))
        if killed:
            program.kill()
        else:
            program.stdin.write("\n")
            program.stdin.close()
        gone, alive = psutil.wait_procs([replica], timeout=60)
    assert not alive
    assert gone


# ---------------------------------------------------------------- places


class Stub:
    """A process that is none."""

    def __init__(self, name: str, place: int, share: Any, gpu: str) -> None:
        self.name, self.share_index, self.share, self.gpu, self.killed = name, place, share, gpu, False

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [MemoryNode(0, ((0, 4), (2, 6), (8,)), 2**30), MemoryNode(5, ((1, 5),), 2**20)]
    monkeypatch.setattr(frontend, "memory_nodes", lambda: nodes)
    monkeypatch.setattr(frontend, "LocalReplica", Stub)


def places(found: list[Any]) -> list[tuple[set[int], tuple[int, ...]]]:
    return [(each.share.cpus, each.share.nodes) for each in found]


@pytest.mark.usefixtures("two_nodes")
def test_a_replica_for_each_memory_node_or_for_equal_parts() -> None:
    machine = OneMachine(FleetConfig(replicas="numa"), "fleet")
    assert places([machine.spawn() for _ in range(machine.replicas)]) == [({0, 2, 4, 6, 8}, (0,)), ({1, 5}, (5,))]
    machine = OneMachine(FleetConfig(replicas=2), "fleet")
    assert places([machine.spawn(), machine.spawn()]) == [({0, 2, 4, 6}, (0,)), ({1, 5, 8}, (0, 5))]


@pytest.mark.usefixtures("two_nodes")
def test_a_place_is_filled_again_by_whoever_comes_next() -> None:
    machine = OneMachine(FleetConfig(replicas=2), "fleet")
    running: list[Any] = [machine.spawn(), machine.spawn()]
    for old in running[:]:  # as `restart` does
        running.append(machine.spawn())
        assert running[-1].share_index == old.share_index
        machine.end(old)
    assert old.killed
    machine.end(running[3], lost=True)
    running.append(machine.spawn())
    assert (running[4].name, running[4].share_index) == ("fleet/4", running[3].share_index)
    third: Any = machine.spawn()  # a fleet that was made larger
    alone = next(each for each in (running[2], running[4]) if each.share_index != third.share_index)
    assert machine.removal_scores() == {running[2].name: 0.5, running[4].name: 0.5, third.name: 0.5} | {alone.name: 1}
    machine.close()
    assert all(each.killed for each in (*running, third))


@pytest.mark.usefixtures("two_nodes")
def test_a_replica_that_no_node_has_room_for_is_refused() -> None:
    machine = OneMachine(FleetConfig(replicas="numa", replica_memory="1GiB"), "fleet")
    with pytest.raises(FleetError, match=r"\(1\.00 GiB\): memory nodes \[5\] have 0\.00 GiB; fewer replicas have more"):
        machine.prepare("demo", EngineConfig())
    OneMachine(FleetConfig(replicas=1, replica_memory="1GiB"), "fleet").prepare("demo", EngineConfig())


@pytest.mark.usefixtures("two_nodes")
def test_gpus_are_divided_and_hidden_from_who_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    none: Any = OneMachine(FleetConfig(replicas=1), "fleet").spawn()
    assert none.gpu == ""
    machine = OneMachine(FleetConfig(replicas=3, num_gpus=0.5), "fleet")
    found: list[Any] = [machine.spawn() for _ in range(3)]
    assert [each.gpu for each in found] == ["3", "3", "5"]
    with pytest.raises(FleetError, match="every GPU has its own"):
        machine.spawn()
    machine.end(found[1])
    successor: Any = machine.spawn()
    assert successor.gpu == "3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(frontend, "read_devices", lambda: (2**34, 2**34))
    with pytest.raises(FleetError, match="no room for 3 replicas: 2 fit"):
        OneMachine(FleetConfig(replicas=3, num_gpus=1.0), "fleet")


@pytest.mark.parametrize(
    ("settings", "ray", "here"),
    [
        ({}, None, True),
        ({}, SimpleNamespace(is_initialized=lambda: False), True),
        ({}, SimpleNamespace(is_initialized=lambda: True), False),
        ({"address": "local"}, SimpleNamespace(is_initialized=lambda: True), True),
        ({"address": "head:1"}, None, False),
    ],
)
def test_ray_is_used_where_it_is_named_or_there(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], ray: Any, here: bool
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert runs_here(FleetConfig(**settings)) is here
    monkeypatch.setenv("RAY_ADDRESS", "head:1")
    assert runs_here(FleetConfig(**settings)) is (settings.get("address") == "local")


@pytest.mark.parametrize(("settings", "said"), ROWS["what_makes_no_sense_here_is_refused"])
async def test_what_makes_no_sense_here_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        await Fleet.from_pretrained("demo", **settings)


def test_a_ray_cluster_knows_no_memory_nodes() -> None:
    from asyncengine.integrations.fleet.ray_cluster import RayCluster

    with pytest.raises(InvalidParameter, match="replicas: must be a number with Ray"):
        RayCluster(FleetConfig(replicas="numa", address="auto"), "fleet")
