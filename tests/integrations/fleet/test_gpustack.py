"""Placement on random clusters: compared with GPUStack's rules, which `gpustack_rules` transcribes, where these are for
one device or host, and judged by what holds of every placement.

The differences that docs/howto/placement.md lists cannot show in the comparison; `test_placement` has tests of them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from support.long import TIMES

from asyncengine.integrations.placement import Claim, Cluster, Device, Node, Placement, Refusal, place, rank_for_removal

from .gpustack_rules import Rules, filtered
from .random_clusters import GIB, Case, random_case

CASES = 1200 * TIMES
"""Number of random clusters, of which about two thirds are compared."""


def test_random_clusters_are_filled_as_gpustack_fills_them() -> None:
    seen: Counter[str] = Counter()
    for seed in range(CASES):
        case = random_case(seed, utilization=True, single=True)
        claim = replace(case.claim, devices=None if case.claim.device_bytes is None else 1)
        rules = Rules(claim, case.nodes, case.instances, case.strategy)
        hosts = {rules.free[node.name][0] for node in rules.left}
        if claim.host_bytes and any(node.unified for node in rules.left):
            continue
        if case.strategy == "spread" and claim.cpu_bytes is not None and len(hosts) > 1:
            continue  # GPUStack takes the host with most free memory
        expected = rules.best()
        found = place(claim, case.nodes, instances=case.instances, strategy=case.strategy)
        if expected is None:
            assert isinstance(found, Refusal), seed
            assert [(reason.what, reason.nodes) for reason in found.reasons[: len(rules.fell)]] == [*rules.fell.items()]
            seen["refused"] += 1
            continue
        assert isinstance(found, Placement), (seed, expected, str(found))
        (share,), (node, indices, taken, host) = found.shares, expected.part
        assert (found.stage, share.node, share.host_bytes) == (expected.stage, node, host), seed
        assert share.devices == tuple((index, taken[index]) for index in indices), seed
        assert found.score == pytest.approx(expected.score, rel=1e-12), seed
        seen[found.stage] += 1
    assert min(seen[stage] for stage in ("device", "cpu", "refused")) >= CASES // 20, seen


def test_instances_are_given_up_in_gpustacks_order() -> None:
    many = 0
    for seed in range(CASES // 3):
        case = random_case(seed, utilization=True, single=True)
        expected = Rules(case.claim, case.nodes, case.instances, case.strategy).order_of_removal()
        ranked = rank_for_removal(Cluster(case.nodes, case.instances), case.claim.model, strategy=case.strategy)
        assert [each.instance.name for each in ranked] == [name for name, _ in expected], seed
        assert [each.score for each in ranked] == pytest.approx([score for _, score in expected], rel=1e-12), seed
        many += len(expected) > 1
    assert many > CASES // 50


LIVES = 500 * TIMES


def placed(case: Case) -> Placement | Refusal:
    return place(case.claim, case.nodes, instances=case.instances, strategy=case.strategy)


def test_no_device_and_no_host_is_given_more_than_it_has() -> None:
    count = 0
    for seed in range(LIVES):
        case = random_case(seed, utilization=seed % 3 == 0)
        found = placed(case)
        if isinstance(found, Refusal):
            continue
        count += 1
        rules = Rules(case.claim, case.nodes, case.instances, case.strategy)
        allowed = {node.name: node for node in rules.left}
        nodes = [share.node for share in found.shares]
        assert len(set(nodes)) == len(nodes), seed
        for share in found.shares:
            node, (host, free) = allowed[share.node], rules.free[share.node]
            assert share.host_bytes <= host, seed
            assert all(0 < taken <= free[index] for index, taken in share.devices), seed
            chosen = dict(case.claim.on)
            assert not chosen or {index for index, _ in share.devices} <= set(chosen[share.node]), seed
            if node.unified:  # one memory for both
                assert share.host_bytes + sum(taken for _, taken in share.devices) <= host, seed
            assert case.claim.divides(len(share.devices) or 1), seed
        devices = [device for share in found.shares for device in share.devices]
        if devices:
            copied = case.claim.copied_bytes
            assert sum(taken - copied for _, taken in devices) >= case.claim.device_bytes - copied, seed
            kinds = {d.kind for s in found.shares for d in allowed[s.node].devices if d.index in dict(s.devices)}
            assert len(kinds) == 1, seed
            assert case.claim.devices in (None, len(devices)), seed
            part = copied + -(-(case.claim.device_bytes - copied) // len(devices))
            assert all(taken >= part for _, taken in devices), seed
    assert count > LIVES // 3


def freed(case: Case, r: random.Random) -> Case:
    """The same with more free memory somewhere: more of it, less reserved, or an instance gone."""
    nodes, instances = list(case.nodes), list(case.instances)
    way, place = r.randrange(4), r.randrange(len(nodes))
    node = nodes[place]
    if way == 0 and instances:
        instances.pop(r.randrange(len(instances)))
    elif way == 1 and node.devices:
        more = [r.choice((0, 1, GIB, 8 * GIB, 80 * GIB)) for _ in node.devices]
        devices = tuple(replace(d, memory=d.memory + n) for d, n in zip(node.devices, more, strict=True))
        host = node.host_memory + (sum(more) if node.unified else 0)
        nodes[place] = replace(node, host_memory=host, devices=devices)
    elif way == 2:
        nodes[place] = replace(node, host_memory=node.host_memory + r.choice((1, GIB, 100 * GIB)))
    else:
        nodes[place] = replace(node, host_reserved=0, device_reserved=0)
    return replace(case, nodes=nodes, instances=instances)


def test_more_free_memory_never_worsens_a_placement() -> None:
    """A model that was placed stays placed, in no later stage, on no more devices; one that was refused may now fit.
    GPUStack's own rules do not hold this."""
    better = 0
    for seed in range(LIVES):
        case = random_case(seed, utilization=False)
        before, r = placed(case), random.Random(seed)
        for _ in range(3):
            case = freed(case, r)
        after = placed(case)
        if isinstance(before, Refusal):
            if isinstance(after, Refusal):
                assert after.device_bytes >= before.device_bytes, seed
                assert after.cpu_bytes >= before.cpu_bytes, seed
            else:
                better += 1
            continue
        assert isinstance(after, Placement), seed
        assert rank(after) <= rank(before), seed
        better += rank(after) < rank(before)
    assert better > LIVES // 100


