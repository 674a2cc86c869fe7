"""A fleet on real Ray: three raylets on this machine, the bundled model, one node killed in the middle of it all.

Short by default: two replicas. ASYNCENGINE_LONG=10 asks for three and more streams, and for one replica more than
nodes; the same scenes then take minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.data import cases_of
from support.long import TIMES

from asyncengine import AsyncEngine, Engine, EngineDead, FleetError, InvalidParameter, SamplingParams
from asyncengine.integrations.fleet import Fleet
from asyncengine.integrations.fleet.placing import DEVICE_MEMORY

ROWS: dict[str, Any] = cases_of(__file__)

STREAMS = 100 * TIMES
REPLICAS = 2 if STREAMS <= 100 else 3
ENGINE: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "32MiB", "show_progress": False, "dtype": "float32"}
TEXTS = [f"Tell me about city {number} and the {number * 3} rivers that meet there, please." for number in range(10)]
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=11, ignore_eos=True)
PATIENCE = 60.0
"""Seconds that something may take on a busy machine before a test says that it does not come about."""


async def come(condition: Any, what: str, most: float = PATIENCE) -> float:
    """Seconds until `condition` holds."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > most:
            raise AssertionError(f"{what} did not come about within {most} s")
        await asyncio.sleep(0.02)
    return time.monotonic() - start


