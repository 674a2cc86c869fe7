"""Events of a simulated cluster, drawn at random in advance, so that every strategy meets the same."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from asyncengine.checks import as_integer, as_number
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.placement.nodes import Claim, Device, Node

GIB = 2**30
Kind = Literal["arrive", "leave", "fail", "return"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a simulation. Times are in hours. Raises `InvalidParameter` naming the field."""

    nodes: int = 32
    devices: int = 8
    """Devices of each node."""
    device_gib: float = 80.0
    host_gib: float = 512.0
    hours: float = 168.0
    arrivals: float = 20.0
    """Instances that are asked for, an hour, on average."""
    lifetime: float = 8.0
    """Lifetime of an instance, on average."""
    failures: float = 0.01
    """Failures of each node, an hour."""
    repair: float = 2.0
    """Until a failed node is back, on average."""
    models: int = 12
    """Different ones, from a fraction of a device to several nodes; the first are asked for most."""
    utilization: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("nodes", 1, 100_000), ("devices", 0, 64), ("models", 1, 1000), ("seed", 0, 2**31 - 1)):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), low, high))
        for name in ("device_gib", "host_gib", "hours", "arrivals", "lifetime", "repair"):
            value = as_number(name, getattr(self, name), 0.0, 1e6, exclusive_low=True)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "failures", as_number("failures", self.failures, 0.0, 1e3))
        object.__setattr__(self, "utilization", as_number("utilization", self.utilization, 0.0, 1.0))
        if self.hours * (self.arrivals + self.nodes * self.failures) > 1e7:
            raise InvalidParameter("hours", "make more than ten million events; simulate less")


@dataclass(order=True, slots=True)
class Event:
    """Something happens to an instance or a node."""

    at: float
    number: int
    """Breaks ties, in the order in which events were made."""
    kind: Kind = field(compare=False)
    name: str = field(compare=False)
    claim: Claim | None = field(compare=False, default=None)


def make_nodes(plan: Plan) -> list[Node]:
    """All alike, each with the files of a third of the models."""
    draw = Random(f"nodes {plan.seed}")
    devices = [Device(index=index, memory=int(plan.device_gib * GIB)) for index in range(plan.devices)]
    names = [claim.model for claim in make_claims(plan)]
    return [
        Node(
            name=f"node-{number}",
            host_memory=int(plan.host_gib * GIB),
            devices=tuple(devices),
            files=tuple(name for name in names if draw.random() < 1 / 3),
        )
        for number in range(plan.nodes)
    ]


def make_claims(plan: Plan) -> list[Claim]:
    """Sizes from a tenth of a device to twice a node, on a scale of equal ratios; small ones first."""
    low, high = 0.1 * plan.device_gib, 2.0 * plan.device_gib * max(plan.devices, 1)
    steps = max(plan.models - 1, 1)
    sizes = [int(low * (high / low) ** (number / steps) * GIB) for number in range(plan.models)]
    return [
        Claim(
            model=f"model-{number}",
            device_bytes=size,
            cpu_bytes=None if plan.devices else size,
            utilization=plan.utilization,
            split=(64,),
            several_nodes=True,
        )
        for number, size in enumerate(sizes)
    ]


def make_events(plan: Plan) -> Iterator[Event]:
    """In order of time: arrivals (Poisson) that leave again, nodes that fail and return (exponential times)."""
    draw = Random(f"events {plan.seed}")
    claims = make_claims(plan)
    weights = [1 / (number + 1) for number in range(plan.models)]
    waiting: list[Event] = []
    count = 0

    def push(at: float, kind: Kind, name: str, claim: Claim | None = None) -> None:
        nonlocal count
        count += 1
        heapq.heappush(waiting, Event(at, count, kind, name, claim))

    push(draw.expovariate(plan.arrivals), "arrive", "instance-0", draw.choices(claims, weights)[0])
    for number in range(plan.nodes):
        if plan.failures:
            push(draw.expovariate(plan.failures), "fail", f"node-{number}")
    arrived = 1
    while waiting:
        event = heapq.heappop(waiting)
        if event.at > plan.hours:
            return
        yield event
        if event.kind == "arrive":
            push(event.at + draw.expovariate(1 / plan.lifetime), "leave", event.name)
            claim = draw.choices(claims, weights)[0]
            push(event.at + draw.expovariate(plan.arrivals), "arrive", f"instance-{arrived}", claim)
            arrived += 1
        elif event.kind == "fail":
            push(event.at + draw.expovariate(1 / plan.repair), "return", event.name)
        elif event.kind == "return":
            push(event.at + draw.expovariate(plan.failures), "fail", event.name)
