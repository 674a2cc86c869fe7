"""Cost and gain of a fleet, on this machine: `python -m benchmarks.fleet cost|prefixes|loss|divide|apart`.

The first three run on Ray nodes of this machine, the others without Ray.

cost      one engine beside a fleet of one replica: CPU time of this program per token and stream, time to first token
prefixes  conversations of many turns on three replicas: cached tokens beside those of one engine
loss      a node is killed in the middle: how long until its streams end (or go on), and until it is replaced
divide    one engine on all cores beside a fleet whose replicas divide them, in turns: tokens a second of equal streams
apart     two replicas of half the machine, without roles and as "prefill" and "decode", in turns: time between tokens
          of running streams while long prompts arrive, and these prompts' time to the first token
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncengine import AsyncEngine, EngineDead, SamplingParams
from asyncengine.integrations.fleet import Fleet
from asyncengine.integrations.placement.routing import Role
from benchmarks.peers.shapes import SHAPES, write_checkpoint

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
        kills: list[Kill] = []
        async with fleet:
            for number in range(args.kills):
                if number:
                    cluster.add_node(num_cpus=2)  # in this thread: it sets handlers of signals
                kills.append(await _lose_one(fleet, cluster, args.tokens))
                print(kills[-1], flush=True)
    ended = [kill.ended for kill in kills if kill.dead]
    whole = [kill.whole for kill in kills]
    if ended:
        print(f"dead streams ended after the kill: median {statistics.median(ended):.2f} s, most {max(ended):.2f} s")
    print(f"fleet whole after the kill: median {statistics.median(whole):.1f} s, most {max(whole):.1f} s")


@dataclass(frozen=True)
class Kill:
    """Outcome for a fleet one of whose nodes was killed; seconds."""

    lost: int
    """Replicas that were on the node."""
    dead: int
    ended: float
    """From the kill to the end of the last stream that ended dead."""
    silent: float
    """The same from the replica's last word."""
    others: int
    exact: int
    resumed: int
    whole: float
    """From the kill until all replicas serve."""

    def __str__(self) -> str:
        return (
            f"{self.lost} replicas lost; {self.dead} streams ended dead, {self.ended:.2f} s after the kill, "
            f"{self.silent:.2f} s after the last word; {self.exact} of {self.others} others exact, {self.resumed} of "
            f"them elsewhere; replaced after {self.whole:.1f} s"
        )


async def _lose_one(fleet: Fleet, cluster: Any, tokens: int) -> Kill:
    """Kill a node on which streams are running, and wait until the fleet is whole again."""
    long = SamplingParams(max_tokens=tokens, temperature=1.0, seed=5, ignore_eos=True)
    texts = [f"A story about number {number}" for number in range(12)]
    streams = [fleet.stream(text, long) for text in texts]
    for stream in streams:
        await anext(stream)
    replicas = fleet.core.fleet.dispatcher.replicas
    elsewhere = [replica for replica in replicas.values() if replica.process.node != cluster.head_node.node_id]
    victim = max(elsewhere, key=lambda replica: len(replica.requests))
    if not victim.requests:
        raise RuntimeError("all streams had ended before a node could be killed: --tokens is too small")
    node = next(node for node in cluster.worker_nodes if node.node_id == victim.process.node)
    at, before = time.monotonic(), fleet.stats()
    killing = asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)

    async def end(stream: Any) -> tuple[float, float, list[int] | None]:
        """Seconds after the kill and after the replica's last word, and what it said."""
        try:
            said = (await stream.result()).token_ids
        except EngineDead:
            return time.monotonic() - at, time.monotonic() - victim.heard_at, None
        return 0.0, 0.0, said

    ends = (await asyncio.gather(killing, *(end(stream) for stream in streams)))[1:]
    while fleet.stats().lost == before.lost or len(replicas) < 3:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)
    whole = time.monotonic() - at
    dead = [(kill, word) for kill, word, said in ends if said is None]
    again = await asyncio.gather(*(fleet.generate(text, long) for text in texts))
    exact = sum(said == right.token_ids for (_, _, said), right in zip(ends, again, strict=True) if said is not None)
    ended, silent = [max(times, default=0.0) for times in zip(*dead, strict=True)] or [0.0, 0.0]
    now = fleet.stats()
    return Kill(
        lost=now.lost - before.lost, dead=len(dead), ended=ended, silent=silent, others=len(ends) - len(dead),
        exact=exact, resumed=now.resumed - before.resumed, whole=whole,
    )  # fmt: skip


async def divide(args: argparse.Namespace) -> None:
    settings = {**ENGINE, "num_threads": None, "kv_cache_memory": args.kv_cache_memory}
    replicas: Any = args.replicas if args.replicas == "numa" else int(args.replicas)
    made, ratios = args.streams * args.tokens, list[float]()
    async with (
        await AsyncEngine.from_pretrained(args.model, hosted=True, **settings) as engine,
        await Fleet.from_pretrained(args.model, replicas=replicas, address="local", **settings) as fleet,
    ):
        threads = [stats.threads.most for stats in (await fleet.replica_stats()).values()]
        print(f"one engine of {engine.stats().threads.most} threads, replicas of {threads}")
        for each in (engine, fleet):
            await _streams(each, args.streams, 16)
        for number in range(args.rounds):
            both = (engine, fleet) if number % 2 else (fleet, engine)
            seconds = {each: (await _streams(each, args.streams, args.tokens))[0] for each in both}
            ratios.append(seconds[engine] / seconds[fleet])
            print(f"engine {made / seconds[engine]:.1f} tokens/s, fleet {made / seconds[fleet]:.1f}", flush=True)
    print(f"fleet over engine: {statistics.median(ratios):.3f} (median), {min(ratios):.3f} to {max(ratios):.3f}")