def processes_of(session: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if session in path.read_text() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Three raylets with room for two replicas each. Nothing of them is left behind."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # else no node may say that it has one
    pytest.importorskip("ray", reason='needs ray: pip install "asyncengine[cluster]"')
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    head["_system_config"] = {"prestart_worker_first_driver": False}  # as little as can be of what nobody has asked for
    cluster = Cluster(initialize_head=True, head_node_args=head)
    session = Path(cluster.head_node.get_session_dir_path()).name
    try:
        cluster.add_node(num_cpus=2, labels={"zone": "north"}, wait=False)
        cluster.add_node(num_cpus=2, num_gpus=1, labels={"zone": "south", DEVICE_MEMORY: "1GiB"}, wait=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        import ray

        ray.shutdown()
        cluster.shutdown()
        deadline = time.monotonic() + 20
        while (left := processes_of(session)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, 9)
        assert not left


@pytest.fixture(scope="module")
def right() -> dict[str, list[int]]:
    """One engine's answer to each text."""
    with Engine.from_pretrained("demo", **ENGINE) as engine:
        return {text: engine.generate(text, PARAMS).token_ids for text in TEXTS}


async def visit(engine: AsyncEngine, number: int, right: dict[str, list[int]], rng: random.Random) -> bool:
    """Reads one stream; about a third leave early. True: it was read to its end."""
    text, stays = TEXTS[number % len(TEXTS)], rng.randrange(-40, 20)
    tokens: list[int] = []
    async with engine.stream(text, PARAMS) as stream:
        async for chunk in stream:
            tokens += chunk.token_ids
            if 0 < stays <= len(tokens):
                break
    assert tokens == right[text][: len(tokens)]
    return len(tokens) == PARAMS.max_tokens


async def nothing_held(fleet: Fleet) -> None:
    await come(lambda: not any(fleet.stats().loads.values()), "a fleet without requests")

    async def held() -> int:
        stats = (await fleet.replica_stats()).values()
        return sum(sum(s.requests.values()) + s.pages.held + s.pages.shared + s.pages.retiring for s in stats)

    gives_up = time.monotonic() + PATIENCE
    while await held():
        assert time.monotonic() < gives_up, "replicas hold something"
        await asyncio.sleep(0.05)


REFUSED: dict[str, tuple[dict[str, Any], str]] = ROWS["refused"]
"""Settings that no node meets, and what is said of each node: read from Ray's own figures and labels."""


async def refusals(fleet: Fleet, cluster: Any) -> None:
    """Checks refusals beside a fleet that has a part of everything."""
    with pytest.raises(InvalidParameter, match="another fleet has it"):
        await Fleet.from_pretrained("demo", name="three", **ENGINE)
    for settings, said in REFUSED.values():
        with pytest.raises(FleetError, match="no room for a replica .*" + said):
            await Fleet.from_pretrained("demo", **settings, **ENGINE)


async def reserved(fleet: Fleet) -> None:
    """Each replica is on a node of its own, and has there what was claimed for it, no more and no less."""
    from ray._private import state

    hosts = [replica.process for replica in fleet.core.fleet.dispatcher.replicas.values()]
    assert len({host.node for host in hosts}) == len(hosts)

    def taken(node: str) -> list[float]:
        free, total = state.available_resources_per_node()[node], state.total_resources_per_node()[node]
        return [total[kind] - free.get(kind, 0) for kind in ("CPU", "memory")]

    for host in hosts:
        wanted = [1, host.placed.shares[0].host_bytes]
        await come(lambda node=host.node, wanted=wanted: taken(node) == wanted, f"a reservation of {wanted}")
    assert hosts[0].placed.shares[0].host_bytes > 32 * 2**20  # keys and values are the least of it


@pytest.mark.ray
async def test_three_raylets(cluster: Any, right: dict[str, list[int]]) -> None:
    rng = random.Random(1)
    settings = {**ENGINE, "address": cluster.address, "start_timeout": 120.0}
    async with await Fleet.from_pretrained("demo", replicas=REPLICAS, name="three", **settings) as fleet:
        members = fleet.core.fleet.dispatcher.replicas
        await reserved(fleet)
        await refusals(fleet, cluster)

        whole = await asyncio.gather(*(visit(fleet, number, right, rng) for number in range(STREAMS)))
        assert sum(whole) > STREAMS * 0.5
        await nothing_held(fleet)

        long = PARAMS.replace(max_tokens=3900)  # on no machine may they end before the node does
        streams = [fleet.stream(text, long) for text in TEXTS]
        heads = [(await anext(stream)).token_ids for stream in streams]
        head_node = cluster.head_node.node_id
        victim = next(m for m in members.values() if m.process.node != head_node and m.requests)
        doomed = {request.spec.prompt for request in victim.requests.values()}
        killed_at = time.monotonic()
        cluster.remove_node(
            next(n for n in cluster.worker_nodes if n.node_id == victim.process.node), allow_graceful=False
        )
        for text, stream, head in zip(TEXTS, streams, heads, strict=True):
            if tuple(fleet.tokenize(text)) in doomed:
                with pytest.raises(EngineDead, match="was lost"):
                    await stream.result()
                print(f"its stream ended {time.monotonic() - killed_at:.1f} s after the node")
            else:
                both = min(len(head), len(right[text]))  # with guesses, the first chunk may be as long as any
                assert both
                assert head[:both] == right[text][:both]
                stream.abort()
                tokens = (await stream.result()).token_ids  # as many as came before the abort: the node may die early
                both = min(len(tokens), len(right[text]))
                assert tokens[: len(head)] == head
                assert tokens[:both] == right[text][:both]
        took = await come(lambda: len(members) == REPLICAS, "a replacement")
        print(f"replaced {time.monotonic() - killed_at:.1f} s after the node was killed (waited {took:.1f} s)")
        assert (await fleet.generate(TEXTS[0], PARAMS)).token_ids == right[TEXTS[0]]
        if TIMES > 1:
            await fleet.scale(3)  # on the two nodes that are left
            await fleet.scale(2)
            nodes = {replica.process.node for replica in members.values()}
            assert len(nodes) == 2, "one of those that shared a node went"
        await fleet.scale(1)
        (left,) = members.values()
        await ranks_on_one_node(left.process.node, right, settings)
    await stages_on_two_nodes(cluster, right, settings)


def free_cores() -> dict[str, float]:
    """Number of CPUs that are free on each node."""
    from ray._private import state

    return {node: free.get("CPU", 0) for node, free in state.available_resources_per_node().items()}


async def ranks_on_one_node(taken: str, right: dict[str, list[int]], settings: dict[str, Any]) -> None:
    """A replica of two ranks has both cores of the node that is free, and its ranks end with it."""
    await come(lambda: 2 in free_cores().values(), "a node that is free")
    async with await Fleet.from_pretrained("demo", **{**settings, "tensor_parallel": 2, "num_threads": 2}) as fleet:
        (replica,) = fleet.core.fleet.dispatcher.replicas.values()
        node = replica.process.node
        assert node != taken
        await come(lambda: not free_cores()[node], "a bundle of two cores")
        assert fleet.info.tensor_parallel == 2
        for text in TEXTS[:2]:
            assert (await fleet.generate(text, PARAMS)).token_ids == right[text]
        (rank,) = rank_workers()
        await fleet.kill_one()
        await come(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, "the end of its rank")


async def stages_on_two_nodes(cluster: Any, right: dict[str, list[int]], settings: dict[str, Any]) -> None:
    """A pipeline that has no room on one node has a stage on each of two. When one of them is killed, streams end with
    the reason, and the replica is placed anew on the nodes that are left."""
    staged = {**settings, "pipeline_parallel": 2, "num_cpus": 1.5}
    ray = pytest.importorskip("ray")
    ray.init(cluster.address, log_to_driver=False)
    try:  # Ray hears a moment later than the program that the fleet before this one has gone
        await come(lambda: sum(free >= 1.5 for free in free_cores().values()) >= 2, "two nodes that are free")
    finally:
        ray.shutdown()
    async with await Fleet.from_pretrained("demo", **staged) as fleet:
        members = fleet.core.fleet.dispatcher.replicas
        (first,) = members.values()
        nodes = [share.node for share in first.process.placed.shares]
        assert len(set(nodes)) == 2
        assert fleet.info.pipeline_parallel == 2
        for text in TEXTS[:2]:
            assert (await fleet.generate(text, PARAMS)).token_ids == right[text]
        cluster.add_node(num_cpus=2)
        stream = fleet.stream(TEXTS[0], PARAMS.replace(max_tokens=3900))
        await anext(stream)
        victim = next(node for node in cluster.worker_nodes if node.node_id in nodes)
        cluster.remove_node(victim, allow_graceful=False)
        with pytest.raises(EngineDead, match=r"was lost|was killed or has ended"):
            await stream.result()
        await come(lambda: members and first not in members.values(), "a replacement")
        (second,) = members.values()
        assert victim.node_id not in [share.node for share in second.process.placed.shares]
        assert (await fleet.generate(TEXTS[0], PARAMS)).token_ids == right[TEXTS[0]]


def rank_workers() -> list[psutil.Process]:
    """Other ranks of replicas on this machine: children of actors of a fleet."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            parent = each.parent() if "rank_worker" in " ".join(each.info["cmdline"] or ()) else None
            if parent is not None and "ray::" in "".join(parent.cmdline()):
                found.append(each)
    return found


@pytest.mark.ray
async def test_a_head_that_does_not_answer_is_named() -> None:
    pytest.importorskip("ray", reason='needs ray: pip install "asyncengine[cluster]"')
    with pytest.raises(FleetError, match=r"no Ray head answers at 127\.0\.0\.1:1"):
        await Fleet.from_pretrained("demo", address="127.0.0.1:1", **ENGINE)


async def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FleetError, match=r'pip install "asyncengine\[cluster\]"'):
        await Fleet.from_pretrained("demo", address="auto", **ENGINE)
