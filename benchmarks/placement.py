"""Time of one placement on a large cluster, and whether a million of them leak anything.

    python -m benchmarks.placement                 # 10,000 nodes of eight devices, filled to a half
    python -m benchmarks.placement --leak 1000000  # so many placements, each removed again, on 32 nodes

No model, no torch: only `asyncengine.cluster`. The claims are of every stage, with labels and backends to filter. A
fifth of them fits nowhere, which takes longest: every stage is tried and what would have fitted is worked out.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
import time
from collections.abc import Iterator

from asyncengine.integrations.placement import Claim, Cluster, Device, Instance, Node, Placement, Share, place

GIB = 2**30


def make_nodes(count: int, devices: int, draw: random.Random) -> list[Node]:
    return [
        Node(
            name=f"node-{number}",
            host_memory=512 * GIB,
            devices=tuple(Device(index=index, memory=80 * GIB) for index in range(devices)),
            labels={"zone": str(number % 8), "host": f"node-{number}"},
            backends={"asyncengine": ["0.2"]} if number % 10 else {},
            files=[f"model-{draw.randrange(64)}" for _ in range(3)],
            ready=number % 50 != 0,
        )
        for number in range(count)
    ]


def claims(draw: random.Random) -> Iterator[tuple[str, Claim]]:
    """(what it is, claim), without end."""
    while True:
        name = f"model-{draw.randrange(64)}"
        zone = {"labels": {"zone": str(draw.randrange(8))}} if draw.random() < 0.3 else {}
        small, large, huge = (draw.randrange(*sizes) * GIB for sizes in ((2, 60), (90, 500), (700, 2400)))
        yield "one device", Claim(model=name, device_bytes=small, backend="asyncengine", **zone)
        yield "several devices", Claim(model=name, device_bytes=large, split=(64,), **zone)
        yield (
            "several nodes",
            Claim(model=name, device_bytes=huge, split=(64,), several_nodes=True, **zone),
        )
        yield "host", Claim(model=name, cpu_bytes=small, labels={"zone": "3"})
        yield (
            "refused",
            Claim(model=name, device_bytes=2**52, cpu_bytes=2**52, split=(64,), several_nodes=True),
        )


def measure(nodes: int, devices: int, placements: int, strategy: str, *, seed: int) -> dict[str, object]:
    """Milliseconds of one placement, on a cluster that is filled to a half."""
    draw = random.Random(seed)
    table = Cluster(make_nodes(nodes, devices, draw))
    for node in table.nodes:
        for device in node.devices[::2]:
            share = Share(node=node.name, devices=((device.index, draw.randrange(10, 76) * GIB),))
            model = f"model-{draw.randrange(64)}"
            table.start(Instance(name=f"{node.name}-{device.index}", model=model, shares=(share,)))
    times: dict[str, list[float]] = {}
    source = claims(draw)
    for number in range(placements):
        kind, claim = next(source)
        begin = time.perf_counter()
        found = place(claim, table, strategy=strategy)
        times.setdefault(kind, []).append(1e3 * (time.perf_counter() - begin))
        if isinstance(found, Placement):
            table.start(found.instance(f"instance-{number}"))
            if number >= 200 and f"instance-{number - 200}" in table.instances:
                table.stop(f"instance-{number - 200}")
    everything = sorted(value for values in times.values() for value in values)
    row = {"strategy": strategy, "placements": placements, **_percentiles(everything)}
    return {**row, "kinds": {kind: _percentiles(sorted(values)) for kind, values in times.items()}}


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": round(values[min(int(len(values) * q / 100), len(values) - 1)], 3) for q in (50, 99, 100)}


def leak(total: int, seed: int) -> list[dict[str, float]]:
    """Memory after every twentieth part of `total` placements; each instance is stopped sooner or later, and a node
    leaves and comes back now and then."""
    draw = random.Random(seed)
    nodes = make_nodes(32, 8, draw)
    table, source = Cluster(nodes), claims(draw)
    drawn = [next(source) for _ in range(1000)]
    pool = [claim for kind, claim in drawn if kind in ("one device", "host")] * 8
    pool += [claim for kind, claim in drawn if kind in ("several devices", "several nodes")]
    alive: list[str] = []
    rows, done, stopped, begin = [], 0, 0, time.perf_counter()
    while done < total:
        claim = pool[draw.randrange(len(pool))]
        found = place(claim, table)
        while not isinstance(found, Placement) and alive:
            table.stop(alive.pop(draw.randrange(len(alive))))
            stopped += 1
            found = place(claim, table)
        if not isinstance(found, Placement):
            continue  # not even on an empty cluster
        table.start(found.instance(f"instance-{done}"))
        alive.append(f"instance-{done}")
        done += 1
        if len(alive) > 40:
            table.stop(alive.pop(draw.randrange(len(alive))))
            stopped += 1
        if done % 1000 == 0:
            node = draw.choice(table.nodes)
            lost = {instance.name for instance in table.remove(node.name)}
            stopped += len(lost)
            alive = [name for name in alive if name not in lost]
            table.add(node)
        if done % max(total // 20, 1) == 0:
            gc.collect()
            rows.append({"placements": done, "removals": stopped, "seconds": round(time.perf_counter() - begin, 1),
                         "rss_mib": round(_rss() / 2**20, 2), "objects": len(gc.get_objects())})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    for name in alive:
        table.stop(name)
    assert not table.instances
    assert not len(table.by_model)
    assert not table.used.any()
    assert not table.host_used.any()
    assert not any(counts.any() for counts in table.counts())
    return rows


def _rss() -> int:
    """Bytes of this process now, where the system says; else the most there were."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--placements", type=int, default=1000)
    parser.add_argument("--leak", type=int, metavar="N", help="look for leaks over N placements instead")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.leak:
        leak(args.leak, args.seed)
        return
    for strategy in ("spread", "binpack"):
        row = measure(args.nodes, args.devices, args.placements, strategy, seed=args.seed)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