APART: dict[str, tuple[Role, Role]] = {"both": ("both", "both"), "apart": ("prefill", "decode")}


async def apart(args: argparse.Namespace) -> None:
    settings = {**ENGINE, "num_threads": None, "kv_cache_memory": args.kv_cache_memory}
    model = args.model
    if model in SHAPES:
        model = write_checkpoint(SHAPES[model], "bfloat16", Path(tempfile.gettempdir()) / f"asyncengine-{model}")
    random_ids, figures = random.Random(1), {name: list[list[float]]() for name in APART}
    async with await Fleet.from_pretrained(model, replicas=2, address="local", **settings) as fleet:
        replicas = fleet.core.fleet.dispatcher.replicas
        while not all(replica.peer for replica in replicas.values()):  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.05)
        for number in range(-1, args.rounds):
            for name in list(APART)[:: 1 if number % 2 else -1]:
                for replica, role in zip(replicas, APART[name], strict=True):
                    await fleet.set_role(replica, role)
                found = await _disturb(fleet, args, random_ids)
                if number >= 0:  # after a round to warm up
                    figures[name].append(found)
                    print(name, " ".join(f"{value:.1f}" for value in found), flush=True)
        stats = fleet.stats()
    print(f"{stats.prefilled} prompts pulled, others: {dict(stats.prefills_failed)}; medians of {args.rounds} rounds:")
    print("          ms between two tokens: p50, p99, most; tokens/s; ms to a prompt's first token: p50, most")
    for name, rounds in figures.items():
        print(f"{name:9}", " ".join(f"{statistics.median(values):9.1f}" for values in zip(*rounds, strict=True)))
    ratios = [one[1] / other[1] for one, other in zip(figures["apart"], figures["both"], strict=True)]
    print(f"p99, apart over both: {statistics.median(ratios):.3f} (median), {min(ratios):.3f} to {max(ratios):.3f}")


async def _disturb(fleet: Fleet, args: argparse.Namespace, random_ids: random.Random) -> list[float]:
    """Milliseconds between two tokens of running streams (p50, p99, most) while long prompts arrive, one every
    `args.gap` seconds; the streams' tokens a second; milliseconds to the prompts' first tokens (p50, most)."""
    forever = SamplingParams(max_tokens=args.context, temperature=0, ignore_eos=True)
    gaps, firsts, over = list[float](), list[float](), asyncio.Event()
    vocab = fleet.info.vocab_size

    def ids(count: int) -> list[int]:
        return [random_ids.randrange(3, vocab - 1) for _ in range(count)]

    async def stream(running: asyncio.Event) -> None:
        async with fleet.stream(ids(32), forever) as chunks:
            last = 0.0
            async for _ in chunks:
                now = time.perf_counter()
                if running.is_set() and begun.is_set():
                    gaps.append(now - last)
                last = now
                running.set()
                if over.is_set():
                    return

    async def prompt(after: float) -> None:
        await asyncio.sleep(after)
        at = time.perf_counter()
        await fleet.generate(ids(args.prompt), forever.replace(max_tokens=1))
        firsts.append(time.perf_counter() - at)

    begun, all_running = asyncio.Event(), [asyncio.Event() for _ in range(args.streams)]
    streams = asyncio.gather(*(stream(running) for running in all_running))
    for running in all_running:
        await running.wait()
    begun.set()
    at = time.perf_counter()
    await asyncio.gather(*(prompt(number * args.gap) for number in range(args.prompts)))
    seconds = time.perf_counter() - at
    over.set()
    await streams
    while any(fleet.stats().loads.values()):  # noqa: ASYNC110  # the next round must not find them there
        await asyncio.sleep(0.02)
    gaps.sort()
    latency = [gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100], gaps[-1]]
    first = [statistics.median(firsts), max(firsts)]
    return [*(1e3 * each for each in latency), len(gaps) / seconds, *(1e3 * each for each in first)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "prefixes", "loss", "divide", "apart"))
    parser.add_argument("--streams", type=int, help="64, with divide 16, with apart 4")
    parser.add_argument("--tokens", type=int, help="of each stream; 200, with loss 1000")
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=6, help="turns under way at once")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--kills", type=int, default=1, help="nodes, one after the other")
    parser.add_argument("--model", default="demo", help="with divide and apart; with apart also a shape of peers")
    parser.add_argument("--replicas", default="2", help='with divide: a number, or "numa"')
    parser.add_argument("--rounds", type=int, default=8, help="with divide and apart: of each of the two")
    parser.add_argument("--kv-cache-memory", default="64MiB", help="with divide and apart: of each engine")
    parser.add_argument("--prompts", type=int, default=6, help="with apart: in a round")
    parser.add_argument("--prompt", type=int, default=1024, help="with apart: tokens of each")
    parser.add_argument("--gap", type=float, default=2.0, help="with apart: seconds between two of them")
    parser.add_argument("--context", type=int, default=3000, help="with apart: most tokens of a stream")
    args = parser.parse_args()
    args.tokens = args.tokens or (1000 if args.what == "loss" else 200)
    args.streams = args.streams or {"divide": 16, "apart": 4}.get(args.what, 64)
    works = {"cost": cost, "prefixes": prefixes, "loss": loss, "divide": divide, "apart": apart}
    asyncio.run(works[args.what](args))


if __name__ == "__main__":
    main()