def rank(found: Placement) -> tuple[int, int, int]:
    return (
        ("device", "devices", "nodes", "cpu").index(found.stage),
        sum(len(share.devices) for share in found.shares),
        len(found.shares),
    )


def test_a_refusal_counts_every_node_and_says_what_would_have_fitted() -> None:
    seen: Counter[str] = Counter()
    for seed in range(LIVES):
        case = random_case(seed, utilization=seed % 3 == 0)
        found = placed(case)
        if isinstance(found, Placement):
            continue
        assert found.nodes == len(case.nodes) == sum(reason.nodes for reason in found.reasons), seed
        left, fell = filtered(case.claim, case.nodes)
        names = {reason.what: reason.nodes for reason in found.reasons}
        assert {name: count for name, count in names.items() if name in fell} == fell, seed
        assert sum(names.values()) - sum(fell.values()) == len(left), seed
        assert all(reason.nodes > 0 and reason.text in str(found) for reason in found.reasons), seed
        seen.update(names)
        for field in ("device_bytes", "cpu_bytes"):
            most = getattr(found, field)
            assert most < (getattr(case.claim, field) or 2**60), seed
            if most == 0:
                continue
            other = {"device_bytes": None, "cpu_bytes": None}
            other["copied_bytes"] = case.claim.copied_bytes if field == "device_bytes" else 0
            fits = replace(case, claim=replace(case.claim, **{**other, field: most}))
            assert isinstance(placed(fits), Placement), (seed, field)
            larger = replace(case, claim=replace(case.claim, **{**other, field: most + 1}))
            assert isinstance(placed(larger), Refusal), (seed, field)
            seen[field] += 1
    assert seen.keys() >= {"cluster", "devices", "labels", "status", "backend", "path", "no device", "host memory",
                           "device memory", "device_bytes", "cpu_bytes"}  # fmt: skip


