"""What a fleet costs and gains, on three Ray nodes of this machine: `python -m benchmarks.fleet cost|prefixes|loss`.

cost      one engine beside a fleet of one replica: CPU time of this program per token and stream, time to first token
prefixes  conversations of many turns on three replicas: cached tokens beside those of one engine
loss      a node is killed in the middle: how long until its streams end (or go on), and until it is replaced
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

from asyncengine import AsyncEngine, EngineDead, SamplingParams
from asyncengine.cluster.fleet import Fleet

ENGINE: dict[str, Any] = {"num_threads": 1, "kv_cache_memory": "64MiB", "show_progress": False}


@contextlib.asynccontextmanager
async def ray_nodes(count: int, cpus: int) -> AsyncIterator[Any]:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": cpus, "include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count - 1):
            cluster.add_node(num_cpus=cpus)
        yield cluster
    finally:
        cluster.shutdown()


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def _streams(engine: AsyncEngine, count: int, tokens: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, for `count` streams of `tokens` tokens at once."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    async def one(number: int) -> None:
        async for _ in engine.stream(f"Count the {number} sheep.", params):
            pass

    began, cpu = time.perf_counter(), _cpu()
    await asyncio.gather(*(one(number) for number in range(count)))
    return time.perf_counter() - began, _cpu() - cpu


async def _first_tokens(engine: AsyncEngine, count: int) -> float:
    """Median seconds to the first token of single requests, one after the other."""
    params, times = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True), []
    for number in range(count):
        began = time.perf_counter()
        await engine.generate([3 + number % 50, 5, 7, 11], params)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def cost(args: argparse.Namespace) -> None:
    async with await AsyncEngine.from_pretrained("demo", hosted=True, **ENGINE) as engine:
        await _streams(engine, 4, 8)
        alone_first = await _first_tokens(engine, 200)
        alone = await _streams(engine, args.streams, args.tokens)
    async with ray_nodes(1, 2) as cluster:
        fleet = await Fleet.from_pretrained("demo", replicas=1, address=cluster.address, **ENGINE)
        async with fleet:
            await _streams(fleet, 4, 8)
            fleet_first = await _first_tokens(fleet, 200)
            carried = await _streams(fleet, args.streams, args.tokens)
    made = args.streams * args.tokens
    print(f"{args.streams} streams of {args.tokens} tokens: one engine {alone[0]:.2f} s, fleet {carried[0]:.2f} s")
    print(f"CPU of this program per token and stream, engine not included: {carried[1] / made * 1e6:.1f} us")
    print(f"wall time per token and stream: {(carried[0] - alone[0]) / made * 1e6:+.1f} us beside one engine")
    print(f"first token, median: {alone_first * 1e3:.2f} ms alone, {fleet_first * 1e3:.2f} ms in the fleet")


async def _talk(engine: AsyncEngine, conversations: int, turns: int, at_once: int) -> tuple[int, int]:
    """Cached and all prompt tokens of conversations that grow turn by turn."""
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    places, cached, prompts = asyncio.Semaphore(at_once), 0, 0

    async def one(number: int) -> None:
        nonlocal cached, prompts
        text = f"You are the assistant of customer {number}, who speaks of {number * 17} things. " * 4
        for turn in range(turns):
            text += f"\nQ{turn}: and what about number {number * 100 + turn}?\nA:"
            async with places:
                answer = await engine.generate(text, params)
            text += answer.text
            cached += answer.usage.cached_tokens
            prompts += answer.usage.prompt_tokens

    await asyncio.gather(*(one(number) for number in range(conversations)))
    return cached, prompts


async def prefixes(args: argparse.Namespace) -> None:
    async with await AsyncEngine.from_pretrained("demo", **ENGINE) as engine:
        alone = await _talk(engine, args.conversations, args.turns, args.at_once)
    async with ray_nodes(3, 2) as cluster:
        fleet = await Fleet.from_pretrained("demo", replicas=3, address=cluster.address, **ENGINE)
        async with fleet:
            carried = await _talk(fleet, args.conversations, args.turns, args.at_once)
            print({name: s.prompt_tokens for name, s in (await fleet.replica_stats()).items()})
    print(f"one engine: {alone[0]} of {alone[1]} prompt tokens cached ({alone[0] / alone[1]:.3f})")
    print(
        f"3 replicas: {carried[0]} of {carried[1]} ({carried[0] / carried[1]:.3f}), {carried[0] / alone[0]:.3f} of it"
    )


async def loss(args: argparse.Namespace) -> None:
    async with ray_nodes(3, 2) as cluster:
        fleet = await Fleet.from_pretrained(
            "demo", replicas=3, address=cluster.address, on_loss="resume" if args.resume else "error", **ENGINE
        )
        async with fleet:
            for _ in range(args.kills):
                await _lose_one(fleet, cluster, args.tokens)
                cluster.add_node(num_cpus=2)


async def _lose_one(fleet: Fleet, cluster: Any, tokens: int) -> None:
    """Kill a node on which streams are running, and wait until the fleet is whole again."""
    long = SamplingParams(max_tokens=tokens, temperature=1.0, seed=5, ignore_eos=True)
    texts = [f"A story about number {number}" for number in range(12)]
    streams = [fleet.stream(text, long) for text in texts]
    for stream in streams:
        await anext(stream)
    members = fleet.door.fleet.crew.members
    head = cluster.head_node.node_id
    victim = next(m for m in members.values() if m.host.node != head and m.flights)
    node = next(node for node in cluster.worker_nodes if node.node_id == victim.host.node)
    at, resumed = time.monotonic(), fleet.stats().resumed
    killing = asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)

    async def end(stream: Any) -> tuple[float, float, list[int] | None]:
        """Seconds after the kill and after the replica's last word, and what it said."""
        try:
            said = (await stream.result()).token_ids
        except EngineDead:
            return time.monotonic() - at, time.monotonic() - victim.heard_at, None
        return 0.0, 0.0, said

    ends = (await asyncio.gather(killing, *(end(stream) for stream in streams)))[1:]
    while len(members) < 3:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)
    whole = time.monotonic() - at
    dead = [(kill, word) for kill, word, said in ends if said is None]
    again = [(await fleet.generate(text, long)).token_ids for text in texts]
    exact = sum(said == right for (_, _, said), right in zip(ends, again, strict=True) if said is not None)
    after = [max(times, default=0.0) for times in zip(*dead, strict=True)] or [0.0, 0.0]
    print(
        f"{len(dead)} streams ended dead, {after[0]:.2f} s after the kill, {after[1]:.2f} s after the last word; "
        f"{exact} of {len(ends) - len(dead)} others exact, {fleet.stats().resumed - resumed} of them elsewhere; "
        f"replaced after {whole:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "prefixes", "loss"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=6, help="turns under way at once")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kills", type=int, default=1, help="nodes, one after the other")
    args = parser.parse_args()
    asyncio.run({"cost": cost, "prefixes": prefixes, "loss": loss}[args.what](args))


if __name__ == "__main__":
    main()
