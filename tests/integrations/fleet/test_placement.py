"""Placement by hand: each filter, each stage, each score and each refusal on a cluster that one can see through."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
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


@pytest.mark.parametrize(
    ("what", "wants", "has"),
    [
        ("cluster", {"cluster": "blue"}, {"cluster": "blue"}),
        ("devices", {"on": {"b": [1]}}, {}),
        ("labels", {"labels": {"zone": "x", "gpu": "h100"}}, {"labels": {"gpu": "h100", "zone": "x", "more": ""}}),
        ("backend", {"backend": "vllm"}, {"backends": {"vllm": ["0.33"]}}),
        ("backend", {"backend": "vllm", "version": "0.33"}, {"backends": {"vllm": ["0.32", "0.33"]}}),
        ("path", {"path": "/models/m"}, {"paths": ["/models/m"]}),
        ("cpus", {"cpus": 1.5}, {"cpus": 1.5}),
    ],
)
def test_each_filter_lets_through_what_it_should(what: str, wants: dict[str, Any], has: dict[str, Any]) -> None:
    found = place(claim(**wants), [node("a", cpus=1), node("b", **{"cpus": 1, **has}), node("c", cpus=1)])
    assert nodes_of(found) == ["b"]
    nobody = place(claim(**wants), [node("a", cpus=1), node("c", cpus=1)])
    assert isinstance(nobody, Refusal)
    assert [(reason.what, reason.nodes) for reason in nobody.reasons] == [(what, 2)]
    assert nobody.device_bytes == 0


def test_a_node_that_is_not_ready_takes_nothing_until_it_is() -> None:
    table = Cluster([node("a", ready=False)])
    found = place(claim(), table)
    assert str(found) == "m fits on none of 1 nodes: 1 not ready"
    table.set_ready("a", True)
    assert nodes_of(place(claim(), table)) == ["a"]


def test_cpus_are_shared_out_to_the_last_and_given_back() -> None:
    table = Cluster([node("a", cpus=0.3), node("b")])  # nobody counts those of b
    for number in range(3):  # three times 0.1 is more than 0.3 in floating point
        found = place(claim(1, cpus=0.1, on={"a": [0]}), table)
        assert nodes_of(found) == ["a"]
        table.start(found.instance(f"i{number}"))  # type: ignore[union-attr]
    assert str(place(claim(1, cpus=0.1, on={"a": [0]}), table)) == (
        "m fits on none of 2 nodes: 1 none of the chosen devices; 1 with fewer than 0.1 free CPUs"
    )
    assert nodes_of(place(claim(1, cpus=1000), table)) == ["b"]
    table.stop("i1")
    assert nodes_of(place(claim(1, cpus=0.1, on={"a": [0]}), table)) == ["a"]


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


# ---------------------------------------------------------------- fit


def test_stages_are_tried_in_order() -> None:
    nodes = [node("a"), node("b")]
    sizes = (60, 130, 300, 330)
    found = [place(claim(size, several_nodes=True, cpu_bytes=GIB), nodes) for size in sizes]
    assert [each.stage for each in found if isinstance(each, Placement)] == ["device", "devices", "nodes", "cpu"]
    taken = [[index for share in each.shares for index, _ in share.devices] for each in found]  # type: ignore[union-attr]
    assert taken == [[0], [0, 1], [0, 1, 0, 1], []]


def test_devices_share_evenly_and_divide_the_heads() -> None:
    nodes = [node("a", devices=4)]
    found = place(claim(200, split=(28,)), nodes)
    assert isinstance(found, Placement)
    assert found.shares[0].devices == tuple((index, 50 * GIB) for index in range(4))  # three do not divide 28
    assert isinstance(place(claim(170, split=(2,)), nodes), Refusal)
    assert isinstance(place(claim(100, devices=3, split=(2,)), nodes), Refusal)
    three = place(claim(100, devices=3), nodes)
    assert isinstance(three, Placement)
    assert [taken for _, taken in three.shares[0].devices] == [-(-100 * GIB // 3)] * 3


def test_each_device_has_its_copy_and_its_part_of_the_rest() -> None:
    """A replica takes one device where it suffices, then as few of one node as do, then of several."""
    nodes = [node("a", devices=4), node("b", devices=4)]

    def taken(gib: float, **changes: Any) -> list[list[int]]:
        found = place(claim(gib, copied_bytes=20 * GIB, **changes), nodes)
        assert isinstance(found, Placement), str(found)
        return [[count // GIB for _, count in share.devices] for share in found.shares]

    assert taken(80) == [[80]]
    assert taken(81, split=(8,)) == [[50, 50]]  # 20 and half of 61, in whole GiB
    assert taken(141) == [[60, 60, 60]]  # two have 120 beside their copies, and 121 are needed
    assert taken(272, several_nodes=True) == [[62] * 3] * 2  # six: equally many on each node
    refused = place(claim(300, copied_bytes=20 * GIB, devices=4), nodes)
    assert isinstance(refused, Refusal)
    assert refused.device_bytes == (20 + 4 * 60) * GIB
    assert place(claim(90, copied_bytes=85 * GIB), nodes).device_bytes == 0, "no device has room for a copy"  # type: ignore[union-attr]


def test_one_instance_takes_devices_of_one_kind() -> None:
    mixed = (
        Device(index=0, memory=80 * GIB, kind="cuda"),
        Device(index=1, memory=80 * GIB, kind="rocm"),
        Device(index=2, memory=70 * GIB, kind="cuda"),
    )
    found = place(claim(140), [node("a", own=mixed)])
    assert isinstance(found, Placement)
    assert found.shares[0].devices == ((0, 70 * GIB), (2, 70 * GIB))


def test_host_memory_beside_devices_is_counted_and_shared_where_it_is_unified() -> None:
    small = node("a", host_memory=4 * GIB)
    refused = place(claim(host_bytes=5 * GIB), [small])
    assert isinstance(refused, Refusal)
    assert [reason.what for reason in refused.reasons] == ["host memory"]
    one = node("u", devices=1, gib=32, host_memory=32 * GIB, unified=True)
    assert isinstance(place(claim(28, host_bytes=4 * GIB), [one]), Placement)
    assert isinstance(place(claim(29, host_bytes=4 * GIB), [one]), Refusal)
    assert isinstance(place(claim(20), [one], instances=[instance("i", "u", {0: 20 * GIB})]), Refusal)
    assert isinstance(place(claim(20), [one], instances=[instance("i", "u", host_bytes=20 * GIB)]), Refusal)


# ---------------------------------------------------------------- scores


def test_spread_goes_where_least_runs_and_binpack_where_most_does() -> None:
    nodes = [node("a"), node("b"), node("c")]
    running = [instance("i", "a", {0: 30 * GIB}), instance("j", "b", {1: 10 * GIB}, "other")]
    assert nodes_of(place(claim(), nodes, instances=running)) == ["c"]
    packed = place(claim(), nodes, instances=running, strategy="binpack")
    assert isinstance(packed, Placement)
    assert packed.shares == (Share(node="a", devices={0: 10 * GIB}),)


def test_spread_is_graded_and_not_in_strict_levels() -> None:
    """A node with none of this model goes before one that has as many of it as any. One that has few of it, and of
    others, goes before the node that has most of others."""
    others = [instance(f"o{number}", "others", {number % 2: GIB}, "other") for number in range(8)]
    few = [instance("m", "few", {0: GIB})]
    assert nodes_of(place(claim(), [node("few"), node("others")], instances=[*few, *others])) == ["others"]
    many = [instance(f"m{number}", "many", {0: GIB}) for number in range(8)]
    nodes = [node("many"), node("others"), node("few")]
    assert nodes_of(place(claim(), nodes, instances=[*many, *few, *others])) == ["few"]


def test_files_decide_between_equals() -> None:
    nodes = [node("a"), node("b", files=["draft"]), node("c", files=["m"]), node("d", files=["m", "draft"])]
    assert nodes_of(place(claim(), nodes)) == ["c"]
    assert nodes_of(place(claim(draft="draft"), nodes)) == ["d"]
    assert nodes_of(place(claim(), [node("a"), node("b")])) == ["a"]


# ---------------------------------------------------------------- differences from GPUStack's rules


def test_spread_counts_an_instance_of_many_devices_once() -> None:
    """GPUStack counts it once for each device, so that a node with three instances looks emptier."""
    wide = instance("wide", "a", dict.fromkeys(range(4), GIB), "other")
    narrow = [instance(f"n{index}", "b", {index: GIB}, "other") for index in range(3)]
    assert nodes_of(place(claim(), [node("a", devices=8), node("b", devices=8)], instances=[wide, *narrow])) == ["a"]


def test_every_node_of_an_instance_is_scored() -> None:
    """GPUStack's spread looks at the first alone; its binpack multiplies the followers' sum by their number."""
    rocm = (Device(index=0, memory=80 * GIB, kind="rocm"),)
    nodes = [node("a", devices=1), node("b", devices=1), node("c", own=rocm), node("d", own=rocm)]
    crowded = [instance(f"i{number}", "b", {0: GIB}, "other") for number in range(3)]
    assert nodes_of(place(claim(120, several_nodes=True), nodes, instances=crowded)) == ["c", "d"]
    full = [node(name, devices=1, gib=100) for name in "abcd"]
    found = place(claim(400, utilization=1.0, several_nodes=True), full, strategy="binpack")
    assert isinstance(found, Placement)
    assert found.score == pytest.approx(100 * 2 / 3)  # no host memory is claimed


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


# ---------------------------------------------------------------- scale-down


def test_the_worst_instance_goes_first() -> None:
    nodes = [node("a"), node("b"), node("c", ready=False)]
    running = [
        instance("good", "a", {0: GIB}, layers=(32, 32)),
        instance("half", "b", {0: GIB}, layers=(16, 32)),
        instance("starting", "b", {1: GIB}, state="starting", layers=(32, 32)),
        instance("failed", "a", {1: GIB}, state="failed"),
        instance("away", "c", {0: GIB}),
        instance("other", "a", {0: GIB}, "other"),
    ]
    table = Cluster(nodes, running)
    ranked = rank_for_removal(table, "m")
    names = [each.instance.name for each in ranked]
    assert names[2:] == ["starting", "half", "good"]
    assert set(names[:2]) == {"failed", "away"}
    best = rank_for_removal(table, "m", total_max=1.0)
    assert [each.instance.name for each in best] == names
    assert best[-1].score == pytest.approx(ranked[-1].score / 111)
    assert [each.instance.name for each in rank_for_removal(table, "m", names=["good", "half"])] == ["half", "good"]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "field", "says"),
    [
        (lambda: place(claim(), []), "nodes", "at least one"),
        (lambda: place(claim(), [node("a"), node("a")]), "nodes", "of this name already"),
        (lambda: place(claim(), [node("a")], strategy="random"), "strategy", "'spread', 'binpack'"),
        (lambda: place("m", [node("a")]), "model", "must be a Claim"),  # type: ignore[arg-type]
        (lambda: place(claim(), ["a"]), "nodes", "must be Nodes"),  # type: ignore[list-item]
        (lambda: place(claim(), None), "nodes", "at least one"),  # type: ignore[arg-type]
        (lambda: place(claim(), [node("a")], instances=[instance("i", "b")]), "node", "not in the cluster"),
        (lambda: place(claim(), [node("a")], instances=[instance("i", "a", {7: 1})]), "devices", "no device 7"),
        (lambda: place(claim(), [node("a")], instances=[instance("i", "a")] * 2), "instances", "this name already"),
        (lambda: Device(index=0, memory=float("nan")), "memory", "must be an integer"),
        (lambda: Device(index=0, memory=-1), "memory", ">= 1"),
        (lambda: Device(index=0, memory=2**60), "memory", "between"),
        (lambda: Device(index=-1, memory=1), "index", ">= 0"),
        (lambda: Device(index=0, memory="eighty"), "memory", "positive number of bytes"),  # type: ignore[arg-type]
        (lambda: node("a", host_memory=float("inf")), "host_memory", "must be an integer"),
        (lambda: node("a", host_reserved=-5), "host_reserved", ">= 0"),
        (lambda: node("a", own=(Device(index=3, memory=1),) * 2), "devices", "device 3 twice"),
        (lambda: node("a", labels=[("zone", "x"), ("zone", "y")]), "labels", "contradict each other"),
        (lambda: node("a", labels={"zone": 3}), "labels", "'zone' must have a value"),
        (lambda: node(""), "name", "not empty"),
        (lambda: node("a", files="m"), "files", "sequence of str"),
        (lambda: node("a", unified=True), "devices", "at most one"),
        (lambda: node("a", devices=1, unified=True), "devices", "at most host_memory"),
        (lambda: node("a", ready="yes"), "ready", "True or False"),
        (lambda: claim(labels=(("zone", "x"), ("zone", "y"))), "labels", "both 'x' and 'y'"),
        (lambda: Claim(model="m"), "device_bytes", "must be given"),
        (lambda: claim(utilization=float("nan")), "utilization", "must be finite"),
        (lambda: claim(cpus=float("nan")), "cpus", "must be finite"),
        (lambda: node("a", cpus=-1), "cpus", "must be >= 0"),
        (lambda: Share(node="a", cpus="2"), "cpus", "must be a number"),
        (lambda: claim(utilization=1.5), "utilization", "<= 1"),
        (lambda: claim(devices=0), "devices", ">= 1"),
        (lambda: claim(1, copied_bytes=GIB + 1), "copied_bytes", "between 0 and 1073741824"),
        (lambda: Claim(model="m", cpu_bytes=1, copied_bytes=1), "copied_bytes", "between 0 and 0"),
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


def test_a_cluster_without_nodes_refuses_and_a_refused_instance_changes_nothing() -> None:
    found = place(claim(), Cluster())
    assert str(found) == "m fits on none of 0 nodes: there are none"
    table = Cluster([node("a")])
    table.start(instance("i", "a", {0: GIB}))
    with pytest.raises(InvalidParameter):
        table.start(replace(instance("j", "a", {0: GIB}), shares=(Share(node="a"), Share(node="elsewhere"))))
    assert list(table.instances) == ["i"]
    assert int(table.used.sum()) == GIB


def test_a_model_larger_than_everything_is_refused_with_what_there_is() -> None:
    found = place(claim(2**22, several_nodes=True, cpu_bytes=2**52), [node("a"), node("b", devices=1)])
    assert isinstance(found, Refusal)
    assert (found.device_bytes, found.cpu_bytes) == (160 * GIB, 64 * GIB)


def test_texts_are_read_as_sizes_and_the_rule_of_thumb_is_gpustacks() -> None:
    assert Device(index=0, memory="80GiB").memory == 80 * GIB  # type: ignore[arg-type]
    assert rule_of_thumb(10 * GIB) == 14 * GIB


def test_the_package_imports_no_torch_and_no_ray() -> None:
    code = (
        "import sys, asyncengine.integrations.placement, asyncengine.integrations.placement.routing;"
        "print([m for m in ('torch', 'ray', 'transformers', 'rich', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