def test_a_table_that_has_lived_answers_as_a_new_one() -> None:
    """Nodes come and go, instances start and stop: what is left decides, to the last bit of the score."""
    for seed in range(LIVES // 25):
        r = random.Random(seed)
        pool = [node for each in range(6) for node in random_case(1000 * seed + each, utilization=False).nodes]
        named = {f"{place}-{node.name}": node for place, node in enumerate(pool)}
        nodes = {name: replace(node, name=name, cpus=r.choice((None, 1, 2.5))) for name, node in named.items()}
        table, number, compared = Cluster(), 0, 0
        for _ in range(120):
            outside = [name for name in nodes if name not in {node.name for node in table.nodes}]
            way = r.random()
            if outside and (way < 0.3 or not len(table)):
                table.add(nodes[r.choice(outside)])
            elif way < 0.42:
                name = r.choice([node.name for node in table.nodes])
                lost = table.remove(name)
                assert all(any(share.node == name for share in each.shares) for each in lost)
            elif way < 0.55 and table.instances:
                table.stop(r.choice(list(table.instances)))
            else:
                case = random_case(r.randrange(10_000), utilization=True)
                claim = replace(case.claim, on={}, labels={}, cluster=None, cpus=r.choice((0, 0.1, 0.7)))
                found = place(claim, table, strategy=case.strategy)
                fresh = Cluster(table.nodes, table.instances.values())
                assert found == place(claim, fresh, strategy=case.strategy), seed
                assert found == place(claim, table, strategy=case.strategy), seed
                compared += 1
                if isinstance(found, Placement):
                    number += 1
                    table.start(found.instance(f"i{number}"))
            assert (table.cpu_used <= table.cpu_limit).all()
        assert compared > 20


def test_rows_that_move_together_take_everything_with_them() -> None:
    """When enough nodes have gone the others move up: what runs there, their files and their order go along."""
    first = [
        Node(name=f"n{i}", host_memory=64 * GIB, devices=[Device(index=3, memory=GIB * (20 + i % 7))],
             files=["m"] if i % 5 == 0 else [], labels={"odd": str(i % 2)}, ready=i % 11 > 0, cpus=i % 3)
        for i in range(300)
    ]  # fmt: skip
    table = Cluster(first)
    claims = [Claim(model=f"m{i % 3}"[: 1 + i % 2], device_bytes=(1 + i % 5) * GIB, cpus=0.7) for i in range(200)]
    for number, claim in enumerate(claims):
        found = place(claim, table, strategy="spread" if number % 3 else "binpack")
        assert isinstance(found, Placement)
        table.start(found.instance(f"i{number}"))
    place(claims[1], table)
    for i in range(0, 300, 2):
        table.remove(f"n{i}")
    assert table.shape[0] == 300
    table.add(Node(name="new", host_memory=GIB))
    assert table.shape[0] == 151  # they have moved
    assert len(table.instances) > 50
    fresh = Cluster(table.nodes, table.instances.values())
    for claim in [*claims, Claim(model="m", device_bytes=GIB, labels={"odd": "1"}), Claim(model="m", cpu_bytes=GIB)]:
        for strategy in ("spread", "binpack"):
            assert place(claim, table, strategy=strategy) == place(claim, fresh, strategy=strategy)
    for name in list(table.instances):
        table.stop(name)
    assert not table.used.any()
    assert not table.cpu_used.any()
    assert len(table.by_model) == 0
