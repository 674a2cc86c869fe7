"""Placement by hand: refusals, bad input, and differences from GPUStack's rules, which test_gpustack.py compares."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from asyncengine.errors import InvalidParameter, OutOfMemory
from asyncengine.integrations.placement import (
    Claim,
    Cluster,
    Device,
    Instance,
    Node,
    Placement,
    Refusal,
    Share,
    place,
    rank_for_removal,
    rule_of_thumb,
)

GIB = 2**30


def node(name: str, devices: int = 2, gib: int = 80, **changes: Any) -> Node:
    own = tuple(Device(index=index, memory=gib * GIB) for index in range(devices))
    if "own" in changes:
        own = changes.pop("own")
    return Node(**{"name": name, "host_memory": 64 * GIB, "devices": own, **changes})


def claim(gib: float = 10, **changes: Any) -> Claim:
    return Claim(**{"model": "m", "device_bytes": int(gib * GIB), **changes})


def instance(
    name: str, where: str, devices: dict[int, int] | None = None, model: str = "m", **changes: Any
) -> Instance:
    share = Share(node=where, devices=devices or {}, host_bytes=changes.pop("host_bytes", 0))
    return Instance(name=name, model=model, shares=(share,), **changes)


def nodes_of(found: Placement | Refusal) -> list[str]:
    assert isinstance(found, Placement), str(found)
    return [share.node for share in found.shares]


# ---------------------------------------------------------------- filters


def test_a_refusal_reads_as_a_sentence() -> None:
    nodes = [node("a", labels={"zone": "x"}), node("b"), node("c", ready=False, labels={"zone": "x"})]
    found = place(claim(500, labels={"zone": "x"}), nodes)
    assert str(found) == (
        "m fits on none of 3 nodes: 1 without the labels zone=x; 1 not ready; 1 with too little free memory on "
        "devices; a claim of 160.00 GiB on devices would have fitted"
    )
    assert isinstance(found, Refusal)
    with pytest.raises(OutOfMemory, match=r"160.00 GiB"):
        raise found.error()


# ---------------------------------------------------------------- differences from GPUStack's rules


def test_spread_counts_an_instance_of_many_devices_once() -> None:
    """GPUStack counts it once for each device, so that a node with three instances looks emptier."""
    wide = instance("wide", "a", dict.fromkeys(range(4), GIB), "other")
    narrow = [instance(f"n{index}", "b", {index: GIB}, "other") for index in range(3)]
    assert nodes_of(place(claim(), [node("a", devices=8), node("b", devices=8)], instances=[wide, *narrow])) == ["a"]


def test_as_few_devices_as_suffice_and_the_first_of_equals() -> None:
    """GPUStack takes all devices of each node, and devices and hosts by what is free."""
    found = place(claim(400, several_nodes=True), [node(name, devices=4) for name in "ab"])
    assert isinstance(found, Placement)
    assert [len(share.devices) for share in found.shares] == [3, 3]
    half = [instance("i", "a", {0: 40 * GIB, 1: 40 * GIB}, "other")]  # free to exactly the utilization
    found = place(claim(70, utilization=0.5), [node("a")], instances=half)
    assert isinstance(found, Placement)
    assert len(found.shares[0].devices) == 2
    roomy = [instance("i", "a", {0: 4 * GIB, 1: 2 * GIB}, "other"), instance("j", "a", {2: GIB}, "other")]
    found = place(claim(140, utilization=0.9), [node("a", devices=3)], instances=roomy)
    assert isinstance(found, Placement)
    assert [index for index, _ in found.shares[0].devices] == [0, 1]
    hosts = [Node(name="a", host_memory=16 * GIB), Node(name="b", host_memory=64 * GIB)]
    assert nodes_of(place(Claim(model="m", cpu_bytes=GIB), hosts)) == ["a"]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "field", "says"),
    [
        (lambda: place(claim(), []), "nodes", "at least one"),
        (lambda: place(claim(), [node("a"), node("a")]), "nodes", "of this name already"),
        (lambda: place(claim(), [node("a")], strategy="random"), "strategy", "'spread', 'binpack'"),
        (lambda: place("m", [node("a")]), "model", "must be a Claim"),  # type: ignore[arg-type]
        (lambda: place(claim(), ["a"]), "nodes", "must be Nodes"),  # type: ignore[list-item]
        (lambda: place(claim(), [node("a")], instances=[instance("i", "b")]), "node", "not in the cluster"),
        (lambda: place(claim(), [node("a")], instances=[instance("i", "a", {7: 1})]), "devices", "no device 7"),
        (lambda: place(claim(), [node("a")], instances=[instance("i", "a")] * 2), "instances", "this name already"),
        (lambda: Device(index=0, memory=float("nan")), "memory", "must be an integer"),
        (lambda: Device(index=-1, memory=1), "index", ">= 0"),
        (lambda: Device(index=0, memory="eighty"), "memory", "positive number of bytes"),  # type: ignore[arg-type]
        (lambda: node("a", own=(Device(index=3, memory=1),) * 2), "devices", "device 3 twice"),
        (lambda: node("a", labels=[("zone", "x"), ("zone", "y")]), "labels", "contradict each other"),
        (lambda: node("a", labels={"zone": 3}), "labels", "'zone' must have a value"),
        (lambda: node(""), "name", "not empty"),
        (lambda: node("a", files="m"), "files", "sequence of str"),
        (lambda: node("a", unified=True), "devices", "at most one"),
        (lambda: node("a", devices=1, unified=True), "devices", "at most host_memory"),
        (lambda: Claim(model="m"), "device_bytes", "must be given"),
        (lambda: node("a", cpus=-1), "cpus", "must be >= 0"),
        (lambda: claim(devices=0), "devices", ">= 1"),
        (lambda: claim(1, copied_bytes=GIB + 1), "copied_bytes", "between 0 and 1073741824"),
        (lambda: claim(split=(0,)), "split", ">= 1"),
        (lambda: claim(on={"a": [0, 0]}), "on", "twice"),
        (lambda: claim(on={"a": []}), "on", "1 to"),
        (lambda: claim(version="0.2"), "version", "of a backend"),
        (lambda: Share(node="a", devices=((0, 1), (0, 2))), "devices", "device 0 twice"),
        (lambda: Instance(name="i", model="m", shares=()), "shares", "at least one"),
        (lambda: instance("i", "a", layers=(5, 4)), "layers", "between 0 and 4"),
        (lambda: instance("i", "a", state="asleep"), "state", "'starting', 'running', 'failed'"),
        (lambda: Cluster([node("a")]).stop("i"), "instance", "not in the cluster"),
        (lambda: Cluster([node("a")]).remove("b"), "node", "not in the cluster"),
        (lambda: rank_for_removal(Cluster([node("a")]), "m", names=["i"]), "names", "no instance of 'm'"),
        (lambda: rank_for_removal(Cluster([node("a")]), "m", strategy="x"), "strategy", "must be one of"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(make: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        make()
    assert caught.value.field == field
    assert says in str(caught.value)


def test_texts_are_read_as_sizes_and_the_rule_of_thumb_is_gpustacks() -> None:
    assert Device(index=0, memory="80GiB").memory == 80 * GIB  # type: ignore[arg-type]
    assert rule_of_thumb(10 * GIB) == 14 * GIB


def test_the_package_imports_no_torch_and_a_fleet_no_ray() -> None:
    code = (
        "import sys, asyncengine.integrations.placement, asyncengine.integrations.placement.routing;"
        "print([m for m in ('torch', 'ray', 'transformers', 'rich', 'matplotlib') if m in sys.modules]);"
        "import asyncengine.cluster.fleet; print('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False"]
