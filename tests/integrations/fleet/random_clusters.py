"""Random clusters, what runs on them, and models to place: small enough for every stage, tie and refusal to occur."""

from __future__ import annotations

import random
from dataclasses import dataclass

from asyncengine.integrations.placement import Claim, Device, Instance, Node, Share

GIB = 2**30
MODELS = ("m0", "m1", "m2", "m3")
MEMORIES = (8 * GIB, 16 * GIB, 24 * GIB, 24 * GIB - 12_345, 80 * GIB)


@dataclass(frozen=True)
class Case:
    nodes: list[Node]
    instances: list[Instance]
    claim: Claim
    strategy: str


def random_case(seed: int, *, utilization: bool, single: bool = False) -> Case:
    """A case of this seed. `utilization`: the claim has one, as GPUStack's language models do; else it may. `single`:
    no instance has more than one device."""
    r = random.Random(seed)
    plain = r.random() < 0.5  # alike nodes, with nothing to filter: many ties
    kinds = ("cuda",) if plain or r.random() < 0.6 else ("cuda", "rocm")
    nodes = [_node(r, f"n{i}", kinds, plain) for i in range(r.randint(1, 9))]
    instances = _instances(r, nodes, single=single)
    return Case(nodes, instances, _claim(r, nodes, plain, utilization), r.choice(("spread", "binpack")))


def _node(r: random.Random, name: str, kinds: tuple[str, ...], plain: bool) -> Node:
    unified = r.random() < 0.12
    count = 1 if unified else r.choice((0, 1, 2, 2, 4, 4, 8)) if not plain else 4
    memory = r.choice(MEMORIES)
    devices = [
        Device(
            index=i if plain else 2 * i + 1,
            memory=memory if plain or r.random() < 0.7 else r.choice(MEMORIES),
            kind=r.choice(kinds),
        )
        for i in range(count)
    ]
    if not plain:
        r.shuffle(devices)
    return Node(
        name=name,
        host_memory=r.choice((80, 80, 96)) * GIB if unified else r.choice((16, 64, 256)) * GIB,
        devices=devices,
        host_reserved=0 if plain else r.choice((0, GIB, 4 * GIB)),
        device_reserved=0 if plain else r.choice((0, 0, 0, GIB)),
        unified=unified,
        cluster="a" if plain or r.random() < 0.85 else "b",
        labels={} if plain else {"zone": r.choice("xy"), "disk": r.choice(("ssd", "hdd"))},
        backends={"asyncengine": r.choice((["0.1"], ["0.1", "0.2"]))} if plain or r.random() < 0.9 else {},
        files=[model for model in MODELS if r.random() < 0.25],
        paths=["/models"] if r.random() < 0.8 else [],
        ready=r.random() < 0.92,
    )


def _instances(r: random.Random, nodes: list[Node], *, single: bool) -> list[Instance]:
    """Some take half of a device exactly, so that a utilization of 0.5 is met to the byte. `single`: none has more than
    one device."""
    found = []
    for number in range(r.choice((0, 0, 0, 2, 4, 14))):
        shares = []
        for node in r.sample(nodes, min(len(nodes), 1 if single else r.choice((1, 1, 1, 2, 3)))):
            on = r.sample(node.devices, min(len(node.devices), r.choice((0, 1, 1) if single else (0, 1, 1, 2, 4))))
            taken = [(d.index, d.memory // r.choice((2, 2, 4, 16))) for d in on]
            shares.append(Share(node=node.name, devices=taken, host_bytes=r.choice((0, 0, GIB, 8 * GIB))))
        every = r.choice((None, 32))
        found.append(
            Instance(
                name=f"i{number}",
                model=r.choice(MODELS),
                shares=shares,
                state=r.choice(("running", "running", "starting", "failed")),
                layers=None if every is None else (r.randint(0, every), every),
            )
        )
    return found


def _claim(r: random.Random, nodes: list[Node], plain: bool, utilization: bool) -> Claim:
    on = {}
    if not plain and r.random() < 0.15:
        for node in r.sample(nodes, min(2, len(nodes))):
            if node.devices:
                on[node.name] = [d.index for d in r.sample(node.devices, r.randint(1, len(node.devices)))]
        on = on or {"elsewhere": [0]}
    cpu = r.choice((None, None, None, 4 * GIB, 40 * GIB, 400 * GIB))
    device: int | None = int(
        r.choice((1, 6, 10, 20, 35, 70, 140, 200, 300, 300, 10_000)) * GIB * r.choice((0.5, 0.9, 1.0, 1.3))
    )
    share = r.choice((0.25, 0.5, 0.5, 0.9, 0.9, 1.0))
    device = None if cpu is not None and r.random() < 0.3 else device
    return Claim(
        model=r.choice(MODELS),
        device_bytes=device,
        cpu_bytes=cpu,
        host_bytes=r.choice((0, 0, 0, GIB, 20 * GIB)),
        utilization=share if utilization or r.random() < 0.3 else 0.0,
        devices=r.choice((None, None, None, None, None, None, 1, 2, 3, 4, 8, 16)),
        split=r.choice(((), (32,), (8, 1000), (28,))),
        several_nodes=r.random() < 0.8,
        cluster=None if plain else r.choice((None, "a", "a")),
        labels={} if plain else r.choice(({}, {}, {"zone": "x"}, {"zone": "y", "disk": "ssd"}, {"zone": "z"})),
        on=on,
        backend=r.choice((None, "asyncengine")),
        version=None,
        path=None if r.random() < 0.8 else "/models",
        draft=r.choice((None, None, "m3")),
        copied_bytes=0 if device is None else int(device * r.choice((0, 0, 0.1, 0.6))),
    )
