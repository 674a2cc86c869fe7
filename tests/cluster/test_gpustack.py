"""Where placement follows GPUStack's rules, which stand in `gpustack_rules`, transcribed, and where it differs.

The differences are those that docs/howto/placement.md lists: one test each. On random clusters in which none of them
can show (`_alike`), both choose the same nodes and devices, with the same score.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import groupby

import pytest
from cluster.gpustack_rules import Candidate, Rules
from cluster.random_clusters import GIB, Case, random_case

from asyncengine.cluster import (
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
)

CASES = int(os.environ.get("ASYNCENGINE_CLUSTERS", "2400"))
"""Of random clusters, of which about a half are compared."""


def _alike(case: Case, rules: Rules) -> bool:
    """Whether no difference between the rules can show in where `case.claim` goes."""
    claim, u = case.claim, case.claim.utilization
    free = {node.name: rules.free[node.name] for node in rules.left}
    if claim.devices is not None and not claim.divides(claim.devices):
        return False
    if case.strategy == "spread":
        if any(len(share.devices) > 1 for each in case.instances for share in each.shares):
            return False
        if claim.cpu_bytes is not None and len({host for host, _ in free.values()}) > 1:
            return False
    if claim.host_bytes and any(node.unified for node in rules.left):
        return False
    if claim.device_bytes is not None and rules.one_device():
        return True  # the first stage decides, which is the same
    for node in rules.left:
        own, left = rules.devices[node.name], free[node.name][1]
        if any(left[device.index] / device.memory == u for device in own):
            return False
        usable = [device for device in own if left[device.index] / device.memory > u]
        for _, kind in groupby(sorted(usable, key=lambda device: device.kind), key=lambda device: device.kind):
            if len({(device.memory, left[device.index]) for device in kind}) > 1:
                return False
    if not claim.several_nodes or (claim.device_bytes is not None and rules.several_devices()):
        return True
    every = [device for node in rules.left for device in rules.devices[node.name]]
    return max(map(len, rules.devices.values()), default=0) <= 1 and len({(d.kind, d.memory) for d in every}) <= 1


def test_random_clusters_are_filled_as_gpustack_fills_them() -> None:
    seen: Counter[str] = Counter()
    for seed in range(CASES):
        case = random_case(seed, utilization=True, alike=seed % 2 == 0)
        rules = Rules(case.claim, case.nodes, case.instances, case.strategy)
        if not _alike(case, rules):
            continue
        expected = rules.best()
        found = place(case.claim, case.nodes, instances=case.instances, strategy=case.strategy)
        if expected is None:
            assert isinstance(found, Refusal), seed
            assert [(reason.what, reason.nodes) for reason in found.reasons[: len(rules.fell)]] == [*rules.fell.items()]
            seen["refused"] += 1
            continue
        assert isinstance(found, Placement), (seed, expected, str(found))
        assert found.stage == expected.stage, seed
        assert _parts(found) == _parts_of(expected), seed
        if len(found.shares) == 1 or (case.strategy == "binpack" and len(found.shares) == 2):
            assert found.score == pytest.approx(expected.score, rel=1e-12), seed
        seen[found.stage] += 1
    assert min(seen[stage] for stage in ("device", "devices", "nodes", "cpu", "refused")) >= CASES // 200, seen


def test_instances_are_given_up_in_gpustacks_order() -> None:
    many = 0
    for seed in range(CASES // 3):
        case = random_case(seed, utilization=True, alike=seed % 2 == 0)
        most = 1 if case.strategy == "spread" else 2
        if any(len(each.shares) > most for each in case.instances if each.model == case.claim.model):
            continue
        if case.strategy == "spread" and any(len(s.devices) > 1 for each in case.instances for s in each.shares):
            continue
        expected = Rules(case.claim, case.nodes, case.instances, case.strategy).order_of_removal()
        ranked = rank_for_removal(Cluster(case.nodes, case.instances), case.claim.model, strategy=case.strategy)
        assert [each.instance.name for each in ranked] == [name for name, _ in expected], seed
        assert [each.score for each in ranked] == pytest.approx([score for _, score in expected], rel=1e-12), seed
        many += len(expected) > 1
    assert many > CASES // 150


# ---------------------------------------------------------------- the differences


def test_spread_counts_an_instance_of_many_devices_once() -> None:
    """GPUStack counts one on four devices four times, so that it goes to the node with three instances."""
    nodes = [_node("a", *[80] * 8), _node("b", *[80] * 8)]
    wide = _instance("wide", "a", {0: 1, 1: 1, 2: 1, 3: 1})
    narrow = [_instance(f"n{index}", "b", {index: 1}) for index in range(3)]
    found, theirs = _both(_claim(10), nodes, [wide, *narrow])
    assert [share.node for share in found.shares] == ["a"]
    assert theirs.main[0] == "b"


def test_binpack_of_several_nodes_takes_the_mean_of_the_followers() -> None:
    """GPUStack multiplies their sum by their number, and passes 100."""
    nodes = [_node(name, 100) for name in "abcd"]
    found, theirs = _both(_claim(400, utilization=1.0, several_nodes=True), nodes, [], "binpack")
    one = 100 * 2 / 3  # no host memory is claimed
    assert found.score == pytest.approx(one)
    assert theirs.score == pytest.approx((5 * one + 3 * 3 * one) / 8)
    assert theirs.score > 100


def test_spread_over_several_nodes_scores_all_of_them() -> None:
    """GPUStack scores the first alone: the team whose other node is crowded looks as good as the empty one."""
    nodes = [_node("a", 80), _node("b", 80), _node("c", 80, kind="rocm"), _node("d", 80, kind="rocm")]
    crowded = [_instance(f"i{number}", "b", {0: 1}) for number in range(3)]
    found, theirs = _both(_claim(140, several_nodes=True), nodes, crowded)
    assert [share.node for share in found.shares] == ["c", "d"]
    assert theirs.main[0] == "a"


def test_more_free_memory_can_worsen_gpustacks_choice_and_not_ours() -> None:
    """By what is free, the smaller device goes first, and two are not enough any more."""
    one = _node("a", 80, 80, 76)
    for last, expected in ((6, 2), (1, 3)):
        found, theirs = _both(_claim(143), [one], [_instance("i", "a", {0: 6, 1: 6, 2: last})])
        assert len(found.shares[0].devices) == 2
        assert len(theirs.main[1]) == expected


def test_a_device_that_is_free_to_exactly_its_utilization_counts_beside_others() -> None:
    taken = [_instance("i", "a", {0: 40, 1: 40})]
    wants = _claim(70, utilization=0.5)
    found = place(wants, [_node("a", 80, 80)], instances=taken)
    assert isinstance(found, Placement)
    assert len(found.shares[0].devices) == 2
    assert Rules(wants, [_node("a", 80, 80)], taken, "spread").best() is None


def test_several_nodes_give_as_few_devices_as_do() -> None:
    """GPUStack takes all devices of each node."""
    found, theirs = _both(_claim(400, several_nodes=True), [_node(name, 80, 80, 80, 80) for name in "ab"], [])
    assert [len(share.devices) for share in found.shares] == [3, 3]
    assert [len(part[1]) for part in (theirs.main, *theirs.followers)] == [4, 4]


def test_a_number_of_devices_that_does_not_divide_the_model_is_refused() -> None:
    """GPUStack takes the next number that does."""
    wants = _claim(100, devices=3, split=(32,))
    found = place(wants, [_node("a", 80, 80, 80, 80)])
    theirs = Rules(wants, [_node("a", 80, 80, 80, 80)], [], "spread").best()
    assert isinstance(found, Refusal)
    assert theirs is not None
    assert len(theirs.main[1]) == 4


def test_of_equal_devices_and_hosts_the_first_is_taken() -> None:
    """GPUStack takes devices, and hosts for their processors, by what is free."""
    roomy = [_instance("i", "a", {0: 4, 1: 2}), _instance("j", "a", {2: 1})]
    found, theirs = _both(_claim(140), [_node("a", 80, 80, 80)], roomy)
    assert [index for index, _ in found.shares[0].devices] == [0, 1]
    assert theirs.main[1] == [2, 1]
    hosts = [Node(name="a", host_memory=16 * GIB), Node(name="b", host_memory=64 * GIB)]
    found, theirs = _both(Claim(model="m", cpu_bytes=GIB), hosts, [])
    assert (found.shares[0].node, theirs.main[0]) == ("a", "b")


# ---------------------------------------------------------------- what the cases are made of


def _both(
    claim: Claim, nodes: list[Node], instances: list[Instance], strategy: str = "spread"
) -> tuple[Placement, Candidate]:
    """Ours, and theirs."""
    found, theirs = (
        place(claim, nodes, instances=instances, strategy=strategy), Rules(claim, nodes, instances, strategy).best(),
    )  # fmt: skip
    assert isinstance(found, Placement), str(found)
    assert theirs is not None
    return found, theirs


def _parts(found: Placement) -> list[tuple[str, list[tuple[int, int]], int]]:
    return [(share.node, [*share.devices], share.host_bytes) for share in found.shares]


def _parts_of(theirs: Candidate) -> list[tuple[str, list[tuple[int, int]], int]]:
    parts = [theirs.main, *theirs.followers]
    return [(node, [(index, taken[index]) for index in indexes], ram) for node, indexes, taken, ram in parts]


def _node(name: str, *gib: int, kind: str = "cuda") -> Node:
    devices = [Device(index=index, memory=each * GIB, kind=kind) for index, each in enumerate(gib)]
    return Node(name=name, host_memory=64 * GIB, devices=devices)


def _claim(gib: int, *, utilization: float = 0.9, **changes: object) -> Claim:
    return Claim(model="m", device_bytes=gib * GIB, utilization=utilization, **changes)  # type: ignore[arg-type]


def _instance(name: str, where: str, gib: dict[int, int]) -> Instance:
    """Of another model."""
    share = Share(node=where, devices={index: each * GIB for index, each in gib.items()})
    return Instance(name=name, model="other", shares=(share,))
